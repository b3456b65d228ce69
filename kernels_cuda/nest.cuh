/* A tile of the codec nest in a warp's registers (docs/format.md, "Codec nest"; engine/codec_nest.c is the truth).
 *
 * Lane 4 g + t has rows 2 g and 2 g + 1 of columns 16 t .. 16 t + 15, that is of half lines 4 t .. 4 t + 3, which are one
 * triple of plane B. Half line 4 t + k is the lane's part of the k-th mma.m16n8k16: its rows are the tile's in the order 0, 2,
 * 4, .. 14, 1, 3, .. 15, its columns those of half lines k, 4 + k, 8 + k, 12 + k. */
#ifndef CASS_NEST_CUH
#define CASS_NEST_CUH

#include "ptx.cuh"

#include "backend.h"

enum { ROWS = 16, COLS = 64, BIAS = 18, RELATIVE_MOST = 140 };
enum { FORM_EXACT, FORM_RELATIVE };
#define PANEL_SCALE 281474976710656.0f /* 2^48 */

/* By cell: draft magnitudes; E; 64 M6. Four to a word, as PRMT wants them. */
#define MAGNITUDES_LOW 0x3d2b1f16u
#define MAGNITUDES_HIGH 0x040d7755u
#define EXPONENTS_LOW 0x11111010u
#define EXPONENTS_HIGH 0x000f1212u
#define TOP_BITS_LOW 0x40004000u
#define TOP_BITS_HIGH 0x00004000u

/* What a block of threads looks up. spread: for each byte of 8 T bits, those bits at bit 6 of bytes, the last one first, so that
 * a rank from 1 to 8 selects its own. low: the first words of exponents and top bits, which compilers would otherwise move into a
 * register for every use. */
struct Tables {
  uint2 spread[256];
  uint32_t low[2];
};

DEVICE void fill_tables(Tables &tables) {
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) {
    uint32_t turned = (i << 1 | i >> 7) & 255u;
    tables.spread[i] = make_uint2((turned & 15u) * 0x08102040u & 0x40404040u, (turned >> 4) * 0x08102040u & 0x40404040u);
  }
  if (threadIdx.x == 0)
    tables.low[0] = EXPONENTS_LOW, tables.low[1] = TOP_BITS_LOW;
}

/* A lane's dwords of rows 2 g (x) and 2 g + 1 (y): lines 2 t and 2 t + 1 of A, a triple of B; and G of the two rows. */
struct Planes {
  uint2 a[2], b[3];
  uint32_t x;
};

DEVICE uint32_t load_word(const uint8_t *p) { return *(const uint32_t *)p; }

/* Where a lane finds a tile's planes: its own parts of A, B and X. */
struct Stream {
  const uint8_t *a, *b, *x;
};

DEVICE Stream stream_at(const CudaMatrix &w, size_t tile) {
  unsigned g = lane_of() / 4, t = lane_of() % 4;
  if (SEED_BUG == 1)
    g = lane_of() % 8, t = lane_of() / 8;
  return {w.a + 512 * tile + 128 * t + 8 * g, w.b + 768 * tile + 192 * t + 8 * g, w.x + 16 * tile + 2 * g};
}

DEVICE void advance(Stream &s, uint32_t tiles) { s.a += 512 * tiles, s.b += 768 * tiles, s.x += 16 * tiles; }

DEVICE Planes load_planes(const Stream &s) {
  Planes p;
#pragma unroll
  for (int i = 0; i < 2; i++)
    p.a[i] = __ldg((const uint2 *)(s.a + 64 * i));
#pragma unroll
  for (int i = 0; i < 3; i++)
    p.b[i] = __ldg((const uint2 *)(s.b + 64 * i));
  p.x = __ldg((const uint16_t *)s.x);
  return p;
}

/* ---- records ------------------------------------------------------------------------------------ */

/* Room for what a tile without escapes can have, from the multiple of 16 before it on, and for reading 4 bytes further. */
enum { RECORD_ROOM = 688, RECORD_CHUNKS = RECORD_ROOM / 16 - 1 };

/* Fetches a tile's record; all lanes' copies are there after cp_async_wait and __syncwarp. */
DEVICE void fetch_record(uint8_t *room, const uint8_t *side, uint32_t from, uint32_t to) {
  uint32_t lane = lane_of(), begin = from & ~15u, chunks = (to - begin + 15) / 16;
  room += 16 * lane;
  const uint8_t *p = side + 16 * lane + begin;
  if (lane < chunks)
    cp_async16(room, p);
  if (lane + WARP < chunks && lane + WARP < RECORD_CHUNKS) /* few tiles have so much */
    cp_async16(room + 16 * WARP, p + 16 * WARP);
}

/* 32 bits from a bit on. */
DEVICE uint32_t bits_at(const uint32_t *rooms, uint32_t bit) {
  const uint32_t *p = rooms + word_of(bit);
  return __funnelshift_r(p[0], p[1], bit);
}

/* ---- cells -------------------------------------------------------------------------------------- */

