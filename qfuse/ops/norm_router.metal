#include "norm_router.h"
// A simdgroup takes `part` columns of h, or `rows` rows of the router on h * w_norm, which it makes as it reads.
constexpr int P = (H + part - 1) / part, ROUTER = (E + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < ROUTER + B * P; i += step) {
  if (i < ROUTER) {
    const int row = i * rows;
    float acc[rows][B] = {};
    gemv<w_router_bits, w_router_group, H, take, depth>(
        acc, normed(x, r, w_norm), w_router, w_router_scales, w_router_biases, row, E - 1, lane);
    for (int j = lane; j < rows * B; j += 32)
      if (row + j % rows < E) router_dot[j / rows * E + row + j % rows] = gemv_pick(acc, j % rows, j / rows);
  } else {
    const int b = (i - ROUTER) / P, p = (i - ROUTER) % P;
    float sum = 0;
    for (int c = p * part + lane; c < metal::min((p + 1) * part, H); c += 32) {
      const float value = float(x[b * H + c]) + float(r[b * H + c]);
      h[b * H + c] = T(value);
      hw[b * H + c] = T(value * float(w_norm[c]));
      sum += value * value;
    }
    sum = simd_sum(sum);
    if (lane == 0) x2[b * P + p] = sum;
  }
}
