// A simdgroup takes 32 columns of one head; its lanes first weigh the blocks, then hand the weights round. It reads
// AHEAD blocks at a time; past the last, that one again at weight 0.
constexpr int COLUMNS = (D + 31) / 32, N = (blocks + 31) / 32, AHEAD = 16;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < B * Hq * COLUMNS; i += step) {
  const int head = i / COLUMNS, d = i % COLUMNS * 32 + lane;
  float weight[N], top = -INFINITY, total = 0, o = 0;
  for (int j = 0; j < N; ++j) {
    weight[j] = lane + 32 * j < blocks ? max_part[head * blocks + lane + 32 * j] : -INFINITY;
    top = metal::max(top, weight[j]);
  }
  top = simd_max(top);
  if (top == -INFINITY) top = 0;
  for (int j = 0; j < N; ++j) {
    weight[j] = metal::exp(weight[j] - top);
    if (lane + 32 * j < blocks) total += weight[j] * sum_part[head * blocks + lane + 32 * j];
  }
  total = simd_sum(total);
  for (int j = 0; j < N; ++j) {
    for (int n = 0; n < 32; n += AHEAD) {
      float part[AHEAD];
      for (int m = 0; m < AHEAD; ++m)
        part[m] = o_part[long(head * blocks + metal::min(32 * j + n + m, blocks - 1)) * D + metal::min(d, D - 1)];
      for (int m = 0; m < AHEAD; ++m) o += simd_shuffle(weight[j], n + m) * part[m];
    }
  }
  if (d < D) a[head * D + d] = T(total > 0 ? o / total * gate[head * D + d] : 0.0f);
}
