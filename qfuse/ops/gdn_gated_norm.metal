// One simdgroup a value head, Dv/32 values a lane.
constexpr int N = (Dv + 31) / 32;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < B * Hv; i += step) {
  float v[N], sum = 0;
  for (int j = 0; j < N; ++j) {
    v[j] = lane + 32 * j < Dv ? float(y[i * Dv + lane + 32 * j]) : 0.0f;
    sum += v[j] * v[j];
  }
  const float r = metal::rsqrt(simd_sum(sum) / Dv + eps);
  for (int j = 0; j < N; ++j) {
    const int d = lane + 32 * j;
    if (d < Dv) a[i * Dv + d] = T(v[j] * r * float(w_norm[d]) * z[i * Dv + d]);
  }
}
