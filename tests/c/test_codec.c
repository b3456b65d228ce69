/* The nest codec: bits come back whatever they are, sizes keep their bounds, the draft is what docs/format.md says,
 * damaged planes are never read outside of. */
#include "kernel_cases.h"

/* ---- round trip ------------------------------------------------------------------------------------ */

static void check_round_trip(int kind, uint32_t rows, uint32_t cols) {
  Case t = case_make(PYCASS_CODEC_NEST, kind, rows, cols);
  size_t n = (size_t)rows * cols;
  pycass_nest_sizes s;
  pycass_nest_bound(rows, cols, &s);
  CHECK(t.side_size <= s.side_bound && t.side_size % 64 == 0, "%u x %u: side of %zu", rows, cols, t.side_size);
  CHECK(nest_check_side(t.side, t.side_size, matrix_tiles(&t.w)) == PYCASS_OK, "%s", pycass_error_detail());
  uint16_t *bits = malloc(2 * n);
  matrix_bits(&t.w, 0, t.w.rows, bits);
  CHECK(memcmp(bits, t.bits, 2 * n) == 0, "%s, %u x %u: other bits", kind_name[kind], rows, cols);
  float *row = malloc(cols * sizeof *row);
  for (uint32_t r = 0; r < rows; r += 1 + rows / 4) {
    matrix_row_exact(&t.w, r, row);
    for (uint32_t k = 0; k < cols; k++)
      CHECK(f32_bits(row[k]) == (uint32_t)bits[(size_t)r * cols + k] << 16, "row %u, column %u", r, k);
  }
  free(bits), free(row);
  case_free(&t);
}

static void test_sizes(void) {
  for (uint32_t rows = 1; rows <= 70; rows++)
    for (uint32_t i = 0; i < 10; i++)
      check_round_trip((int)(random_u32() % N_KIND), rows, 1 + random_below(200));
  for (uint32_t cols = 1; cols <= 200; cols++)
    for (int kind = 0; kind < N_KIND; kind++)
      check_round_trip(kind, 1 + random_below(20), cols);
  static const uint32_t edge[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  for (size_t i = 0; i < 13; i++)
    for (size_t j = 0; j < 13; j++)
      check_round_trip(BITS, edge[i], edge[j]);
}

/* Each of the 65536 values, alone in a group of zeros and with the largest exponent beside it. */
static void test_every_value(void) {
  enum { ROWS = 1024, COLS = 64 };
  uint16_t *w = calloc(ROWS * COLS, 2), *back = malloc(2 * ROWS * COLS);
  pycass_nest_sizes n;
  pycass_nest_bound(ROWS, COLS, &n);
  uint8_t *p = malloc(n.a + n.x + n.b + n.side_bound);
  Matrix m = matrix_shape(PYCASS_CODEC_NEST, ROWS, COLS);
  uint8_t *a = p, *x = a + n.a, *b = x + n.x, *side = b + n.b;
  m.a = a, m.x = x, m.b = b, m.side = side;
  for (int with_large = 0; with_large < 2; with_large++)
    for (uint32_t base = 0; base < 65536; base += ROWS) {
      size_t side_size;
      for (uint32_t r = 0; r < ROWS; r++) {
        w[r * COLS + r % COLS] = (uint16_t)(base + r);
        w[r * COLS + (r + 1) % COLS] = with_large ? 0x7f7f : 0;
      }
      CHECK(pycass_nest_encode(w, ROWS, COLS, a, x, b, side, &side_size) == PYCASS_OK, "encode");
      matrix_bits(&m, 0, m.rows, back);
      CHECK(memcmp(w, back, 2 * ROWS * COLS) == 0, "values from %u", base);
      memset(w, 0, 2 * ROWS * COLS);
    }
  free(w), free(back), free(p);
}

/* ---- the draft's values ----------------------------------------------------------------------------- */

/* From the document's table, in double. */
static double draft_of(uint16_t w, int group) {
  static const int magnitude[8] = {22, 31, 43, 61, 85, 119, 13, 4};
  int e = w >> 7 & 255, d = group - e, high = (w & 127) >= 64;
  int c = d < 0 ? 5 : d == 0 ? 4 + high : d == 1 ? 2 + high : d == 2 ? high : d == 3 ? 6 : 7;
  return (w >> 15 ? -1 : 1) * magnitude[c] / 70.0 * ldexp(1, group - 127);
}

/* Columns k0 .. k1 - 1 of a row, the rest being zeros: G is E0 or, if all m at E0 are below 64, E0 - 1; at least 4. */
static void check_group(const uint16_t *row, uint32_t k0, uint32_t k1, int group, int kind) {
  int top = 0, largest = 0;
  for (uint32_t k = k0; k < k1; k++)
    top = (row[k] >> 7 & 255) > top ? row[k] >> 7 & 255 : top;
  for (uint32_t k = k0; k < k1; k++)
    if ((row[k] >> 7 & 255) == top && (row[k] & 127) > largest)
      largest = row[k] & 127;
  bool less = top > 4 && largest < 64 && group == top - 1;
  CHECK(group == (top > 4 ? top : 4) || less, "%s: a group exponent of %d for a largest exponent of %d, mantissa %d",
        kind_name[kind], group, top, largest);
  if (kind == OVER || kind == FREE) /* what these kinds are for */
    CHECK(top < 120 || less, "%s: a group exponent of %d", kind_name[kind], group);
}

static void check_draft(int kind, uint32_t rows, uint32_t cols) {
  Case t = case_make(PYCASS_CODEC_NEST, kind, rows, cols);
  float *draft = malloc(sizeof *draft * rows * cols);
  CHECK(pycass_nest_decode_draft(t.a, t.x, rows, cols, draft) == PYCASS_OK, "%s", pycass_error_detail());
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t k = 0; k < cols; k++) {
      uint32_t tile = r / 16 * t.w.n_group + k / 64;
      int group = t.x[16 * tile + r % 16];
      if (k % 64 == 0)
        check_group(t.bits + (size_t)r * cols, k, k + 64 < cols ? k + 64 : cols, group, kind);
      double want = draft_of(t.bits[(size_t)r * cols + k], group), got = draft[(size_t)r * cols + k];
      if (group > 4 && group < 254)
        CHECK(fabs(got - want) <= 1e-6 * fabs(want), "%s: %g, not %g", kind_name[kind], got, want);
    }
  for (size_t i = 16 * matrix_tiles(&t.w); i % 64; i++)
    CHECK(t.x[i] == 0, "X is not padded with zeros");
  free(draft);
  case_free(&t);
}

