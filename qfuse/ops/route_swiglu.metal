#include "gemv.h"
#include "norm_factor.h"
#include "swiglu.h"
// A simdgroup takes `rows` rows of gate and up: of a chosen expert for its batch row, or of the shared one for all.
// It does the routing of a batch row by itself, its lanes over the experts, so that nothing is shared.
constexpr int N = (I + rows - 1) / rows, ROUTED = B * k * N, GATE = ROUTED + (Is + rows - 1) / rows;
constexpr int P = (H + part - 1) / part, PER = (E + 31) / 32;
const int lane = thread_index_in_simdgroup, step = threadgroups_per_grid.x * simdgroups;
const int start = threadgroup_position_in_grid.x * simdgroups + simdgroup_index_in_threadgroup;
int routed = -1;  // the batch row whose j-th expert lane j has, and whose norm has the factor r
uint mine = 0;
float r = 0;
for (int i = start; i <= GATE; i += step) {
  if (i < ROUTED) {
    const int slot = i / N, b = slot / k, row = i % N * rows;
    if (b != routed) {
      routed = b;
      r = norm_factor<P>(x2 + b * P, H, eps, lane);
      uint key[PER];  // of a logit, in the same order; 0 is below every logit's
      for (int j = 0; j < PER; ++j) {
        const float logit = lane + 32 * j < E ? r * router_dot[b * E + lane + 32 * j] + 0.0f : 0;  // -0 is 0
        uint word = as_type<uint>(metal::isnan(logit) ? -INFINITY : logit);
        key[j] = lane + 32 * j < E ? (word >> 31 ? ~word : word | 1u << 31) : 0;
      }
      for (int c = 0; c < k; ++c) {
        uint top = 0, at = E;
        for (int j = 0; j < PER; ++j) top = metal::max(top, key[j]);
        top = simd_max(top);
        for (int j = PER; j-- > 0;)
          if (key[j] == top) at = lane + 32 * j;
        at = simd_min(at);
        for (int j = 0; j < PER; ++j)
          if (at == uint(lane + 32 * j)) key[j] = 0;
        if (lane == c) mine = at;
      }
      if (i == b * k * N) {
        const float logit = r * router_dot[b * E + mine], most = simd_shuffle(logit, 0);
        float total = 0;
        for (int j = 0; j < PER; ++j)
          if (lane + 32 * j < E) total += metal::exp(r * router_dot[b * E + lane + 32 * j] - most);
        total = simd_sum(total);
        const float p = lane < k ? metal::exp(logit - most) / total : 0, whole = norm_topk ? simd_sum(p) : 1;
        if (lane < k) indices[b * k + lane] = mine;
        if (lane < k) scores[b * k + lane] = p / whole;
      }
    }
    const uint e = simd_shuffle(mine, slot % k);
    float gate[rows][1] = {}, up[rows][1] = {};
    gate_up<w_gate_bits, w_gate_group, w_up_bits, w_up_group, I, H, take, depth>(
        gate, up, hw + b * H, e, w_gate, w_gate_scales, w_gate_biases, w_up, w_up_scales, w_up_biases, row, lane);
    for (int j = lane; j < rows; j += 32)
      if (row + j < I)
        act_routed[slot * I + row + j] = silu(r * gemv_pick(gate, j, 0)) * r * gemv_pick(up, j, 0);
  } else if (i < GATE) {
    const int row = (i - ROUTED) * rows;
    float gate[rows][B] = {}, up[rows][B] = {};
    gate_up<ws_gate_bits, ws_gate_group, ws_up_bits, ws_up_group, Is, H, take, depth>(
        gate, up, hw, 0, ws_gate, ws_gate_scales, ws_gate_biases, ws_up, ws_up_scales, ws_up_biases, row, lane);
    for (int b = 0; b < B; ++b) {
      const float scale = norm_factor<P>(x2 + b * P, H, eps, lane);
      for (int c = 0; c < rows; ++c) gate[c][b] *= scale, up[c][b] *= scale;
    }
    for (int j = lane; j < rows * B; j += 32) {
      const int b = j / rows, c = j % rows;
      if (row + c < Is) act_shared[b * Is + row + c] = silu(gemv_pick(gate, c, b)) * gemv_pick(up, c, b);
    }
  } else {
    float acc[1][B] = {};
    gemv<w_shared_gate_bits, w_shared_gate_group, H, take, depth>(
        acc, hw, w_shared_gate, w_shared_gate_scales, w_shared_gate_biases, 0, 0, lane);
    for (int b = 0; b < B; ++b) {
      const float logit = acc[0][b] * norm_factor<P>(x2 + b * P, H, eps, lane);
      if (lane == 0) shared_gate_logit[b] = logit;
    }
  }
}
