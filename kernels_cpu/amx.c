/* AMX-BF16 on top of AVX-512. As avx512, but for the target product: TDPBF16PS multiplies BF16 by BF16, so activations
 * are cut into three BF16 pieces, x = high + mid + low, each the upper half of what is left. The three are exact (8 of
 * the 24 bits of a float each, all of x's sign), products are exact, and only sums are rounded.
 *
 * A result passes 17 roundings inside a TDPBF16PS at most and then one for each of the six per group, so
 *   |y - sum w x| <= (18 + 6 n_group) 2^-24 sum |w x| + 2^-120 (n_group + sum |w| + sum |x|),
 * the last term because the instruction takes denormals for zeros. The scalar order's bound is 32 n_group 2^-24.
 *
 * One order for every m, m = 1 too: groups in turn, in each 16 pairs and 16 more, of each low, mid, high. Token rows
 * are independent in the instruction, so those that pad a block to 16 change nothing. */
#include "avx512_common.h"
#include "sets.h"

enum { ROW_BYTES = 64, AMX_TOKENS = 16, AMX_BLOCKS = 4, PIECES = 3 };
/* Activation tiles [block][group][half][piece] of a pass, 1 KB each: a pass takes fewer groups for more tokens. */
enum { PASS_TILES = 96 };

typedef uint16_t ActTile[AMX_TOKENS][32];

/* Tile registers: 0..3 sums of up to four blocks of 16 tokens, 4 weights, 5..7 pieces of activations. */
static void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++)
    config.row_bytes[i] = ROW_BYTES, config.rows[i] = 16;
  _tile_loadconfig(&config);
}

/* The intrinsics do not tell the compiler which memory they read. */
static inline void memory_is_read(void) { __asm__ volatile("" ::: "memory"); }

/* 32 columns of a token: pair p of its row in the three pieces' tiles holds columns 8 j + i and 8 j + i + 4. */
static void cut_activations(ActTile piece[PIECES], uint32_t row, const float *x) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
  __m512 a = _mm512_permutex2var_ps(x0, first, x1), b = _mm512_permutex2var_ps(x0, second, x1);
  for (int i = 0; i < PIECES; i++) {
    __m512i top_a = _mm512_and_si512(_mm512_castps_si512(a), upper);
    __m512i top_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
    _mm512_storeu_si512(piece[i][row], _mm512_or_si512(_mm512_srli_epi32(top_a, 16), top_b));
    a = _mm512_sub_ps(a, _mm512_castsi512_ps(top_a));
    b = _mm512_sub_ps(b, _mm512_castsi512_ps(top_b));
  }
}

/* What a pass multiplies: groups [g0, g1) of m tokens, as tiles [block][group - g0][half][piece]. */
typedef struct Pass {
  const ActTile *act;
  size_t g0, g1;
  uint32_t m;
} Pass;

#define MULTIPLY_TOKENS(block)                                                                                         \
  do {                                                                                                                 \
    const ActTile *piece_ = act + (size_t)(block) * (n_group) * 2 * PIECES;                                            \
    _tile_loadd(5, piece_[2], ROW_BYTES);                                                                              \
    _tile_loadd(6, piece_[1], ROW_BYTES);                                                                              \
    _tile_loadd(7, piece_[0], ROW_BYTES);                                                                              \
    _tile_dpbf16ps(block, 5, 4);                                                                                       \
    _tile_dpbf16ps(block, 6, 4);                                                                                       \
    _tile_dpbf16ps(block, 7, 4);                                                                                       \
  } while (0)

/* A decoded weight tile times up to 64 tokens; n_group is the pass's. */
static inline void multiply_tile(TilePairs tile, const ActTile *act, size_t n_group, uint32_t m) {
  for (int half = 0; half < 2; half++, act += PIECES) {
    _tile_loadd(4, tile[16 * half], ROW_BYTES);
    MULTIPLY_TOKENS(0);
    if (m > AMX_TOKENS)
      MULTIPLY_TOKENS(1);
    if (m > 2 * AMX_TOKENS)
      MULTIPLY_TOKENS(2);
    if (m > 3 * AMX_TOKENS)
      MULTIPLY_TOKENS(3);
  }
}

