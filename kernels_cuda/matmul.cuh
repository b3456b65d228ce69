/* Products, target and draft. A block of threads has 16 rows and divides their groups among its warps, a warp's by turns; the
 * warps' sums are added in order. Who adds what depends on the matrix alone, never on the tokens. */
#ifndef CASS_MATMUL_CUH
#define CASS_MATMUL_CUH

#include "nest.cuh"

enum { TARGET_WARPS = 8, DRAFT_WARPS = 4, MMA_TOKENS = 8 };

struct Products {
  CudaProduct p[CUDA_PRODUCTS];
};

/* The product that a block of threads works at; block becomes the row block. */
DEVICE CudaProduct find_product(const Products &list, uint32_t &block) {
  CudaProduct p = list.p[0];
  for (int i = 1; i < CUDA_PRODUCTS && block >= p.w.n_block; i++)
    block -= p.w.n_block, p = list.p[i];
  return p;
}

/* A tile, or 16 hot columns, as left operands, and a token's activations that they meet. A lane of a token past the
 * last one has the last one's: its sums are nobody's. */
struct Left {
  uint32_t a[4][4];
};
struct Right {
  uint4 v[2];
};

DEVICE const uint16_t *right_at(const CudaActs &acts, uint32_t token, uint32_t m, uint32_t n_group, uint32_t group) {
  return acts.panels + ((size_t)(token < m ? token : m - 1) * n_group + group) * COLS + lane_of() % 4 * 16;
}
DEVICE Right load_right(const uint16_t *p) { return {{__ldg((const uint4 *)p), __ldg((const uint4 *)p + 1)}}; }

DEVICE void multiply_tile(float (&d)[4], const Left &l, const Right &r) {
  mma_bf16(d, l.a[0], r.v[0].x, r.v[0].y);
  mma_bf16(d, l.a[1], r.v[0].z, r.v[0].w);
  mma_bf16(d, l.a[2], r.v[1].x, r.v[1].y);
  mma_bf16(d, l.a[3], r.v[1].z, r.v[1].w);
}

/* d += the product of a row block's hot columns with eight tokens. */
DEVICE void multiply_hot(float (&d)[4], const CudaMatrix &w, uint32_t block, const CudaActs &acts, uint32_t token0, uint32_t m) {
  uint32_t g = lane_of() / 4, t = lane_of() % 4;
  for (uint32_t i = t; i < w.n_hot / 4; i += 4) {
    uint4 v = __ldg((const uint4 *)(w.hot_words + ((size_t)block * (w.n_hot / 4) + i) * 64 + g % 2 * 32 + g / 2 * 8));
    uint2 x = make_uint2(0, 0);
    if (token0 + g < m)
      x = __ldg((const uint2 *)(acts.hot + (size_t)(token0 + g) * COLS + 4 * i));
    const uint32_t a[4] = {v.x, v.z, v.y, v.w};
    mma_bf16(d, a, x.x, x.y);
  }
}

/* y = the warps' sums: part [warp][token][row], n_token a multiple of 8. */
template <int n_warp, int n_token>
DEVICE void add_warps(const float (&part)[n_warp][n_token][ROWS], const CudaProduct &p, uint32_t block, uint32_t token0,
                      uint32_t m) {
  for (uint32_t i = threadIdx.x; i < n_token * ROWS; i += blockDim.x) {
    uint32_t token = i / ROWS, row = i % ROWS;
    float s = part[0][token][row];
    for (int warp = 1; warp < n_warp; warp++)
      s += part[warp][token][row];
    if (token0 + token < m)
      p.y[(size_t)(token0 + token) * p.ldy + block * ROWS + row] = s * (1 / PANEL_SCALE);
  }
}

template <int n_warp, int n_token>
DEVICE void store_sums(float (&part)[n_warp][n_token][ROWS], const float (*s)[4]) {
  uint32_t g = lane_of() / 4, t = lane_of() % 4, warp = threadIdx.x / WARP;
#pragma unroll
  for (int n = 0; n < n_token / MMA_TOKENS; n++)
    for (int i = 0; i < 4; i++)
      part[warp][MMA_TOKENS * n + 2 * t + i % 2][2 * g + i / 2] = s[n][i];
}

/* ---- target, nest ------------------------------------------------------------------------------- */

