// One simdgroup a head of queries or keys, its lanes over the dims, then over the rotated pairs, which it reads again.
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
  for (int j = 0; j < N; ++j)
    if (lane + 32 * j >= R && lane + 32 * j < D) out[lane + 32 * j] = T(scale * x[j]);
  for (int p = lane; p < R / 2; p += 32) {
    const int q = p + R / 2;
    const float angle = position[b] * metal::exp2(float(p) / (-R / 2) * metal::log2(theta));
    const float cosine = metal::cos(angle), sine = metal::sin(angle);
    const float first = scale * float(in[p]) * (query ? float(w_qnorm[p]) : float(w_knorm[p]));
    const float second = scale * float(in[q]) * (query ? float(w_qnorm[q]) : float(w_knorm[q]));
    out[p] = T(first * cosine - second * sine);
    out[q] = T(second * cosine + first * sine);
  }
}
