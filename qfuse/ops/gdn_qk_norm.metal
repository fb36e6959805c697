// One simdgroup a head of q or k; Dk/32 values a lane.
const uint lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
for (uint i = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup; i < B * 2 * Hk; i += step) {
  const uint row = i / (2 * Hk), head = i % (2 * Hk);
  auto in = qkv + row * (2 * Hk * Dk + Nv) + head * Dk;
  float x[Dk / 32], sum = 0;
  for (int j = 0; j < Dk / 32; ++j) {
    x[j] = static_cast<float>(in[lane + 32 * j]);
    sum += x[j] * x[j];
  }
  float scale = metal::rsqrt(simd_sum(sum) + l2_eps);
  if (head < Hk) scale *= metal::rsqrt(float(Dk));
  auto out = head < Hk ? q + (row * Hk + head) * Dk : k + (row * Hk + head - Hk) * Dk;
  for (int j = 0; j < Dk / 32; ++j) out[lane + 32 * j] = static_cast<T>(x[j] * scale);
}
