#include "swiglu.h"
// A simdgroup takes `rows` rows of gate and up: of an expert for its batch row, or of the shared one for all rows.
constexpr int N = (I + rows - 1) / rows, ROUTED = B * k * N, NS = (Is + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < ROUTED + NS; i += step) {
  if (i < ROUTED) {
    const int slot = i / N, row = i % N * rows, e = metal::min(indices[slot], uint(E - 1));
    float gate[rows][1] = {}, up[rows][1] = {};
    gate_up<w_gate_bits, w_gate_group, w_up_bits, w_up_group, I, H, take, depth>(
        gate, up, n + slot / k * H, e, w_gate, w_gate_scales, w_gate_biases, w_up, w_up_scales, w_up_biases, row, lane);
    for (int j = lane; j < rows; j += 32)
      if (row + j < I) act_routed[slot * I + row + j] = silu(gemv_pick(gate, j, 0)) * gemv_pick(up, j, 0);
  } else {
    const int row = (i - ROUTED) * rows;
    float gate[rows][B] = {}, up[rows][B] = {};
    gate_up<ws_gate_bits, ws_gate_group, ws_up_bits, ws_up_group, Is, H, take, depth>(
        gate, up, n, 0, ws_gate, ws_gate_scales, ws_gate_biases, ws_up, ws_up_scales, ws_up_biases, row, lane);
    for (int j = lane; j < rows * B; j += 32) {
      const int b = j / rows, c = j % rows;
      if (row + c < Is) act_shared[b * Is + row + c] = silu(gemv_pick(gate, c, b)) * gemv_pick(up, c, b);
    }
  }
}
