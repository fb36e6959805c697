// Metal's words for a C++17 compiler; no library is included, so that no name of one is there. With SIM_TYPES the same
// text is only type-checked, by clang, with address spaces as types; without, they mean nothing and the kernel runs.
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t, uchar;
typedef __UINT16_TYPE__ uint16_t, ushort;
typedef __UINT32_TYPE__ uint32_t, uint;
typedef __UINT64_TYPE__ uint64_t, ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
typedef __fp16 half, float16_t;  // the older name there
#else
typedef _Float16 half, float16_t;
#endif
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define METAL_FUNC inline __attribute__((always_inline))
#define UNCHECKED __attribute__((no_sanitize("thread")))
#define thread

template <bool B, class X> struct enable_if {};
template <class X> struct enable_if<true, X> { typedef X type; };
template <class X> struct identity { typedef X type; };
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <class X> inline constexpr bool integral = X(1) / X(2) == X(0);

#ifdef SIM_TYPES
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
typedef __bf16 bfloat16_t;
template <class X, int N> using vec = X __attribute__((ext_vector_type(N)));
#else
#define device
#define constant
#define threadgroup
struct bfloat16_t {  // float becomes one only when asked to, as in Metal; an integer by itself
  uint16_t bits;
  bfloat16_t() = default;
  explicit constexpr bfloat16_t(float x) : bits(rounded(x)) {}
  template <class I, class = typename enable_if<integral<I>, I>::type> constexpr bfloat16_t(I x) : bits(rounded(x)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  static constexpr uint16_t rounded(float x) {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);
    return x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};
template <> inline constexpr bool integral<bfloat16_t> = false;
template <> inline constexpr bool integral<half> = false;
#define SIM_BFLOAT(op) \
  constexpr bfloat16_t operator op(bfloat16_t a, bfloat16_t b) { return bfloat16_t(float(a) op float(b)); } \
  template <class I> constexpr typename enable_if<integral<I>, bfloat16_t>::type operator op(bfloat16_t a, I b) { \
    return a op bfloat16_t(b); \
  } \
  template <class I> constexpr typename enable_if<integral<I>, bfloat16_t>::type operator op(I a, bfloat16_t b) { \
    return bfloat16_t(a) op b; \
  } \
  inline bfloat16_t& operator op##=(bfloat16_t& a, bfloat16_t b) { return a = a op b; }
SIM_BFLOAT(+)
SIM_BFLOAT(-)
SIM_BFLOAT(*)
SIM_BFLOAT(/)
template <class X, int N> struct vec;
template <class X> struct alignas(2 * sizeof(X)) vec<X, 2> {
  X x, y;
  vec() = default;
  constexpr vec(X v) : x(v), y(v) {}
  constexpr vec(X x, X y) : x(x), y(y) {}
  X& operator[](int i) { return (&x)[i]; }
  X operator[](int i) const { return (&x)[i]; }
};
template <class X> struct alignas(4 * sizeof(X)) vec<X, 3> {
  X x, y, z;
  vec() = default;
  constexpr vec(X v) : x(v), y(v), z(v) {}
  constexpr vec(X x, X y, X z) : x(x), y(y), z(z) {}
  X& operator[](int i) { return (&x)[i]; }
  X operator[](int i) const { return (&x)[i]; }
};
template <class X> struct alignas(4 * sizeof(X)) vec<X, 4> {
  X x, y, z, w;
  vec() = default;
  constexpr vec(X v) : x(v), y(v), z(v), w(v) {}
  constexpr vec(X x, X y, X z, X w) : x(x), y(y), z(z), w(w) {}
  X& operator[](int i) { return (&x)[i]; }
  X operator[](int i) const { return (&x)[i]; }
};
#define SIM_VECTOR(op) \
  template <class X, int N> vec<X, N> operator op(vec<X, N> a, vec<X, N> b) { \
    for (int i = 0; i < N; ++i) a[i] = a[i] op b[i]; \
    return a; \
  } \
  template <class X, int N> vec<X, N> operator op(vec<X, N> a, typename identity<X>::type b) { \
    return a op vec<X, N>(b); \
  } \
  template <class X, int N> vec<X, N> operator op(typename identity<X>::type a, vec<X, N> b) { \
    return vec<X, N>(a) op b; \
  } \
  template <class X, int N> vec<X, N>& operator op##=(vec<X, N>& a, vec<X, N> b) { return a = a op b; }
SIM_VECTOR(+)
SIM_VECTOR(-)
SIM_VECTOR(*)
SIM_VECTOR(/)
SIM_VECTOR(&)
SIM_VECTOR(|)
#endif
#define SIM_NAMED(X, name) typedef vec<X, 2> name##2; typedef vec<X, 3> name##3; typedef vec<X, 4> name##4;
SIM_NAMED(float, float)
SIM_NAMED(half, half)
SIM_NAMED(bfloat16_t, bfloat)
SIM_NAMED(char, char)
SIM_NAMED(uchar, uchar)
SIM_NAMED(short, short)
SIM_NAMED(ushort, ushort)
SIM_NAMED(int, int)
SIM_NAMED(uint, uint)
typedef bfloat16_t bfloat;
template <class To, class From> To as_type(From from) { return __builtin_bit_cast(To, from); }

// What runtime.cpp gives. Places are those of the caller.
#define SIM_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
namespace sim {
struct Lanes {  // what a SIMD operation brought together: 16 bytes a lane, and which lanes took part
  unsigned char (*slots)[16];
  uint active, lane;
  bool* reduced;  // whether the slots hold the results of a reduction already
};
Lanes meet(const void* value, int bytes, const char* operation, const char* file, int line);
void barrier(int flags, bool simdgroup, const char* file, int line);
void inactive(int lane, const char* operation, const char* file, int line);
size_t shared(int id, size_t bytes, int element, const char* name);
void touch(const volatile void* address, int bytes);
void left();
extern void* buffers[];
extern uint at[];
template <class X> UNCHECKED inline X slot(const Lanes& lanes, int lane) {
  X x;
  __builtin_memcpy((void*)&x, lanes.slots[lane], sizeof x);
  return x;
}
}  // namespace sim

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, SIM_PLACE) { sim::barrier(int(flags), false, file, line); }
inline void simdgroup_barrier(mem_flags flags, SIM_PLACE) { sim::barrier(int(flags), true, file, line); }

