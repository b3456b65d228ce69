/* AMX-BF16 on top of AVX-512. As avx512bf16, but for the target product's order: TDPBF16PS sums the odd and the even
 * words of 16 pairs apart, adds the two and then adds that to the sum so far.
 *
 * A result passes 17 roundings inside a TDPBF16PS at most and then one for each of the two per group, so
 *   |y - sum w x| <= (20 + 2 n_group) 2^-24 sum |w x| + 2^-120 (n_group + 1 + sum |w| + sum |x|),
 * the last term because the instruction takes denormals for zeros. The scalar order's bound is 32 n_group 2^-24.
 *
 * One order for every m, m = 1 too: groups in turn, in each 8 half lines and 8 more. Token rows are independent in the
 * instruction, so those that pad a block to 16 change nothing. */
#include "avx512_common.h"
#include "sets.h"

enum { ROW_BYTES = 64, AMX_TOKENS = 16, AMX_BLOCKS = 4 };
/* Activation tiles [block][group][half] of a pass, 1 KB each: a pass takes fewer groups for more tokens. */
enum { PASS_TILES = 96 };

/* 16 tokens, 16 pairs: words 0, 1 and 2, 3 of eight half lines. */
typedef uint16_t ActTile[AMX_TOKENS][32];
/* The weights they meet: the same pairs, of 16 rows. */
typedef uint32_t PairTile[16][NEST_ROWS];

/* Tile registers: 0..3 sums of up to four blocks of 16 tokens, 4 weights, 5 activations. */
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

static inline void pair_tiles(PairTile pairs[2], TileWords tile) {
  for (int hl = 0; hl < 16; hl++) {
    __m512 w0 = _mm512_loadu_ps(tile[hl]), w1 = _mm512_loadu_ps(tile[hl] + 32);
    _mm512_storeu_ps(pairs[hl / 8][2 * (hl % 8)], _mm512_shuffle_ps(w0, w1, 0x88));
    _mm512_storeu_ps(pairs[hl / 8][2 * (hl % 8) + 1], _mm512_shuffle_ps(w0, w1, 0xdd));
  }
}

/* What a pass multiplies: groups [g0, g1), where hot columns are the first group if there are some, of m tokens, as tiles [block][group - g0][half]. */
typedef struct Pass {
  const ActTile *act;
  size_t g0, g1;
  uint32_t m;
} Pass;

#define MULTIPLY_TOKENS(block)                                                                                         \
  do {                                                                                                                 \
    _tile_loadd(5, act[(size_t)(block) * n_group * 2], ROW_BYTES);                                                     \
    _tile_dpbf16ps(block, 5, 4);                                                                                       \
  } while (0)

/* A decoded weight tile times up to 64 tokens; n_group is the pass's. */
static inline void multiply_pairs(PairTile pairs[2], const ActTile *act, size_t n_group, uint32_t m) {
  for (int half = 0; half < 2; half++, act++) {
    _tile_loadd(4, pairs[half], ROW_BYTES);
    MULTIPLY_TOKENS(0);
    if (m > AMX_TOKENS)
      MULTIPLY_TOKENS(1);
    if (m > 2 * AMX_TOKENS)
      MULTIPLY_TOKENS(2);
    if (m > 3 * AMX_TOKENS)
      MULTIPLY_TOKENS(3);
  }
}

/* A tile's bits; g counts the hot columns as a group. */
static void decode_tile(const Matrix *w, size_t block, size_t g, TileWords out) {
  if (w->n_hot && g == 0) {
    memset(out, 0, sizeof(TileWords));
    memcpy(out, hot_half_line(w, block, 0), w->n_hot / 4 * sizeof *out);
    return;
  }
  size_t t = block * w->n_group + g - (w->n_hot != 0);
  if (w->codec == PYCASS_CODEC_NEST)
    set_nest_decode_tile(w, t, out);
  else
    set_raw_decode_tile(w, t, out);
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
    _Alignas(64) TileWords tile;
    _Alignas(64) PairTile pairs[2][2]; /* in turn, so that they need not wait for the last ones' readers */
    decode_tile(w, block, g, tile);
    pair_tiles(pairs[g % 2], tile);
    memory_is_read();
    multiply_pairs(pairs[g % 2], p->act + (g - p->g0) * 2, p->g1 - p->g0, p->m);
  }
  _tile_stored(0, sums[0], ROW_BYTES);
  if (p->m > AMX_TOKENS)
    _tile_stored(1, sums[AMX_TOKENS], ROW_BYTES);
  if (p->m > 2 * AMX_TOKENS)
    _tile_stored(2, sums[2 * AMX_TOKENS], ROW_BYTES);
  if (p->m > 3 * AMX_TOKENS)
    _tile_stored(3, sums[3 * AMX_TOKENS], ROW_BYTES);
  const __m512 scale = _mm512_set1_ps(p->g1 == w->n_group + (w->n_hot != 0) ? 1 / PANEL_SCALE : 1);
  for (uint32_t i = 0; i < p->m; i++)
    _mm512_storeu_ps(y + i * ldy, _mm512_mul_ps(_mm512_loadu_ps(sums[i]), scale));
}

/* Up to 64 tokens. All row blocks take the first groups, then all the next ones, so that the activations' tiles stay in
 * L2; the sums wait in y, which changes no bit of them. */
static void amx_tokens(float *y, size_t ldy, const Matrix *w, const Acts *acts, size_t token, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  _Alignas(64) ActTile act[PASS_TILES];
  const size_t blocks = (m + AMX_TOKENS - 1) / AMX_TOKENS, groups = PASS_TILES / 2 / blocks;
  const size_t hot = w->n_hot != 0, total = w->n_group + hot;
  memset(act, 0, sizeof act); /* rows past m */
  for (size_t g0 = 0; g0 < total; g0 += groups) {
    const Pass p = {act, g0, g0 + min_size(groups, total - g0), m};
    const size_t n = p.g1 - g0;
    for (uint32_t i = 0; i < m; i++)
      for (size_t g = g0; g < p.g1; g++) {
        const uint16_t *x = g < hot ? acts->hot + panel_at(token + i, 1, 0)
                                    : acts->panels + panel_at(token + i, w->n_group, g - hot);
        for (size_t hl = 0; hl < (g < hot ? w->n_hot / 4 : 16); hl++)
          memcpy(act[i / AMX_TOKENS * 2 * n + (g - g0) * 2 + hl / 8][i % AMX_TOKENS] + 4 * (hl % 8),
                 x + hl * PANEL_TOKENS * 4, 4 * sizeof *x);
      }
    for (size_t block = block0; block < block1; block++)
      pass_block(y + block * NEST_ROWS, ldy, w, block, &p);
  }
}

static void amx_matmul(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  if (matrix_is_cass(w)) { /* whose tiles come in turn only */
    set_matmul(y, ldy, w, acts, m, block0, block1);
    return;
  }
  configure_tiles();
  for (uint32_t i = 0; i < m; i += AMX_BLOCKS * AMX_TOKENS)
    amx_tokens(y + i * ldy, ldy, w, acts, i,
               m - i < AMX_BLOCKS * AMX_TOKENS ? m - i : AMX_BLOCKS * AMX_TOKENS, block0, block1);
  _tile_release();
}

const Kernels kernels_amx = {.name = "amx",
                             .nest_decode_tile = set_nest_decode_tile,
                                .nest_columns = set_nest_columns,
                             .cass_next_tile = set_cass_next_tile,
                             .matmul = amx_matmul,
                             .matmul_draft = set_matmul_draft,
                             .scores_draft = set_scores_draft,
                             SIMD_OPS_TABLE};
