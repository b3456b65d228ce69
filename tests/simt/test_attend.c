/* Attention on the device against sums in double over the rows that scalar decoders give: plain and encoded blocks, target and
 * draft; and a token's bits whatever tokens are with it. */
#include "../../engine/kv.h"
#include "device.h"

static const Kernels *scalar;

/* A cache of one layer, the first n_encoded positions encoded, on the host and on the device. */
typedef struct Cache {
  KvCache kv;
  CudaKv d;
  uint16_t *k, *v; /* all plain rows [n_head_kv][n_ctx][dim] */
} Cache;

static uint16_t random_kv(int kind) {
  uint16_t w = random_weight(kind);
  return kind == GAUSS ? bf16_from_f32(bf16_to_f32(w) * 50.0f) : w;
}

static Cache cache_make(uint32_t n_head, uint32_t n_head_kv, uint32_t dim, uint32_t n_pos, uint32_t n_encoded, int kind) {
  pycass_config c = {.n_layer = 1, .n_head = n_head, .n_head_kv = n_head_kv, .head_dim = dim};
  Cache a;
  CHECK(kv_init(&a.kv, &c, n_pos, PYCASS_KV_NEST) == PYCASS_OK, "no memory");
  size_t n = (size_t)n_head_kv * n_pos * dim;
  a.k = malloc(2 * n), a.v = malloc(2 * n);
  for (size_t i = 0; i < n; i++)
    a.k[i] = random_kv(kind), a.v[i] = random_kv(kind);
  memcpy(a.kv.k, a.k, 2 * n), memcpy(a.kv.v, a.v, 2 * n);
  const uint8_t **block = calloc(n_pos / 64 + 1, sizeof *block);
  while (a.kv.encoded < n_encoded) {
    CHECK(kv_encode(&a.kv, 0), "no memory");
    const KvBlock *b = &a.kv.block[a.kv.encoded / 64];
    block[a.kv.encoded / 64] = device_copy(b->data, b->bytes);
    kv_encoded(&a.kv, true);
  }
  for (uint32_t h = 0; h < n_head_kv; h++) { /* nobody may read these */
    memset(a.kv.k + kv_at(&a.kv, 0, h, 0), 255, 2 * n_encoded * dim);
    memset(a.kv.v + kv_at(&a.kv, 0, h, 0), 255, 2 * n_encoded * dim);
  }
  a.d = (CudaKv){device_copy(a.kv.k, 2 * n), device_copy(a.kv.v, 2 * n), device_copy(block, (n_pos / 64 + 1) * sizeof *block),
                 n_head, n_head_kv, dim, n_pos};
  free(block);
  return a;
}

static void cache_free(Cache *a) {
  const uint8_t **block = malloc((a->d.n_ctx / 64 + 1) * sizeof *block);
  OK(cuda->download(block, a->d.block, (a->d.n_ctx / 64 + 1) * sizeof *block, NULL));
  for (uint32_t i = 0; i < a->kv.encoded / 64; i++)
    OK(cuda->release((void *)(uintptr_t)block[i]));
  OK(cuda->release((void *)(uintptr_t)a->d.k));
  OK(cuda->release((void *)(uintptr_t)a->d.v));
  OK(cuda->release((void *)(uintptr_t)a->d.block));
  kv_free(&a->kv), free(a->k), free(a->v), free(block);
}

/* Rows of a head that a pass sees: out [n][dim]. */
static void rows_seen(const Cache *a, uint32_t head, int which, bool draft, uint32_t n, float *out) {
  uint32_t dim = a->d.head_dim;
  uint16_t scratch[64 * 1024];
  for (uint32_t p = 0; p < n; p += 64) {
    uint32_t count = n - p < 64 ? n - p : 64;
    Matrix unit;
    if (draft && kv_draft_unit(&a->kv, 0, head, which, p / 64, 0, dim, &unit)) {
      for (uint32_t c = 0; c < dim; c++) {
        float channel[64];
        int8_t key[64];
        matrix_row_draft(&unit, c, channel);
        nest_key_row(&unit, c, key);
        for (uint32_t i = 0; i < count; i++)
          out[(size_t)(p + i) * dim + c] = which == KV_VALUES ? channel[i] : ldexpf(key[i], unit.x[c] - 127 - 6);
      }
      continue;
    }
    KvRows r = kv_rows(&a->kv, scalar, 0, head, which, p / 64, draft, 0, dim, scratch);
    for (uint32_t i = 0; i < count * dim; i++)
      out[(size_t)p * dim + i] = bf16_to_f32(r.row[i / dim * r.stride + i % dim]);
  }
}

