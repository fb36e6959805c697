// One simdgroup a head of queries or keys, its lanes over the dims; the partner of a rotated dim is read again.
constexpr int N = (D + 31) / 32;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < B * (Hq + Hkv); i += step) {
  const int b = i / (Hq + Hkv), head = i % (Hq + Hkv);
  const bool query = head < Hq;
  auto in = query ? queries + (b * Hq + head) * D : keys + (b * Hkv + head - Hq) * D;
  auto out = query ? q_rot + (b * Hq + head) * D : k_rot + (b * Hkv + head - Hq) * D;
  float x[N], sum = 0;
  for (int j = 0; j < N; ++j) {
    const int d = metal::min(lane + 32 * j, D - 1);
    const float value = float(in[d]);
    x[j] = value * (query ? float(w_qnorm[d]) : float(w_knorm[d]));
    if (lane + 32 * j < D) sum += value * value;
  }
  const float scale = metal::rsqrt(simd_sum(sum) / D + eps);
  for (int j = 0; j < N; ++j) {
    const int d = lane + 32 * j;
    if (d < R) {
      const int p = d % (R / 2), partner = d < R / 2 ? d + R / 2 : p;
      const float y = float(in[partner]) * (query ? float(w_qnorm[partner]) : float(w_knorm[partner]));
      const float angle = position[b] * metal::exp2(float(p) / (-R / 2) * metal::log2(theta));
      x[j] = x[j] * metal::cos(angle) + (d < R / 2 ? -y : y) * metal::sin(angle);
    }
    if (d < D) out[d] = T(scale * x[j]);
  }
}
