#include "gemv.h"
// A simdgroup takes `rows` rows for all batch rows.
constexpr int N = (H + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < N; i += step) {
  const int row = i * rows;
  float acc[rows][B] = {};
  gemv<w_down_bits, w_down_group, I, take, depth>(acc, act, w_down, w_down_scales, w_down_biases, row, H - 1, lane);
  for (int j = lane; j < rows * B; j += 32) {
    const int b = j / rows, c = j % rows;
    if (row + c < H) out[b * H + row + c] = T(float(h[b * H + row + c]) + gemv_pick(acc, c, b));
  }
}
