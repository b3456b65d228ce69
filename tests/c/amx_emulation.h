/* The tile instructions that kernels_cpu/amx.c uses, in plain C after Intel's description, so that its code can run on
 * a machine without AMX. Include it before amx.c. */
#ifndef CASS_AMX_EMULATION_H
#define CASS_AMX_EMULATION_H

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

#include "base.h"

typedef struct EmulatedTile {
  uint8_t row[16][64];
} EmulatedTile;
static _Thread_local EmulatedTile emulated_tile[8];
static _Thread_local struct {
  uint16_t row_bytes[8];
  uint8_t rows[8];
  int configured;
} emulated;

static inline void emulated_loadconfig(const void *p) {
  const uint8_t *config = p;
  if (config[0] != 1)
    abort();
  for (int i = 0; i < 8; i++) {
    memcpy(&emulated.row_bytes[i], config + 16 + 2 * i, 2);
    emulated.rows[i] = config[48 + i];
    if (emulated.row_bytes[i] > 64 || emulated.rows[i] > 16)
      abort();
  }
  memset(emulated_tile, 0, sizeof emulated_tile);
  emulated.configured = 1;
}

static inline void emulated_release(void) { emulated.configured = 0; }

static inline void emulated_loadd(int t, const void *base, size_t stride) {
  if (!emulated.configured)
    abort();
  for (int r = 0; r < emulated.rows[t]; r++)
    memcpy(emulated_tile[t].row[r], (const uint8_t *)base + (size_t)r * stride, emulated.row_bytes[t]);
}

static inline void emulated_stored(int t, void *base, size_t stride) {
  if (!emulated.configured)
    abort();
  for (int r = 0; r < emulated.rows[t]; r++)
    memcpy((uint8_t *)base + (size_t)r * stride, emulated_tile[t].row[r], emulated.row_bytes[t]);
}

/* Denormals are zeros, as input and as output. */
static inline float emulated_flush(float f) { return f != 0 && fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f; }
static inline float emulated_bf16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return emulated_flush(bf16_to_f32(v));
}

/* C [m][n] += A [m][k pairs] B [k][n pairs]; the two halves of the pairs are summed apart, then together, then to C. */
static inline void emulated_dpbf16ps(int c, int a, int b) {
  if (!emulated.configured)
    abort();
  for (int m = 0; m < emulated.rows[c]; m++)
    for (int n = 0; n < emulated.row_bytes[c] / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < emulated.row_bytes[a] / 4; k++) {
        const uint8_t *x = emulated_tile[a].row[m] + 4 * k, *w = emulated_tile[b].row[k] + 4 * n;
        even = emulated_flush(fmaf(emulated_bf16(x), emulated_bf16(w), even));
        odd = emulated_flush(fmaf(emulated_bf16(x + 2), emulated_bf16(w + 2), odd));
      }
      memcpy(&sum, emulated_tile[c].row[m] + 4 * n, 4);
      sum = emulated_flush(emulated_flush(sum) + emulated_flush(even + odd));
      memcpy(emulated_tile[c].row[m] + 4 * n, &sum, 4);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadd(t, base, stride) emulated_loadd(t, base, stride)
#define _tile_stored(t, base, stride) emulated_stored(t, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_dpbf16ps(c, a, b)
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release

#endif
