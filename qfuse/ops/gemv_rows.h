#include "gemv_load.h"
// Rows of an affine-quantised matrix times B vectors: a simdgroup takes R rows, a lane V inputs of a group at a time.
// A row past the last repeats it, so that no load is out of bounds: the caller masks the store.

template <int K, int B, int V, typename X>
inline void gemv_inputs(thread float (&v)[B][V], thread float (&sum)[B], X x, int k) {
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

template <int BITS, int GROUP, int K, int R, int B, int V, typename S>
inline void gemv_rows(
    thread float (&acc)[R][B], thread float (&v)[B][V], thread float (&sum)[B],
    const device uint* w, S scales, S biases, int row, int last, int k) {
  constexpr float MIDDLE = 1 << (BITS - 1);
  for (int r = 0; r < R; ++r) {
    const int n = metal::min(row + r, last), g = n * (K / GROUP) + k / GROUP;
    uint codes[V * BITS / 32];
    gemv_words<BITS % 4 == 0>(codes, w + n * (K / 32 * BITS) + k / 8 * BITS / 4);
    const float scale = float(scales[g]), bias = float(biases[g]) + MIDDLE * scale;
    float dot[B] = {};
    for (int i = 0; i < V; ++i) {
      const uint code = gemv_code<BITS>(codes, i);
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
