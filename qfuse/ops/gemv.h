#include "gemv_rows.h"
// acc += rows of w times x, complete in every lane.
template <int BITS, int GROUP, int K, int V, int R, int B, typename X, typename S>
inline void gemv(
    thread float (&acc)[R][B], X x, const device uint* w, S scales, S biases, int row, int last, uint lane) {
  for (int k = lane * V; k < K; k += 32 * V) {
    float v[B][V], sum[B];
    gemv_inputs<K>(v, sum, x, k);
    gemv_rows<BITS, GROUP, K>(acc, v, sum, w, scales, biases, row, last, k);
  }
  gemv_sum(acc);
}
