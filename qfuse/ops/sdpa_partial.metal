#include "sdpa_partial.h"
// A threadgroup takes one block of keys of one kv head. A simdgroup takes `rows` of its query heads, more where there
// are too few simdgroups, and KEYS keys at a time; those with the same heads share out the keys, and join at the end.
// A lane has PER dims, V together: 16 bytes of a key where D allows it. It does the softmax of one key and head, those
// number lane / W / P and lane / W % P of the simdgroup's. Keys and values are read one round ahead.
constexpr int G = Hq / Hkv, LEAST = (G + simdgroups - 1) / simdgroups, WANTED = rows > LEAST ? rows : LEAST;
constexpr int HEADS = WANTED < G ? WANTED : G, GROUPS = (G + HEADS - 1) / HEADS, SHARES = simdgroups / GROUPS;
constexpr int PER = D / 32, V = PER % 8 == 0 ? 8 : PER % 4 == 0 ? 4 : PER % 2 == 0 ? 2 : 1;
constexpr int P = sdpa_power(2 * HEADS - 1), MOST = 32 / P, KEYS = sdpa_power(take / PER < MOST ? take / PER : MOST);
constexpr int W = 32 / (KEYS * P), STEP = SHARES * KEYS * blocks, WORDS = (V * sizeof(T) + 3) / 4;
threadgroup float joined[SHARES > 1 ? GROUPS * HEADS * (D + 2) : 1];
const int lane = thread_index_in_simdgroup, share = simdgroup_index_in_threadgroup / GROUPS, A = k_cache_shape[2];
const int first = simdgroup_index_in_threadgroup % GROUPS * HEADS;
int end = metal::min(length[0], A);
#if HAS_MASK
end = metal::min(end, mask_shape[1]);
#endif
for (int tile = threadgroup_position_in_grid.x; tile < B * Hkv * blocks; tile += threadgroups_per_grid.x) {
  const int block = tile % blocks, kv = tile / blocks;
  const auto keys = k_cache + long(kv) * A * D, values = v_cache + long(kv) * A * D;
  float q[HEADS][PER / V][V], o[HEADS][PER] = {}, sum = 0, top = -INFINITY;
  for (int h = 0; h < HEADS; ++h) {
    const int head = kv * G + metal::min(first + h, G - 1);
    for (int c = 0; c < PER / V; ++c) gemv_load(q[h][c], q_rot, head * D, (32 * c + lane) * V);
  }
  uint k[KEYS][PER / V][WORDS], v[KEYS][PER / V][WORDS];
  int n = share < SHARES ? block + share * KEYS * blocks : end;
  sdpa_load<blocks, V>(k, keys, n, end - 1, lane);
  sdpa_load<blocks, V>(v, values, n, end - 1, lane);
  for (; n < end; n += STEP) {
    float s[KEYS * P] = {}, x[PER];
    for (int i = 0; i < KEYS; ++i) {
      sdpa_values<T, V>(x, k[i]);
      for (int h = 0; h < HEADS; ++h) {
        for (int d = 0; d < PER; ++d) s[i * P + h] += q[h][d / V][d % V] * x[d];
      }
    }
    sdpa_load<blocks, V>(k, keys, n + STEP, end - 1, lane);
    const int mine = n + lane / W / P * blocks;
    bool live = mine < end;
#if HAS_MASK
    live = live && mask[kv / Hkv * long(mask_shape[1]) + mine];
#endif
    const float total = sdpa_sums(s, lane) * metal::rsqrt(float(D)), score = live ? total : -INFINITY;
    float higher = metal::max(top, score);
    for (int i = 16; i >= W * P; i /= 2) higher = metal::max(higher, simd_shuffle_xor(higher, i));
    const float base = higher == -INFINITY ? 0.0f : higher;
    const float old = metal::exp(top - base), weight = metal::exp(score - base);
    top = higher;
    sum = sum * old + weight;
    for (int h = 0; h < HEADS; ++h) {
      const float less = simd_shuffle(old, h * W);
      for (int d = 0; d < PER; ++d) o[h][d] *= less;
    }
    for (int i = 0; i < KEYS; ++i) {
      sdpa_values<T, V>(x, v[i]);
#if HAS_MASK
      const bool seen = simd_shuffle(uint(live), i * P * W);
      for (int d = 0; d < PER; ++d) x[d] = seen ? x[d] : 0.0f;
#endif
      for (int h = 0; h < HEADS; ++h) {
        const float w = simd_shuffle(weight, (i * P + h) * W);
        for (int d = 0; d < PER; ++d) o[h][d] += w * x[d];
      }
    }
    sdpa_load<blocks, V>(v, values, n + STEP, end - 1, lane);
  }
  for (int i = 16; i >= W * P; i /= 2) sum += simd_shuffle_xor(sum, i);
  for (int from = 1; from < SHARES; ++from) {
    auto at = joined + first * (D + 2);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int h = 0; h < HEADS && share == from; ++h) {
      for (int d = 0; d < PER; ++d) at[h * (D + 2) + 32 * d + lane] = o[h][d];
      if (lane == h * W) at[h * (D + 2) + D] = sum, at[h * (D + 2) + D + 1] = top;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (share == 0) {
      const int h = metal::min(lane / W % P, HEADS - 1) * (D + 2);
      const float higher = metal::max(top, at[h + D + 1]), base = higher == -INFINITY ? 0.0f : higher;
      const float ours = metal::exp(top - base), theirs = metal::exp(at[h + D + 1] - base);
      top = higher;
      sum = sum * ours + at[h + D] * theirs;
      for (int h = 0; h < HEADS; ++h) {
        const float x = simd_shuffle(ours, h * W), y = simd_shuffle(theirs, h * W);
        for (int d = 0; d < PER; ++d) o[h][d] = o[h][d] * x + at[h * (D + 2) + 32 * d + lane] * y;
      }
    }
  }
  if (share > 0) continue;
  for (int h = 0; h < HEADS; ++h) {
    if (first + h >= G) break;
    const int at = (kv * G + first + h) * blocks + block;
    for (int c = 0; c < PER / V; ++c) sdpa_store<V>(o_part + long(at) * D + (32 * c + lane) * V, o[h] + c * V);
    if (lane == h * W) sum_part[at] = sum, max_part[at] = top;
  }
}
