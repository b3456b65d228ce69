/* The engine of simt.h: fibers, barriers, warps' exchanges, cp.async. For TSan this file is compiled with SIMT_TSAN and without
 * -fsanitize=thread, so that only the kernels' own accesses count. */
#include "simt.h"

#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <cstdio>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#define ASAN(x) x
#else
#define ASAN(x)
#endif
#ifdef SIMT_TSAN
#include <sanitizer/tsan_interface.h>
#define TSAN(x) x
extern "C" void AnnotateIgnoreReadsBegin(const char *, int), AnnotateIgnoreReadsEnd(const char *, int);
extern "C" void AnnotateIgnoreWritesBegin(const char *, int), AnnotateIgnoreWritesEnd(const char *, int);
/* memcpy and malloc are watched even in code that is not instrumented. */
struct Quiet {
  Quiet() { AnnotateIgnoreReadsBegin(__FILE__, 0), AnnotateIgnoreWritesBegin(__FILE__, 0); }
  ~Quiet() { AnnotateIgnoreWritesEnd(__FILE__, 0), AnnotateIgnoreReadsEnd(__FILE__, 0); }
};
#define QUIET Quiet quiet
#else
#define TSAN(x)
#define QUIET (void)0
#endif

extern "C" __attribute__((weak)) unsigned char __start_simt_shared[], __stop_simt_shared[];

