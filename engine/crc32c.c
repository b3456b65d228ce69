/* CRC-32C (Castagnoli, reflected), eight bytes a step from tables; SSE4.2's instruction where the CPU has it. */
#include "base.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#define POLY 0x82F63B78u

static uint32_t table[8][256];

__attribute__((constructor)) static void build_tables(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++)
      c = (c >> 1) ^ (POLY & (0u - (c & 1u)));
    table[0][i] = c;
  }
  for (int t = 1; t < 8; t++)
    for (uint32_t i = 0; i < 256; i++)
      table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 255];
}

static uint32_t crc_tables(uint32_t c, const uint8_t *p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t v = load_u64(p) ^ c;
    c = 0;
    for (int i = 0; i < 8; i++)
      c ^= table[7 - i][(v >> (8 * i)) & 255];
  }
  while (n--)
    c = (c >> 8) ^ table[0][(c ^ *p++) & 255];
  return c;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc_sse42(uint32_t c, const uint8_t *p, size_t n) {
  uint64_t c64 = c;
  for (; n >= 8; n -= 8, p += 8)
    c64 = _mm_crc32_u64(c64, load_u64(p));
  c = (uint32_t)c64;
  while (n--)
    c = _mm_crc32_u8(c, *p++);
  return c;
}
#endif

/* Both ways, so that a test can compare them. */
uint32_t cass_crc32c_tables(uint32_t crc, const void *data, size_t size) { return ~crc_tables(~crc, data, size); }

uint32_t pycass_crc32c(uint32_t crc, const void *data, size_t size) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2"))
    return ~crc_sse42(~crc, data, size);
#endif
  return cass_crc32c_tables(crc, data, size);
}
