/* The CUDA library's other kernels against the scalar set: bit for bit where an element needs no other's, otherwise within the
 * error of sums in another order. */
#include "device.h"

static const Kernels *scalar;

static float *random_row(size_t n) {
  float *x = malloc(n * sizeof *x);
  for (size_t i = 0; i < n; i++)
    x[i] = random_gauss() * (random_below(50) ? 1.0f : 30.0f);
  return x;
}
static uint16_t *random_bf16(size_t n) {
  uint16_t *x = malloc(n * sizeof *x);
  for (size_t i = 0; i < n; i++)
    x[i] = bf16_from_f32(random_gauss());
  return x;
}
static float *fetched(const float *device, size_t n) {
  float *x = malloc(n * sizeof *x);
  OK(cuda->download(x, device, n * sizeof *x, NULL));
  return x;
}

/* Of a norm: half the sum's relative error, (n + n') eps for n and n' additions, and a few roundings. */
static void close_norm(const char *what, const float *want, const float *got, size_t n, size_t of) {
  for (size_t i = 0; i < n; i++)
    CHECK(fabs((double)want[i] - got[i]) <= ((double)of / 256 + 16 + (double)of / 16 + 6) * 0x1p-24 * fabs((double)want[i]),
          "%s: element %zu is %g, not %g", what, i, got[i], want[i]);
}

static void test_norm(uint32_t m, uint32_t n, bool add) {
  uint32_t ld = n + random_below(9);
  float *x = random_row(m * ld), *h = random_row(m * ld);
  uint16_t *weight = random_bf16(n);
  float *dx = device_copy(x, m * ld * sizeof *x), *dh = device_copy(h, m * ld * sizeof *h);
  uint16_t *dw = device_copy(weight, n * sizeof *weight);
  OK(cuda->add_norm(dh, dx, ld, m, add, dw, n, 1e-5f, NULL));
  float *x1 = fetched(dx, m * ld), *h1 = fetched(dh, m * ld);
  for (uint32_t i = 0; i < m; i++) {
    if (add)
      scalar->add(x + i * ld, h + i * ld, n);
    CHECK(same_floats(x + i * ld, x1 + i * ld, n), "the sum before a norm of %u", n);
    scalar->rmsnorm(h + i * ld, x + i * ld, weight, n, 1e-5f);
    close_norm("norm", h + i * ld, h1 + i * ld, n, n);
  }
  OK(cuda->release(dx));
  OK(cuda->release(dh));
  OK(cuda->release(dw));
  free(x), free(h), free(x1), free(h1), free(weight);
}

static void test_swiglu(uint32_t m, uint32_t n) {
  float *gate = random_row(m * n), *up = random_row(m * n);
  float *dg = device_copy(gate, m * n * sizeof *gate), *du = device_copy(up, m * n * sizeof *up);
  OK(cuda->swiglu(dg, du, n, m, n, NULL));
  float *got = fetched(dg, m * n);
  scalar->swiglu(gate, up, m * n);
  CHECK(same_floats(gate, got, m * n), "swiglu of %u", n);
  OK(cuda->release(dg));
  OK(cuda->release(du));
  free(gate), free(up), free(got);
}

static void test_argmax(uint32_t n) {
  enum { M = 3 };
  float *x = random_row(M * n);
  for (uint32_t i = 0; i < n; i += 7)
    x[n + i] = NAN, x[2 * n + i] = 1e9f; /* the first of equals */
  float *dx = device_copy(x, M * n * sizeof *x);
  int out[M], *d = device_alloc(sizeof out);
  OK(cuda->argmax(d, dx, n, M, n, NULL));
  OK(cuda->download(out, d, sizeof out, NULL));
  for (uint32_t r = 0; r < M; r++) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
      if (x[r * n + i] > x[r * n + best] || isnan(x[r * n + best]))
        best = i;
    CHECK(out[r] == (int)best || isnan(x[r * n + best]), "row %u of %u: %d, not %u", r, n, out[r], best);
  }
  OK(cuda->release(dx));
  OK(cuda->release(d));
  free(x);
}

static void test_embed(Case t) {
  enum { M = 4 };
  DeviceMatrix d = device_matrix(&t);
  int ids[M] = {0, (int)t.w.rows - 1, (int)random_below(t.w.rows), (int)random_below(t.w.rows)};
  int *device_ids = device_copy(ids, sizeof ids);
  float *x = device_alloc(M * t.w.cols * sizeof *x), *want = malloc(t.w.cols * sizeof *want);
  for (int draft = 0; draft < 2; draft++) {
    OK(cuda->embed(x, t.w.cols, device_ids, M, &d.w, draft, NULL));
    float *got = fetched(x, M * t.w.cols);
    for (int i = 0; i < M; i++) {
      (draft ? matrix_row_draft : matrix_row_exact)(&t.w, (uint32_t)ids[i], want);
      CHECK(same_floats(want, got + i * t.w.cols, t.w.cols), "row %d, draft %d", ids[i], draft);
    }
    free(got);
  }
  OK(cuda->release(device_ids));
  OK(cuda->release(x));
  free(want);
  device_matrix_free(&d), case_free(&t);
}

