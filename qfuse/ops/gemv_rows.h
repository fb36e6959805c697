// Rows of an affine-quantised matrix times B vectors: a simdgroup takes R rows, a lane V inputs of a group at a time.
// A row past the last repeats it, so that no load is out of bounds: the caller masks the store.

// N words from p; together where they start at a multiple of their size, as codes of 4 and 8 bits do.
template <bool TOGETHER, int N>
inline void gemv_words(thread uint (&w)[N], const device uint* p) {
  int i = 0;
  for (; TOGETHER && i + 4 <= N; i += 4) {
    const uint4 q = *reinterpret_cast<const device uint4*>(p + i);
    w[i] = q.x, w[i + 1] = q.y, w[i + 2] = q.z, w[i + 3] = q.w;
  }
  for (; TOGETHER && i + 2 <= N; i += 2) {
    const uint2 q = *reinterpret_cast<const device uint2*>(p + i);
    w[i] = q.x, w[i + 1] = q.y;
  }
  for (; i < N; ++i) w[i] = p[i];
}

// The i-th of the values of type X in a word.
template <typename X>
inline float gemv_value(uint word, int i) {
  return float(as_type<X>(ushort(word >> 16 * i)));
}
template <>
inline float gemv_value<float>(uint word, int) {
  return as_type<float>(word);
}

// V inputs of a row; x is a pointer here, and whatever has an overload of this elsewhere.
template <int V, typename X>
inline void gemv_load(thread float (&v)[V], const device X* x, int row, int k) {
  constexpr int PER = 4 / sizeof(X);
  uint w[V / PER];
  gemv_words<true>(w, reinterpret_cast<const device uint*>(x + row + k));
  for (int i = 0; i < V; ++i) v[i] = gemv_value<X>(w[i / PER], i % PER);
}

template <typename X>
inline void gemv_load(thread float (&v)[1], const device X* x, int row, int k) {
  v[0] = float(x[row + k]);
}

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
      const float u = as_type<float>(0x4b000000u | code) - (8388608.0f + MIDDLE);  // the bits of 2^23 + code
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
