/* The codecs cass1 and cass2: bits come back (cass2: what is left of them), the draft is what docs/format.md says, sizes keep
 * their bounds, damaged parts are refused or decode to something without a read outside of them. */
#include "check.h"
#include "codec_cass.h"

#define CASS1 PYCASS_CODEC_CASS1
#define CASS2 PYCASS_CODEC_CASS2

/* A matrix and its parts, in buffers of exactly their sizes. */
typedef struct Case {
  pycass_codec codec;
  pycass_cass_params params;
  uint32_t rows, cols;
  uint16_t *w;
  float *norms;
  uint8_t *spec, *ver;
  size_t spec_size, ver_size;
  pycass_cass_stats stats;
} Case;

/* Any bits; trained weights; few values; many zeros; exponents that fall off, escapes among them. */
enum { ANY, TRAINED, FEW, ZEROS, FALLING, N_KIND };
static uint16_t weight_of(int kind) {
  uint16_t sign_mantissa = (uint16_t)(random_u32() & 0x807fu);
  switch (kind) {
  case ANY: return (uint16_t)random_u32();
  case TRAINED: return bf16_from_f32(0.03f * random_gauss());
  case FEW: return random_below(3) ? 0x3f80 : 0xbf81;
  case ZEROS: return random_below(10) ? (uint16_t)(random_below(2) << 15) : (uint16_t)random_u32();
  default: return (uint16_t)(sign_mantissa | (120u - (uint32_t)__builtin_ctz(random_u32() | 1u << 30)) << 7);
  }
}

static Case encode(pycass_codec codec, pycass_cass_params params, int kind, uint32_t rows, uint32_t cols, bool norms) {
  Case t = {.codec = codec, .params = params, .rows = rows, .cols = cols, .w = malloc(2 * (size_t)rows * cols)};
  for (size_t i = 0; i < (size_t)rows * cols; i++)
    t.w[i] = weight_of(kind);
  t.norms = norms ? malloc(cols * sizeof(float)) : NULL;
  for (uint32_t k = 0; norms && k < cols; k++)
    t.norms[k] = random_below(5) ? random_unit() : 0;
  pycass_cass_sizes bound;
  CHECK(pycass_cass_bound(rows, cols, &bound) == PYCASS_OK, "%s", pycass_error_detail());
  uint8_t *spec = malloc(bound.speculation_bound), *ver = malloc(bound.verification_bound);
  CHECK(pycass_cass_encode(codec, &params, t.w, rows, cols, t.norms, spec, &t.spec_size, ver, &t.ver_size, &t.stats) ==
            PYCASS_OK,
        "%s", pycass_error_detail());
  CHECK(t.spec_size <= bound.speculation_bound && t.ver_size <= bound.verification_bound, "bounds");
  t.spec = exact_copy(spec, t.spec_size), t.ver = exact_copy(ver, t.ver_size);
  free(spec), free(ver);
  return t;
}

static Case random_case(pycass_codec codec) {
  pycass_cass_params params = {(float)random_below(100) / 101, random_below(8), random_below(2), 0};
  params.pruned_raw = codec == CASS1 && random_below(4) == 0;
  return encode(codec, params, (int)random_below(N_KIND), 1 + random_below(40), 1 + random_below(300), random_below(2));
}

static void case_free(Case *t) { free(t->w), free(t->norms), free(t->spec), free(t->ver); }

static uint16_t *decode(const Case *t, bool draft) {
  uint16_t *out = malloc(2 * (size_t)t->rows * t->cols);
  CHECK(pycass_cass_decode(t->codec, t->spec, t->spec_size, draft ? NULL : t->ver, t->ver_size, t->rows, t->cols, out) ==
            PYCASS_OK,
        "%s", pycass_error_detail());
  return out;
}

/* ---- values ------------------------------------------------------------------------------------------- */

