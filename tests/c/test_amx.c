/* The amx set's target product over emulated tiles: within its bound, and one result for every m and range. */
#include "amx_emulation.h"

#define kernels_amx kernels_amx_emulated
#include "../../kernels_cpu/amx.c"

#include "kernel_cases.h"

static void check_bound(const Case *t, const char *what, const float *y, const float *x, size_t ldx, size_t ldy,
                        uint32_t m) {
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t r = 0; r < t->w.rows; r++) {
      double exact = 0, size = 0, weights = 0, acts = 0;
      for (uint32_t k = 0; k < t->w.cols; k++) {
        double a = bf16_to_f32(t->bits[(size_t)r * t->w.cols + k]), b = bf16_to_f32(bf16_from_f32(x[i * ldx + k]));
        exact += a * b, size += fabs(a * b), weights += fabs(a), acts += fabs(b);
      }
      double bound = (20 + 2.0 * t->w.n_group) * 0x1p-24 * size + 0x1p-120 * (t->w.n_group + 1 + weights + acts);
      CHECK(fabs(y[i * ldy + r] - exact) <= bound, "%s: %u x %u, m = %u: %g is not %g within %g", what, t->w.rows,
            t->w.cols, m, y[i * ldy + r], exact, bound);
    }
}

/* m tokens at once in one range; then the first few alone, block by block. */
static void check_product(const Case *t, const char *what, uint32_t m) {
  const Matrix *w = &t->w;
  size_t ldx = (size_t)w->n_group * NEST_COLS, ldy = (size_t)w->n_block * NEST_ROWS, n = m * ldy;
  float *x = random_acts(m, w->cols, ldx), *y = malloc(n * sizeof *y), *part = malloc(n * sizeof *y);
  Acts acts = acts_of(&kernels_amx, x, ldx, m, w);
  kernels_amx.matmul(y, ldy, w, &acts, m, 0, w->n_block);
  acts_free(&acts);
  check_bound(t, what, y, x, ldx, ldy, m);
  uint32_t fewer[] = {1, 2, 9, 16, 17, 33, 49, 64};
  for (size_t i = 0; i < sizeof fewer / sizeof *fewer && fewer[i] < m; i++) {
    uint32_t first = m - fewer[i];
    memset(part, 0x55, n * sizeof *part);
    acts = acts_of(&kernels_amx, x + first * ldx, ldx, fewer[i], w);
    for (uint32_t block = 0; block < w->n_block; block++)
      kernels_amx.matmul(part, ldy, w, &acts, fewer[i], block, block + 1);
    acts_free(&acts);
    CHECK(memcmp(part, y + first * ldy, fewer[i] * ldy * sizeof *y) == 0, "%s: %u x %u, m = %u and m = %u differ", what,
          w->rows, w->cols, m, fewer[i]);
  }
  free(x), free(y), free(part);
}

int main(void) {
  const Kernels *k;
  flush_denormals();
  if (kernels_select("avx512", &k) != PYCASS_OK) {
    printf("skipped: this machine has no AVX-512\n");
    return 77;
  }
  static const uint32_t tokens[] = {1, 2, 3, 8, 15, 16, 17, 32, 40, 64, 65, 130};
  static const int kinds[] = {GAUSS, WIDE, DENORMAL, OVER, ZEROS};
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
    for (int kind = 0; kind < 5; kind++) {
      uint32_t rows = 1 + random_below(40), cols = 1 + random_below(300);
      Case nest = case_make(PYCASS_CODEC_NEST, kinds[kind], rows, cols);
      Case raw = case_make(PYCASS_CODEC_RAW, kinds[kind], rows, cols);
      check_product(&nest, kind_name[kinds[kind]], tokens[i]);
      check_product(&raw, kind_name[kinds[kind]], tokens[i]);
      Case hot = case_make_hot(kinds[kind], rows, cols, 16 * (1 + (uint32_t)kind % 4));
      check_product(&hot, kind_name[kinds[kind]], tokens[i]);
      case_free(&nest), case_free(&raw), case_free(&hot);
    }
  Case wide = case_make(PYCASS_CODEC_NEST, GAUSS, 20, 64 * 40); /* several passes for one token, too */
  check_product(&wide, "wide", 3), check_product(&wide, "wide", 66);
  case_free(&wide);
  printf("ok\n");
  return 0;
}
