#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 256, SPINS = 200, YIELDS = 2000 };

typedef struct Worker {
  Pool *pool;
  uint32_t index;
  pthread_t thread;
} Worker;

struct Pool {
  uint32_t n_threads, n_active;
  pid_t pid; /* of the process that has the workers: a fork's child has none */
  PoolFn *fn;
  void *arg;
  atomic_uint run;       /* number of the current run; a change starts the workers */
  atomic_uint finished;  /* workers done with it */
  atomic_uint arrived, phase; /* the barrier */
  atomic_uint claimed;        /* items shared out since it */
  atomic_bool stop;
  atomic_uint sleeping;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  Worker worker[MAX_THREADS];
};

static inline void relax(uint32_t spins) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (spins > SPINS)
    sched_yield();
}

void pool_barrier(Pool *p) {
  uint32_t phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == p->n_active) {
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&p->claimed, 0, memory_order_relaxed);
    atomic_store_explicit(&p->phase, phase + 1, memory_order_release);
    return;
  }
  for (uint32_t i = 0; atomic_load_explicit(&p->phase, memory_order_acquire) == phase; i++)
    relax(i);
}

bool pool_claim(Pool *p, uint32_t n, uint32_t *from, uint32_t *to) {
  uint32_t at = atomic_load_explicit(&p->claimed, memory_order_relaxed);
  do {
    if (at >= n)
      return false;
    *from = at;
    *to = at + (n - at) / (2 * p->n_active) + 1; /* less and less, so that all end together */
  } while (!atomic_compare_exchange_weak_explicit(&p->claimed, &at, *to, memory_order_relaxed, memory_order_relaxed));
  return true;
}

/* Returns when the run number is no longer seen. */
static void wait_for_run(Pool *p, uint32_t seen) {
  for (uint32_t i = 0; i < SPINS + YIELDS; i++) {
    if (atomic_load_explicit(&p->run, memory_order_acquire) != seen)
      return;
    relax(i);
  }
  pthread_mutex_lock(&p->mutex);
  atomic_fetch_add(&p->sleeping, 1);
  while (atomic_load(&p->run) == seen)
    pthread_cond_wait(&p->wake, &p->mutex);
  atomic_fetch_sub(&p->sleeping, 1);
  pthread_mutex_unlock(&p->mutex);
}

static void start_run(Pool *p) {
  atomic_fetch_add(&p->run, 1); /* sequentially consistent with sleeping: a sleeper is seen or sees the run */
  if (atomic_load(&p->sleeping)) {
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
  }
}

static void *work(void *arg) {
  Worker *w = arg;
  Pool *p = w->pool;
  for (uint32_t seen = 0;; seen++) {
    wait_for_run(p, seen);
    if (atomic_load(&p->stop))
      return NULL;
    if (w->index < p->n_active)
      p->fn(p->arg, w->index, p->n_active);
    atomic_fetch_add_explicit(&p->finished, 1, memory_order_release);
  }
}

pycass_status pool_new(uint32_t n_threads, Pool **out) {
  if (n_threads < 1 || n_threads > MAX_THREADS)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "%u threads; 1 to %d are possible", n_threads, MAX_THREADS);
  Pool *p = calloc(1, sizeof *p);
  if (!p)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for threads");
  p->n_threads = 1, p->pid = getpid();
  pthread_mutex_init(&p->mutex, NULL);
  pthread_cond_init(&p->wake, NULL);
  for (uint32_t i = 1; i < n_threads; i++) {
    p->worker[i] = (Worker){p, i, 0};
    if (pthread_create(&p->worker[i].thread, NULL, work, &p->worker[i]) != 0) {
      pool_free(p);
      return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "cannot start thread %u of %u", i + 1, n_threads);
    }
    p->n_threads = i + 1;
  }
  *out = p;
  return PYCASS_OK;
}

void pool_free(Pool *p) {
  if (!p)
    return;
  if (p->pid == getpid()) {
    atomic_store(&p->stop, true);
    start_run(p);
    for (uint32_t i = 1; i < p->n_threads; i++)
      pthread_join(p->worker[i].thread, NULL);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->wake);
  }
  free(p);
}

void pool_run(Pool *p, uint32_t n_threads, PoolFn *fn, void *arg) {
  bool alone = p->n_threads == 1 || p->pid != getpid();
  p->n_active = alone ? 1 : n_threads < p->n_threads ? n_threads : p->n_threads;
  p->fn = fn, p->arg = arg;
  atomic_store_explicit(&p->finished, 0, memory_order_relaxed);
  atomic_store_explicit(&p->claimed, 0, memory_order_relaxed);
  if (!alone)
    start_run(p);
  fn(arg, 0, p->n_active);
  for (uint32_t i = 0; !alone && atomic_load_explicit(&p->finished, memory_order_acquire) != p->n_threads - 1; i++)
    relax(i);
}

#if defined(__linux__)
static bool first_sibling(int cpu) {
  char path[96];
  int first = cpu;
  snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
  FILE *f = fopen(path, "r");
  if (f) {
    if (fscanf(f, "%d", &first) != 1)
      first = cpu;
    fclose(f);
  }
  return first == cpu;
}

uint32_t pool_physical_cores(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0)
    return 1;
  uint32_t allowed = 0, first = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &set)) {
      allowed++;
      first += first_sibling(cpu);
    }
  uint32_t n = first ? first : allowed; /* none: only second siblings are allowed */
  return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}
#else
uint32_t pool_physical_cores(void) {
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (uint32_t)n;
}
#endif
