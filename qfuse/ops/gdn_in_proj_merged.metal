#include "gdn_in_proj.h"
// A simdgroup takes `rows` rows of a matrix; then each lane finishes one of their products, at the place its row names.
constexpr int SHARE = Hv / Hk, HEAD = 2 * Dk + 2 * SHARE * Dv, ROWS = Hk * HEAD;
constexpr int QKVZ = (ROWS + rows - 1) / rows, ALL = QKVZ + (2 * Hv + rows - 1) / rows;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < ALL; i += step) {
  float acc[rows][B] = {};
  const int row = (i < QKVZ ? i : i - QKVZ) * rows;
  if (i < QKVZ) {
    gemv<w_qkvz_bits, w_qkvz_group, H, take, depth>(acc, n, w_qkvz, w_qkvz_scales, w_qkvz_biases, row, ROWS - 1, lane);
  } else {
    gemv<w_ba_bits, w_ba_group, H, take, depth>(acc, n, w_ba, w_ba_scales, w_ba_biases, row, 2 * Hv - 1, lane);
  }
  for (int j = lane; j < rows * B; j += 32) {
    const int b = j / rows, r = row + j % rows;
    float value = gemv_pick(acc, j % rows, b);
    if (i < QKVZ && r < ROWS) {
      const int head = r / HEAD, at = r % HEAD;
      if (at >= HEAD - SHARE * Dv) {
        z[b * Hv * Dv + head * SHARE * Dv + at - (HEAD - SHARE * Dv)] = silu(value);
        continue;
      }
      const int c = at < Dk ? head * Dk + at
        : at < 2 * Dk ? (Hk + head - 1) * Dk + at : (2 * Hk - 2) * Dk + head * SHARE * Dv + at;
#if HAS_MASK
      if (!mask[b]) value = 0;
#endif
      qkv[b * C + c] = T(gdn_conv<C, Kc>(value, b, c, conv_state, conv_state_next, w_conv));
    } else if (i >= QKVZ && r < 2 * Hv) {
      const int head = r / (2 * SHARE), at = r % (2 * SHARE), c = head * SHARE + at % SHARE;
      if (at < SHARE) {
        beta[b * Hv + c] = sigmoid(value);
      } else {
        g[b * Hv + c] = gdn_decay(value + float(dt_bias[c]), float(A_log[c]));
      }
    }
  }
}
