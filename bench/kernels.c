/* Kernel sets against a plain read loop: bench_kernels [rows cols [set]]. Cycles per 64 weights in the caches; then
 * milliseconds (best of several) and GB/s of the planes read, on a matrix larger than the caches, 1 and 2 threads; and
 * what matters of it as ratios to a plain BF16 product of one token, so that machines and days can be compared. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <math.h>

#include "kernels.h"

enum { MAX_M = 64, MAX_THREADS = 64 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *big(size_t n) {
  void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    exit(1);
  madvise(p, n, MADV_HUGEPAGE);
  return p;
}

static float gauss(void) {
  float u = ((float)rand() + 1.0f) / ((float)RAND_MAX + 2.0f), v = (float)rand() / (float)RAND_MAX;
  return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

/* A nest matrix [rows, cols] that repeats encoded rows, since encoding takes longer than all measurements. */
static size_t nest_matrix(Matrix *w, uint32_t rows, uint32_t cols, size_t *side_bytes) {
  uint32_t part_rows = rows < 512 ? rows : 512;
  pycass_nest_sizes n;
  pycass_nest_bound(part_rows, cols, &n);
  uint16_t *bits = malloc((size_t)part_rows * cols * 2);
  for (size_t i = 0; i < (size_t)part_rows * cols; i++)
    bits[i] = bf16_from_f32(0.02f * gauss());
  uint8_t *a = malloc(n.a), *x = malloc(n.x), *b = malloc(n.b), *side = malloc(n.side_bound);
  size_t size;
  if (pycass_nest_encode(bits, part_rows, cols, a, x, b, side, &size) != PYCASS_OK)
    exit(1);
  *w = matrix_shape(PYCASS_CODEC_NEST, rows, cols);
  size_t tiles = matrix_tiles(w), part = (size_t)(part_rows + 15) / 16 * w->n_group;
  size_t first = 4 * (part + 1), records = load_u32(side + 4 * part) - first, repeats = (tiles + part - 1) / part;
  uint8_t *wa = big(512 * tiles), *wx = big(16 * tiles + 64), *wb = big(768 * tiles);
  uint8_t *ws = big(4 * (tiles + 1) + repeats * records + NEST_SIDE_SLACK);
  for (size_t t = 0; t <= tiles; t++) {
    uint32_t offset = (uint32_t)(4 * (tiles + 1) + t / part * records + load_u32(side + 4 * (t % part)) - first);
    memcpy(ws + 4 * t, &offset, 4);
  }
  for (size_t i = 0; i < repeats; i++) {
    size_t t = i * part, count = min_size(part, tiles - t);
    memcpy(wa + 512 * t, a, 512 * count), memcpy(wb + 768 * t, b, 768 * count);
    memcpy(wx + 16 * t, x, 16 * count), memcpy(ws + 4 * (tiles + 1) + i * records, side + first, records);
  }
  w->a = wa, w->x = wx, w->b = wb, w->side = ws;
  *side_bytes = 4 * tiles + repeats * records;
  free(bits), free(a), free(x), free(b), free(side);
  return tiles;
}

enum { READ, DRAFT, TARGET };
typedef struct Job {
  int what;
  const Kernels *k;
  const Matrix *w;
  const Acts *acts;
  float *y;
  size_t ldy;
  uint32_t m, block0, block1;
  uint64_t sum;
} Job;

