#include "gemv.h"
// A simdgroup takes `rows` rows: of an expert's matrix for its batch row, or of the shared one for all batch rows.
constexpr int N = (H + rows - 1) / rows, ROUTED = B * k * N;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < ROUTED + N; i += step) {
  const int slot = i / N, row = i % N * rows;
  if (i < ROUTED) {
    const long n = long(metal::min(indices[slot], uint(E - 1))) * H * I;
    float acc[rows][1] = {};
    gemv<w_down_bits, w_down_group, I, take, depth>(
        acc, act_routed + slot * I, w_down + n / 32 * w_down_bits, w_down_scales + n / w_down_group,
        w_down_biases + n / w_down_group, row, H - 1, lane);
    for (int j = lane; j < rows; j += 32)
      if (row + j < H) d_routed[slot * H + row + j] = gemv_pick(acc, j, 0);
  } else {
    float acc[rows][B] = {};
    gemv<ws_down_bits, ws_down_group, Is, take, depth>(
        acc, act_shared, ws_down, ws_down_scales, ws_down_biases, row, H - 1, lane);
    for (int j = lane; j < rows * B; j += 32)
      if (row + j % rows < H) d_shared[j / rows * H + row + j % rows] = gemv_pick(acc, j % rows, j / rows);
  }
}
