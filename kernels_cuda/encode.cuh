/* Encodes blocks of the KV cache (docs/format.md, "Blocks of the KV cache"), byte for byte as nest_encode_columns of
 * engine/codec_nest.c: a warp has a head's keys or values, tile after tile. It happens once in 64 tokens. */
#ifndef CASS_ENCODE_CUH
#define CASS_ENCODE_CUH

#include "attend.cuh"

enum { MIN_GROUP = 4, MOST_BITS = 2 + 512 + 128 + 8, TILE_WEIGHTS = 1024 };

/* A lane's words of a tile: [row][half line][c]. */
struct Words {
  uint16_t w[2][4][4];
};
/* A record being made. */
struct Record {
  uint32_t bits[MOST_BITS / 4];
  uint8_t escape[TILE_WEIGHTS];
};

DEVICE uint32_t exponent_of(uint32_t w) { return w >> 7 & 255u; }

DEVICE uint32_t cell_of(uint32_t w, uint32_t group) {
  int d = (int)group - (int)exponent_of(w);
  return d < 0 ? 5 : d < 3 ? 4 - 2 * (uint32_t)d + (w >> 6 & 1u) : d == 3 ? 6 : 7;
}

/* The draft's squared error of a weight, as draft_error. */
DEVICE uint64_t error_of(uint32_t w, uint32_t top, uint32_t group) {
  uint32_t below = top - exponent_of(w);
  uint64_t value = exponent_of(w) ? (uint64_t)((128 + (w & 127u)) * 70) << 12 >> (below > 12 ? 12 : below) : 0;
  uint32_t magnitude = prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, cell_of(w, group)) & 255u;
  uint64_t draft = (uint64_t)magnitude << 19 >> (top - group), d = value > draft ? value - draft : draft - value;
  return d * d;
}

/* Largest, or sum, of the four lanes of a row. */
DEVICE uint32_t row_max(uint32_t v) {
  for (int d = 1; d < 4; d *= 2) {
    uint32_t other = __shfl_xor_sync(ALL_LANES, v, d);
    v = v > other ? v : other;
  }
  return v;
}
DEVICE uint64_t row_sum(uint64_t v) {
  for (int d = 1; d < 4; d *= 2)
    v += __shfl_xor_sync(ALL_LANES, v, d);
  return v;
}
DEVICE uint32_t lanes_sum(uint32_t v) {
  for (int d = 1; d < WARP; d *= 2)
    v += __shfl_xor_sync(ALL_LANES, v, d);
  return v;
}

/* G of a row, of whose 64 words w are the lane's 16. */
DEVICE uint32_t group_of(const uint16_t (*w)[4], bool always_top) {
  uint32_t top = MIN_GROUP, largest = 0;
  uint64_t error[2] = {0, 0};
  for (int i = 0; i < 16; i++)
    top = exponent_of(w[i / 4][i % 4]) > top ? exponent_of(w[i / 4][i % 4]) : top;
  top = row_max(top);
  for (int i = 0; i < 16; i++) {
    uint32_t v = w[i / 4][i % 4];
    if (exponent_of(v) == top)
      largest = (v & 127u) > largest ? v & 127u : largest;
    error[0] += error_of(v, top, top), error[1] += error_of(v, top, top - 1);
  }
  largest = row_max(largest);
  error[0] = row_sum(error[0]), error[1] = row_sum(error[1]);
  bool lower = !always_top && top > MIN_GROUP && largest < 64 && error[1] < error[0];
  return lower ? top - 1 : top;
}

DEVICE Words load_words(const uint16_t *rows, uint32_t dim, uint32_t tile) {
  Words words;
  for (uint32_t i = 0; i < 32; i++) {
    uint32_t row = i / 16, half = i / 4 % 4, c = i % 4, channel = ROWS * tile + lane_of() / 4 * 2 + row;
    uint32_t pos = lane_of() % 4 * 16 + half / 2 * 8 + half % 2 + 2 * c;
    words.w[row][half][c] = channel < dim ? rows[(size_t)pos * dim + channel] : 0;
  }
  return words;
}

