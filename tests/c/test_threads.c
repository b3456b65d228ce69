/* The pool: every thread runs once a run, barriers separate phases, fewer active threads than the pool has. Written
 * with plain variables between barriers, so that a thread sanitizer sees a missing one. */
#include <unistd.h>

#include "check.h"
#include "threads.h"

enum { MOST = 64, PHASES = 20 };

typedef struct Shared {
  Pool *pool;
  uint32_t want_threads;
  uint32_t slot[MOST][16]; /* a cache line each */
} Shared;

/* Each phase writes its own slot and, after a barrier, reads a neighbour's. */
static void relay(void *arg, uint32_t thread, uint32_t n_threads) {
  Shared *s = arg;
  CHECK(n_threads == s->want_threads && thread < n_threads, "thread %u of %u, not %u", thread, n_threads, s->want_threads);
  for (uint32_t phase = 0; phase < PHASES; phase++) {
    uint32_t before = s->slot[(thread + 1) % n_threads][0];
    pool_barrier(s->pool);
    CHECK(before == s->slot[thread][0], "thread %u is in another phase", thread);
    s->slot[thread][0]++;
    pool_barrier(s->pool);
  }
}

static void count(void *arg, uint32_t thread, uint32_t n_threads) {
  (void)n_threads;
  ((Shared *)arg)->slot[thread][0]++;
}

static void check_slots(const Shared *s, uint32_t n_pool, uint32_t want) {
  for (uint32_t i = 0; i < n_pool; i++)
    CHECK(s->slot[i][0] == (i < s->want_threads ? want : 0), "thread %u of %u ran %u times, not %u", i, s->want_threads,
          s->slot[i][0], want);
}

static void test_pool(uint32_t n_pool) {
  Shared s = {0};
  CHECK(pool_new(n_pool, &s.pool) == PYCASS_OK, "%s", pycass_error_detail());
  for (uint32_t ask = 1; ask <= n_pool + 2; ask += 1 + n_pool / 8) {
    s.want_threads = ask < n_pool ? ask : n_pool;
    memset(s.slot, 0, sizeof s.slot);
    for (uint32_t run = 0; run < 5; run++)
      pool_run(s.pool, ask, relay, &s);
    check_slots(&s, n_pool, 5 * PHASES);
  }
  pool_free(s.pool);
}

/* Runs close together, and runs that find the workers asleep. */
static void test_many_runs(uint32_t n_pool, uint32_t n_runs, uint32_t sleep_every) {
  Shared s = {.want_threads = n_pool};
  CHECK(pool_new(n_pool, &s.pool) == PYCASS_OK, "%s", pycass_error_detail());
  for (uint32_t i = 0; i < n_runs; i++) {
    pool_run(s.pool, n_pool, count, &s);
    if (sleep_every && i % sleep_every == 0)
      usleep(3000 + random_below(6000));
  }
  check_slots(&s, n_pool, n_runs);
  pool_free(s.pool);
}

enum { ITEMS = 1000 };
static uint8_t item[ITEMS];

/* Loops over all items, one after the other: every item is taken by one thread a loop. */
static void claim(void *arg, uint32_t thread, uint32_t n_threads) {
  Shared *s = arg;
  (void)n_threads;
  for (uint32_t loop = 0; loop < PHASES; loop++) {
    uint32_t n = loop % 3 ? ITEMS / (loop + 1) : loop, from, to; /* fewer items than threads, too */
    while (pool_claim(s->pool, n, &from, &to)) {
      CHECK(from < to && to <= n, "items %u to %u of %u", from, to, n);
      for (uint32_t i = from; i < to; i++)
        item[i]++;
    }
    pool_barrier(s->pool);
    for (uint32_t i = 0; thread == 0 && i < n; i++) {
      CHECK(item[i] == 1, "item %u of %u was taken %u times", i, n, item[i]);
      item[i] = 0;
    }
    pool_barrier(s->pool);
  }
}

static void test_claim(void) {
  for (uint32_t n_pool = 1; n_pool <= 5; n_pool += 2) {
    Shared s = {0};
    CHECK(pool_new(n_pool, &s.pool) == PYCASS_OK, "%s", pycass_error_detail());
    for (int run = 0; run < 10; run++)
      pool_run(s.pool, n_pool, claim, &s);
    pool_free(s.pool);
  }
}

static void test_start_and_stop(void) {
  for (uint32_t i = 0; i < 100; i++) {
    Pool *p = NULL;
    CHECK(pool_new(1 + i % 5, &p) == PYCASS_OK, "%s", pycass_error_detail());
    if (i % 3 == 0)
      usleep(i % 2 ? 0 : 4000);
    pool_free(p); /* without a run, awake or asleep */
  }
  pool_free(NULL);
}

static void test_bounds(void) {
  Pool *p = NULL;
  CHECK(pool_new(0, &p) == PYCASS_ERR_INVALID_ARGUMENT && !p, "a pool of 0 threads");
  CHECK(pool_new(257, &p) == PYCASS_ERR_INVALID_ARGUMENT && !p, "a pool of 257 threads");
  CHECK(pool_new(UINT32_MAX, &p) == PYCASS_ERR_INVALID_ARGUMENT && !p, "a pool of 2^32 - 1 threads");
  uint32_t cores = pool_physical_cores();
  CHECK(cores >= 1 && cores <= 256, "%u cores", cores);
}

int main(void) {
  static const uint32_t sizes[] = {1, 2, 3, 7};
  test_bounds();
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    test_pool(sizes[i]);
  test_many_runs(2, 3000, 0), test_many_runs(4, 500, 0);
  test_many_runs(3, 60, 2);
  test_claim();
  test_start_and_stop();
  printf("ok\n");
  return 0;
}
