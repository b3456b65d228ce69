/* Whole tiny models on the GPU that $PYCASS_CUDA_LIB's library finds, in sessions like any other: logits near the CPU's, each
 * token's the same bits for every number of tokens, speculation changing nothing. */
#include <stdlib.h>
#include <unistd.h>

#include "../c/check.h"
#include "../c/tiny_cass.h"

enum { N_PROMPT = 20, N_NEW = 24 };

static pycass_session *open_session(pycass_model *m) {
  pycass_session *s = NULL;
  pycass_status status = pycass_session_new(m, &(pycass_session_options){.n_ctx = 256, .n_threads = 1}, &s);
  CHECK(status == PYCASS_OK, "%s", pycass_error_detail());
  return s;
}

static pycass_model *open_model(const char *path, const char *device) {
  pycass_model *m = NULL;
  pycass_model_options o = {.kernel = "scalar", .device = device};
  CHECK(pycass_model_load(path, &o, &m) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(!strcmp(pycass_model_device(m, NULL), device), "another device");
  return m;
}

static int32_t *prompt_of(uint32_t n_vocab) {
  static int32_t ids[N_PROMPT];
  for (int i = 0; i < N_PROMPT; i++)
    ids[i] = (int32_t)((uint32_t)i * 37 % n_vocab);
  return ids;
}

/* Logits of the prompt, m tokens at a time. */
static float *logits_of(pycass_session *s, uint32_t n_vocab, size_t m) {
  float *out = malloc(sizeof(float) * N_PROMPT * n_vocab);
  const int32_t *ids = prompt_of(n_vocab);
  CHECK(pycass_session_trim(s, 0) == PYCASS_OK, "trim");
  for (size_t i = 0; i < N_PROMPT; i += m) {
    pycass_status status = pycass_session_eval(s, ids + i, min_size(m, N_PROMPT - i), out + i * n_vocab);
    CHECK(status == PYCASS_OK, "%s", pycass_error_detail());
  }
  return out;
}

static void generate(pycass_session *s, uint32_t n_vocab, pycass_speculation how, pycass_token *out) {
  pycass_sampling sampling = pycass_sampling_default();
  CHECK(pycass_session_configure(s, &sampling, &how) == PYCASS_OK, "configure");
  pycass_session_record(s, 1);
  CHECK(pycass_session_trim(s, 0) == PYCASS_OK, "trim");
  CHECK(pycass_session_prompt(s, prompt_of(n_vocab), N_PROMPT, 0, NULL, NULL) == PYCASS_OK, "%s", pycass_error_detail());
  for (size_t n = 0, some; n < N_NEW; n += some)
    CHECK(pycass_session_next(s, out + n, N_NEW - n, &some) == PYCASS_OK, "%s", pycass_error_detail());
}

/* Sums have another order than on the CPU: a rounding that turns moves an activation by 2^-8 of itself, and what follows. */
static double check_logits(pycass_session *gpu, pycass_session *cpu, uint32_t n_vocab) {
  float *expected = logits_of(cpu, n_vocab, 5), *one = logits_of(gpu, n_vocab, 1);
  double error = 0, size = 0;
  for (size_t i = 0; i < (size_t)N_PROMPT * n_vocab; i++) {
    double e = fabs((double)one[i] - (double)expected[i]);
    CHECK(isfinite(one[i]), "logit %zu is not finite", i);
    error = e > error ? e : error, size += (double)expected[i] * (double)expected[i];
  }
  size = sqrt(size / (N_PROMPT * (double)n_vocab));
  CHECK(error < 0.15 * size, "logits are off by %g, of %g", error, size);
  for (size_t m = 2; m <= N_PROMPT; m += m < 3 ? 3 : m < 8 ? 3 : 12) { /* 2, 5, 8, 20 */
    float *many = logits_of(gpu, n_vocab, m);
    CHECK(!memcmp(one, many, sizeof(float) * N_PROMPT * n_vocab), "%zu tokens at a time: other bits", m);
    free(many);
  }
  free(expected), free(one);
  return error / size;
}

static void check_speculation(pycass_session *s, uint32_t n_vocab) {
  pycass_token plain[N_NEW], drafted[N_NEW];
  pycass_stats stats;
  generate(s, n_vocab, (pycass_speculation){PYCASS_SPEC_OFF, 1, 0, 0}, plain);
  for (int32_t n = 1; n <= 16; n = 2 * n + 1) {
    generate(s, n_vocab, (pycass_speculation){PYCASS_SPEC_ON, n, 1, 0}, drafted);
    CHECK(!memcmp(plain, drafted, sizeof plain), "drafts of %d change the output", n);
    pycass_session_stats(s, &stats);
    CHECK(stats.drafted > 0, "nothing was drafted");
  }
}

int main(void) {
  static const int kinds[] = {TINY_LLAMA, TINY_QWEN2, TINY_QWEN3, TINY_HOT, TINY_RAW};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    TinyModel tiny = tiny_model(kinds[i]);
    char path[256];
    tiny_write(&tiny, path);
    pycass_model *here = open_model(path, "cpu"), *there = open_model(path, "cuda");
    pycass_session *cpu = open_session(here), *gpu = open_session(there);
    double error = check_logits(gpu, cpu, tiny.config.n_vocab);
    if (tiny.codec != PYCASS_CODEC_RAW)
      check_speculation(gpu, tiny.config.n_vocab);
    printf("model %d: logits to %.1e of their size, plain = speculative\n", kinds[i], error);
    pycass_session_free(cpu), pycass_session_free(gpu);
    pycass_model_free(here), pycass_model_free(there);
    unlink(path);
  }
  printf("ok\n");
  return 0;
}