#define SIM_UNARIES(F) \
  F(exp, __builtin_expf(x)) F(exp2, __builtin_exp2f(x)) F(exp10, __builtin_powf(10.0f, x)) F(log, __builtin_logf(x)) \
  F(log2, __builtin_log2f(x)) F(log10, __builtin_log10f(x)) F(sin, __builtin_sinf(x)) F(cos, __builtin_cosf(x)) \
  F(tan, __builtin_tanf(x)) F(sinh, __builtin_sinhf(x)) F(cosh, __builtin_coshf(x)) F(tanh, __builtin_tanhf(x)) \
  F(asin, __builtin_asinf(x)) F(acos, __builtin_acosf(x)) F(atan, __builtin_atanf(x)) F(sqrt, __builtin_sqrtf(x)) \
  F(rsqrt, 1.0f / __builtin_sqrtf(x)) F(floor, __builtin_floorf(x)) F(ceil, __builtin_ceilf(x)) \
  F(round, __builtin_roundf(x)) F(rint, __builtin_rintf(x)) F(trunc, __builtin_truncf(x)) F(fabs, __builtin_fabsf(x)) \
  F(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
#define SIM_UNARY(name, value) \
  inline float name(float x) { return value; } \
  inline half name(half v) { const float x = v; return half(value); } \
  inline bfloat16_t name(bfloat16_t v) { const float x = v; return bfloat16_t(float(value)); }
#define SIM_BINARIES \
  inline float pow(float x, float y) { return __builtin_powf(x, y); } \
  inline float fmod(float x, float y) { return __builtin_fmodf(x, y); } \
  inline float atan2(float y, float x) { return __builtin_atan2f(y, x); } \
  inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); } \
  inline float divide(float x, float y) { return x / y; }