static uint64_t read_loop(const uint8_t *p, size_t n) {
  uint64_t s[8] = {0};
  for (size_t i = 0; i + 64 <= n; i += 64)
    for (int l = 0; l < 8; l++)
      s[l] += load_u64(p + i + 8 * l);
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

static void *run(void *arg) {
  Job *j = arg;
  uint64_t denormals = flush_denormals();
  size_t tile0 = (size_t)j->block0 * j->w->n_group, n = (size_t)(j->block1 - j->block0) * j->w->n_group;
  if (j->what == READ)
    j->sum = read_loop(j->w->a + 512 * tile0, 512 * n) + read_loop(j->w->b + 768 * tile0, 768 * n);
  else if (j->what == DRAFT)
    j->k->matmul_draft(j->y, j->ldy, j->w, j->acts, j->m, j->block0, j->block1);
  else
    j->k->matmul(j->y, j->ldy, j->w, j->acts, j->m, j->block0, j->block1);
  restore_denormals(denormals);
  return NULL;
}

static double best_of(Job job, int threads, int repeats) {
  double best = 1e9;
  for (int i = 0; i < repeats; i++) {
    pthread_t id[MAX_THREADS];
    Job part[MAX_THREADS];
    double start = now();
    for (int t = 0; t < threads; t++) {
      part[t] = job;
      part[t].block0 = (uint32_t)((uint64_t)job.w->n_block * (unsigned)t / (unsigned)threads);
      part[t].block1 = (uint32_t)((uint64_t)job.w->n_block * (unsigned)(t + 1) / (unsigned)threads);
      if (t)
        pthread_create(&id[t], NULL, run, &part[t]);
    }
    run(&part[0]);
    for (int t = 1; t < threads; t++)
      pthread_join(id[t], NULL);
    double took = now() - start;
    best = took < best ? took : best;
  }
  return best;
}

/* Core clock in GHz, by a chain of dependent additions of a cycle each. */
static double clock_ghz(void) {
  double best = 0;
  for (int i = 0; i < 5; i++) {
    uint64_t v = 1;
    double start = now();
    for (int k = 0; k < 2000000; k++)
      __asm__ volatile("add %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\t"
                       "add %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0" : "+r"(v));
    double ghz = 20000000 / (now() - start) * 1e-9;
    best = ghz > best ? ghz : best;
  }
  return best;
}

static void report(const char *what, uint32_t m, double seconds, size_t bytes, const char *unit) {
  printf("  %-6s m=%-3u %8.3f ms %6.1f GB/s%s\n", what, m, seconds * 1e3, (double)bytes / seconds * 1e-9, unit);
}

/* The same matrix with 16 hot columns and a draft bias. */
static Matrix with_hot(const Matrix *nest) {
  static uint32_t hot[HOT_UNIT];
  Matrix w = *nest;
  size_t padded = (size_t)w.n_block * NEST_ROWS;
  uint16_t *words = big(padded * HOT_UNIT * sizeof *words);
  float *bias = big(padded * sizeof *bias);
  for (size_t i = 0; i < padded * HOT_UNIT; i++)
    words[i] = (uint16_t)(0x3c00 + (i * 2654435761u >> 20 & 0x1ff));
  for (size_t i = 0; i < padded; i++)
    bias[i] = 0.01f;
  for (uint32_t i = 0; i < HOT_UNIT; i++)
    hot[i] = i * w.cols / HOT_UNIT;
  w.n_hot = HOT_UNIT, w.hot = hot, w.hot_words = words, w.bias = bias;
  return w;
}

/* Time per weight, that of raw for one token being 1. In turn, so that what else runs on the machine hits all alike. */
static void ratios(const Matrix *nest, const Matrix *hot, const Matrix *raw, Job job, int threads) {
  enum { N = 7 };
  const struct {
    const char *what;
    int kind;
    const Matrix *w;
    uint32_t m;
  } of[] = {{"raw m=1", TARGET, raw, 1}, {"draft m=1", DRAFT, nest, 1}, {"target m=1", TARGET, nest, 1},
            {"target m=8", TARGET, nest, 8}, {"with hot columns: draft m=1", DRAFT, hot, 1}, {"target m=1", TARGET, hot, 1},
            {"target m=8", TARGET, hot, 8}};
  double best[N] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
  for (int round = 0; round < 9; round++)
    for (int i = 0; i < N; i++) {
      job.what = of[i].kind, job.w = of[i].w, job.m = of[i].m;
      double took = best_of(job, threads, 1);
      best[i] = took < best[i] ? took : best[i];
    }
  printf("  time per weight:");
  for (int i = 0; i < N; i++)
    printf(" %s %.3f%s", of[i].what, best[i] / best[0], i < N - 1 ? "," : "\n");
}

static void large(const Kernels *k, const Matrix *nest, size_t side_bytes, const Matrix *hot, const Matrix *raw, Job job,
                  int threads) {
  static const uint32_t tokens[] = {1, 2, 3, 4, 5, 8, 16, 64};
  size_t tiles = matrix_tiles(nest), draft = 528 * tiles, all = (528 + 768) * tiles + side_bytes;
  job.k = k, job.w = nest;
  printf("%s, %d thread%s\n", k->name, threads, threads > 1 ? "s" : "");
  for (int i = 0; i < 8; i++) {
    job.m = tokens[i];
    job.what = DRAFT;
    if (job.m <= 16)
      report("draft", job.m, best_of(job, threads, 9), draft, "");
    job.what = TARGET;
    report("target", job.m, best_of(job, threads, job.m > 16 ? 2 : 7), all, "");
  }
  job.w = raw;
  for (uint32_t m = 1; m <= 8; m *= 8) {
    job.m = m;
    report("raw", m, best_of(job, threads, 5), (size_t)raw->rows * raw->cols * 2, "");
  }
  ratios(nest, hot, raw, job, threads);
}

static void in_cache(const Kernels *k, uint32_t cols, Job job, double ghz) {
  Matrix w;
  size_t side, tiles = nest_matrix(&w, 64, cols, &side);
  job.k = k, job.w = &w, job.ldy = 64;
  printf("%s, in cache, cycles per 64 weights at %.2f GHz:", k->name, ghz);
  TileWords out;
  double best = 1e9;
  for (int i = 0; i < 200; i++) {
    double start = now();
    for (size_t t = 0; t < tiles; t++)
      k->nest_decode_tile(&w, t, out);
    double took = now() - start;
    best = took < best ? took : best;
  }
  double unit = ghz * 1e9 / (double)tiles / 16;
  printf(" decode %.1f", best * unit);
  for (uint32_t m = 1; m <= 16; m *= 2) {
    job.m = m;
    job.what = DRAFT;
    printf(" | m=%u draft %.1f", m, best_of(job, 1, 100) * unit);
    job.what = TARGET;
    printf(" target %.1f", best_of(job, 1, 100) * unit);
  }
  printf("\n");
}

int main(int argc, char **argv) {
  uint32_t rows = argc > 2 ? (uint32_t)atoi(argv[1]) : 71680, cols = argc > 2 ? (uint32_t)atoi(argv[2]) : 1536;
  Matrix nest, raw = matrix_shape(PYCASS_CODEC_RAW, rows, cols);
  size_t side_bytes;
  flush_denormals();
  nest_matrix(&nest, rows, cols, &side_bytes);
  uint16_t *bits = big((size_t)rows * cols * 2);
  for (size_t i = 0; i < (size_t)rows * cols; i++)
    bits[i] = (uint16_t)(0x3c00 + (i * 2654435761u >> 20 & 0x1ff));
  raw.raw = bits;
  const Matrix hot = with_hot(&nest);
  size_t ldx = (size_t)nest.n_group * NEST_COLS, ldy = (size_t)nest.n_block * NEST_ROWS, n = nest.n_group;
  float *x = calloc(MAX_M * ldx, sizeof *x), *y = calloc(MAX_M * ldy, sizeof *y);
  for (size_t i = 0; i < MAX_M * ldx; i++)
    x[i] = gauss();
  Acts acts = {calloc(MAX_M * ldx, sizeof(uint16_t)), calloc(MAX_M * NEST_COLS, sizeof(uint16_t)), malloc(MAX_M * ldx), malloc(MAX_M * n * sizeof(float)),
               malloc(MAX_M * n * sizeof(int32_t))};
  double ghz = clock_ghz();
  printf("%u x %u: %.2f bits a weight\n", rows, cols,
         8.0 * ((double)(528 + 768) + (double)side_bytes / (double)matrix_tiles(&nest)) / 1024.0);
  const char *name;
  for (size_t i = 0; (name = pycass_kernel_name(i, NULL)) != NULL; i++) {
    const Kernels *k;
    if ((argc > 3 ? strcmp(argv[3], name) != 0 : strcmp(name, "scalar") == 0) || kernels_select(name, &k) != PYCASS_OK)
      continue;
    k->quantize(&acts, x, ldx, MAX_M, nest.n_group);
    for (uint32_t i = 0; i < MAX_M; i++)
      k->round(acts.panels + panel_at(i, n, 0), x + i * ldx, nest.n_group);
    Job job = {.acts = &acts, .y = y, .ldy = ldy, .w = &nest};
    in_cache(k, cols, job, ghz);
    for (int threads = 1; threads <= 2; threads++) {
      report("read", 0, best_of(job, threads, 9), 1280 * matrix_tiles(&nest), " (plain loop over A and B)");
      large(k, &nest, side_bytes, &hot, &raw, job, threads);
    }
  }
  return 0;
}
