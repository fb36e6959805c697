#include "gemv_load.h"
// Before a loop over an array of a thread's own: in a loop that stays one, such an array is not in registers.
#define UNROLL _Pragma("unroll")

// Rows of an affine-quantised matrix times B vectors: a simdgroup takes R rows, a lane V inputs of a group at a time.
// A row past the last repeats it, so that no load is out of bounds: the caller masks the store.

template <int K, int B, int V, typename X>
inline void gemv_inputs(thread float (&v)[B][V], thread float (&sum)[B], X x, int k) {
  UNROLL
  for (int b = 0; b < B; ++b) {
    gemv_load(v[b], x, b * K, k);
    sum[b] = 0;
    for (int i = 0; i < V; ++i) sum[b] += v[b][i];
  }
}

// The i-th code of a run that starts at a word: codes follow one another, whatever their width.
template <int BITS, int N>
inline uint gemv_code(thread uint (&w)[N], int i) {
  const int at = BITS * i / 32, shift = BITS * i % 32;
  uint code = w[at] >> shift;
  if (shift + BITS > 32) code |= w[at + 1] << (32 - shift);
  return code & ((1u << BITS) - 1);
}

// V codes of a row with their scale and bias, not computed with yet.
template <int BITS, int V>
struct GemvRun {
  uint codes[V * BITS / 32];
  float scale, bias;
};

// A lane's runs of R rows from input k on, N of them 32 V apart. If there are several, none of their loads is put off
// past the end of this: a compiler would put one off until its value is used.
template <int BITS, int GROUP, int K, int N, int R, int V, typename S>
inline void gemv_take(
    thread GemvRun<BITS, V> (&runs)[N][R], const device uint* w, S scales, S biases, int row, int last, int k) {
  UNROLL
  for (int i = 0; i < N; ++i, k += 32 * V)
    UNROLL
    for (int r = 0; r < R && k < K; ++r) {
      const int n = metal::min(row + r, last), g = n * (K / GROUP) + k / GROUP;
      gemv_words<BITS % 4 == 0>(runs[i][r].codes, w + n * (K / 32 * BITS) + k / 8 * BITS / 4);
      runs[i][r].scale = float(scales[g]), runs[i][r].bias = float(biases[g]);
    }
  if (N > 1) simdgroup_barrier(mem_flags::mem_none);
}

template <int BITS, int R, int B, int V>
inline void gemv_dot(
    thread float (&acc)[R][B], thread float (&v)[B][V], thread float (&sum)[B], thread GemvRun<BITS, V> (&runs)[R]) {
  constexpr float MIDDLE = 1 << (BITS - 1);
  UNROLL
  for (int r = 0; r < R; ++r) {
    const float scale = runs[r].scale, bias = runs[r].bias + MIDDLE * scale;
    float dot[B] = {};
    UNROLL
    for (int i = 0; i < V; ++i) {
      const uint code = gemv_code<BITS>(runs[r].codes, i);
      const float u = as_type<float>(code | 75u << 24) - (8388608 + MIDDLE);  // the bits of 2^23 + code
      for (int b = 0; b < B; ++b) dot[b] += u * v[b][i];
    }
    for (int b = 0; b < B; ++b) acc[r][b] += scale * dot[b] + bias * sum[b];
  }
}

template <int R, int B>
inline void gemv_sum(thread float (&acc)[R][B]) {
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = simd_sum(acc[r][b]);
}

// acc[r][b], chosen by comparison: a register has no address.
template <int R, int B>
inline float gemv_pick(thread float (&acc)[R][B], int r, int b) {
  float value = 0;
  for (int i = 0; i < R * B; ++i) value = i == r * B + b ? acc[i / B][i % B] : value;
  return value;
}
