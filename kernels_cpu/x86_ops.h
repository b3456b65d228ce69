/* What AVX2 and AVX-512 share of what simd_ops.h wants. */
#ifndef CASS_X86_OPS_H
#define CASS_X86_OPS_H

#include <immintrin.h>

#include "simd_ops.h"

/* As ops_round: eight columns, of two half lines, at a time. */
static void simd_round(uint16_t *panels, const float *x, uint32_t n_group) {
  const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1), quiet = _mm256_set1_epi32(0x40);
  const __m128i columns = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (size_t j = 0; j < 8 * (size_t)n_group; j++) {
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * j), _mm256_set1_ps(PANEL_SCALE));
    __m256i u = _mm256_castps_si256(v), top = _mm256_srli_epi32(u, 16);
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, half), _mm256_and_si256(top, one));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_or_si256(top, quiet), nan);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    words = _mm_shuffle_epi8(words, columns);
    _mm_storel_epi64((__m128i *)(panels + 2 * j * PANEL_TOKENS * 4), words);
    _mm_storel_epi64((__m128i *)(panels + (2 * j + 1) * PANEL_TOKENS * 4), _mm_srli_si128(words, 8));
  }
}

#endif
