/* What every engine file needs: little-endian loads, bit casts, rounding, the error path. */
#ifndef CASS_BASE_H
#define CASS_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "pycass.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pycass runs on little-endian machines"
#endif

#define CASS_ALIGN 64u /* cache line, and the alignment of every part of a file */

static inline uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}
static inline uint64_t load_u64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, 8);
  return v;
}
static inline float f32_from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t f32_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static inline float bf16_to_f32(uint16_t v) { return f32_from_bits((uint32_t)v << 16); }
/* To nearest even; a NaN stays one. */
static inline uint16_t bf16_from_f32(float f) {
  uint32_t u = f32_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return (uint16_t)((u >> 16) | 0x40u);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Zeroed, 64-byte aligned; NULL when there is no memory. Freed with cass_free. */
void *cass_alloc(size_t size);
void cass_free(void *p);

/* Records the detail for pycass_error_detail() and returns the status. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
pycass_status
cass_fail(pycass_status status, const char *format, ...);

#define RETURN_IF(expr)                                                                                                \
  do {                                                                                                                 \
    pycass_status status_ = (expr);                                                                                    \
    if (status_ != PYCASS_OK)                                                                                          \
      return status_;                                                                                                  \
  } while (0)

#endif
