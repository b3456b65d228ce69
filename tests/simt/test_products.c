/* The CUDA library's products against the scalar kernels: under the shim, or on a GPU with libpycass_cuda.so. The codec's words
 * and the draft's integer sums bit for bit, float sums within the bound below, a token's row the same bits for every m. */
#include "device.h"

static const Kernels *scalar;

/* y of two orders of addition differ by at most (n + n') eps times the sum of |products|, n additions each. The device adds up
 * to 64 products a group (a tensor core may cut bits off instead of rounding: eps is 2^-23), then a warp's groups, then 8
 * warps, and 64 hot columns; the scalar kernels 32, the groups and 2. The last term is what denormals, which the scalar kernels
 * take for zero, and the last product can be. */
static double bound(const Case *t, const float *x, size_t row) {
  double sum = 0;
  for (uint32_t k = 0; k < t->w.cols; k++) {
    double w = bf16_to_f32(t->bits[row * t->w.cols + k]);
    sum += fabs(w * (double)x[k]) * 1.004; /* activations are rounded to BF16 */
  }
  double n = 64 + t->w.n_group / 8 + 1 + 8 + 64 + 32 + t->w.n_group + 2;
  return n * 0x1p-23 * sum + 0x1p-126;
}

static void same_rows(const char *what, const float *first, const float *y, uint32_t m, size_t ld, uint32_t rows, uint32_t wide) {
  for (uint32_t i = 0; i < m; i++)
    CHECK(same_floats(first + i * ld, y + i * ld, rows), "%s: token %u of %u has other bits than among %u", what, i, m, wide);
}

static const uint32_t widths[] = {1, 2, 5, 8, 16, 40};
enum { N_WIDTH = sizeof widths / sizeof *widths, MOST = 40 };

typedef struct Trial {
  Case t;
  DeviceMatrix d;
  float *x;      /* [MOST][ld] */
  size_t ld, ldy;
  const char *what;
} Trial;

/* y of the device for m tokens, in a new buffer. */
static float *device_product(const Trial *a, uint32_t m, bool draft) {
  DeviceActs acts = device_acts(&a->d, a->x, (uint32_t)a->ld, m, !draft || a->t.w.n_hot, draft);
  CudaProduct p = {a->d.w, device_alloc(m * a->ldy * sizeof(float)), (uint32_t)a->ldy};
  OK((draft ? cuda->matmul_draft : cuda->matmul)(&p, 1, &acts.acts, m, NULL));
  float *y = malloc(m * a->ldy * sizeof *y);
  OK(cuda->download(y, p.y, m * a->ldy * sizeof *y, NULL));
  OK(cuda->release(p.y));
  device_acts_free(&acts);
  return y;
}

static void check_widths(const Trial *a, const float *all, bool draft) {
  for (int i = 0; i + 1 < N_WIDTH; i++) {
    float *y = device_product(a, widths[i], draft);
    same_rows(a->what, all, y, widths[i], a->ldy, a->t.w.rows, MOST);
    free(y);
  }
}

static void check_target(const Trial *a) {
  float *want = malloc(MOST * a->ldy * sizeof *want), *all = device_product(a, MOST, false);
  Acts acts = acts_of(scalar, a->x, a->ld, MOST, &a->t.w);
  scalar->matmul(want, a->ldy, &a->t.w, &acts, MOST, 0, a->t.w.n_block);
  for (uint32_t i = 0; i < MOST; i++)
    for (uint32_t r = 0; r < a->t.w.rows; r++) {
      float w = want[i * a->ldy + r], y = all[i * a->ldy + r];
      double most = bound(&a->t, a->x + i * a->ld, r);
      bool odd = !isfinite(w) || !isfinite(most); /* sums of infinities and NaNs: of these only whether they are finite */
      CHECK(odd ? !isfinite(y) || !isfinite(most) : fabs((double)y - w) <= most, "%s: token %u, row %u: %g, not %g, bound %g",
            a->what, i, r, y, w, most);
    }
  check_widths(a, all, false);
  acts_free(&acts), free(want), free(all);
}