SIM_UNARIES(SIM_UNARY)
SIM_BINARIES
namespace fast {
SIM_UNARIES(SIM_UNARY)
SIM_BINARIES
}  // namespace fast
namespace precise {
SIM_UNARIES(SIM_UNARY)
SIM_BINARIES
}  // namespace precise
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return half(__builtin_fabsf(x)); }
inline bfloat16_t abs(bfloat16_t x) { return bfloat16_t(__builtin_fabsf(x)); }
inline int abs(int x) { return x < 0 ? -x : x; }
template <class X> X min(X a, X b) { return a != a || b < a ? b : a; }
template <class X> X max(X a, X b) { return a != a || a < b ? b : a; }
template <class X> X clamp(X x, X low, X high) { return min(max(x, low), high); }
template <class X> X select(X a, X b, bool c) { return c ? b : a; }
template <class X> X mix(X a, X b, X t) { return a + (b - a) * t; }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
template <class X, int N> X dot(vec<X, N> a, vec<X, N> b) {
  X sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}

enum memory_order { memory_order_relaxed };
template <class X> struct atomic { X value; };
typedef atomic<float> atomic_float;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
#define SIM_ATOMIC(space, name, result) \
  template <class X> UNCHECKED X name(volatile space atomic<X>* at, typename identity<X>::type x, memory_order) { \
    sim::touch((const volatile void*)(size_t)at, sizeof(X)); \
    const X old = at->value; \
    at->value = result; \
    return old; \
  }
#define SIM_ATOMICS(space) \
  SIM_ATOMIC(space, atomic_fetch_add_explicit, X(old + x)) SIM_ATOMIC(space, atomic_fetch_sub_explicit, X(old - x)) \
  SIM_ATOMIC(space, atomic_fetch_min_explicit, min(old, x)) SIM_ATOMIC(space, atomic_fetch_max_explicit, max(old, x)) \
  SIM_ATOMIC(space, atomic_fetch_and_explicit, X(old & x)) SIM_ATOMIC(space, atomic_fetch_or_explicit, X(old | x)) \
  SIM_ATOMIC(space, atomic_fetch_xor_explicit, X(old ^ x)) SIM_ATOMIC(space, atomic_exchange_explicit, x) \
  template <class X> void atomic_store_explicit(volatile space atomic<X>* at, typename identity<X>::type x, \
                                                memory_order order) { \
    atomic_exchange_explicit(at, x, order); \
  } \
  template <class X> UNCHECKED X atomic_load_explicit(const volatile space atomic<X>* at, memory_order) { \
    sim::touch((const volatile void*)(size_t)at, sizeof(X)); \
    return at->value; \
  } \
  template <class X> UNCHECKED bool atomic_compare_exchange_weak_explicit(volatile space atomic<X>* at, X* expected, \
                                                                          X x, memory_order, memory_order) { \
    sim::touch((const volatile void*)(size_t)at, sizeof(X)); \
    const X old = at->value; \
    const bool same = old == *expected; \
    if (same) at->value = x; \
    *expected = old; \
    return same; \
  }
SIM_ATOMICS(device)
#ifdef SIM_TYPES
SIM_ATOMICS(threadgroup)
#endif

