#include "swiglu.h"
#include "scaled.h"
// A simdgroup takes `rows` rows of gate and up for all batch rows; the norm's factor comes last, being one a row.
constexpr int N = (I + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
float factor[1][B];
for (int b = 0; b < B; ++b) {
  float sum = 0;
  for (int c = lane; c < H; c += 32) sum += float(h[b * H + c]) * float(h[b * H + c]);
  factor[0][b] = metal::rsqrt(simd_sum(sum) / H + eps);
}
for (int i = start; i < N; i += step) {
  const int row = i * rows;
  float gate[rows][B] = {}, up[rows][B] = {};
  gate_up<w_gate_bits, w_gate_group, w_up_bits, w_up_group, I, H, take, depth>(
      gate, up, scaled(h, w_norm), 0, w_gate, w_gate_scales, w_gate_biases, w_up, w_up_scales, w_up_biases, row, lane);
  for (int j = lane; j < rows * B; j += 32) {
    const int b = j / rows, c = j % rows;
    const float r = gemv_pick(factor, 0, b);
    if (row + c < I) act[b * I + row + c] = silu(r * gemv_pick(gate, c, b)) * (r * gemv_pick(up, c, b));
  }
}