/* Queries, keys and values of a few tokens, with biases and norms or without. */
static void test_heads(uint32_t m, uint32_t n_head, uint32_t n_head_kv, uint32_t n, bool bias, bool norm) {
  enum { POS = 5 };
  uint32_t ld_q = n_head * n, ld_kv = n_head_kv * n, n_ctx = POS + m + 3, pos = POS;
  float *v[3] = {random_row(m * ld_q), random_row(m * ld_kv), random_row(m * ld_kv)}, *d[3], *freq = random_row(n / 2);
  uint16_t *b[3] = {random_bf16(ld_q), random_bf16(ld_kv), random_bf16(ld_kv)}, *g[2] = {random_bf16(n), random_bf16(n)};
  for (uint32_t i = 0; i < n / 2; i++)
    freq[i] = fabsf(freq[i]);
  for (int i = 0; i < 3; i++)
    d[i] = device_copy(v[i], m * (i ? ld_kv : ld_q) * sizeof(float));
  size_t cache = (size_t)n_head_kv * n_ctx * n * sizeof(uint16_t);
  CudaHeads h = {d[0], d[1], d[2], ld_q, ld_kv, n_head, n_head_kv, n, n_ctx, 1e-6f, NULL, NULL, NULL, NULL, NULL,
                 device_alloc(cache), device_alloc(cache)};
  if (bias)
    h.q_bias = device_copy(b[0], 2 * ld_q), h.k_bias = device_copy(b[1], 2 * ld_kv), h.v_bias = device_copy(b[2], 2 * ld_kv);
  if (norm)
    h.q_norm = device_copy(g[0], 2 * n), h.k_norm = device_copy(g[1], 2 * n);
  OK(cuda->zero(h.k_cache, cache, NULL));
  OK(cuda->zero(h.v_cache, cache, NULL));
  uint32_t *device_pos = device_copy(&pos, sizeof pos);
  float *device_freq = device_copy(freq, n / 2 * sizeof *freq), *angles = device_alloc(m * n * sizeof(float));
  OK(cuda->angles(angles, device_freq, 1.5f, device_pos, m, n, NULL));
  OK(cuda->finish_qkv(&h, m, angles, device_pos, NULL));
  float *cos_sin = fetched(angles, m * n), *got[3];
  for (int i = 0; i < 3; i++)
    got[i] = fetched(d[i], m * (i ? ld_kv : ld_q));
  uint16_t *rows[2] = {malloc(cache), malloc(cache)};
  OK(cuda->download(rows[0], h.k_cache, cache, NULL));
  OK(cuda->download(rows[1], h.v_cache, cache, NULL));
  for (uint32_t t = 0; t < m; t++) {
    for (uint32_t i = 0; i < n / 2; i++) {
      float angle = (float)(POS + t) * freq[i];
      CHECK(cos_sin[t * n + i] == (float)cos((double)angle) * 1.5f, "cosine %u", i);
      CHECK(cos_sin[t * n + n / 2 + i] == (float)sin((double)angle) * 1.5f, "sine %u", i);
    }
    for (int i = 0; i < 3; i++) {
      uint32_t heads = i ? n_head_kv : n_head, ld = heads * n;
      float *x = v[i] + t * ld;
      if (bias)
        scalar->add_bf16(x, b[i], ld);
      for (uint32_t head = 0; head < heads && norm && i < 2; head++)
        scalar->rmsnorm(x + head * n, x + head * n, g[i], n, 1e-6f);
      double most = 0;
      for (uint32_t k = 0; k < ld; k++)
        most = fmax(most, fabs((double)x[k]));
      if (i < 2)
        scalar->rope(x, heads, n, cos_sin + t * n);
      for (uint32_t k = 0; k < ld; k++) /* without norms no sum is left that could differ; a rotated pair adds two errors */
        CHECK(norm && i < 2 ? fabs((double)x[k] - got[i][t * ld + k]) <= ((double)n / 16 + 32) * 0x1p-24 * 3 * most
                            : x[k] == got[i][t * ld + k],
              "part %d, token %u, element %u: %g, not %g", i, t, k, got[i][t * ld + k], x[k]);
      for (uint32_t k = 0; k < ld && i; k++)
        CHECK(rows[i - 1][((size_t)(k / n) * n_ctx + POS + t) * n + k % n] == bf16_from_f32(got[i][t * ld + k]),
              "cache of part %d, token %u, element %u", i, t, k);
    }
  }
  const void *all[] = {d[0], d[1], d[2], h.q_bias, h.k_bias, h.v_bias, h.q_norm, h.k_norm, h.k_cache, h.v_cache, device_pos,
                       device_freq, angles};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i])
      OK(cuda->release((void *)(uintptr_t)all[i]));
  for (int i = 0; i < 3; i++)
    free(v[i]), free(b[i]), free(got[i]);
  free(g[0]), free(g[1]), free(rows[0]), free(rows[1]), free(freq), free(cos_sin);
}

int main(int argc, char **argv) {
  bool little = argc > 1 && !strcmp(argv[1], "little");
  flush_denormals();
  CHECK(kernels_select("scalar", &scalar) == PYCASS_OK, "no scalar kernels");
  device_open();
  test_norm(2, 576, true), test_norm(1, 37, false);
  test_swiglu(2, 300);
  test_argmax(1003), test_argmax(5);
  for (int kind = 0; kind < (little ? 1 : N_KIND); kind++)
    test_embed(case_make(PYCASS_CODEC_NEST, kind, 40, 1 + random_below(600)));
  test_embed(case_make_hot(GAUSS, 33, 300, 32));
  test_embed(case_make(PYCASS_CODEC_RAW, BITS, 20, 77));
  test_heads(2, 6, 2, 64, false, false), test_heads(3, 4, 1, 128, false, true), test_heads(1, 3, 3, 80, true, false);
  printf("ok\n");
  return 0;
}