/* The nibbles of half line k: those of row 2 g, then those of 2 g + 1. */
DEVICE uint32_t half_line(const Planes &p, int k) {
  uint2 v = p.a[k / 2];
  if (k % 2 == 0)
    return prmt(choose(0x0f0f0f0fu, v.x, v.x >> 4), choose(0x0f0f0f0fu, v.y, v.y >> 4), 0x6420);
  return prmt(choose(0x0f0f0f0fu, v.x << 4, v.x), choose(0x0f0f0f0fu, v.y << 4, v.y), 0x7531);
}

/* Signs of its weights in a row, at bit 7 of each byte. */
DEVICE uint32_t signs(const Planes &p, int k, int row) {
  uint32_t v = row ? p.a[k / 2].y : p.a[k / 2].x;
  return (k % 2 ? v : v << 4) & 0x80808080u;
}

/* Mantissa bits 5..0 of its weights in a row. */
DEVICE uint32_t low6(const Planes &p, int k, int row) {
  uint32_t b0 = row ? p.b[0].y : p.b[0].x, b1 = row ? p.b[1].y : p.b[1].x, b2 = row ? p.b[2].y : p.b[2].x;
  if (k < 3)
    return (k == 0 ? b0 : k == 1 ? b1 : b2) & 0x3f3f3f3fu;
  return (b0 >> 2 & 0x30303030u) | (b1 >> 4 & 0x0c0c0c0cu) | (b2 >> 6 & 0x03030303u);
}

/* Bit 3 of each nibble that is a cell with a T bit; of each that is the cell with a q. */
DEVICE uint32_t has_t(uint32_t cells) { return (cells + 0x33333333u) & 0x88888888u; }
DEVICE uint32_t has_q(uint32_t cells) { return (cells + 0x11111111u) & 0x88888888u; }
/* In each nibble, how many there are up to it; the last of the eight has all of them, at most 8. */
DEVICE uint32_t ranks(uint32_t mask) { return (mask >> 3) * 0x11111111u; }

/* How many there are before each of the lane's half lines, of what count[k] has in its top nibble, in a byte each: before its
 * weights within the half lines 4 t .. 4 t + k. all: in the four half lines, of all lanes. */
DEVICE uint32_t count_before(const uint32_t count[4], uint32_t &all) {
  uint32_t own = prmt(prmt(count[0], count[1], 0x0073), prmt(count[2], count[3], 0x0073), 0x5410) >> 4 & 0x0f0f0f0fu;
  uint32_t sum = add_below<16, WARP>(add_below<8, WARP>(add_below<4, WARP>(own)));
  uint32_t total = __shfl_sync(ALL_LANES, sum, 28 | lane_of()); /* at most 64 in a byte */
  all = dot_bytes(total, 0x01010101u, 0);
  return total * 0x01010100u + sum - own; /* at most 192 + 56 */
}

/* What a lane knows of its half lines before it reads the record: cells; has_t, has_q and their ranks; and where its T bits and
 * nibbles q begin, as bit numbers. */
struct Places {
  uint32_t cells[4], is_t[4], is_q[4], rank_t[4], rank_q[4];
  uint32_t t[4], q[4];
};

/* record: byte number of the record. */
DEVICE Places find_places(const Planes &p, uint32_t record) {
  Places at;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    at.cells[k] = half_line(p, k) & 0x77777777u;
    at.is_t[k] = has_t(at.cells[k]), at.is_q[k] = has_q(at.cells[k]);
    at.rank_t[k] = ranks(at.is_t[k]), at.rank_q[k] = ranks(at.is_q[k]);
  }
  uint32_t all_t, all_q, before_t = count_before(at.rank_t, all_t), before_q = count_before(at.rank_q, all_q);
  uint32_t own = all_t | all_q << 16, sum = add_below<2, 4>(add_below<1, 4>(own)); /* and before the lane's four half lines */
  uint32_t n_q = __shfl_sync(ALL_LANES, sum, 3) >> 16;
  sum -= own;
  uint32_t q0 = 8 * (record + 2) + 4 * (sum >> 16), t0 = 8 * (record + 2 + (n_q + 1) / 2) + (sum & 0xffffu);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    at.t[k] = dot_bytes(before_t, 1u << 8 * k, t0);
    at.q[k] = dot_bytes(before_q, 4u << 8 * k, q0);
  }
  return at;
}

/* ---- words -------------------------------------------------------------------------------------- */

