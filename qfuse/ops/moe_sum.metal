#include "silu.h"
// One column of one batch row a thread.
for (int i = thread_position_in_grid.x; i < B * H; i += threads_per_grid.x) {
  const int b = i / H, c = i % H;
  float sum = sigmoid(shared_gate_logit[b]) * d_shared[i];
  for (int j = 0; j < k; ++j) sum += scores[b * k + j] * d_routed[(b * k + j) * H + c];
  y[i] = T(sum);
}