// SIMD operations. A sum is the ascending xor butterfly over the lanes that take part.
template <class X, class Join> UNCHECKED X simd_reduced(X x, const char* name, Join join, const char* file, int line) {
  const sim::Lanes lanes = sim::meet(&x, sizeof x, name, file, line);
  if (!*lanes.reduced) {
    X all[32], next[32];
    for (int i = 0; i < 32; ++i) all[i] = sim::slot<X>(lanes, i);
    uint active = lanes.active;
    for (int step = 1; step < 32; step *= 2) {
      uint some = 0;
      for (int i = 0; i < 32; ++i) {
        const bool a = active >> i & 1, b = active >> (i ^ step) & 1;
        next[i] = a && b ? join(all[i], all[i ^ step]) : b ? all[i ^ step] : all[i];
        some |= uint(a || b) << i;
      }
      __builtin_memcpy((void*)all, next, sizeof all);
      active = some;
    }
    for (int i = 0; i < 32; ++i) __builtin_memcpy(lanes.slots[i], (const void*)&all[i], sizeof x);
    *lanes.reduced = true;
  }
  return sim::slot<X>(lanes, lanes.lane);
}
#define SIM_REDUCTION(name, value) \
  template <class X> X name(X x, SIM_PLACE) { \
    return simd_reduced(x, #name, [](X a, X b) { return X(value); }, file, line); \
  }
SIM_REDUCTION(simd_sum, a + b)
SIM_REDUCTION(simd_product, a * b)
SIM_REDUCTION(simd_min, min(a, b))
SIM_REDUCTION(simd_max, max(a, b))
SIM_REDUCTION(simd_and, a & b)
SIM_REDUCTION(simd_or, a | b)
SIM_REDUCTION(simd_xor, a ^ b)
template <class X> UNCHECKED X simd_moved(X x, int to, bool keep, const char* name, const sim::Lanes& lanes,
                                          const char* file, int line) {
  if (keep) return x;
  if (!(lanes.active >> (to & 31) & 1)) sim::inactive(to & 31, name, file, line);
  return sim::slot<X>(lanes, to & 31);
}
#define SIM_SHUFFLE(name, to, keep) \
  template <class X> UNCHECKED X name(X x, ushort by, SIM_PLACE) { \
    const sim::Lanes lanes = sim::meet(&x, sizeof x, #name, file, line); \
    const int lane = lanes.lane; \
    return simd_moved(x, to, keep, #name, lanes, file, line); \
  }
SIM_SHUFFLE(simd_shuffle, by, false)
SIM_SHUFFLE(simd_broadcast, by, false)
SIM_SHUFFLE(simd_shuffle_xor, lane ^ by, false)
SIM_SHUFFLE(simd_shuffle_down, lane + by, lane + by > 31)
SIM_SHUFFLE(simd_shuffle_up, lane - by, lane < by)
SIM_SHUFFLE(simd_shuffle_rotate_down, lane + by, false)
SIM_SHUFFLE(simd_shuffle_rotate_up, lane - by, false)
template <class X> UNCHECKED X simd_broadcast_first(X x, SIM_PLACE) {
  const sim::Lanes lanes = sim::meet(&x, sizeof x, "simd_broadcast_first", file, line);
  return sim::slot<X>(lanes, __builtin_ctz(lanes.active));
}
template <class X> UNCHECKED X simd_scanned(X x, bool self, const char* name, const char* file, int line) {
  const sim::Lanes lanes = sim::meet(&x, sizeof x, name, file, line);
  X sum = X(0);
  for (uint i = 0; i < lanes.lane + self; ++i)
    if (lanes.active >> i & 1) sum = X(sum + sim::slot<X>(lanes, i));
  return sum;
}
template <class X> X simd_prefix_inclusive_sum(X x, SIM_PLACE) {
  return simd_scanned(x, true, "simd_prefix_inclusive_sum", file, line);
}
template <class X> X simd_prefix_exclusive_sum(X x, SIM_PLACE) {
  return simd_scanned(x, false, "simd_prefix_exclusive_sum", file, line);
}
struct simd_vote {
  uint bits;
  explicit operator uint64_t() const { return bits; }
};
UNCHECKED inline simd_vote simd_ballot(bool x, SIM_PLACE) {
  const sim::Lanes lanes = sim::meet(&x, sizeof x, "simd_ballot", file, line);
  uint bits = 0;
  for (int i = 0; i < 32; ++i) bits |= uint(lanes.active >> i & 1 && sim::slot<bool>(lanes, i)) << i;
  return {bits};
}
UNCHECKED inline bool simd_any(bool x, SIM_PLACE) {
  const sim::Lanes lanes = sim::meet(&x, sizeof x, "simd_any", file, line);
  for (int i = 0; i < 32; ++i)
    if (lanes.active >> i & 1 && sim::slot<bool>(lanes, i)) return true;
  return false;
}
inline bool simd_all(bool x, SIM_PLACE) { return !simd_any(!x, file, line); }
UNCHECKED inline bool simd_is_first(SIM_PLACE) {
  const bool x = true;
  const sim::Lanes lanes = sim::meet(&x, sizeof x, "simd_is_first", file, line);
  return lanes.lane == uint(__builtin_ctz(lanes.active));
}
}  // namespace metal
using namespace metal;

// From the utilities that MLX puts before a kernel.
inline int64_t elem_to_loc(int64_t element, constant const int* shape, constant const int64_t* strides, int ndim) {
  int64_t location = 0;
  for (int i = ndim - 1; i >= 0; --i) location += element % shape[i] * strides[i], element /= shape[i];
  return location;
}
template <class X, class U> inline X ceildiv(X n, U m) { return (n + m - 1) / m; }
