#include "gemv.h"
#include "silu.h"
// A simdgroup takes `rows` rows of w_q, w_k or w_v. A head of w_q is D rows of the query, then D of the gate.
constexpr int NQ = 2 * Hq * D, NK = Hkv * D, Q = (NQ + rows - 1) / rows, KEY = (NK + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < Q + 2 * KEY; i += step) {
  float acc[rows][B] = {};
  const int row = (i - (i < Q ? 0 : i < Q + KEY ? Q : Q + KEY)) * rows;
  if (i < Q) {
    gemv<w_q_bits, w_q_group, H, take, depth>(acc, n, w_q, w_q_scales, w_q_biases, row, NQ - 1, lane);
  } else if (i < Q + KEY) {
    gemv<w_k_bits, w_k_group, H, take, depth>(acc, n, w_k, w_k_scales, w_k_biases, row, NK - 1, lane);
  } else {
    gemv<w_v_bits, w_v_group, H, take, depth>(acc, n, w_v, w_v_scales, w_v_biases, row, NK - 1, lane);
  }
  for (int j = lane; j < rows * B; j += 32) {
    const int b = j / rows, c = row + j % rows, head = c / (2 * D), d = c % (2 * D);
    const float value = gemv_pick(acc, j % rows, b);
    if (i >= Q) {
      if (c < NK) (i < Q + KEY ? keys : values)[b * NK + c] = T(value);
    } else if (c < NQ && d < D) {
      queries[(b * Hq + head) * D + d] = T(value);
    } else if (c < NQ) {
      gate[(b * Hq + head) * D + d - D] = sigmoid(value);
    }
  }
}
