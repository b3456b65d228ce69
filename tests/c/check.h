/* What the C tests share: one macro, random numbers, buffers that address sanitizer watches to the byte. */
#ifndef CASS_CHECK_H
#define CASS_CHECK_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base.h"

#define CHECK(cond, ...)                                                                                               \
  do {                                                                                                                 \
    if (!(cond)) {                                                                                                     \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #cond);                                                                \
      printf(__VA_ARGS__);                                                                                             \
      printf("\n");                                                                                                    \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static uint64_t random_state = 1;
static inline uint32_t random_u32(void) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  uint32_t x = (uint32_t)(random_state >> 32);
  return x ^ x >> 15;
}
static inline uint32_t random_below(uint32_t n) { return random_u32() % n; }
static inline float random_unit(void) { return (float)(random_u32() >> 8) / 16777216.0f; }
static inline float random_gauss(void) {
  return sqrtf(-2.0f * logf(random_unit() + 1e-9f)) * cosf(6.2831853f * random_unit());
}

/* A copy in a buffer of exactly n bytes at an address that is aligned to 64. */
static inline uint8_t *exact_copy(const void *data, size_t n) {
  void *p = NULL;
  CHECK(posix_memalign(&p, 64, n ? n : 1) == 0, "no memory");
  if (n)
    memcpy(p, data, n);
  return p;
}

static inline void put_u32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void put_u64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

#endif
