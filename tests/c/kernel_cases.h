/* Matrices and comparisons for the kernel tests. */
#ifndef CASS_KERNEL_CASES_H
#define CASS_KERNEL_CASES_H

#include "check.h"
#include "kernels.h"

enum { GAUSS, ZERO, ZEROS, DENORMAL, WIDE, BITS, SMALL, CROWDED, ESCAPES, TOP, EDGE, OVER, FREE, N_KIND };
static const char *const kind_name[N_KIND] = {"gauss",   "zero",    "zeros", "denormal", "wide", "bits", "small",
                                              "crowded", "escapes", "top",   "edge",     "over", "free"};

static inline uint16_t random_weight(int kind) {
  uint16_t sign = (uint16_t)(random_u32() & 0x8000u), mantissa = (uint16_t)(random_u32() & 127u);
  switch (kind) {
  case GAUSS: return bf16_from_f32(0.02f * random_gauss());
  case ZERO: return sign;
  case ZEROS: return random_below(30) ? bf16_from_f32(0.02f * random_gauss()) : sign;
  case DENORMAL: return (uint16_t)(sign | mantissa | (random_below(8) == 0) << 7);
  case WIDE: return (uint16_t)(sign | (60 + random_below(120)) << 7 | mantissa); /* finite products */
  case BITS: return (uint16_t)random_u32();
  case SMALL: return (uint16_t)(sign | (100 + random_below(8)) << 7 | mantissa); /* but for the group's first */
  case CROWDED: /* all but a few have a T bit: 57 or more a half line, beginning at any bit */
    return (uint16_t)(sign | (random_below(20) ? 104 + random_below(4) : 111u) << 7 | mantissa);
  case ESCAPES: /* from d = 13 on down, with zeros and denormals */
    if (random_below(12))
      return bf16_from_f32(0.02f * random_gauss());
    return (uint16_t)(sign | (random_below(2) ? 100 + random_below(8) : random_below(100)) << 7 | mantissa);
  case TOP: return (uint16_t)(sign | 120 << 7 | mantissa | 64);
  case EDGE: /* mostly a mantissa of 64 at E0, so no choice of G */
    return (uint16_t)(sign | (119 + random_below(2)) << 7 | (63 + random_below(2)));
  default: return (uint16_t)(sign | (119 + random_below(2)) << 7 | 1); /* e = G + 1 where G is one less */
  }
}

/* A matrix in buffers of exactly the documented sizes. */
typedef struct Case {
  Matrix w;
  uint16_t *bits; /* [rows][cols] */
  uint8_t *a, *x, *b, *side;
  size_t side_size;
  uint32_t *hot;
  uint16_t *hot_words;
  float *bias;
  uint8_t *spec, *ver;
  size_t spec_size, ver_size;
} Case;

static inline void *copy_exact(const void *p, size_t n) {
  void *q = malloc(n);
  return memcpy(q, p, n);
}

static inline Case case_make(pycass_codec codec, int kind, uint32_t rows, uint32_t cols) {
  Case t = {.w = matrix_shape(codec, rows, cols)};
  t.bits = malloc(sizeof(uint16_t) * rows * cols);
  for (size_t i = 0; i < (size_t)rows * cols; i++)
    t.bits[i] = kind == SMALL && i % cols % 64 == 0 ? (uint16_t)(111 << 7) : random_weight(kind);
  t.w.raw = t.bits;
  if (codec == PYCASS_CODEC_RAW)
    return t;
  pycass_nest_sizes n;
  CHECK(pycass_nest_bound(rows, cols, &n) == PYCASS_OK, "bound");
  t.a = malloc(n.a), t.x = malloc(n.x), t.b = malloc(n.b);
  uint8_t *side = malloc(n.side_bound);
  CHECK(pycass_nest_encode(t.bits, rows, cols, t.a, t.x, t.b, side, &t.side_size) == PYCASS_OK, "encode");
  if (kind == FREE) { /* as OVER, but the largest mantissa is 63: allowed, though the encoder would not choose it */
    memset(t.b, 0xff, n.b);
    for (size_t i = 0; i < (size_t)rows * cols; i++)
      t.bits[i] |= 63;
  }
  t.side = copy_exact(side, t.side_size);
  free(side);
  t.w.a = t.a, t.w.x = t.x, t.w.b = t.b, t.w.side = t.side, t.w.raw = NULL;
  return t;
}

