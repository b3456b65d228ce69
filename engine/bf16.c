/* Conversions of whole arrays to BF16, for writers of files. */
#include "base.h"

size_t pycass_bf16_from_f32(uint16_t *dst, const float *src, size_t n) {
  size_t changed = 0;
  for (size_t i = 0; i < n; i++) {
    dst[i] = bf16_from_f32(src[i]);
    changed += (f32_bits(src[i]) & 0xffffu) != 0;
  }
  return changed;
}

static float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, e = h >> 10 & 31u, m = h & 1023u;
  if (e == 31)
    return f32_from_bits(sign | 0x7f800000u | m << 13);
  if (e)
    return f32_from_bits(sign | (e + 112) << 23 | m << 13);
  float v = (float)m * 0x1p-24f; /* denormals and zero, exact in binary32 */
  return sign ? -v : v;
}

size_t pycass_bf16_from_f16(uint16_t *dst, const uint16_t *src, size_t n) {
  size_t changed = 0;
  for (size_t i = 0; i < n; i++) {
    float f = f16_to_f32(src[i]);
    dst[i] = bf16_from_f32(f);
    changed += (f32_bits(f) & 0xffffu) != 0;
  }
  return changed;
}

size_t pycass_bf16_find_nonfinite(const uint16_t *v, size_t n) {
  for (size_t i = 0; i < n; i++)
    if ((v[i] & 0x7f80u) == 0x7f80u)
      return i;
  return n;
}
