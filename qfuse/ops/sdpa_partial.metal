#include "gemv_single.h"
// A threadgroup takes one block of keys of one kv head, `rows` keys at a time; its simdgroups share out query heads.
// A lane has PER dims, V together: 16 bytes of a key where D allows it. A key past the end is the last at weight 0.
constexpr int G = Hq / Hkv, HEADS = (G + simdgroups - 1) / simdgroups, PER = D / 32;
constexpr int V = PER % 8 == 0 ? 8 : PER % 4 == 0 ? 4 : PER % 2 == 0 ? 2 : 1;
const int lane = thread_index_in_simdgroup, first = simdgroup_index_in_threadgroup * HEADS, A = k_cache_shape[2];
int end = metal::min(length[0], A);
#if HAS_MASK
end = metal::min(end, mask_shape[1]);
#endif
for (int tile = threadgroup_position_in_grid.x; tile < B * Hkv * blocks; tile += threadgroups_per_grid.x) {
  const int block = tile % blocks, kv = tile / blocks;
  float q[HEADS][PER / V][V], o[HEADS][PER / V][V] = {}, sum[HEADS] = {}, top[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    top[h] = -INFINITY;
    const int head = kv * G + metal::min(first + h, G - 1);
    for (int c = 0; c < PER / V; ++c) gemv_load(q[h][c], q_rot, head * D, (32 * c + lane) * V);
  }
  for (int n = block; n < end; n += rows * blocks) {
    float k[rows][PER / V][V], v[rows][PER / V][V];
    bool live[rows];
    for (int i = 0; i < rows; ++i) {
      const long key = metal::min(n + i * blocks, end - 1);
      live[i] = n + i * blocks < end;
      for (int c = 0; c < PER / V; ++c) {
        gemv_load(k[i][c], k_cache + (long(kv) * A + key) * D, 0, (32 * c + lane) * V);
        gemv_load(v[i][c], v_cache + (long(kv) * A + key) * D, 0, (32 * c + lane) * V);
      }
#if HAS_MASK
      live[i] = live[i] && mask[kv / Hkv * long(mask_shape[1]) + key];
      for (int d = 0; d < PER; ++d) v[i][d / V][d % V] = live[i] ? v[i][d / V][d % V] : 0.0f;
#endif
    }
    for (int h = 0; h < HEADS; ++h) {
      float s[rows], higher = top[h];
      for (int i = 0; i < rows; ++i) {
        s[i] = 0;
        for (int d = 0; d < PER; ++d) s[i] += q[h][d / V][d % V] * k[i][d / V][d % V];
        s[i] = simd_sum(s[i]) * metal::rsqrt(float(D));
        s[i] = live[i] ? s[i] : -INFINITY;
        higher = metal::max(higher, s[i]);
      }
      const float base = higher == -INFINITY ? 0.0f : higher, old = metal::exp(top[h] - base);
      top[h] = higher;
      sum[h] *= old;
      for (int d = 0; d < PER; ++d) o[h][d / V][d % V] *= old;
      for (int i = 0; i < rows; ++i) {
        const float weight = metal::exp(s[i] - base);
        sum[h] += weight;
        for (int d = 0; d < PER; ++d) o[h][d / V][d % V] += weight * v[i][d / V][d % V];
      }
    }
  }
  for (int h = 0; h < HEADS && first + h < G; ++h) {
    const int at = (kv * G + first + h) * blocks + block;
    for (int d = 0; d < PER; ++d) o_part[long(at) * D + (32 * (d / V) + lane) * V + d % V] = o[h][d / V][d % V];
    if (lane == 0) sum_part[at] = sum[h];
    if (lane == 0) max_part[at] = top[h];
  }
}