/* A tile on its way: its planes in registers, its record in shared memory, where record is its byte number. */
struct Coming {
  Planes planes;
  uint32_t record, form;
};
struct Offsets {
  uint32_t from, to;
};

DEVICE Offsets load_offsets(const uint32_t *p) { return {__ldg(p), __ldg(p + 1)}; }

/* A warp's tiles in turn: where the next one's parts are, and the offsets of its record, which were fetched one tile earlier. */
struct Tiles {
  Stream planes;
  const uint8_t *form, *side;
  const uint32_t *offsets;
  Offsets ahead;
  uint32_t room; /* of the two, the byte number of the next one's */
};

DEVICE Tiles tiles_from(const CudaMatrix &w, uint32_t tile, uint32_t room) {
  const uint32_t *offsets = (const uint32_t *)w.side + tile;
  return {stream_at(w, tile), w.form + tile, w.side, offsets, load_offsets(offsets), room};
}

/* Begins to fetch the next tile; more: there is one after it. */
DEVICE Coming fetch_tile(Tiles &t, uint8_t *rooms, bool more) {
  fetch_record(rooms + t.room, t.side, t.ahead.from, t.ahead.to);
  Coming c = {load_planes(t.planes), t.room + (t.ahead.from & 15u), __ldg(t.form)};
  t.offsets += more ? TARGET_WARPS : 0, t.form += TARGET_WARPS;
  advance(t.planes, TARGET_WARPS);
  t.ahead = load_offsets(t.offsets);
  t.room = threadIdx.x / WARP * 4 * RECORD_ROOM + RECORD_ROOM - t.room;
  return c;
}

/* A tile with exact words as left operand: rare. */
DEVICE Left decode_exact(const uint8_t *side, uint32_t tile, Planes planes) {
  Left left;
  ExactTile exact = exact_tile(side, tile, planes);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    exact_words(left.a[k], exact, planes, k, planes.x);
    for (int i = 0; i < 4; i++)
      left.a[k][i] = flush_words(left.a[k][i]);
  }
  return left;
}

/* The tile as left operand, and what its rows' products are multiplied by: of rows 2 g and 2 g + 1. */
DEVICE Left decode_tile(float (&unit)[2], const Coming &c, const uint32_t *rooms, const Tables &tables, const uint32_t low[2],
                        const CudaMatrix &w, uint32_t tile) {
  if (c.form != FORM_RELATIVE) {
    unit[0] = unit[1] = 1;
    return decode_exact(w.side, tile, c.planes);
  }
  Left left;
  Places at = find_places(c.planes, c.record);
#pragma unroll
  for (int k = 0; k < 4; k++)
    relative_words(left.a[k], c.planes, k, at, rooms, tables, low);
  unit[0] = __uint_as_float(((c.planes.x & 255u) - BIAS + 127) << 23);
  unit[1] = __uint_as_float(((c.planes.x >> 8) - BIAS + 127) << 23);
  return left;
}