namespace simt {
namespace context = boost::context;
Thread *self;
Grid grid;

namespace {
enum class State { ready, at_barrier, in_warp, done };
enum class Order { forward, reverse, random };

struct Fiber : Thread {
  State state = State::done;
  const char *file = "";
  int line = 0;
  context::fiber here, scheduler;
  std::deque<std::vector<Copy>> copies; /* groups under way; the last one is open */
  const void *stack = nullptr;
  size_t stack_size = 0;
  void *fake_stack = nullptr, *tsan = nullptr;
};

/* An exchange of one mask of a warp; by turns in two buffers, since a fast lane may be in the next one already. */
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  uint64_t turn = 0;
  alignas(16) unsigned char deposit[2][32][DEPOSIT];
  char order[2];
  const char *file = "";
  int line = 0;
};

struct {
  std::vector<std::unique_ptr<Fiber>> &threads = *new std::vector<std::unique_ptr<Fiber>>; /* never freed: nothing unwinds */
  std::vector<std::vector<std::unique_ptr<Meeting>>> warps;
  std::deque<unsigned> ready;
  unsigned n = 0, alive = 0, arrived = 0;
  uint64_t phase = 0;
  char barrier_order[2], start_order, end_order;
  void (*entry)(void *) = nullptr;
  void *arg = nullptr;
  const char *kernel = "";
  std::mt19937_64 random;
  void *main_fake_stack = nullptr, *main_tsan = nullptr;
  const void *main_stack = nullptr;
  size_t main_stack_size = 0;
} engine;

struct Config {
  Order order = Order::forward;
  bool copy_early = false;
  uint64_t seed = 1;
  Config() {
    const char *s = std::getenv("SIMT_ORDER"), *copy = std::getenv("SIMT_COPY");
    order = !s ? Order::forward : *s == 'r' && s[1] == 'e' ? Order::reverse : *s == 'r' ? Order::random : Order::forward;
    if (order == Order::random && s[6] == ':')
      seed = std::strtoull(s + 7, nullptr, 0);
    copy_early = copy && !std::strcmp(copy, "early");
  }
};
const Config &config() {
  static const Config c;
  return c;
}

Fiber *running() { return static_cast<Fiber *>(self); }
unsigned nth(unsigned k, unsigned n) { return config().order == Order::reverse ? n - 1 - k : k; }
void release(void *p) { TSAN(__tsan_release(p)); (void)p; }
void acquire(void *p) { TSAN(__tsan_acquire(p)); (void)p; }

[[noreturn]] void fail(const char *what, const char *file = "", int line = 0) {
  std::printf("simt: kernel %s: %s", engine.kernel, what);
  if (line)
    std::printf(" at %s:%d", file, line);
  if (self)
    std::printf(", block %u, thread %u", grid.block.x, self->index.x);
  std::printf("\n");
  for (unsigned i = 0, shown = 0; i < engine.n && shown < 4; i++) {
    const Fiber *t = engine.threads[i].get();
    if (t->state == State::at_barrier || t->state == State::in_warp)
      std::printf("  thread %u waits at %s:%d\n", i, t->file, t->line), shown++;
  }
  std::fflush(nullptr);
  std::_Exit(70);
}

/* ---- fibers -------------------------------------------------------------------------------------- */

void yield() {
  Fiber *t = running();
  ASAN(__sanitizer_start_switch_fiber(&t->fake_stack, engine.main_stack, engine.main_stack_size));
  TSAN(__tsan_switch_to_fiber(engine.main_tsan, __tsan_switch_to_fiber_no_sync));
  t->scheduler = std::move(t->scheduler).resume();
  ASAN(__sanitizer_finish_switch_fiber(t->fake_stack, &engine.main_stack, &engine.main_stack_size));
}

void resume(Fiber *t) {
  self = t;
  ASAN(__sanitizer_start_switch_fiber(&engine.main_fake_stack, t->stack, t->stack_size));
  TSAN(__tsan_switch_to_fiber(t->tsan, __tsan_switch_to_fiber_no_sync));
  t->here = std::move(t->here).resume();
  ASAN(__sanitizer_finish_switch_fiber(engine.main_fake_stack, nullptr, nullptr));
  self = nullptr;
}

void open_barrier() {
  QUIET;
  engine.arrived = 0, engine.phase++;
  const Fiber *first = nullptr;
  for (unsigned k = 0; k < engine.n; k++) {
    unsigned i = nth(k, engine.n);
    Fiber *t = engine.threads[i].get();
    if (t->state != State::at_barrier)
      continue;
    if (first && (first->line != t->line || std::strcmp(first->file, t->file)))
      fail("threads of one block are at different barriers", t->file, t->line);
    first = t;
    t->state = State::ready;
    engine.ready.push_back(i);
  }
}

/* A fiber has the same thread index in all blocks. */
void live() {
  ASAN(__sanitizer_finish_switch_fiber(nullptr, &engine.main_stack, &engine.main_stack_size));
  for (;;) {
    acquire(&engine.start_order);
    engine.entry(engine.arg);
    release(&engine.end_order);
    {
      QUIET;
      running()->copies.clear();
    }
    running()->state = State::done;
    if (--engine.alive && engine.arrived == engine.alive)
      open_barrier();
    yield();
  }
}

/* Tells address sanitizer where the stack is. */
struct KnownStack {
  context::fixedsize_stack memory;
  Fiber *t;
  context::stack_context allocate() {
    context::stack_context c = memory.allocate();
    t->stack = static_cast<char *>(c.sp) - c.size, t->stack_size = c.size;
    return c;
  }
  void deallocate(context::stack_context &c) { memory.deallocate(c); }
};

void add_fiber() {
  enum { STACK = 128 * 1024, STAGGER = 192 }; /* that not all stacks' tops fall into the same cache sets */
  size_t k = engine.threads.size();
  engine.threads.push_back(std::make_unique<Fiber>());
  Fiber *t = engine.threads.back().get();
  TSAN(t->tsan = __tsan_create_fiber(0));
  t->here = context::fiber(std::allocator_arg, KnownStack{context::fixedsize_stack(STACK + k % 61 * STAGGER), t},
                           [t](context::fiber &&scheduler) {
                             t->scheduler = std::move(scheduler);
                             live();
                             return std::move(t->scheduler);
                           });
}

/* ---- blocks -------------------------------------------------------------------------------------- */

#ifdef __SANITIZE_ADDRESS__
__attribute__((no_sanitize("address")))
#endif
void poison_shared() {
  for (unsigned char *p = __start_simt_shared; p && p < __stop_simt_shared; p++)
    *(volatile unsigned char *)p = 0xff; /* NaN as float and as BF16 */
}

void prepare_block() {
  poison_shared();
  engine.alive = engine.n, engine.arrived = 0;
  engine.warps.resize((engine.n + 31) / 32);
  for (auto &warp : engine.warps)
    for (auto &meeting : warp)
      meeting->arrived = 0;
  engine.ready.clear();
  for (unsigned k = 0; k < engine.n; k++) {
    unsigned i = nth(k, engine.n);
    Fiber *t = engine.threads[i].get();
    t->lane = i % 32, t->warp = i / 32, t->state = State::ready;
    t->index = make_uint3(i % grid.threads.x, i / grid.threads.x % grid.threads.y, i / (grid.threads.x * grid.threads.y));
    engine.ready.push_back(i);
  }
}

void run_block() {
  QUIET;
  prepare_block();
  release(&engine.start_order);
  while (!engine.ready.empty()) {
    size_t k = config().order == Order::random ? engine.random() % engine.ready.size() : 0;
    unsigned i = engine.ready[k];
    engine.ready[k] = engine.ready.front();
    engine.ready.pop_front();
    resume(engine.threads[i].get());
  }
  acquire(&engine.end_order);
  if (engine.alive)
    fail("threads wait for others that never come");
}

Meeting &meeting_of(unsigned warp, uint32_t mask) {
  QUIET;
  for (auto &m : engine.warps[warp])
    if (m->mask == mask)
      return *m;
  engine.warps[warp].push_back(std::make_unique<Meeting>());
  engine.warps[warp].back()->mask = mask;
  return *engine.warps[warp].back();
}

void check_lanes(const Fiber *t, uint32_t mask, const char *file, int line) {
  if (!(mask >> t->lane & 1))
    fail("a lane that its mask does not name", file, line);
  for (unsigned k = 0; k < 32; k++)
    if (mask >> k & 1 && (t->warp * 32 + k >= engine.n || engine.threads[t->warp * 32 + k]->state == State::done))
      fail("the mask names a lane that has ended", file, line);
}
} // namespace