static void test_draft(void) {
  for (int kind = 0; kind < N_KIND; kind++)
    for (int i = 0; i < 10; i++)
      check_draft(kind, 1 + random_below(40), 1 + random_below(200));
}

/* ---- sizes and damage ------------------------------------------------------------------------------- */

static void test_bounds(void) {
  pycass_nest_sizes s;
  CHECK(pycass_nest_bound(0, 5, &s) == PYCASS_ERR_INVALID_ARGUMENT, "0 rows");
  CHECK(pycass_nest_bound(5, 0, &s) == PYCASS_ERR_INVALID_ARGUMENT, "0 columns");
  CHECK(pycass_nest_bound((1u << 28) + 1, 1, &s) == PYCASS_ERR_INVALID_ARGUMENT, "2^28 + 1 rows");
  CHECK(pycass_nest_bound(1, UINT64_MAX, &s) == PYCASS_ERR_INVALID_ARGUMENT, "2^64 - 1 columns");
  CHECK(pycass_nest_bound(1u << 28, 1u << 28, &s) == PYCASS_OK && s.a == (size_t)1 << 55, "the largest matrix");
  CHECK(pycass_nest_bound(17, 65, &s) == PYCASS_OK && s.a == 2048 && s.x == 64 && s.b == 3072, "17 x 65");
}