/* out [dim] and, in bound, how far a float result may be from it. A score's error is at most (dim + 2) eps of its products'
 * absolute sum, and twice the largest one changes e^score by that part; sums are of n weights, chunks, and a few roundings. */
static void attend_double(const Cache *a, const float *q, const float *keys, const float *values, uint32_t n, double *out,
                          double *bound) {
  uint32_t dim = a->d.head_dim;
  double *s = malloc(n * sizeof *s), top = -INFINITY, sum = 0, worst = 0;
  for (uint32_t p = 0; p < n; p++) {
    double dot = 0, size = 0;
    for (uint32_t c = 0; c < dim; c++) {
      double x = (double)q[c] * (double)keys[(size_t)p * dim + c];
      dot += x, size += fabs(x);
    }
    s[p] = dot / sqrt(dim), top = fmax(top, s[p]), worst = fmax(worst, size / sqrt(dim));
  }
  for (uint32_t p = 0; p < n; p++)
    sum += s[p] = exp(s[p] - top);
  double part = 2 * (dim + 4) * 0x1p-24 * worst + (CUDA_CHUNK + n / CUDA_CHUNK + 32) * 2 * 0x1p-24;
  for (uint32_t c = 0; c < dim; c++) {
    double size = 0;
    out[c] = 0;
    for (uint32_t p = 0; p < n; p++)
      out[c] += s[p] / sum * (double)values[(size_t)p * dim + c], size += s[p] / sum * fabs((double)values[(size_t)p * dim + c]);
    bound[c] = part * size * 1.1 + 0x1p-126;
  }
  free(s);
}

static float *device_attend(const Cache *a, const float *q, uint32_t m, uint32_t first, bool draft) {
  size_t n = (size_t)m * a->d.n_head * a->d.head_dim;
  uint32_t ld = a->d.n_head * a->d.head_dim, *pos = device_copy(&first, sizeof first);
  float *dq = device_copy(q, n * sizeof *q), *out = device_alloc(n * sizeof *q);
  float *work = device_alloc(cuda_attend_work(&a->d, m, first + m) * sizeof *work), *got = malloc(n * sizeof *q);
  OK(cuda->attend(out, ld, dq, ld, m, &a->d, pos, first + m, draft, work, NULL));
  OK(cuda->download(got, out, n * sizeof *q, NULL));
  OK(cuda->release(pos));
  OK(cuda->release(dq));
  OK(cuda->release(out));
  OK(cuda->release(work));
  return got;
}

static void test_attend(uint32_t n_head, uint32_t n_head_kv, uint32_t dim, uint32_t n_pos, uint32_t n_encoded, int kind) {
  enum { M = 3 };
  Cache a = cache_make(n_head, n_head_kv, dim, n_pos, n_encoded, kind);
  uint32_t first = n_pos - M, ld = n_head * dim;
  float *q = malloc(M * ld * sizeof *q), *keys = malloc((size_t)n_pos * dim * sizeof *keys);
  float *values = malloc((size_t)n_pos * dim * sizeof *values);
  double *want = malloc(dim * sizeof *want), *bound = malloc(dim * sizeof *bound);
  for (uint32_t i = 0; i < M * ld; i++)
    q[i] = random_gauss();
  for (int draft = 0; draft < 2; draft++) {
    float *got = device_attend(&a, q, M, first, draft), *one = device_attend(&a, q + ld, 1, first + 1, draft);
    CHECK(same_floats(got + ld, one, ld), "a token alone has other bits, %u positions", n_pos);
    for (uint32_t h = 0; h < n_head; h++) {
      rows_seen(&a, h / (n_head / n_head_kv), KV_KEYS, draft, n_pos, keys);
      rows_seen(&a, h / (n_head / n_head_kv), KV_VALUES, draft, n_pos, values);
      for (uint32_t t = 0; t < M; t++) {
        attend_double(&a, q + t * ld + h * dim, keys, values, first + t + 1, want, bound);
        for (uint32_t c = 0; c < dim; c++)
          CHECK(fabs(want[c] - (double)got[t * ld + h * dim + c]) <= bound[c],
                "%u heads of %u, %u positions, draft %d, token %u, head %u, column %u: %g, not %g, bound %g", n_head, dim, n_pos,
                draft, t, h, c, got[t * ld + h * dim + c], want[c], bound[c]);
      }
    }
    free(got), free(one);
  }
  free(q), free(keys), free(values), free(want), free(bound);
  cache_free(&a);
}