/* A row block in one pass, on top of y where g0 > 0. Sums go through a buffer, since y has no rows past m. */
static void pass_block(float *y, size_t ldy, const Matrix *w, size_t block, const Pass *p) {
  _Alignas(64) float sums[AMX_BLOCKS * AMX_TOKENS][NEST_ROWS];
  for (uint32_t i = 0; i < round_up(p->m, AMX_TOKENS); i++)
    _mm512_storeu_ps(sums[i], p->g0 && i < p->m ? _mm512_loadu_ps(y + i * ldy) : _mm512_setzero_ps());
  memory_is_read();
  _tile_loadd(0, sums[0], ROW_BYTES);
  if (p->m > AMX_TOKENS)
    _tile_loadd(1, sums[AMX_TOKENS], ROW_BYTES);
  if (p->m > 2 * AMX_TOKENS)
    _tile_loadd(2, sums[2 * AMX_TOKENS], ROW_BYTES);
  if (p->m > 3 * AMX_TOKENS)
    _tile_loadd(3, sums[3 * AMX_TOKENS], ROW_BYTES);
  for (size_t g = p->g0; g < p->g1; g++) {
    _Alignas(64) TilePairs tile[2]; /* in turn, so that a decoder need not wait for the last tile's readers */
    set_decode_tile(w, block * w->n_group + g, tile[g % 2]);
    memory_is_read();
    multiply_tile(tile[g % 2], p->act + (g - p->g0) * 2 * PIECES, p->g1 - p->g0, p->m);
  }
  _tile_stored(0, sums[0], ROW_BYTES);
  if (p->m > AMX_TOKENS)
    _tile_stored(1, sums[AMX_TOKENS], ROW_BYTES);
  if (p->m > 2 * AMX_TOKENS)
    _tile_stored(2, sums[2 * AMX_TOKENS], ROW_BYTES);
  if (p->m > 3 * AMX_TOKENS)
    _tile_stored(3, sums[3 * AMX_TOKENS], ROW_BYTES);
  for (uint32_t i = 0; i < p->m; i++)
    _mm512_storeu_ps(y + i * ldy, _mm512_loadu_ps(sums[i]));
}

/* Up to 64 tokens. All row blocks take the first groups, then all the next ones, so that activations are cut once and
 * stay in L2; the sums wait in y, which changes no bit of them. */
static void amx_tokens(float *y, size_t ldy, const Matrix *w, const float *x, size_t ldx, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  _Alignas(64) ActTile act[PASS_TILES];
  const size_t blocks = (m + AMX_TOKENS - 1) / AMX_TOKENS, groups = PASS_TILES / (2 * PIECES) / blocks;
  memset(act, 0, sizeof act); /* rows past m */
  for (size_t g0 = 0; g0 < w->n_group; g0 += groups) {
    const Pass p = {act, g0, g0 + min_size(groups, w->n_group - g0), m};
    for (uint32_t i = 0; i < m; i++)
      for (size_t half = 0; half < 2 * (p.g1 - g0); half++)
        cut_activations(act + (i / AMX_TOKENS * 2 * (p.g1 - g0) + half) * PIECES, i % AMX_TOKENS,
                        x + i * ldx + g0 * NEST_COLS + 32 * half);
    for (size_t block = block0; block < block1; block++)
      pass_block(y + block * NEST_ROWS, ldy, w, block, &p);
  }
}

static void amx_matmul(float *y, size_t ldy, const Matrix *w, const float *x, size_t ldx, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  configure_tiles();
  for (uint32_t i = 0; i < m; i += AMX_BLOCKS * AMX_TOKENS)
    amx_tokens(y + i * ldy, ldy, w, x + i * ldx, ldx,
               m - i < AMX_BLOCKS * AMX_TOKENS ? m - i : AMX_BLOCKS * AMX_TOKENS, block0, block1);
  _tile_release();
}

const Kernels kernels_amx = {.name = "amx",
                             .nest_decode_tile = set_nest_decode_tile,
                             .matmul = amx_matmul,
                             .matmul_draft = set_matmul_draft,
                             SIMD_OPS_TABLE};