static void test_side_offsets(void) {
  Case t = case_make(PYCASS_CODEC_NEST, BITS, 40, 130); /* 9 tiles */
  for (size_t n = 0; n < t.side_size; n += 1 + (n > 64 && n + 1100 < t.side_size) * 31) {
    uint8_t *cut = exact_copy(t.side, n);
    size_t end = load_u32(t.side + 4 * 9);
    CHECK((nest_check_side(cut, n, 9) == PYCASS_OK) == (n >= end + NEST_SIDE_SLACK), "cut at %zu", n);
    free(cut);
  }
  for (size_t i = 0; i <= 9; i++)
    for (int k = 0; k < 4; k++) {
      uint8_t *bad = exact_copy(t.side, t.side_size);
      uint32_t values[] = {0, load_u32(bad + 4 * i) + (i ? 1u << 20 : 1), UINT32_MAX, (uint32_t)t.side_size - 1023};
      put_u32(bad + 4 * i, values[k]);
      CHECK(nest_check_side(bad, t.side_size, 9) == PYCASS_ERR_CORRUPT, "offset %zu = %u", i, values[k]);
      free(bad);
    }
  case_free(&t);
}

/* Any planes, with the bytes around the side part that the format promises and no more. */
static void test_any_planes(void) {
  for (int i = 0; i < 200; i++) {
    uint32_t rows = 1 + random_below(40), cols = 1 + random_below(200);
    Matrix m = matrix_shape(PYCASS_CODEC_NEST, rows, cols);
    size_t tiles = matrix_tiles(&m), planes = 1296 * tiles, offsets = 4 * (tiles + 1), records = random_below(600);
    size_t side_size = offsets + records + NEST_SIDE_SLACK;
    uint8_t *p = malloc(planes), *around = malloc(NEST_MAX_ESCAPES + side_size), *side = around + NEST_MAX_ESCAPES;
    static const uint8_t fill[] = {0x00, 0x77, 0xff, 0x88, 0x70};
    for (size_t k = 0; k < planes; k++)
      p[k] = i % 6 == 5 ? (uint8_t)random_u32() : fill[i % 6];
    for (size_t k = 0; k < NEST_MAX_ESCAPES + side_size; k++)
      around[k] = (uint8_t)(i % 3 ? 0xff : random_u32());
    uint32_t at = (uint32_t)offsets;
    for (size_t k = 0; k <= tiles; k++) {
      put_u32(side + 4 * k, at);
      at += random_below((uint32_t)(offsets + records) - at + 1);
    }
    CHECK(nest_check_side(side, side_size, tiles) == PYCASS_OK, "%s", pycass_error_detail());
    m.a = p, m.b = p + 512 * tiles, m.x = p + 1280 * tiles, m.side = side;
    uint16_t *out = malloc(2 * (size_t)rows * cols);
    matrix_bits(&m, 0, m.rows, out);
    free(out), free(p), free(around);
  }
}

/* ---- conversions to BF16 ---------------------------------------------------------------------------- */

static void test_conversions(void) {
  float f[] = {1, 1.00390625f, 1.01171875f, -0.0f, 3.4e38f, INFINITY, NAN, 1e-41f};
  uint16_t want[] = {0x3f80, 0x3f80, 0x3f82, 0x8000, 0x7f80, 0x7f80, 0x7fc0, 0}, got[8];
  CHECK(pycass_bf16_from_f32(got, f, 8) == 4, "changed values");
  for (int i = 0; i < 7; i++)
    CHECK(got[i] == want[i], "%g became %04x", f[i], got[i]);
  CHECK(pycass_bf16_find_nonfinite(got, 8) == 4 && pycass_bf16_find_nonfinite(got, 4) == 4, "first Inf or NaN");
  uint16_t nan_low = 0, h[] = {0x3c00, 0x0001, 0x8000, 0x7c00, 0x7e01, 0x3c01, 0xfbff};
  uint32_t bits = 0x7f800001; /* a NaN whose upper half alone is infinity */
  memcpy(f, &bits, 4);
  pycass_bf16_from_f32(&nan_low, f, 1);
  CHECK((nan_low & 0x7f80) == 0x7f80 && (nan_low & 0x7f), "a NaN became %04x", nan_low);
  uint16_t want16[] = {0x3f80, 0x3380, 0x8000, 0x7f80, 0x7fc0, 0x3f80, 0xc780};
  CHECK(pycass_bf16_from_f16(got, h, 7) == 3, "changed values");
  for (int i = 0; i < 7; i++)
    CHECK(got[i] == want16[i], "half %04x became %04x", h[i], got[i]);
}

int main(void) {
  test_sizes();
  test_every_value();
  test_draft();
  test_bounds();
  test_side_offsets();
  test_any_planes();
  test_conversions();
  printf("ok\n");
  return 0;
}