/* The same for the draft: 32 of its weights to a lane's sum, which is of a warp's groups, 8 lanes and 4 warps. */
static double draft_bound(const Trial *a, const Acts *acts, uint32_t token, uint32_t row) {
  const Matrix *w = &a->t.w;
  double sum = w->bias ? fabs((double)w->bias[row]) : 0;
  float *weights = malloc(w->cols * sizeof *weights);
  matrix_row_draft(w, row, weights);
  for (uint32_t k = 0; k < w->cols; k++) { /* an activation is at most half a step from its q */
    double x = fabs((double)a->x[token * a->ld + k]) * 1.004 + 70 * (double)acts->scale[token * w->n_group + k / 64];
    sum += fabs((double)weights[k]) * x;
  }
  free(weights);
  double n = w->n_group / 4 + 1 + 8 + 4 + 2 + 64 + w->n_group + 64;
  return sum > 1e36 ? INFINITY : n * 0x1p-23 * sum + 0x1p-126; /* partial sums may have no end there */
}

static void check_draft(const Trial *a) {
  float *want = malloc(MOST * a->ldy * sizeof *want), *all = device_product(a, MOST, true);
  Acts acts = acts_of(scalar, a->x, a->ld, MOST, &a->t.w);
  scalar->matmul_draft(want, a->ldy, &a->t.w, &acts, MOST, 0, a->t.w.n_block);
  for (uint32_t i = 0; i < MOST; i++)
    for (uint32_t r = 0; r < a->t.w.rows; r++) {
      double most = draft_bound(a, &acts, i, r);
      float w = want[i * a->ldy + r], y = all[i * a->ldy + r];
      CHECK(!isfinite(w) || !isfinite(most) || fabs((double)y - w) <= most, "%s, draft: token %u, row %u: %g, not %g, bound %g",
            a->what, i, r, y, w, most);
    }
  check_widths(a, all, true);
  acts_free(&acts), free(want), free(all);
}

/* With one scale for a row, y / (scale 2^(G - 127)) is the integer. */
static void check_integers(const Trial *a) {
  DeviceActs acts = device_acts(&a->d, a->x, (uint32_t)a->ld, MOST, false, true);
  float one[MOST];
  for (uint32_t i = 0; i < MOST; i++)
    one[i] = 1;
  OK(cuda->upload(acts.acts.scale, one, sizeof one, NULL));
  CudaProduct p = {a->d.w, device_alloc(MOST * a->ldy * sizeof(float)), (uint32_t)a->ldy};
  OK(cuda->matmul_draft(&p, 1, &acts.acts, MOST, NULL));
  float *y = malloc(MOST * a->ldy * sizeof *y), *want = malloc(MOST * a->ldy * sizeof *y);
  OK(cuda->download(y, p.y, MOST * a->ldy * sizeof *y, NULL));
  Acts host = acts_of(scalar, a->x, a->ld, MOST, &a->t.w);
  memcpy(host.scale, one, sizeof one);
  scalar->matmul_draft(want, a->ldy, &a->t.w, &host, MOST, 0, a->t.w.n_block);
  for (uint32_t i = 0; i < MOST; i++)
    CHECK(same_floats(want + i * a->ldy, y + i * a->ldy, a->t.w.rows), "token %u has another integer", i);
  OK(cuda->release(p.y));
  device_acts_free(&acts), acts_free(&host), free(y), free(want);
}

static void check_words(const Trial *a) {
  const Matrix *w = &a->t.w;
  size_t n = matrix_tiles(w);
  TileWords *got = malloc(n * sizeof *got), want;
  uint8_t *form = malloc(n);
  OK(cuda->download(form, a->d.w.form, n, NULL));
  for (int relative = 0; relative < 2; relative++) {
    uint16_t *out = device_alloc(n * sizeof *got);
    OK(cuda->decode(out, &a->d.w, relative, NULL));
    OK(cuda->download(got, out, n * sizeof *got, NULL));
    for (size_t t = 0; t < n; t++) {
      CHECK(!form[t] || nest_is_relative(w, t), "%s: tile %zu taken in relative form", a->what, t);
      if (relative && !form[t])
        continue;
      (relative ? nest_decode_relative : nest_decode_tile)(w, t, want);
      CHECK(memcmp(want, got[t], sizeof want) == 0, "%s: other words in tile %zu, relative %d", a->what, t, relative);
    }
    OK(cuda->release(out));
  }
  free(got), free(form);
}

