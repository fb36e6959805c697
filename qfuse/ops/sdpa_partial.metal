// A threadgroup takes one block of keys of one kv head; its simdgroups share out the query heads, which share each key.
constexpr int G = Hq / Hkv, HEADS = (G + simdgroups - 1) / simdgroups, PER = D / 32;
const int lane = thread_index_in_simdgroup, first = simdgroup_index_in_threadgroup * HEADS, A = k_cache_shape[2];
int end = metal::min(length[0], A);
#if HAS_MASK
end = metal::min(end, mask_shape[1]);
#endif
for (int tile = threadgroup_position_in_grid.x; tile < B * Hkv * blocks; tile += threadgroups_per_grid.x) {
  const int block = tile % blocks, kv = tile / blocks, b = kv / Hkv;
  auto keys = k_cache + long(kv) * A * D + lane;
  auto values = v_cache + long(kv) * A * D + lane;
  float q[HEADS][PER], o[HEADS][PER] = {}, sum[HEADS] = {}, top[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    top[h] = -INFINITY;
    for (int j = 0; j < PER; ++j)
      q[h][j] = float(q_rot[(kv * G + metal::min(first + h, G - 1)) * D + lane + 32 * j]);
  }
  for (int n = block; n < end; n += blocks) {
#if HAS_MASK
    if (!mask[long(b) * mask_shape[1] + n]) continue;
#endif
    float k[PER], v[PER];
    for (int j = 0; j < PER; ++j) {
      k[j] = float(keys[long(n) * D + 32 * j]);
      v[j] = float(values[long(n) * D + 32 * j]);
    }
    for (int h = 0; h < HEADS; ++h) {
      float s = 0;
      for (int j = 0; j < PER; ++j) s += q[h][j] * k[j];
      s = simd_sum(s) * metal::rsqrt(float(D));
      const float higher = metal::max(top[h], s), old = metal::exp(top[h] - higher), weight = metal::exp(s - higher);
      top[h] = higher;
      sum[h] = sum[h] * old + weight;
      for (int j = 0; j < PER; ++j) o[h][j] = o[h][j] * old + weight * v[j];
    }
  }
  for (int h = 0; h < HEADS && first + h < G; ++h) {
    const int at = (kv * G + first + h) * blocks + block;
    for (int j = 0; j < PER; ++j) o_part[long(at) * D + lane + 32 * j] = o[h][j];
    if (lane == 0) sum_part[at] = sum[h];
    if (lane == 0) max_part[at] = top[h];
  }
}