/* The bitmap, by its definition: a weight is pruned if fewer than n of its row are before it. */
static bool is_kept(const Case *t, const uint16_t *row, uint32_t k, uint32_t n) {
  uint32_t before = 0;
  for (uint32_t i = 0; i < t->cols; i++) {
    float a = bf16_to_f32(row[i] & 0x7fff) * (t->norms ? t->norms[i] : 1), b = bf16_to_f32(row[k] & 0x7fff) * (t->norms ? t->norms[k] : 1);
    bool less = isnan(b) ? !isnan(a) : a < b, same = isnan(b) ? isnan(a) : a == b;
    before += less || (same && i < k);
  }
  return before >= n;
}

static uint16_t draft_of(const Case *t, uint16_t w, uint32_t top) {
  uint32_t b = t->params.mantissa_bits, dropped = 7 - b, half = t->params.half ? 64u >> b : 0;
  if (t->codec == CASS1)
    return (uint16_t)((w >> dropped << dropped) | half);
  uint32_t e = w >> 7 & 255, m = (e ? 128u | (w & 127) : w & 127u), below = top - (e ? e : 1);
  m = (below > 7 ? 0 : m >> below) >> dropped << dropped;
  m |= m ? half : 0;
  double value = (double)m * ldexp(1, (int)top - 134);
  if (top == 255) /* out of a double's reach */
    return cass_normalise((w & 0x8000u) | m, top);
  return (uint16_t)((w & 0x8000u) | bf16_from_f32((float)value));
}

static void check_values(const Case *t, const char *what) {
  size_t size = 2 * (size_t)t->rows * t->cols;
  uint16_t *want = malloc(size), *got = decode(t, false), *draft = decode(t, true);
  memcpy(want, t->w, size);
  if (t->codec == CASS2)
    pycass_cass2_round(want, t->rows, t->cols);
  CHECK(memcmp(want, got, size) == 0, "%s: other bits", what);
  uint32_t n = (uint32_t)((double)t->params.prune * t->cols + 0.5);
  for (uint32_t r = 0; r < t->rows; r++)
    for (uint32_t k = 0; k < t->cols; k++) {
      const uint16_t *row = want + (size_t)r * t->cols;
      uint32_t top = 1;
      for (uint32_t i = k / 32 * 32; i < t->cols && i < k / 32 * 32 + 32; i++)
        top = (row[i] >> 7 & 255u) > top ? row[i] >> 7 & 255u : top;
      uint16_t value = is_kept(t, row, k, n) ? draft_of(t, row[k], top) : 0;
      CHECK(draft[(size_t)r * t->cols + k] == value, "%s: the draft has %04x for %04x, not %04x", what,
            draft[(size_t)r * t->cols + k], row[k], value);
    }
  free(want), free(got), free(draft);
}

static void test_random(void) {
  for (int i = 0; i < 300; i++) {
    Case t = random_case(i % 2 ? CASS1 : CASS2);
    char what[80];
    snprintf(what, sizeof what, "case %d, codec %d, %u x %u", i, (int)t.codec, t.rows, t.cols);
    check_values(&t, what);
    case_free(&t);
  }
}

