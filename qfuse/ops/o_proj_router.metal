#include "dense.h"
// A threadgroup takes `part` columns of h, whose squares make one partial whatever the schedule, or a row of the router
// a simdgroup: those are long, and few.
constexpr int P = (H + part - 1) / part, TILES = P + (E + simdgroups - 1) / simdgroups;
threadgroup float squares[B * part];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
for (int tile = threadgroup_position_in_grid.x; tile < TILES; tile += threadgroups_per_grid.x) {
  if (tile < P) {
    for (int first = simd * rows; first < part; first += rows * simdgroups) {
      const int row = tile * part + first;
      float acc[rows][B] = {};
      gemv<w_o_bits, w_o_group, Ka, take, depth>(acc, a, w_o, w_o_scales, w_o_biases, row, H - 1, lane);
      for (int j = lane; j < rows * B; j += 32) {
        const int b = j / rows, c = j % rows;
        if (first + c < part) squares[b * part + first + c] = 0;
        if (first + c < part && row + c < H) {
          const float value = float(x[b * H + row + c]) + gemv_pick(acc, c, b);
          h[b * H + row + c] = T(value);
          hw[b * H + row + c] = T(value * float(w_norm[row + c]));
          squares[b * part + first + c] = value * value;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int b = simd; b < B; b += simdgroups) {
      float sum = 0;
      for (int c = lane; c < part; c += 32) sum += squares[b * part + c];
      sum = simd_sum(sum);
      if (lane == 0) x2[b * P + tile] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    const int row = (tile - P) * simdgroups + simd;
    float acc[1][B] = {};
    dense<Ka, depth>(acc, a, M1, row, E - 1, lane);
    dense<H, depth>(acc, x, Wf, row, E - 1, lane);
    gemv_sum(acc);
    for (int b = lane; b < B; b += 32)
      if (row < E) router_dot[b * E + row] = gemv_pick(acc, 0, b);
  }
}