/* 8 n_tile tokens. The same sums for every n_tile. */
template <int n_tile>
__global__ void __launch_bounds__(TARGET_WARPS *WARP, n_tile > 2 ? 1 : 2) matmul_nest(Products list, CudaActs acts, uint32_t m) {
  __shared__ __align__(16) uint8_t rooms[TARGET_WARPS * 2 * RECORD_ROOM];
  __shared__ float part[TARGET_WARPS][MMA_TOKENS * n_tile][ROWS];
  __shared__ Tables tables;
  uint32_t block = blockIdx.x, token0 = blockIdx.y * MMA_TOKENS * n_tile, warp = threadIdx.x / WARP;
  const CudaProduct p = find_product(list, block);
  const CudaMatrix &w = p.w;
  float s[n_tile][4] = {};

  fill_tables(tables);
  __syncthreads();
  const uint32_t low[2] = {tables.low[0], tables.low[1]};
  if (warp == 0)
#pragma unroll
    for (int n = 0; n < n_tile; n++)
      multiply_hot(s[n], w, block, acts, token0 + MMA_TOKENS * n, m);
  uint32_t first = block * w.n_group, end = first + w.n_group, tile = first + warp;
  if (tile < end) {
    Tiles tiles = tiles_from(w, tile, warp * 2 * RECORD_ROOM);
    Coming next = fetch_tile(tiles, rooms, tile + TARGET_WARPS < end);
    cp_async_commit();
    const uint16_t *x[n_tile];
    for (int n = 0; n < n_tile; n++)
      x[n] = right_at(acts, token0 + MMA_TOKENS * n + lane_of() / 4, m, w.n_group, warp);
    for (; tile < end; tile += TARGET_WARPS) {
      Coming now = next;
      if (tile + TARGET_WARPS < end || SEED_BUG == 4)
        next = fetch_tile(tiles, rooms, tile + 2 * TARGET_WARPS < end);
      cp_async_commit();
      if (SEED_BUG != 3)
        cp_async_wait<1>();
      if (SEED_BUG != 5)
        __syncwarp();
      float unit[2];
      Left left = decode_tile(unit, now, (const uint32_t *)rooms, tables, low, w, tile);
#pragma unroll
      for (int n = 0; n < n_tile; n++) {
        float d[4] = {};
        multiply_tile(d, left, load_right(x[n]));
        x[n] += TARGET_WARPS * COLS;
        for (int j = 0; j < 4; j++)
          s[n][j] = fmaf(d[j], unit[j / 2], s[n][j]);
      }
      __syncwarp();
    }
  }
  store_sums(part, s);
  if (SEED_BUG != 2)
    __syncthreads();
  add_warps(part, p, block, token0, m);
}

/* ---- target, raw -------------------------------------------------------------------------------- */

/* 16 weights of a row from column k on; those outside of the matrix are zero. */
DEVICE void load_raw(uint32_t (&v)[8], const CudaMatrix &w, uint32_t row, uint32_t k) {
  const uint16_t *p = w.raw + (size_t)row * w.cols;
  for (int i = 0; i < 8; i++)
    v[i] = 0;
  if (row >= w.rows)
    return;
  if (w.cols % 8) {
    for (uint32_t i = 0; i < 16 && k + i < w.cols; i++)
      v[i / 2] |= (uint32_t)p[k + i] << 16 * (i % 2);
    return;
  }
  for (int i = 0; i < 2; i++)
    if (k + 8 * i < w.cols) {
      uint4 u = __ldg((const uint4 *)(p + k + 8 * i));
      v[4 * i] = u.x, v[4 * i + 1] = u.y, v[4 * i + 2] = u.z, v[4 * i + 3] = u.w;
    }
}

DEVICE Left load_raw_tile(const CudaMatrix &w, uint32_t block, uint32_t group) {
  Left left;
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32_t v[8];
    load_raw(v, w, block * ROWS + lane_of() / 4 * 2 + row, group * COLS + lane_of() % 4 * 16);
#pragma unroll
    for (int k = 0; k < 4; k++) { /* half lines: even columns, odd columns */
      uint32_t half = k % 2 ? 0x7632 : 0x5410;
      left.a[k][row] = prmt(v[k / 2 * 4], v[k / 2 * 4 + 1], half);
      left.a[k][2 + row] = prmt(v[k / 2 * 4 + 2], v[k / 2 * 4 + 3], half);
    }
  }
  return left;
}

template <int n_tile>
__global__ void __launch_bounds__(TARGET_WARPS *WARP, 1) matmul_raw(Products list, CudaActs acts, uint32_t m) {
  __shared__ float part[TARGET_WARPS][MMA_TOKENS * n_tile][ROWS];
  uint32_t block = blockIdx.x, token0 = blockIdx.y * MMA_TOKENS * n_tile, warp = threadIdx.x / WARP;
  const CudaProduct p = find_product(list, block);
  float s[n_tile][4] = {};
#pragma unroll 2
  for (uint32_t group = warp; group < p.w.n_group; group += TARGET_WARPS) {
    Left left = load_raw_tile(p.w, block, group);
#pragma unroll
    for (int n = 0; n < n_tile; n++)
      multiply_tile(s[n], left, load_right(right_at(acts, token0 + MMA_TOKENS * n + lane_of() / 4, m, p.w.n_group, group)));
  }
  store_sums(part, s);
  __syncthreads();
  add_warps(part, p, block, token0, m);
}

/* ---- draft -------------------------------------------------------------------------------------- */

