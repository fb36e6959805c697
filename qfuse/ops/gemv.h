#include "gemv_rows.h"
// acc += rows of w times x, complete in every lane; a lane takes V inputs DEPTH times before it multiplies the first.
template <int BITS, int GROUP, int K, int V, int DEPTH, int R, int B, typename X, typename S>
inline void gemv(
    thread float (&acc)[R][B], X x, const device uint* w, S scales, S biases, int row, int last, uint lane) {
  GemvRun<BITS, V> runs[DEPTH][R];
  for (int first = 0; first < K; first += 32 * V * DEPTH) {
    int k = first + lane * V;
    gemv_take<BITS, GROUP, K>(runs, w, scales, biases, row, last, k);
    UNROLL
    for (int i = 0; i < DEPTH && k < K; ++i, k += 32 * V) {
      float v[B][V], sum[B];
      gemv_inputs<K>(v, sum, x, k);
      gemv_dot(acc, v, sum, runs[i]);
    }
  }
  gemv_sum(acc);
}
