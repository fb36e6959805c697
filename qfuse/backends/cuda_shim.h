// Metal's words for CUDA, one a line: a kernel's text is given the lines whose word it has.
#define device
#define constant
#define thread
#define threadgroup __shared__
using uint = unsigned int;
using ushort = unsigned short;
using bfloat16_t = __nv_bfloat16;
template <class To, class From> inline To as_type(From from) { To to; memcpy(&to, &from, sizeof(To)); return to; }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
template <class X> inline X simd_shuffle(X x, ushort lane) { return __shfl_sync(~0u, x, lane); }
template <class X> inline X simd_broadcast(X x, ushort lane) { return __shfl_sync(~0u, x, lane); }
template <class X> inline X simd_shuffle_xor(X x, ushort mask) { return __shfl_xor_sync(~0u, x, mask); }
template <class X> inline X simd_sum(X x) { for (int i = 1; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i); return x; }
inline float simd_max(float x) { for (int i = 1; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i)); return x; }
inline uint simd_max(uint x) { return __reduce_max_sync(~0u, x); }
inline float simd_min(float x) { for (int i = 1; i < 32; i *= 2) x = fminf(x, __shfl_xor_sync(~0u, x, i)); return x; }
inline uint simd_min(uint x) { return __reduce_min_sync(~0u, x); }
namespace metal { inline float exp(float x) { return expf(x); } }
namespace metal { inline float exp2(float x) { return exp2f(x); } }
namespace metal { inline float log(float x) { return logf(x); } }
namespace metal { inline float log2(float x) { return log2f(x); } }
namespace metal { inline float cos(float x) { return cosf(x); } }
namespace metal { inline float sin(float x) { return sinf(x); } }
namespace metal { inline float sqrt(float x) { return sqrtf(x); } }
namespace metal { inline float rsqrt(float x) { return rsqrtf(x); } }
namespace metal { inline float abs(float x) { return fabsf(x); } }
namespace metal { inline bool isnan(float x) { return x != x; } }
namespace metal { inline float min(float a, float b) { return fminf(a, b); } }
namespace metal { inline int min(int a, int b) { return a < b ? a : b; } }
namespace metal { inline uint min(uint a, uint b) { return a < b ? a : b; } }
namespace metal { inline float max(float a, float b) { return fmaxf(a, b); } }
namespace metal { inline int max(int a, int b) { return a > b ? a : b; } }
namespace metal { inline uint max(uint a, uint b) { return a > b ? a : b; } }