static void test_sizes_around_a_tile(void) {
  static const uint32_t edge[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  for (size_t i = 0; i < 14; i++)
    for (size_t j = 0; j < 14; j++)
      for (int c = 0; c < 2; c++) {
        Case t = encode(c ? CASS2 : CASS1, (pycass_cass_params){0.4f, 3, 1, 0}, (int)random_below(N_KIND), edge[i], edge[j], false);
        check_values(&t, "edge");
        case_free(&t);
      }
}

/* cass2 against its definition in doubles: the truncated multiple of the group's unit. */
static void test_rounding(void) {
  for (uint32_t i = 0; i < 65536; i++)
    for (uint32_t top = 1; top < 255; top += 1 + (i * 7 + top) % 60) {
      uint16_t w[2] = {(uint16_t)i, (uint16_t)(top << 7)};
      if ((i >> 7 & 255) > top)
        continue;
      double unit = ldexp(1, (int)top - 134), value = (double)bf16_to_f32(w[0]), want = trunc(value / unit) * unit;
      pycass_cass2_round(w, 1, 2);
      CHECK((double)bf16_to_f32(w[0]) == want && w[0] >> 15 == i >> 15 && w[1] == top << 7, "%04x beside %u became %04x", i, top,
            w[0]);
      uint16_t again[2] = {w[0], w[1]};
      pycass_cass2_round(again, 1, 2);
      CHECK(memcmp(again, w, 4) == 0, "rounding %04x twice", i);
    }
}

/* ---- sizes and arguments --------------------------------------------------------------------------------- */

static void test_trained_sizes(void) {
  pycass_cass_params params = {0.4f, 3, 1, 0};
  Case t = encode(CASS1, params, TRAINED, 256, 576, false);
  double n = 256 * 576, spec = 8 * (double)t.spec_size / n, all = spec + 8 * (double)t.ver_size / n;
  CHECK(spec > 4.2 && spec < 4.7 && all < 11.3, "%g, %g bits a weight", spec, all);
  uint64_t count[2] = {0, 0}, ideal = (uint64_t)(n * 0.6);
  for (int i = 0; i < 2; i++)
    for (int e = 0; e < 256; e++)
      count[i] += t.stats.count[i][e];
  CHECK(count[0] + count[1] == 256 * 576 && count[1] == 256 * 230, "counts");
  CHECK(t.stats.exponent_bits[0] > ideal && t.stats.exponent_bits[0] < 2 * ideal, "exponent bits");
  case_free(&t);
}

/* Sixteen bits a weight of mantissas and all exponents escapes: what bounds are made for. */
static void test_longest(void) {
  pycass_cass_params params = {0, 7, 0, 0};
  Case t = encode(CASS1, params, TRAINED, 16, 16384, false);
  for (int i = 0; i < 16 * 16384; i++)
    t.w[i] = (uint16_t)(random_u32() & 0x807fu) | (uint16_t)(i % 256 << 7);
  pycass_cass_sizes bound;
  pycass_cass_bound(16, 16384, &bound);
  free(t.spec), free(t.ver), t.spec = malloc(bound.speculation_bound), t.ver = malloc(bound.verification_bound);
  for (int i = 0; i < 2; i++, params.prune = 0.999f) {
    CHECK(pycass_cass_encode(CASS1, &params, t.w, 16, 16384, NULL, t.spec, &t.spec_size, t.ver, &t.ver_size, NULL) == PYCASS_OK,
          "%s", pycass_error_detail());
    CHECK((i ? t.ver_size : t.spec_size) > (i ? 28u : 29u) * 16384 * 2, "the case is not the worst one");
    uint16_t *got = decode(&t, false);
    CHECK(memcmp(got, t.w, 2 * 16 * 16384) == 0, "other bits");
    free(got);
  }
  case_free(&t);
}

static void test_arguments(void) {
  pycass_cass_sizes s;
  CHECK(pycass_cass_bound(0, 5, &s) == PYCASS_ERR_INVALID_ARGUMENT, "0 rows");
  CHECK(pycass_cass_bound(5, (1u << 28) + 1, &s) == PYCASS_ERR_INVALID_ARGUMENT, "2^28 + 1 columns");
  CHECK(pycass_cass_bound(1u << 28, 1u << 28, &s) == PYCASS_OK, "the largest matrix");
  static const pycass_cass_params bad[] = {{1, 3, 1, 0},  {-0.1f, 3, 1, 0},  {NAN, 3, 1, 0},
                                           {0.4f, 8, 1, 0}, {0.4f, 3, 2, 0}, {0.4f, 3, 1, 2}};
  uint16_t w = 0x3f80, out;
  uint8_t part[2][8192];
  size_t n[2];
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK(pycass_cass_encode(CASS1, &bad[i], &w, 1, 1, NULL, part[0], &n[0], part[1], &n[1], NULL) == PYCASS_ERR_INVALID_ARGUMENT,
          "parameters %zu", i);
  pycass_cass_params good = {0.4f, 3, 1, 1};
  float norms[] = {-1, INFINITY, NAN};
  for (int i = 0; i < 3; i++)
    CHECK(pycass_cass_encode(CASS1, &good, &w, 1, 1, &norms[i], part[0], &n[0], part[1], &n[1], NULL) ==
              PYCASS_ERR_INVALID_ARGUMENT,
          "norm %d", i);
  CHECK(pycass_cass_encode(CASS2, &good, &w, 1, 1, NULL, part[0], &n[0], part[1], &n[1], NULL) == PYCASS_ERR_INVALID_ARGUMENT,
        "cass2 with raw pruned weights");
  CHECK(pycass_cass_encode(PYCASS_CODEC_NEST, &good, &w, 1, 1, NULL, part[0], &n[0], part[1], &n[1], NULL) ==
            PYCASS_ERR_INVALID_ARGUMENT,
        "nest");
  CHECK(pycass_cass_decode(PYCASS_CODEC_RAW, part[0], 64, NULL, 0, 1, 1, &out) == PYCASS_ERR_INVALID_ARGUMENT, "raw");
}

/* ---- damage ------------------------------------------------------------------------------------------------ */

static pycass_status try_decode(const Case *t, size_t spec_size, size_t ver_size) {
  uint8_t *spec = exact_copy(t->spec, spec_size), *ver = exact_copy(t->ver, ver_size);
  uint16_t *out = malloc(2 * (size_t)t->rows * t->cols);
  pycass_status status = pycass_cass_decode(t->codec, spec, spec_size, ver, ver_size, t->rows, t->cols, out);
  free(spec), free(ver), free(out);
  return status;
}

static void test_truncated(const Case *t) {
  for (size_t n = 0; n < t->spec_size; n += 1 + n / 300)
    CHECK(try_decode(t, n, t->ver_size) == PYCASS_ERR_CORRUPT, "speculation data of %zu bytes of %zu", n, t->spec_size);
  for (size_t n = 0; n < t->ver_size; n += 1 + n / 300)
    CHECK(try_decode(t, t->spec_size, n) == PYCASS_ERR_CORRUPT, "verification data of %zu bytes of %zu", n, t->ver_size);
}

/* Every byte of tables and headers, many of the rest, changed; then noise. */
static void test_damaged(Case *t) {
  uint32_t n_block = (t->rows + 15) / 16, refused = 0;
  for (int part = 0; part < 2; part++) {
    uint8_t *p = part ? t->ver : t->spec;
    size_t size = part ? t->ver_size : t->spec_size, table = part ? 0 : CASS_HEADER, end = table + (n_block + 1) * CASS_ENTRY;
    for (size_t i = 0; i < size; i += i < end ? 1 : 1 + random_below(40)) {
      uint8_t was = p[i];
      p[i] ^= (uint8_t)(1u << random_below(8));
      pycass_status status = try_decode(t, t->spec_size, t->ver_size);
      CHECK(status == PYCASS_OK || (status == PYCASS_ERR_CORRUPT && i < end), "byte %zu: status %d", i, (int)status);
      refused += status != PYCASS_OK;
      p[i] = was;
    }
    for (size_t i = end; i < size; i++)
      p[i] = (uint8_t)(random_below(4) ? random_u32() : 0);
    CHECK(try_decode(t, t->spec_size, t->ver_size) == PYCASS_OK, "noise: %s", pycass_error_detail());
    memset(p + end, 0, size - end);
    CHECK(try_decode(t, t->spec_size, t->ver_size) == PYCASS_OK, "zeros: %s", pycass_error_detail());
  }
  CHECK(refused > 60, "%u of a header's 64 bytes and offsets", refused);
}

int main(void) {
  test_random();
  test_sizes_around_a_tile();
  test_rounding();
  test_trained_sizes();
  test_longest();
  test_arguments();
  for (int i = 0; i < 24; i++) {
    Case t = random_case(i % 2 ? CASS1 : CASS2);
    test_truncated(&t);
    test_damaged(&t);
    case_free(&t);
  }
  printf("ok\n");
  return 0;
}