/* A block encoded on the device: what the table points at is what the CPU's encoder makes. */
static void test_encode(uint32_t n_head_kv, uint32_t dim, int kind) {
  enum { POS = 64 };
  Cache a = cache_make(n_head_kv, n_head_kv, dim, 128, 0, kind);
  uint32_t room = cuda_unit_room(dim), first = cuda_unit_first(dim), n_unit = 2 * n_head_kv, tiles = (dim + 15) / 16;
  uint8_t *units = device_alloc((size_t)n_unit * room);
  uint32_t *device_sizes = device_alloc(n_unit * sizeof *device_sizes), sizes[16];
  OK(cuda->encode(units, device_sizes, &a.d, POS, NULL));
  OK(cuda->download(sizes, device_sizes, n_unit * sizeof *sizes, NULL));
  size_t bytes = cuda_block_bytes(sizes, n_head_kv, dim);
  uint8_t *block = device_alloc(bytes), *got = malloc(bytes), *want = calloc(1, room);
  OK(cuda->pack(block, units, device_sizes, n_head_kv, dim, NULL));
  OK(cuda->download(got, block, bytes, NULL));
  for (uint32_t u = 0; u < n_unit; u++) {
    const uint16_t *rows = (u % 2 ? a.v : a.k) + ((size_t)(u / 2) * 128 + POS) * dim;
    uint8_t *planes = want + round_up(16 * tiles, 64);
    size_t size = nest_encode_columns(rows, dim, dim, u % 2 == 0, planes, want, planes + 512 * tiles, want + first);
    CHECK(size == sizes[u], "%s, unit %u: %u bytes, not %zu", kind_name[kind], u, sizes[u], size);
    CHECK(memcmp(want, got + load_u32(got + 8 * u), first) == 0, "%s, unit %u: other planes", kind_name[kind], u);
    CHECK(memcmp(want + first, got + load_u32(got + 8 * u + 4), size) == 0, "%s, unit %u: another side part", kind_name[kind], u);
  }
  OK(cuda->release(units));
  OK(cuda->release(device_sizes));
  OK(cuda->release(block));
  free(got), free(want);
  cache_free(&a);
}

int main(int argc, char **argv) {
  bool little = argc > 1 && !strcmp(argv[1], "little");
  flush_denormals();
  CHECK(kernels_select("scalar", &scalar) == PYCASS_OK, "no scalar kernels");
  device_open();
  test_attend(6, 2, 64, 150, 64, GAUSS);
  test_attend(2, 1, 80, 5, 0, GAUSS);
  for (int kind = 0; kind < (little ? 2 : N_KIND); kind++)
    test_encode(1 + kind % 3, kind % 2 ? 64 : 36, kind);
  if (!little) {
    test_attend(4, 4, 128, 300, 192, GAUSS), test_attend(9, 1, 36, 140, 128, GAUSS), test_attend(2, 2, 256, 131, 64, GAUSS);
    test_attend(3, 1, 64, 200, 128, ESCAPES), test_attend(3, 1, 64, 130, 64, ZEROS), test_attend(2, 1, 64, 130, 64, DENORMAL);
  }
  printf("ok\n");
  return 0;
}
