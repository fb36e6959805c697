// N words from p; together where they start at a multiple of their size, as all do but codes of an odd width.
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
  return float(as_type<X>(ushort(word >> (16 * i))));
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
