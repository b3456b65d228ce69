/* Times draft and target products of a nest matrix with M tokens, and prints a row for each M: microseconds of a product, and GB/s
 * of the weight bytes it reads. ROWS COLS COPIES REPEAT: so many copies are gone through by turns that no cache holds them. */
#include <time.h>

#include "../simt/device.h"

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef struct Bench {
  DeviceMatrix *copy;
  uint32_t n_copy, repeat;
  float *x, *y;
  size_t draft_bytes, target_bytes; /* of one matrix */
} Bench;

/* Microseconds of a product. */
static double time_one(const Bench *b, const DeviceActs *acts, uint32_t m, bool draft) {
  int (*matmul)(const CudaProduct *, uint32_t, const CudaActs *, uint32_t, CudaStream) = draft ? cuda->matmul_draft : cuda->matmul;
  double start = 0;
  for (uint32_t round = 0; round <= b->repeat; round++) { /* the first one warms up */
    if (round == 1) {
      OK(cuda->wait(NULL));
      start = now_us();
    }
    for (uint32_t i = 0; i < b->n_copy; i++) {
      CudaProduct p = {b->copy[i].w, b->y, 16 * b->copy[i].w.n_block};
      OK(matmul(&p, 1, &acts->acts, m, NULL));
    }
  }
  OK(cuda->wait(NULL));
  return (now_us() - start) / (b->repeat * (double)b->n_copy);
}

int main(int argc, char **argv) {
  enum { MOST = 16 };
  CHECK(argc == 5, "ROWS COLS COPIES REPEAT");
  uint32_t rows = (uint32_t)atoi(argv[1]), cols = (uint32_t)atoi(argv[2]), n_copy = (uint32_t)atoi(argv[3]);
  device_open();
  Case t = case_make(PYCASS_CODEC_NEST, GAUSS, rows, cols);
  size_t tiles = matrix_tiles(&t.w), side = load_u32(t.side + 4 * tiles);
  Bench b = {malloc(n_copy * sizeof *b.copy), n_copy, (uint32_t)atoi(argv[4]), random_acts(MOST, cols, cols),
             device_alloc((size_t)MOST * 16 * t.w.n_block * sizeof(float)), 528 * tiles, (528 + 768) * tiles + side};
  for (uint32_t i = 0; i < n_copy; i++)
    b.copy[i] = device_matrix(&t);
  for (uint32_t m = 1; m <= MOST; m *= 2) {
    DeviceActs acts = device_acts(&b.copy[0], b.x, cols, m, true, true);
    double draft = time_one(&b, &acts, m, true), target = time_one(&b, &acts, m, false);
    printf("%u %.2f %.1f %.2f %.1f\n", m, draft, (double)b.draft_bytes / draft * 1e-3, target,
           (double)b.target_bytes / target * 1e-3);
    device_acts_free(&acts);
  }
  return 0;
}
