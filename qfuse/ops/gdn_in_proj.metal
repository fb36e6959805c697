#include "gdn_in_proj.h"
// A simdgroup takes `rows` rows of one of the four matrices; then each lane finishes one of their products.
constexpr int QKV = (C + rows - 1) / rows, Z = QKV + (Hv * Dv + rows - 1) / rows,
              BETA = Z + (Hv + rows - 1) / rows, G = 2 * BETA - Z;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups,
          start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
for (int i = start; i < G; i += step) {
  float acc[rows][B] = {};
  const int row = (i - (i < QKV ? 0 : i < Z ? QKV : i < BETA ? Z : BETA)) * rows;
  if (i < QKV) {
    gemv<w_qkv_bits, w_qkv_group, H, take, depth>(acc, n, w_qkv, w_qkv_scales, w_qkv_biases, row, C - 1, lane);
  } else if (i < Z) {
    gemv<w_z_bits, w_z_group, H, take, depth>(acc, n, w_z, w_z_scales, w_z_biases, row, Hv * Dv - 1, lane);
  } else if (i < BETA) {
    gemv<w_b_bits, w_b_group, H, take, depth>(acc, n, w_b, w_b_scales, w_b_biases, row, Hv - 1, lane);
  } else {
    gemv<w_a_bits, w_a_group, H, take, depth>(acc, n, w_a, w_a_scales, w_a_biases, row, Hv - 1, lane);
  }
  for (int j = lane; j < rows * B; j += 32) {
    const int b = j / rows, c = row + j % rows;
    float value = gemv_pick(acc, j % rows, b);
    if (i < QKV) {
      if (c >= C) continue;
#if HAS_MASK
      if (!mask[b]) value = 0;
#endif
      qkv[b * C + c] = T(gdn_conv<C, Kc>(value, b, c, conv_state, conv_state_next, w_conv));
    } else if (i < Z) {
      if (c < Hv * Dv) z[b * Hv * Dv + c] = silu(value);
    } else if (c < Hv) {
      if (i < BETA) {
        beta[b * Hv + c] = sigmoid(value);
      } else {
        g[b * Hv + c] = gdn_decay(value + float(dt_bias[c]), float(A_log[c]));
      }
    }
  }
}