/* Products of a row's 8 columns, v, with tokens' activations: a nibble with its sign bit set asks for a byte's sign, which is
 * 0, so the positive weights are one look-up and the negative ones another. */
template <int n_token>
DEVICE void draft_row(float (&s)[n_token], uint32_t v, const uint4 (&q)[n_token], const float (&unit)[n_token]) {
  uint32_t w = v ^ 0x88888888u;
  uint32_t plus[2] = {prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, v), prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, v >> 16)};
  uint32_t minus[2] = {prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, w), prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, w >> 16)};
#pragma unroll
  for (int i = 0; i < n_token; i++) {
    int sum = __dp4a((int)plus[0], (int)q[i].x, 0);
    sum = __dp4a((int)plus[1], (int)q[i].y, sum);
    sum = __dp4a((int)minus[0], (int)q[i].z, sum);
    sum = __dp4a((int)minus[1], (int)q[i].w, sum);
    s[i] = fmaf((float)sum, unit[i], s[i]);
  }
}

/* A warp's tiles: lane 4 j + t has line j of rows 4 t .. 4 t + 3. */
template <int n_token>
DEVICE void draft_tiles(float (&s)[4][n_token], const CudaMatrix &w, uint32_t block, const CudaActs &acts, uint32_t token0,
                        uint32_t m) {
  uint32_t line = lane_of() / 4, quad = lane_of() % 4;
#pragma unroll 4
  for (uint32_t group = threadIdx.x / WARP; group < w.n_group; group += DRAFT_WARPS) {
    size_t tile = (size_t)block * w.n_group + group;
    uint4 v = __ldg((const uint4 *)(w.a + 512 * tile) + lane_of()), q[n_token];
    uint32_t x = __ldg((const uint32_t *)(w.x + 16 * tile) + quad);
    float scale[n_token], unit[n_token];
#pragma unroll
    for (int i = 0; i < n_token; i++) {
      size_t at = (size_t)(token0 + i < m ? token0 + i : token0) * w.n_group + group;
      q[i] = __ldg((const uint4 *)(acts.q + (at * 8 + line) * 16)), scale[i] = __ldg(acts.scale + at);
    }
#pragma unroll
    for (int row = 0; row < 4; row++) {
      float power = __uint_as_float((x >> 8 * row & 255u) << 23);
      for (int i = 0; i < n_token; i++)
        unit[i] = scale[i] * power;
      draft_row(s[row], row == 0 ? v.x : row == 1 ? v.y : row == 2 ? v.z : v.w, q, unit);
    }
  }
}

/* n_token is 1, 2 or 4: at most as many as mma takes for the hot columns. */
template <int n_token>
__global__ void __launch_bounds__(DRAFT_WARPS *WARP) matmul_draft(Products list, CudaActs acts, uint32_t m) {
  __shared__ float part[DRAFT_WARPS][n_token][ROWS], hot[1][MMA_TOKENS][ROWS];
  uint32_t block = blockIdx.x, token0 = blockIdx.y * n_token, warp = threadIdx.x / WARP;
  const CudaProduct p = find_product(list, block);
  float s[4][n_token] = {};
  if (warp == 0) {
    float d[1][4] = {};
    multiply_hot(d[0], p.w, block, acts, token0, m);
    store_sums(hot, d);
  }
  draft_tiles(s, p.w, block, acts, token0, m);
#pragma unroll
  for (int row = 0; row < 4; row++)
    for (int i = 0; i < n_token; i++) {
      float sum = s[row][i];
      for (int d = 4; d < WARP; d *= 2)
        sum += __shfl_xor_sync(ALL_LANES, sum, d);
      if (lane_of() < 4)
        part[warp][i][4 * lane_of() + row] = sum;
    }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n_token * ROWS; i += blockDim.x) {
    uint32_t token = i / ROWS, row = i % ROWS;
    float sum = hot[0][token][row] * (1 / PANEL_SCALE) + (p.w.bias ? p.w.bias[block * ROWS + row] : 0);
    for (int k = 0; k < DRAFT_WARPS; k++)
      sum += part[k][token][row];
    if (token0 + token < m)
      p.y[(size_t)(token0 + token) * p.ldy + block * ROWS + row] = sum;
  }
}

#endif
