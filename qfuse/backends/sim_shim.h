// Metal's words for a C++ compiler, and one fiber a thread of a threadgroup. SIMD operations and barriers are
// rendezvous; a simdgroup or threadgroup whose threads never all arrive ends the process with a message.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
typedef unsigned int uint;
typedef unsigned short ushort;
#define device
#define constant
#define thread
#define threadgroup static
typedef _Float16 half;
struct bfloat16_t {  // float converts to it only when asked to, as in Metal
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    bits = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};
struct alignas(8) uint2 { uint x, y; };
struct uint3 { uint x, y, z; };
struct alignas(16) uint4 { uint x, y, z, w; };
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type wants types of one size");
  To to;
  memcpy((void*)&to, &from, sizeof to);
  return to;
}
namespace metal {
inline float exp(float x) { return expf(x); }
inline float exp2(float x) { return exp2f(x); }
inline float log(float x) { return logf(x); }
inline float log2(float x) { return log2f(x); }
inline float cos(float x) { return cosf(x); }
inline float sin(float x) { return sinf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float abs(float x) { return fabsf(x); }
inline bool isnan(float x) { return x != x; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
}  // namespace metal
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

namespace sim {
constexpr int MOST = 512, STACK = 1 << 16;
struct Fiber {
  void* sp;
  char* stack;
  bool done;
  uint simd_ops, barriers;
};
static Fiber fibers[MOST];
static int count, current;
static void* host;
static uint arrived[MOST / 32], at_barrier;
static uint32_t slots[MOST / 32][2][32];
static int idle;  // fibers that gave way since one last arrived somewhere: more than there are, and none can go on
extern "C" void sim_switch(void** from, void* to);
#if defined(__x86_64__)
asm(".text\nsim_switch:\npush %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\n"
    "mov %rsi,%rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#else
#error the simulator switches stacks on x86-64 only
#endif
static void give_way() {
  const int me = current;
  int next = me;
  do next = (next + 1) % count;
  while (fibers[next].done && next != me);
  if (++idle > 2 * count || next == me) {
    fprintf(stderr, "a barrier or SIMD operation is not reached by every thread\n");
    _Exit(3);
  }
  current = next;
  sim_switch(&fibers[me].sp, fibers[next].sp);
}
static const uint32_t* gather(uint32_t value) {
  const int group = current / 32, lane = current % 32;
  const uint op = fibers[current].simd_ops++;
  slots[group][op & 1][lane] = value;
  arrived[group]++, idle = 0;
  while (arrived[group] < 32 * (op + 1)) give_way();
  return slots[group][op & 1];
}
static void leave() {
  fibers[current].done = true, idle = 0;
  for (int i = 1; i <= count; ++i) {
    const int me = current, next = (me + i) % count;
    if (fibers[next].done) continue;
    current = next;
    sim_switch(&fibers[me].sp, fibers[next].sp);
  }
  void* unused;
  sim_switch(&unused, host);
}
static void run(int threads, void (*entry)()) {
  count = threads, at_barrier = 0, idle = 0, current = 0;
  memset(arrived, 0, sizeof arrived);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = (char*)malloc(STACK);
    fiber.done = false, fiber.simd_ops = fiber.barriers = 0;
    void** top = (void**)(((uintptr_t)fiber.stack + STACK) & ~15ull);
    *--top = nullptr, *--top = (void*)entry;
    fiber.sp = top - 6;
  }
  sim_switch(&host, fibers[0].sp);
}
}  // namespace sim

inline void threadgroup_barrier(mem_flags) {
  const uint at = sim::fibers[sim::current].barriers++;
  sim::at_barrier++, sim::idle = 0;
  while (sim::at_barrier < uint(sim::count) * (at + 1)) sim::give_way();
}
template <class X> X simd_reduce(X x, X (*join)(X, X)) {  // the ascending xor butterfly
  for (int step = 1; step < 32; step *= 2) {
    const int lane = sim::current % 32;
    x = join(x, as_type<X>(sim::gather(as_type<uint32_t>(x))[lane ^ step]));
  }
  return x;
}
template <class X> X simd_sum(X x) { return simd_reduce<X>(x, [](X a, X b) { return X(a + b); }); }
template <class X> X simd_max(X x) { return simd_reduce<X>(x, [](X a, X b) { return metal::max(a, b); }); }
template <class X> X simd_min(X x) { return simd_reduce<X>(x, [](X a, X b) { return metal::min(a, b); }); }
template <class X> X simd_shuffle(X x, ushort lane) { return as_type<X>(sim::gather(as_type<uint32_t>(x))[lane & 31]); }
template <class X> X simd_broadcast(X x, ushort lane) { return simd_shuffle(x, lane); }
template <class X> X simd_shuffle_xor(X x, ushort mask) { return simd_shuffle(x, (sim::current % 32) ^ mask); }