/* The lane's parts of planes A and B; group: as in Planes. */
DEVICE Planes make_planes(const Words &words, uint32_t group) {
  uint32_t a[2][2] = {}, b[3][2] = {};
  for (int row = 0; row < 2; row++)
    for (int half = 0; half < 4; half++)
      for (int c = 0; c < 4; c++) {
        uint32_t w = words.w[row][half][c], low = w & 63u, nibble = w >> 15 << 3 | cell_of(w, group >> 8 * row & 255u);
        a[half / 2][row] |= nibble << (8 * c + 4 * (half % 2));
        if (half < 3)
          b[half][row] |= low << 8 * c;
        for (int i = 0; i < 3 && half == 3; i++)
          b[i][row] |= (low >> (4 - 2 * i) & 3u) << (8 * c + 6);
      }
  return {{make_uint2(a[0][0], a[0][1]), make_uint2(a[1][0], a[1][1])},
          {make_uint2(b[0][0], b[0][1]), make_uint2(b[1][0], b[1][1]), make_uint2(b[2][0], b[2][1])},
          group};
}

DEVICE void put_bits(uint32_t *bits, uint32_t at, uint32_t value) {
  atomicOr(bits + at / 32, value << at % 32);
  if (at % 32)
    atomicOr(bits + at / 32 + 1, value >> (32 - at % 32));
}

/* A half line's nibbles q, T bits and escapes, in order. */
struct Side {
  uint32_t q, t, n_escape;
  uint8_t escape[8];
};

DEVICE Side side_of(const Words &words, int half, uint32_t group) {
  Side s = {};
  uint32_t n_q = 0, n_t = 0;
  for (int i = 0; i < 8; i++) {
    uint32_t w = words.w[i / 4][half][i % 4], g = group >> i / 4 * 8 & 255u, e = exponent_of(w), c = cell_of(w, g);
    if (c >= 5)
      s.t |= (c == 5 ? e > g : w >> 6 & 1u) << n_t++;
    if (c != 7)
      continue;
    bool escapes = e && g - e > 17;
    s.q |= (e == 0 ? 0 : escapes ? 15u : e + BIAS - g) << 4 * n_q++;
    if (escapes)
      s.escape[s.n_escape++] = (uint8_t)e;
  }
  return s;
}

/* A tile's record to out; its size. */
DEVICE uint32_t write_record(uint8_t *out, Record &r, const Words &words, const Planes &p) {
  for (uint32_t i = lane_of(); i < MOST_BITS / 4; i += WARP)
    r.bits[i] = 0;
  Places at = find_places(p, 0);
  uint32_t n_q = 0, n_t = 0, count[4], all;
  Side side[4];
  for (int k = 0; k < 4; k++) {
    side[k] = side_of(words, k, p.x), count[k] = side[k].n_escape << 28;
    n_q += at.rank_q[k] >> 28, n_t += at.rank_t[k] >> 28;
  }
  uint32_t before = count_before(count, all), sum = add_below<2, 4>(add_below<1, 4>(all)) - all;
  uint32_t n_escape = __shfl_sync(ALL_LANES, sum + all, 3);
  n_q = lanes_sum(n_q), n_t = lanes_sum(n_t);
  __syncwarp();
  for (int k = 0; k < 4; k++) {
    put_bits(r.bits, at.q[k], side[k].q), put_bits(r.bits, at.t[k], side[k].t);
    for (uint32_t i = 0; i < side[k].n_escape; i++)
      r.escape[n_escape - 1 - (sum + (before >> 8 * k & 255u) + i)] = side[k].escape[i]; /* the first one last */
  }
  if (lane_of() == 0)
    put_bits(r.bits, 0, n_q | (n_escape ? 0x4000u : 0));
  __syncwarp();
  uint32_t n = 2 + (n_q + 1) / 2 + (n_t + 7) / 8;
  for (uint32_t i = lane_of(); i < n + n_escape; i += WARP)
    out[i] = i < n ? (uint8_t)(r.bits[i / 4] >> i % 4 * 8) : r.escape[i - n];
  __syncwarp();
  return n + n_escape;
}

