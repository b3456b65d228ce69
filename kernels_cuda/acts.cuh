/* Activations as products want them, and whole matrices' tiles: their form, their words. */
#ifndef CASS_ACTS_CUH
#define CASS_ACTS_CUH

#include "nest.cuh"

enum { ACTS_WARPS = 4 };

/* Puts a hot column's activation where the hot weights meet it. */
DEVICE void put_hot(uint16_t *hot, const CudaMatrix &w, uint32_t column, float x) {
  for (uint32_t i = 0; i < w.n_hot; i++)
    if (w.hot[i] == column)
      hot[i] = (uint16_t)float_bf16(x * PANEL_SCALE);
}

/* A column's q, as kernels_cpu/ops.h: a NaN is -127. */
DEVICE int quantize(float x, float inverse) {
  float r = (x * inverse + 12582912.0f) - 12582912.0f;
  return (int)(r > -127.0f ? r : -127.0f);
}

/* A warp has a group of a token, a lane columns 2 lane and 2 lane + 1 of it. */
__global__ void __launch_bounds__(ACTS_WARPS *WARP)
    ready_acts(CudaActs acts, const float *x, uint32_t ldx, CudaMatrix w, int panels, int q) {
  uint32_t group = blockIdx.x * ACTS_WARPS + threadIdx.x / WARP, token = blockIdx.y, lane = lane_of();
  if (group >= w.n_group)
    return;
  uint64_t hot = w.n_hot ? w.hot_mask[group] : 0;
  size_t at = (size_t)token * w.n_group + group;
  float v[2], top = 0;
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t k = 2 * lane + i, column = group * COLS + k;
    v[i] = column < w.cols ? x[(size_t)token * ldx + column] : 0;
    if (hot >> k & 1u)
      put_hot(acts.hot + (size_t)token * COLS, w, column, v[i]), v[i] = 0;
    if (panels)
      acts.panels[at * COLS + k / 8 * 8 + i * 4 + k % 8 / 2] = (uint16_t)float_bf16(v[i] * PANEL_SCALE);
    top = fmaxf(top, fabsf(v[i]));
  }
  if (!q)
    return;
  for (int d = 1; d < WARP; d *= 2)
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, d));
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse; /* denormal activations */
  for (int i = 0; i < 2; i++) {
    int value = quantize(v[i], inverse);
    int8_t *line = acts.q + (at * 8 + lane / 4) * 16 + lane % 4 * 2 + i;
    line[0] = (int8_t)value, line[8] = (int8_t)-value;
  }
  if (lane == 0)
    acts.scale[at] = top * (1.0f / 8890.0f);
}

/* Exact words of a warp's tile. */
DEVICE void exact_tile_words(uint32_t (&a)[4][4], const CudaMatrix &w, uint32_t tile) {
  Planes planes = load_planes(stream_at(w, tile));
  ExactTile exact = exact_tile(w.side, tile, planes);
  for (int k = 0; k < 4; k++)
    exact_words(a[k], exact, planes, k, planes.x);
}

/* The relative form cannot have escapes, large exponents, or denormal weights, which would not be zero in it. */
__global__ void __launch_bounds__(ACTS_WARPS *WARP) find_form(uint8_t *form, CudaMatrix w) {
  uint32_t tile = blockIdx.x * ACTS_WARPS + threadIdx.x / WARP, a[4][4];
  if (tile >= w.n_block * w.n_group)
    return;
  exact_tile_words(a, w, tile);
  bool fits = w.x[16 * (size_t)tile + lane_of() % ROWS] <= RELATIVE_MOST;
  fits = fits && !(w.side[load_word(w.side + 4 * (size_t)tile) + 1] & 0x40);
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 4; i++)
      fits = fits && flush_words(a[k][i]) == a[k][i];
  bool relative = __all_sync(ALL_LANES, fits);
  if (lane_of() == 0)
    form[tile] = relative ? FORM_RELATIVE : FORM_EXACT;
}

__global__ void __launch_bounds__(ACTS_WARPS *WARP) decode_tiles(uint16_t *out, CudaMatrix w, int relative) {
  __shared__ __align__(16) uint8_t rooms[ACTS_WARPS * RECORD_ROOM];
  __shared__ Tables tables;
  uint32_t warp = threadIdx.x / WARP, tile = blockIdx.x * ACTS_WARPS + warp, g = lane_of() / 4, t = lane_of() % 4, a[4][4];
  fill_tables(tables);
  __syncthreads();
  if (tile >= w.n_block * w.n_group)
    return;
  if (relative) {
    Planes planes = load_planes(stream_at(w, tile));
    uint32_t from = load_word(w.side + 4 * (size_t)tile), to = load_word(w.side + 4 * (size_t)tile + 4);
    fetch_record(rooms + warp * RECORD_ROOM, w.side, from, to);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    Places at = find_places(planes, warp * RECORD_ROOM + (from & 15u));
    for (int k = 0; k < 4; k++)
      relative_words(a[k], planes, k, at, (const uint32_t *)rooms, tables, tables.low);
  } else {
    exact_tile_words(a, w, tile);
  }
  for (int k = 0; k < 4; k++) /* as tile_word has it */
    *(uint4 *)(out + ((size_t)tile * 16 + 4 * t + k) * 64 + g % 2 * 32 + g / 2 * 8) =
        make_uint4(a[k][0], a[k][2], a[k][1], a[k][3]);
}

#endif