/* ---- what kernels call --------------------------------------------------------------------------- */

void sync_block(const char *file, int line) {
  Fiber *t = running();
  void *order = &engine.barrier_order[engine.phase % 2];
  t->state = State::at_barrier, t->file = file, t->line = line;
  release(order);
  if (++engine.arrived == engine.alive)
    open_barrier();
  yield();
  acquire(order);
}

Deposits exchange(uint32_t mask, const void *mine, size_t size, bool memory, const char *file, int line) {
  Fiber *t = running();
  check_lanes(t, mask, file, line);
  Meeting &m = meeting_of(t->warp, mask);
  if (m.arrived && (m.line != line || std::strcmp(m.file, file)))
    fail("lanes of one mask are at different exchanges", file, line);
  m.file = file, m.line = line;
  uint64_t turn = m.turn % 2;
  if (size) {
    QUIET;
    std::memcpy(m.deposit[turn][t->lane], mine, size);
  }
  m.arrived |= 1u << t->lane;
  if (memory)
    release(&m.order[turn]);
  if (m.arrived == mask) {
    QUIET;
    m.arrived = 0, m.turn++;
    for (unsigned k = 0; k < 32; k++) {
      unsigned lane = nth(k, 32), i = t->warp * 32 + lane;
      if (lane != t->lane && mask >> lane & 1)
        engine.threads[i]->state = State::ready, engine.ready.push_back(i);
    }
  } else {
    t->state = State::in_warp, t->file = file, t->line = line;
    yield();
  }
  if (memory)
    acquire(&m.order[turn]);
  return {m.deposit[turn]};
}

bool copy_later(Copy c) {
  if ((reinterpret_cast<uintptr_t>(c.to) | reinterpret_cast<uintptr_t>(c.from)) % 16)
    fail("cp.async at an address that is not aligned");
  if (config().copy_early)
    return false;
  QUIET;
  auto &copies = running()->copies;
  if (copies.empty())
    copies.emplace_back();
  copies.back().push_back(c);
  return true;
}

void copy_commit() {
  QUIET;
  auto &copies = running()->copies;
  if (copies.empty())
    copies.emplace_back();
  copies.emplace_back();
}

bool copy_due(unsigned most, Copy *c) {
  QUIET;
  auto &copies = running()->copies;
  while (copies.size() > most + 1 && copies.front().empty())
    copies.pop_front();
  if (copies.size() <= most + 1)
    return false;
  *c = copies.front().back();
  copies.front().pop_back();
  return true;
}

void run(const char *kernel, dim3 blocks, dim3 threads, void (*entry)(void *), void *arg) {
  grid.threads = threads, grid.blocks = blocks;
  engine.n = threads.x * threads.y * threads.z;
  engine.kernel = kernel, engine.entry = entry, engine.arg = arg;
  if (!engine.n || engine.n > 1024 || !blocks.x || !blocks.y || !blocks.z || blocks.y > 65535 || blocks.z > 65535)
    fail("a launch of no or too many threads");
  engine.random.seed(config().seed);
  TSAN(engine.main_tsan = __tsan_get_current_fiber());
  while (engine.threads.size() < engine.n)
    add_fiber();
  unsigned n = blocks.x * blocks.y * blocks.z;
  for (unsigned k = 0; k < n; k++) {
    unsigned i = nth(k, n);
    grid.block = make_uint3(i % blocks.x, i / blocks.x % blocks.y, i / (blocks.x * blocks.y));
    run_block();
  }
}
} // namespace simt