/* Unit blockIdx.x: head blockIdx.x / 2's keys or values of 64 plain positions from pos on, to out + room blockIdx.x: what comes
 * first, and at a multiple of 64 the rest, whose size goes to sizes. */
__global__ void __launch_bounds__(WARP)
    encode_units(uint8_t *out, uint32_t room, uint32_t *sizes, CudaKv kv, uint32_t pos) {
  __shared__ Record record;
  uint32_t unit = blockIdx.x, tiles = (kv.head_dim + ROWS - 1) / ROWS, lane = lane_of(), g = lane / 4, t = lane % 4;
  const uint16_t *rows = (unit % 2 ? kv.v : kv.k) + ((size_t)(unit / 2) * kv.n_ctx + pos) * kv.head_dim;
  uint8_t *x = out + (size_t)unit * room, *a = x + (16 * tiles + 63) / 64 * 64, *b = a + 512 * tiles, *side = b + 768 * tiles;
  uint32_t end = 4 * (tiles + 1);
  for (uint32_t i = 16 * tiles + lane; x + i < a; i += WARP)
    x[i] = 0;
  for (uint32_t tile = 0; tile < tiles; tile++) {
    Words words = load_words(rows, kv.head_dim, tile);
    uint32_t first = group_of(words.w[0], unit % 2 == 0), second = group_of(words.w[1], unit % 2 == 0);
    Planes p = make_planes(words, first | second << 8);
    if (t == 0)
      *(uint16_t *)(x + 16 * tile + 2 * g) = (uint16_t)p.x;
    for (int i = 0; i < 2; i++)
      *(uint2 *)(a + 512 * tile + 128 * t + 64 * i + 8 * g) = p.a[i];
    for (int i = 0; i < 3; i++)
      *(uint2 *)(b + 768 * tile + 192 * t + 64 * i + 8 * g) = p.b[i];
    if (lane == 0)
      *(uint32_t *)(side + 4 * tile) = end;
    end += write_record(side + end, record, words, p);
  }
  if (lane == 0)
    *(uint32_t *)(side + 4 * tiles) = end, sizes[unit] = end;
}

/* Units that encode_units left at room's distance, close together, with the table before them. A block of threads has a unit. */
__global__ void __launch_bounds__(OPS_THREADS)
    pack_units(uint8_t *block, const uint8_t *units, uint32_t room, const uint32_t *sizes, uint32_t n_head_kv,
               uint32_t head_dim) {
  uint32_t tiles = (head_dim + ROWS - 1) / ROWS, first = (16 * tiles + 63) / 64 * 64 + 1280 * tiles, unit = blockIdx.x;
  uint32_t at = (16 * n_head_kv + 63) / 64 * 64;
  for (uint32_t i = 0; i < unit; i++)
    at += first + (sizes[i] + 63) / 64 * 64;
  uint32_t n = first + sizes[unit], padded = first + (sizes[unit] + 63) / 64 * 64;
  uint32_t slack = unit + 1 == gridDim.x ? CUDA_BLOCK_SLACK : 0;
  for (uint32_t i = threadIdx.x; i < padded + slack; i += OPS_THREADS)
    block[at + i] = i < n ? units[(size_t)unit * room + i] : 0;
  if (threadIdx.x == 0)
    ((uint32_t *)block)[2 * unit] = at, ((uint32_t *)block)[2 * unit + 1] = at + first;
  for (uint32_t i = 16 * n_head_kv + threadIdx.x; unit == 0 && i < (16 * n_head_kv + 63) / 64 * 64; i += OPS_THREADS)
    block[i] = 0;
}

#endif
