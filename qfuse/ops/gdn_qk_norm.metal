// One simdgroup a head of q or k, Dk/32 values a lane.
constexpr int N = (Dk + 31) / 32;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < B * 2 * Hk; i += step) {
  const int b = i / (2 * Hk), head = i % (2 * Hk);
  auto in = qkv + b * (2 * Hk * Dk + Nv) + head * Dk;
  auto out = (head < Hk ? q : k) + (b * Hk + head % Hk) * Dk;
  float x[N], sum = 0;
  for (int j = 0; j < N; ++j) {
    x[j] = lane + 32 * j < Dk ? float(in[lane + 32 * j]) : 0.0f;
    sum += x[j] * x[j];
  }
  float scale = metal::rsqrt(simd_sum(sum) + l2_eps);
  if (head < Hk) scale *= metal::rsqrt(float(Dk));
  for (int j = 0; j < N; ++j)
    if (lane + 32 * j < Dk) out[lane + 32 * j] = T(x[j] * scale);
}
