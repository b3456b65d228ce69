/* A pool that runs one function on several threads, with barriers inside it. Waiting threads spin for a short while,
 * then yield, then sleep. */
#ifndef CASS_THREADS_H
#define CASS_THREADS_H

#include "base.h"

typedef struct Pool Pool;
typedef void PoolFn(void *arg, uint32_t thread, uint32_t n_threads);

pycass_status pool_new(uint32_t n_threads, Pool **out);
void pool_free(Pool *pool);
/* Runs fn on threads 0 .. n_threads - 1 (at most the pool's); the caller is thread 0. After a
 * fork the child has no workers: there fn runs on the caller alone. */
void pool_run(Pool *pool, uint32_t n_threads, PoolFn *fn, void *arg);
/* Waits for all threads of this run; only inside fn. */
void pool_barrier(Pool *pool);
/* Shares out n items within fn: the next *from .. *to - 1, or false when none are left. Counting restarts at a barrier,
 * so there is one such loop between two of them. Who is slow, because something else runs on its CPU, gets less. */
bool pool_claim(Pool *pool, uint32_t n, uint32_t *from, uint32_t *to);
/* CPUs that this process may use, hyperthreads counted once. */
uint32_t pool_physical_cores(void);

#endif
