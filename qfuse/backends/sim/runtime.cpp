// Runs one launch of a kernel that was compiled behind shim.h, and prints what it finds, a line each:
// kind, severity, file, line, message, between tabs. "@1f3c" in a message is an address in this program.
//
// Each thread of a threadgroup is a fiber. SIMD operations and barriers are rendezvous; threadgroups run one by one.
// Every buffer and threadgroup array lies far from the next, with inaccessible memory between. In a full check the
// kernel is compiled with -fsanitize=thread,…, whose hooks are the functions at the end of this file.
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

extern "C" void sim_kernel();
extern "C" void sim_switch(void** from, void* to);
extern char __executable_start, end;
#if defined(__x86_64__)
asm(".text\nsim_switch:\npush %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\n"
    "mov %rsi,%rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
constexpr int SAVED = 8, RESUME = 6;  // words below the top of a new stack, and which of them is the return address
static uintptr_t pc_of(const ucontext_t* c) { return c->uc_mcontext.gregs[REG_RIP]; }
#elif defined(__aarch64__)
asm(".text\nsim_switch:\nsub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\n"
    "stp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\nldp x19,x20,[sp]\n"
    "ldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\n"
    "ldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n");
constexpr int SAVED = 20, RESUME = 11;
static uintptr_t pc_of(const ucontext_t* c) { return c->uc_mcontext.pc; }
#else
#error the simulator switches stacks on x86-64 and aarch64 only
#endif

namespace sim {
constexpr int MOST = 1024, WIDTH = 32, SHARED = 32, SHARED_BYTES = 32768;
constexpr size_t STACK = 1 << 18, PAGE = 1 << 16;  // a multiple of every page size in use
void* buffers[64];
unsigned at[32];

struct Access {  // who touched an element last, and between which barriers
  uint32_t group, thread, round, fence, simd_round, simd_fence;
  uintptr_t pc;
};
struct Cell {
  Access write, read, other;  // group 0 is nobody
};
struct Region {
  const char* name;
  char kind;  // i an input, o an output, w an output written beforehand, t a threadgroup array
  char* begin;
  size_t bytes;
  int element;
  Cell* cells;
  uint32_t group;  // of a threadgroup array: the threadgroup it was made ready for
};
static Region regions[64 + SHARED];
static int inputs_and_outputs;
static char *reserve, *stacks;
static size_t gap, shared_bytes;
static bool full;
static unsigned seconds, seed;
static uintptr_t last_pc;  // where the kernel last touched memory, known in a full check

struct Fiber {
  void* sp;
  bool done, returned;
  unsigned operations;
  const char *waits_for, *file;
  int line;
};
struct Meeting {  // a barrier, of a threadgroup or of a simdgroup
  int arrived, line, flags;
  const char* file;
  uint32_t round, fences[2];  // how often it was passed; how often it ordered device and threadgroup memory
};
struct Phase {
  unsigned char slots[WIDTH][16];
  uint32_t arrived, took_part;
  unsigned number, done;
  const char *operation, *file;
  int line;
  bool reduced;
};
struct Simdgroup {
  uint32_t all, live;
  Phase phases[2];
  Meeting meeting;
};
static Fiber fibers[MOST];
static Simdgroup simdgroups[MOST / WIDTH];
static Meeting whole;
static int order[MOST], place_of[MOST], count, live, current, idle;
static uint32_t group;
static void* host;

struct Lanes {
  unsigned char (*slots)[16];
  unsigned active, lane;
  bool* reduced;
};

[[noreturn]] static void stop() {
  fflush(stdout);
  _exit(3);
}

static void report(const char* kind, const char* severity, const char* file, int line, uintptr_t pc, const char* format,
                   ...) {
  static struct { const char *kind, *file; int line; uintptr_t pc; } seen[64];
  static int known;
  for (int i = 0; i < known; ++i)
    if (!strcmp(seen[i].kind, kind) && seen[i].file == file && seen[i].line == line && seen[i].pc == pc) return;
  if (known == 64) return;
  seen[known++] = {kind, file, line, pc};
  char message[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  if (pc) printf("%s\t%s\t@%lx@%lx\t0\t%s\n", kind, severity, (unsigned long)pc - 1, (unsigned long)last_pc - 1, message);
  else printf("%s\t%s\t%s\t%d\t%s\n", kind, severity, file, line, message);
}

static Region* region_of(const volatile void* address) {
  const char* a = (const char*)address;
  if (!reserve || a < reserve || a >= reserve + gap * (inputs_and_outputs + SHARED)) return nullptr;
  return &regions[(a - reserve) / gap];
}

[[noreturn]] static void outside(const volatile void* address, const char* what, uintptr_t pc) {
  const Region* r = region_of(address);
  char* a = (char*)address;
  if ((uintptr_t)a < PAGE) report("null dereference", "error", "", 0, pc, "%s through a null pointer", what);
  else if (r && r->begin && r->kind == 'i' && a >= r->begin && a < r->begin + r->bytes)
    report("write to an input", "error", "", 0, pc, "%s of %s[%ld], an input", what, r->name,
           long(a - r->begin) / r->element);
  else if (r && r->begin) {
    const long index = a < r->begin ? -((r->begin - a + r->element - 1) / r->element) : (a - r->begin) / r->element;
    report("out of bounds", "error", "", 0, pc, "%s of %s[%ld], which has %ld elements", what, r->name, index,
           long(r->bytes) / r->element);
  } else if (stacks && a >= stacks && a < stacks + MOST * STACK)
    report("stack overflow", "error", "", 0, pc, "a thread's own variables take more than %zu KiB", STACK >> 10);
  else report("out of bounds", "error", "", 0, pc, "%s of memory that is no buffer's", what);
  stop();
}

static void on_signal(int number, siginfo_t* info, void* context) {
  const uintptr_t pc = pc_of((const ucontext_t*)context) + 1;
  if (number == SIGSEGV || number == SIGBUS) outside(info->si_addr, "access", pc);
  if (number == SIGALRM) report("endless loop", "error", "", 0, pc, "it did not end within %u s", seconds);
  else report("arithmetic", "error", "", 0, pc, number == SIGFPE ? "an integer division by zero" : "illegal instruction");
  stop();
}

[[noreturn]] static void stuck() {
  int at_barrier = 0;
  for (int i = 0; i < count; ++i) at_barrier += !fibers[i].done && !strcmp(fibers[i].waits_for, "threadgroup_barrier");
  for (int i = 0; i < count; ++i) {
    const Fiber& f = fibers[i];
    if (f.done) continue;
    if (!strcmp(f.waits_for, "threadgroup_barrier")) {
      report("divergent barrier", "error", f.file, f.line, 0, "%d of %d threads reach it", at_barrier, count);
      continue;
    }
    int here = 0, first = i / WIDTH * WIDTH, last = first + WIDTH < count ? first + WIDTH : count;
    const Fiber* other = nullptr;
    for (int j = first; j < last; ++j) {
      const bool same = !fibers[j].done && fibers[j].file == f.file && fibers[j].line == f.line;
      here += same;
      if (!same && !fibers[j].done) other = &fibers[j];
    }
    if (other)
      report(strstr(f.waits_for, "barrier") ? "divergent barrier" : "divergent SIMD operation", "error", f.file, f.line,
             0, "%s is reached by %d of %d lanes while others wait at line %d", f.waits_for, here, last - first,
             other->line);
  }
  stop();
}

static void give_way() {
  const int me = current;
  int next = place_of[me];
  do {
    if (++next == count) next = 0;
  } while (fibers[order[next]].done);
  if (++idle > 2 * count + 2) stuck();
  current = order[next];
  if (current != me) sim_switch(&fibers[me].sp, fibers[current].sp);
}

static void wait_at(const char* what, const char* file, int line) {
  fibers[current].waits_for = what, fibers[current].file = file, fibers[current].line = line;
  idle = 0;
}

Lanes meet(const void* value, int bytes, const char* operation, const char* file, int line) {
  const int lane = current % WIDTH;
  Simdgroup& s = simdgroups[current / WIDTH];
  const unsigned number = ++fibers[current].operations;
  Phase& p = s.phases[number & 1];
  wait_at(operation, file, line);
  if (!p.arrived) p.number = number, p.operation = operation, p.file = file, p.line = line;
  else if (p.number != number || p.line != line || strcmp(p.operation, operation)) {
    report("divergent SIMD operation", "error", file, line, 0, "lanes of one simdgroup meet %s of line %d in %s",
           p.operation, p.line, operation);
    stop();
  }
  memcpy(p.slots[lane], value, bytes);
  p.arrived |= 1u << lane;
  while (p.done != number) {
    if (p.arrived != s.live) {
      give_way();
      continue;
    }
    p.took_part = p.arrived, p.arrived = 0, p.reduced = false, p.done = number;
    int returned = 0, missed = 0;
    for (int i = 0; i < WIDTH; ++i)
      if ((s.all & ~p.took_part) >> i & 1) ++(fibers[current / WIDTH * WIDTH + i].returned ? returned : missed);
    if (missed)
      report("divergent SIMD operation", "error", file, line, 0, "%s is missed by %d lanes that did not return",
             operation, missed);
    else if (returned)
      report("SIMD operation after return", "warning", file, line, 0, "%s is missed by %d lanes that have returned",
             operation, returned);
  }
  return {p.slots, p.took_part, unsigned(lane), &p.reduced};
}

void inactive(int lane, const char* operation, const char* file, int line) {
  report("inactive lane", "error", file, line, 0, "%s reads lane %d, which takes no part", operation, lane);
}

void barrier(int flags, bool simdgroup, const char* file, int line) {
  Simdgroup& s = simdgroups[current / WIDTH];
  Meeting& m = simdgroup ? s.meeting : whole;
  wait_at(simdgroup ? "simdgroup_barrier" : "threadgroup_barrier", file, line);
  if (!m.arrived) m.file = file, m.line = line, m.flags = flags;
  else if (m.line != line || strcmp(m.file, file))
    report("divergent barrier", "error", file, line, 0, "other threads wait at the barrier of line %d", m.line);
  m.arrived++, m.flags &= flags;
  const uint32_t round = m.round;
  while (m.round == round) {
    const int here = simdgroup ? __builtin_popcount(s.live) : live;
    const int every = simdgroup ? __builtin_popcount(s.all) : count;
    if (m.arrived != here) {
      give_way();
      continue;
    }
    if (here != every)
      report("divergent barrier", "error", file, line, 0, "%d of %d threads reach it, the others have left", here, every);
    m.arrived = 0, m.round++;
    m.fences[0] += m.flags & 1, m.fences[1] += m.flags >> 1 & 1;
  }
}

void left() { fibers[current].returned = true; }

static uint32_t drawn() { return seed = seed * 1664525u + 1013904223u; }

static void prepare(Region& r, bool clear) {
  if (full && !r.cells)
    r.cells = (Cell*)mmap(nullptr, (r.bytes / r.element + 1) * sizeof(Cell), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  else if (full && clear)
    memset((void*)r.cells, 0, (r.bytes / r.element + 1) * sizeof(Cell));
}

size_t shared(int id, size_t bytes, int element, const char* name) {
  Region& r = regions[inputs_and_outputs + id];
  if (!r.begin) {
    const size_t pages = (bytes + PAGE - 1) / PAGE * PAGE, room = (bytes + 15) / 16 * 16;
    char* start = reserve + gap * (inputs_and_outputs + id) + gap / 2;
    mprotect(start, pages, PROT_READ | PROT_WRITE);
    r = {name, 't', start + pages - room, bytes, element, nullptr, 0};
    shared_bytes += room;
    if (shared_bytes > SHARED_BYTES)
      report("threadgroup memory", "error", "", 0, (uintptr_t)__builtin_return_address(0),
             "%s makes it %zu bytes, more than 32 KiB", name, shared_bytes);
  }
  if (r.group != group) {
    prepare(r, r.group != 0);
    r.group = group;
    memset(r.begin, seed & 1 ? 0x7b : 0xff, bytes);
  }
  return (size_t)r.begin;
}

static bool ordered(const Access& a, const Access& b, bool* fence_only) {
  const bool one_group = a.group == b.group, one_simdgroup = one_group && a.thread / WIDTH == b.thread / WIDTH;
  if (one_group && (a.thread == b.thread || a.fence != b.fence)) return true;
  if (one_simdgroup && a.simd_fence != b.simd_fence) return true;
  *fence_only = one_group && (a.round != b.round || (one_simdgroup && a.simd_round != b.simd_round));
  return false;
}

static void race(const Region& r, long index, const Access& old, const char* did, const Access& now, const char* does,
                 bool only_writes, bool fence_only) {
  const char* where = r.kind == 't' ? "threadgroup memory" : "device memory";
  if (fence_only)
    report("missing fence", "error", "", 0, now.pc,
           "thread %u %s %s[%ld], which thread %u %s at @%lx; no barrier between them orders %s", now.thread, does,
           r.name, index, old.thread, did, (unsigned long)old.pc - 1, where);
  else if (only_writes)
    report("two writers", "warning", "", 0, now.pc, "thread %u writes %s[%ld], which thread %u%s wrote at @%lx",
           now.thread, r.name, index, old.thread, old.group == now.group ? "" : " of another threadgroup",
           (unsigned long)old.pc - 1);
  else
    report("race", "error", "", 0, now.pc, "in %s: thread %u %s %s[%ld], which thread %u%s %s at @%lx", where,
           now.thread, does, r.name, index, old.thread, old.group == now.group ? "" : " of another threadgroup", did,
           (unsigned long)old.pc - 1);
}

static void check(const volatile void* address, size_t bytes, bool write, uintptr_t pc) {
  char* a = (char*)address;
  last_pc = pc;
  if (a >= stacks && a < stacks + MOST * STACK) return;
  Region* r = region_of(address);
  if (!r || !r->begin) {
    if (a >= &__executable_start && a < &end) return;
    outside(address, write ? "write" : "read", pc);
  }
  if (a < r->begin || a + bytes > r->begin + r->bytes || (write && r->kind == 'i'))
    outside(a < r->begin ? a : a + bytes > r->begin + r->bytes ? r->begin + r->bytes : a, write ? "write" : "read", pc);
  if (r->kind == 'i') return;
  const Simdgroup& s = simdgroups[current / WIDTH];
  const int space = r->kind == 't';
  const Access now = {group, uint32_t(current), whole.round, whole.fences[space], s.meeting.round,
                      s.meeting.fences[space], pc};
  for (long i = (a - r->begin) / r->element; i <= long(a + bytes - 1 - r->begin) / r->element; ++i) {
    Cell& c = r->cells[i];
    bool fence = false;
    if (c.write.group && !ordered(c.write, now, &fence))
      race(*r, i, c.write, "wrote", now, write ? "writes" : "reads", write, fence);
    if (write) {
      if (c.read.group && !ordered(c.read, now, &fence)) race(*r, i, c.read, "reads", now, "writes", false, fence);
      else if (c.other.group && !ordered(c.other, now, &fence))
        race(*r, i, c.other, "reads", now, "writes", false, fence);
      c.write = now;
    } else {
      if (!c.write.group && r->kind != 'w')
        report("uninitialised read", "error", "", 0, pc, "thread %d reads %s[%ld], which nobody wrote", current,
               r->name, i);
      if (c.read.group && c.read.thread != now.thread) c.other = c.read;
      c.read = now;
    }
  }
}

void touch(const volatile void* address, int bytes) {  // an atomic access: no race, but within bounds, and a write
  if (!full) return;
  char* a = (char*)address;
  Region* r = region_of(address);
  if (!r || !r->begin || a < r->begin || a + bytes > r->begin + r->bytes)
    outside(address, "atomic access", (uintptr_t)__builtin_return_address(0));
  if (r->cells && !r->cells[(a - r->begin) / r->element].write.group)
    r->cells[(a - r->begin) / r->element].write = {group, uint32_t(current), ~0u, ~0u, ~0u, ~0u,
                                                   (uintptr_t)__builtin_return_address(0)};
}

static void leave() {
  fibers[current].done = true, idle = 0, live--;
  simdgroups[current / WIDTH].live &= ~(1u << current % WIDTH);
  for (int i = 1; i <= count; ++i) {
    const int next = order[(place_of[current] + i) % count];
    if (fibers[next].done) continue;
    current = next;
    void* unused;
    sim_switch(&unused, fibers[next].sp);
  }
  void* unused;
  sim_switch(&unused, host);
}

static unsigned grid[3], threads[3], groups[3], position[3], size[3];

static void enter() {
  const unsigned t = current, lane[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
  for (int i = 0; i < 3; ++i) at[i] = lane[i], at[3 + i] = position[i] * threads[i] + lane[i];
  at[6] = t, at[7] = t % WIDTH, at[8] = t / WIDTH, at[9] = t % 4, at[10] = t / 4;
  sim_kernel();
  leave();
}

static void shuffle(int* items, int n) {
  for (int i = n - 1; i > 0; --i) {
    const int j = drawn() % (i + 1), kept = items[i];
    items[i] = items[j], items[j] = kept;
  }
}

static void run_group() {
  count = live = size[0] * size[1] * size[2];
  idle = 0, whole = {};
  memset((void*)simdgroups, 0, sizeof simdgroups);
  for (int i = 0; i < count; ++i) {
    order[i] = i;
    simdgroups[i / WIDTH].all |= 1u << i % WIDTH;
    fibers[i] = {};
    void** top = (void**)(stacks + STACK * (i + 1));
    memset((void*)(top - SAVED), 0, SAVED * sizeof(void*));
    fibers[i].sp = top - SAVED;
    top[RESUME - SAVED] = (void*)enter;
  }
  for (int i = 0; i <= (count - 1) / WIDTH; ++i) simdgroups[i].live = simdgroups[i].all;
  if (seed) shuffle(order, count);
  for (int i = 0; i < count; ++i) place_of[order[i]] = i;
  current = order[0];
  sim_switch(&host, fibers[current].sp);
}
}  // namespace sim

using namespace sim;

// FILE SECONDS SEED FULL, 3 of grid, 3 of threadgroup, then per buffer NAME KIND OFFSET BYTES ELEMENT
int main(int argc, char** argv) {
  const int file = atoi(argv[1]);
  seconds = atoi(argv[2]), seed = atoi(argv[3]), full = atoi(argv[4]);
  for (int i = 0; i < 3; ++i) grid[i] = atoi(argv[5 + i]), threads[i] = atoi(argv[8 + i]);
  char** given = argv + 11;
  inputs_and_outputs = (argc - 11) / 5;
  gap = 1 << 28;
  for (int i = 0; i < inputs_and_outputs; ++i)
    while (gap < 4 * strtoul(given[5 * i + 3], nullptr, 10)) gap *= 2;
  reserve = (char*)mmap(nullptr, gap * (inputs_and_outputs + SHARED), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  stacks = (char*)mmap(nullptr, MOST * STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserve == MAP_FAILED || stacks == MAP_FAILED) return perror("address space"), 4;
  for (int i = 0; i < inputs_and_outputs; ++i) {
    char** words = given + 5 * i;
    const size_t bytes = strtoul(words[3], nullptr, 10), room = (bytes + 15) / 16 * 16;
    const size_t pages = room ? (room + PAGE - 1) / PAGE * PAGE : PAGE;
    char* start = reserve + gap * i + gap / 2;
    const int may = words[1][0] == 'i' ? PROT_READ : PROT_READ | PROT_WRITE;
    if (mmap(start, pages, may, MAP_SHARED | MAP_FIXED, file, strtol(words[2], nullptr, 10)) == MAP_FAILED)
      return perror("a buffer"), 4;
    regions[i] = {words[0], words[1][0], start + pages - room, bytes, atoi(words[4]), nullptr, 0};
    buffers[i] = regions[i].begin;
    if (regions[i].kind != 'i') prepare(regions[i], false);
  }
  static char signals[1 << 16];
  const stack_t own = {signals, 0, sizeof signals};
  sigaltstack(&own, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(number, &action, nullptr);
  alarm(seconds);

  long total = 1;
  for (int i = 0; i < 3; ++i) {
    threads[i] = threads[i] < grid[i] ? threads[i] : grid[i];
    groups[i] = (grid[i] + threads[i] - 1) / threads[i];
    total *= groups[i];
    at[11 + i] = groups[i], at[14 + i] = grid[i], at[20 + i] = threads[i];
  }
  const int most = threads[0] * threads[1] * threads[2];
  for (int i = 0; i < most; ++i) mprotect(stacks + STACK * i + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE);
  int* tour = (int*)malloc(total * sizeof(int));
  for (int i = 0; i < total; ++i) tour[i] = i;
  if (seed) shuffle(tour, total);
  for (long i = 0; i < total; ++i) {
    position[0] = tour[i] % groups[0];
    position[1] = tour[i] / groups[0] % groups[1];
    position[2] = tour[i] / groups[0] / groups[1];
    for (int k = 0; k < 3; ++k) {
      const unsigned rest = grid[k] - position[k] * threads[k];
      size[k] = rest < threads[k] ? rest : threads[k];
      at[17 + k] = size[k], at[23 + k] = position[k];
    }
    const unsigned many = size[0] * size[1] * size[2];
    at[26] = (many + WIDTH - 1) / WIDTH, at[27] = (many + 3) / 4, at[28] = (most + WIDTH - 1) / WIDTH;
    at[29] = (most + 3) / 4;
    group = tour[i] + 1;
    run_group();
  }
  for (int i = 0; full && i < inputs_and_outputs; ++i) {
    const Region& r = regions[i];
    if (r.kind != 'o') continue;
    long missing = 0, first = 0;
    for (long k = long(r.bytes) / r.element - 1; k >= 0; --k)
      if (!r.cells[k].write.group) ++missing, first = k;
    if (missing)
      report("unwritten output", "error", "", -1 - i, 0, "%ld of %ld elements of %s, the first of them [%ld]", missing,
             long(r.bytes) / r.element, r.name, first);
  }
  fflush(stdout);
  _exit(0);
}

#define PC ((uintptr_t)__builtin_return_address(0))
#define HOOKS(n) \
  void __tsan_read##n(void* a) { check(a, n, false, PC); } \
  void __tsan_write##n(void* a) { check(a, n, true, PC); } \
  void __tsan_unaligned_read##n(void* a) { check(a, n, false, PC); } \
  void __tsan_unaligned_write##n(void* a) { check(a, n, true, PC); } \
  void __tsan_volatile_read##n(void* a) { check(a, n, false, PC); } \
  void __tsan_volatile_write##n(void* a) { check(a, n, true, PC); } \
  void __tsan_read##n##_pc(void* a, void*) { check(a, n, false, PC); } \
  void __tsan_write##n##_pc(void* a, void*) { check(a, n, true, PC); }
struct Where {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[];
};
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* a, size_t n) { check(a, n, false, PC); }
void __tsan_write_range(void* a, size_t n) { check(a, n, true, PC); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check(from, n, false, PC), check(to, n, true, PC);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  check(to, n, true, PC);
  return memset(to, value, n);
}
void __ubsan_handle_type_mismatch_v1(const void* data, uintptr_t address) {
  const struct Mismatch { Where at; const Type* type; uint8_t alignment; }* m = (const Mismatch*)data;
  if (!address) {
    report("null dereference", "error", m->at.file, m->at.line, 0, "of a pointer to %s", m->type->name);
    stop();
  }
  const Region* r = region_of((void*)address);
  if (address & ((1ul << m->alignment) - 1))
    report("misaligned access", "error", m->at.file, m->at.line, 0, "%s wants a multiple of %d bytes%s%s",
           m->type->name, 1 << m->alignment, r && r->begin ? ", in " : "", r && r->begin ? r->name : "");
}
void __ubsan_handle_out_of_bounds(const void* data, uintptr_t index) {
  const struct Bounds { Where at; const Type *array, *index; }* b = (const Bounds*)data;
  report("out of bounds", "error", b->at.file, b->at.line, 0, "index %ld of %s", long(int(index)), b->array->name);
  stop();
}
void __ubsan_handle_shift_out_of_bounds(const void* data, uintptr_t, uintptr_t by) {
  const Where* at = (const Where*)data;
  report("arithmetic", "warning", at->file, at->line, 0, "a shift by %ld bits", long(by));
}
void __ubsan_handle_divrem_overflow(const void* data, uintptr_t, uintptr_t) {
  const Where* at = (const Where*)data;
  report("arithmetic", "error", at->file, at->line, 0, "an integer division by zero");
  stop();
}
}
