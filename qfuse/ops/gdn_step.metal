// A simdgroup takes one value row of a head's state, Dk/32 values a lane, through all steps.
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
const int batch = state_shape[0], steps = q_shape[0] / batch;
for (int i = start; i < batch * Hv * Dv; i += step) {
  const int b = i / (Hv * Dv), hv = i / Dv % Hv, d = i % Dv;
  float s[Dk / 32];
  for (int j = 0; j < Dk / 32; ++j) s[j] = state[long(i) * Dk + lane + 32 * j];
  for (int m = b * steps; m < (b + 1) * steps; ++m) {
#if HAS_MASK
    if (!mask[m]) {
      if (lane == 0) y[(m * Hv + hv) * Dv + d] = T(0.0f);
      continue;
    }
#endif
    const int key = (m * Hk + hv / (Hv / Hk)) * Dk + lane;
    float keys[Dk / 32], memory = 0, out = 0;
    for (int j = 0; j < Dk / 32; ++j) {
      keys[j] = float(k[key + 32 * j]);
      s[j] *= g[m * Hv + hv];
      memory += s[j] * keys[j];
    }
    const float v = float(qkv[m * (2 * Hk * Dk + Hv * Dv) + 2 * Hk * Dk + hv * Dv + d]);
    const float delta = beta[m * Hv + hv] * (v - simd_sum(memory));
    for (int j = 0; j < Dk / 32; ++j) {
      s[j] += delta * keys[j];
      out += s[j] * float(q[key + 32 * j]);
    }
    out = simd_sum(out);
    if (lane == 0) y[(m * Hv + hv) * Dv + d] = T(out);
  }
  for (int j = 0; j < Dk / 32; ++j) state_next[long(i) * Dk + lane + 32 * j] = s[j];
}