/* Half line k in relative form (engine/codec.h): a[0], a[2] of row 2 g, columns +0, +2 and +4, +6; a[1], a[3] of row 2 g + 1. */
DEVICE void relative_words(uint32_t (&a)[4], const Planes &p, int k, const Places &at, const uint32_t *rooms,
                           const Tables &tables, const uint32_t low[2]) {
  uint32_t cells = at.cells[k];
  uint2 bits = *(const uint2 *)((const uint8_t *)tables.spread + (bits_at(rooms, at.t[k] - 3) & 0x7f8u));
  uint32_t window = bits_at(rooms, at.q[k]), even = window & 0x0f0f0f0fu, odd = window >> 4 & 0x0f0f0f0fu;
  uint32_t q_low = prmt(even, odd, 0x1407), q_high = prmt(even, odd, 0x3625);   /* the last one first, as in spread */
  uint32_t select_t = choose_not(0x88888888u, at.is_t[k], at.rank_t[k]); /* bit 3: none, since all bytes are positive */
  uint32_t select_q = choose_not(0x88888888u, at.is_q[k], at.rank_q[k]);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32_t e = prmt(low[0], EXPONENTS_HIGH, cells) + prmt(q_low, q_high, select_q);
    uint32_t m = (prmt(low[1], TOP_BITS_HIGH, cells) + prmt(bits.x, bits.y, select_t)) | low6(p, k, row);
    uint32_t sign = signs(p, k, row);
    a[row] = prmt(e, 0, 0x4140) * 128 + prmt(m, sign, 0x5140); /* T of cell 5 carries */
    a[2 + row] = prmt(e, 0, 0x4342) * 128 + prmt(m, sign, 0x7362);
    cells >>= 16, select_t >>= 16, select_q >>= 16;
  }
}

/* The lane's escapes in a half line: its q that are 15, of the first n in window. */
DEVICE uint32_t count_escapes(uint32_t n, uint32_t window) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; i++)
    count += (window >> 4 * i & 15u) == 15u;
  return count;
}

/* Exact weights of half lines, one by one: for tiles with escapes or denormal weights, of which there are few, and where all
 * bits are wanted. They read the record where it is. */
struct ExactTile {
  const uint8_t *record, *end; /* end: of the record, where the escapes begin */
  Places at;                   /* bit numbers from the record on */
  uint32_t escapes[4];         /* before the lane's weights of each half line */
  bool has_escapes;
};

DEVICE uint32_t record_bits(const uint8_t *record, uint32_t bit) { /* 25 of them, at any address */
  const uint8_t *p = record + bit / 8;
  return (p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24) >> bit % 8;
}

DEVICE ExactTile exact_tile(const uint8_t *side, size_t tile, const Planes &p) {
  ExactTile e;
  e.record = side + load_word(side + 4 * tile), e.end = side + load_word(side + 4 * tile + 4);
  e.has_escapes = e.record[1] & 0x40;
  e.at = find_places(p, 0);
  uint32_t count[4], all;
  for (int k = 0; k < 4; k++) {
    uint32_t window = (record_bits(e.record, e.at.q[k]) & 0xffffu) | record_bits(e.record, e.at.q[k] + 16) << 16;
    count[k] = e.has_escapes ? count_escapes(e.at.rank_q[k] >> 28, window) << 28 : 0;
  }
  uint32_t before = count_before(count, all), sum = add_below<2, 4>(add_below<1, 4>(all));
  for (int k = 0; k < 4; k++)
    e.escapes[k] = sum - all + (before >> 8 * k & 255u);
  return e;
}

/* Half line k, in the order of relative_words; group: G of row 2 g and, 8 bits on, of 2 g + 1. */
DEVICE void exact_words(uint32_t (&a)[4], ExactTile &tile, const Planes &p, int k, uint32_t group) {
  uint32_t nibbles = half_line(p, k), t_at = tile.at.t[k], q_at = tile.at.q[k], n_escape = tile.escapes[k];
  uint64_t words[2] = {0, 0}, low = (uint64_t)low6(p, k, 1) << 32 | low6(p, k, 0);
#pragma unroll 1
  for (int i = 0; i < 8; i++, nibbles >>= 4, low >>= 8) {
    uint32_t c = nibbles & 7u, t = 0, q = 0, low6 = (uint32_t)low & 63u, sign = (nibbles & 8u) << 12;
    if (c >= 5)
      t = record_bits(tile.record, t_at++) & 1u;
    if (c == 7)
      q = record_bits(tile.record, q_at) & 15u, q_at += 4;
    uint32_t e = (c == 7 ? q : prmt(EXPONENTS_LOW, EXPONENTS_HIGH, c) & 255u) + (group >> i / 4 * 8 & 255u) - BIAS;
    uint32_t top = prmt(TOP_BITS_LOW, TOP_BITS_HIGH, c) & 255u, word = sign + (e << 7) + top + 64 * t + low6;
    if (c == 7 && q == 15 && tile.has_escapes) {
      const uint8_t *escape = tile.end - 1 - n_escape++;
      word = sign | (uint32_t)*(escape > tile.record ? escape : tile.record) << 7 | t << 6 | low6; /* if damaged: anything */
    }
    if (c == 7 && q == 0)
      word = sign | t << 6 | low6;
    words[0] = words[0] >> 16 | words[1] << 48, words[1] = words[1] >> 16 | (uint64_t)(word & 0xffffu) << 48;
  }
  a[0] = (uint32_t)words[0], a[2] = (uint32_t)(words[0] >> 32), a[1] = (uint32_t)words[1], a[3] = (uint32_t)(words[1] >> 32);
}

/* Denormals count as zero. */
DEVICE uint32_t flush_words(uint32_t pair) {
  return (pair & 0x7f800000u ? pair & 0xffff0000u : pair & 0x80000000u) |
         (pair & 0x7f80u ? pair & 0xffffu : pair & 0x8000u);
}

#endif