/* A nest matrix with hot columns, as many as fit of n_hot, and a draft bias. */
static inline Case case_make_hot(int kind, uint32_t rows, uint32_t cols, uint32_t n_hot) {
  Case t = case_make(PYCASS_CODEC_NEST, kind, rows, cols);
  size_t side_size, blocks = (rows + 15) / 16;
  float *mean = malloc(cols * sizeof *mean), *importance = malloc(cols * sizeof *importance);
  n_hot = n_hot < cols ? n_hot : cols / HOT_UNIT * HOT_UNIT;
  t.hot = malloc(HOT_MOST * sizeof *t.hot);
  for (uint32_t k = 0, n = 0; k < cols; k++) {
    mean[k] = random_gauss(), importance[k] = mean[k] * mean[k];
    if (n < n_hot && random_below(cols - k) < n_hot - n)
      t.hot[n++] = k;
  }
  pycass_nest_sizes n;
  CHECK(pycass_nest_bound(rows, cols, &n) == PYCASS_OK, "bound");
  free(t.side), t.side = malloc(n.side_bound);
  t.hot_words = malloc(blocks * 16 * n_hot * 2 + 1), t.bias = malloc(blocks * 16 * sizeof *t.bias);
  pycass_nest_calibration c = {t.hot, n_hot, importance, mean};
  CHECK(pycass_nest_encode_calibrated(t.bits, rows, cols, &c, t.a, t.x, t.b, t.side, &side_size, t.hot_words, t.bias) ==
            PYCASS_OK,
        "%s", pycass_error_detail());
  t.side_size = side_size, t.w.side = t.side;
  t.w.n_hot = n_hot, t.w.hot = t.hot, t.w.hot_words = t.hot_words, t.w.bias = t.bias;
  free(mean), free(importance);
  return t;
}

static inline Case case_make_cass(pycass_codec codec, const pycass_cass_params *params, int kind, uint32_t rows, uint32_t cols) {
  Case t = case_make(PYCASS_CODEC_RAW, kind, rows, cols);
  pycass_cass_sizes n;
  CHECK(pycass_cass_bound(rows, cols, &n) == PYCASS_OK, "bound");
  uint8_t *spec = malloc(n.speculation_bound), *ver = malloc(n.verification_bound);
  CHECK(pycass_cass_encode(codec, params, t.bits, rows, cols, NULL, spec, &t.spec_size, ver, &t.ver_size, NULL) == PYCASS_OK,
        "%s", pycass_error_detail());
  t.spec = copy_exact(spec, t.spec_size), t.ver = copy_exact(ver, t.ver_size);
  free(spec), free(ver);
  t.w.codec = codec, t.w.raw = NULL, t.w.spec = t.spec, t.w.ver = t.ver;
  return t;
}

static inline void case_free(Case *t) {
  free(t->spec), free(t->ver);
  free(t->bits), free(t->a), free(t->x), free(t->b), free(t->side), free(t->hot), free(t->hot_words), free(t->bias);
}

/* Activations [m][ld], zero from cols on. */
static inline float *random_acts(uint32_t m, uint32_t cols, size_t ld) {
  float *x = calloc((size_t)m * ld, sizeof *x);
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t k = 0; k < cols; k++)
      x[i * ld + k] = random_gauss() * (random_below(50) ? 1.0f : 20.0f);
  return x;
}

/* Those activations as products of w want them. */
static inline Acts acts_of(const Kernels *k, const float *x, size_t ldx, uint32_t m, const Matrix *w) {
  size_t n_group = w->n_group, n = (size_t)m * n_group, panels = round_up(m, PANEL_TOKENS);
  Acts a = {calloc(panels * n_group * NEST_COLS, 2), calloc(panels * NEST_COLS, 2), malloc(n * NEST_COLS),
            malloc(n * sizeof(float)), malloc(n * sizeof(int32_t))};
  float *cold = copy_exact(x, ((size_t)(m - 1) * ldx + n_group * NEST_COLS) * sizeof *x);
  for (uint32_t i = 0; i < m; i++) {
    for (uint32_t c = 0; c < w->n_hot; c++) {
      a.hot[panel_at(i, 1, 0) + c / 4 * PANEL_TOKENS * 4 + c % 4] = bf16_from_f32(x[i * ldx + w->hot[c]] * PANEL_SCALE);
      cold[i * ldx + w->hot[c]] = 0;
    }
    k->round(a.panels + panel_at(i, n_group, 0), cold + i * ldx, w->n_group);
  }
  k->quantize(&a, cold, ldx, m, w->n_group);
  free(cold);
  return a;
}

static inline void acts_free(Acts *a) { free(a->panels), free(a->hot), free(a->q), free(a->scale), free(a->sum); }

/* Same bits, or both NaN: which NaN comes out of a sum of NaNs is no one's business. */
static inline int same_floats(const float *a, const float *b, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (f32_bits(a[i]) != f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
      return 0;
  return 1;
}

#endif