static Trial trial_make(Case t, const char *what) {
  Trial a = {.t = t, .d = device_matrix(&t), .what = what, .ld = t.w.n_group * NEST_COLS, .ldy = t.w.n_block * NEST_ROWS};
  a.x = random_acts(MOST, t.w.cols, a.ld);
  return a;
}

static void trial_free(Trial *a) {
  device_matrix_free(&a->d), case_free(&a->t), free(a->x);
}

static void test_nest(int kind, uint32_t rows, uint32_t cols, uint32_t n_hot) {
  Trial a = trial_make(n_hot ? case_make_hot(kind, rows, cols, n_hot) : case_make(PYCASS_CODEC_NEST, kind, rows, cols),
                       kind_name[kind]);
  check_words(&a);
  check_target(&a);
  check_draft(&a);
  trial_free(&a);
}

static void test_raw(int kind, uint32_t rows, uint32_t cols) {
  Trial a = trial_make(case_make(PYCASS_CODEC_RAW, kind, rows, cols), "raw");
  check_target(&a);
  trial_free(&a);
}

/* The draft's integers bit for bit: one group of one exponent and a scale that is a power of two, so that all float sums are
 * of integers below 2^24 and none rounds. */
static void test_draft_integers(void) {
  for (int round = 0; round < 6; round++) {
    Trial a = trial_make(case_make(PYCASS_CODEC_NEST, round % 2 ? GAUSS : ESCAPES, 40, 64), "integers");
    for (uint32_t i = 0; i < MOST; i++) {
      for (uint32_t k = 0; k < 64; k++)
        a.x[i * a.ld + k] = (float)(int)random_below(255) - 127;
      a.x[i * a.ld + random_below(64)] = random_below(2) ? 127 : -127; /* so that q is the activation itself */
    }
    check_draft(&a);
    check_integers(&a);
    trial_free(&a);
  }
}

/* Damaged planes and records (offsets are checked when a file is loaded): any words, but nothing out of range, which address
 * sanitizer sees. */
static void test_damaged(int kind, uint32_t rows, uint32_t cols) {
  Case t = case_make(PYCASS_CODEC_NEST, kind, rows, cols);
  size_t tiles = matrix_tiles(&t.w), from = 4 * (tiles + 1), end = load_u32(t.side + 4 * tiles);
  for (uint32_t i = 0; i < 40; i++) {
    t.a[random_below((uint32_t)(512 * tiles))] |= (uint8_t)random_u32();
    t.side[from + random_below((uint32_t)(end - from))] = (uint8_t)random_u32();
  }
  memset(t.a, 0x77, 512); /* all cell 7 */
  for (size_t i = 0; i < tiles; i += 2)
    t.side[load_u32(t.side + 4 * i)] = 255, t.side[load_u32(t.side + 4 * i) + 1] |= i % 4 ? 7 : 71;
  Trial a = trial_make(t, "damaged");
  uint16_t *out = device_alloc(tiles * sizeof(TileWords));
  for (int relative = 0; relative < 2; relative++)
    OK(cuda->decode(out, &a.d.w, relative, NULL));
  free(device_product(&a, 5, false)), free(device_product(&a, 2, true));
  OK(cuda->release(out));
  trial_free(&a);
}

int main(int argc, char **argv) {
  bool little = argc > 1 && !strcmp(argv[1], "little");
  flush_denormals();
  CHECK(kernels_select("scalar", &scalar) == PYCASS_OK, "no scalar kernels");
  device_open();
  test_nest(GAUSS, 23, 9 * 64 + 17, 0);
  if (!little)
    for (int kind = 0; kind < N_KIND; kind++)
      test_nest(kind, 17 + 16 * random_below(2), 1 + random_below(300), 0);
  test_nest(GAUSS, 33, 500, 32);
  test_nest(ESCAPES, 16, 150, 16);
  test_raw(GAUSS, 19, 136);
  if (!little)
    test_raw(GAUSS, 33, 131), test_nest(GAUSS, 16, 18 * 64, 64), test_draft_integers();
  test_damaged(GAUSS, 32, 200), test_damaged(ESCAPES, 16, 64), test_damaged(ZERO, 16, 64);
  printf("ok\n");
  return 0;
}
