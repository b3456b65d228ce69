/* Sessions over tiny random models: plain and speculative decoding are the same bits, the cache's bookkeeping holds
 * under trim, eval, prompt and state, and saved states of any bytes are answered with a status. */
#include <unistd.h>

#include "check.h"
#include "model.h"
#include "spec.h"
#include "tiny_cass.h"

enum { N_GEN = 24, N_PROMPT = 11 };

static char model_path[N_TINY][256];
static const int32_t prompt[N_PROMPT] = {3, 1, 4, 1, 5, 9, 2, 6, 74, 35, 8}; /* 74 is a padding row */

#define OK(expr) CHECK((expr) == PYCASS_OK, "%s", pycass_error_detail())
#define REFUSED(status, expr) CHECK((expr) == status, "%s", pycass_error_detail())

static pycass_model *load_model(int kind, const char *kernel) {
  pycass_model *m = NULL;
  OK(pycass_model_load(model_path[kind], &(pycass_model_options){.kernel = kernel}, &m));
  return m;
}

static pycass_session *new_session(pycass_model *m, uint32_t n_ctx, uint32_t n_threads, uint32_t n_batch) {
  pycass_session *s = NULL;
  OK(pycass_session_new(m, &(pycass_session_options){.n_ctx = n_ctx, .n_threads = n_threads, .n_batch = n_batch}, &s));
  return s;
}

static uint32_t n_vocab(const pycass_model *m) { return pycass_file_config(pycass_model_file(m))->n_vocab; }

/* ---- one order --------------------------------------------------------------------------------------- */

/* Generates n tokens in steps of random capacity. */
static void generate(pycass_session *s, const pycass_sampling *sampling, pycass_speculation spec, pycass_token *out,
                     size_t n) {
  OK(pycass_session_configure(s, sampling, &spec));
  OK(pycass_session_prompt(s, prompt, N_PROMPT, 0, NULL, NULL));
  pycass_session_record(s, 1);
  for (size_t done = 0; done < n;) {
    size_t got = 0, capacity = 1 + random_below(40);
    capacity = min_size(capacity, n - done);
    OK(pycass_session_next(s, out + done, capacity, &got));
    CHECK(got >= 1 && got <= capacity, "%zu tokens for a capacity of %zu", got, capacity);
    done += got;
  }
}

static void check_same(const pycass_token *want, const pycass_token *got, size_t n, const char *what) {
  for (size_t i = 0; i < n; i++) {
    CHECK(got[i].id == want[i].id, "%s: token %zu is %d, not %d", what, i, got[i].id, want[i].id);
    CHECK(got[i].logits_crc32c == want[i].logits_crc32c, "%s: other logits at token %zu", what, i);
    CHECK(f32_bits(got[i].logprob) == f32_bits(want[i].logprob), "%s: another log probability at %zu", what, i);
  }
}

/* Mostly one: on a busy machine with few cores, barriers are slow. */
static uint32_t some_threads(int i) { return i % 8 == 3 ? 2 : i == 5 ? 3 : 1; }

static uint64_t total_drafted, total_accepted;

static void check_speculation(pycass_model *m, const pycass_sampling *sampling, bool few) {
  pycass_token want[N_GEN], got[N_GEN];
  pycass_session *plain = new_session(m, 0, 1, 0);
  generate(plain, sampling, (pycass_speculation){PYCASS_SPEC_OFF, 1, 0, 0}, want, N_GEN);
  for (int i = 0; i < N_GEN; i++)
    CHECK(want[i].id >= 0 && want[i].id < 70, "token %d was sampled; ids from 70 on are padding", want[i].id);
  pycass_session_free(plain);
  static const uint32_t batch[] = {1, 7, 512};
  for (int32_t k = 1; k <= SPEC_MAX_DRAFT; k += few && k > 1 ? 1 + k / 2 : 1) {
    pycass_session *s = new_session(m, N_PROMPT + N_GEN + random_below(20), few ? 1 : some_threads(k), batch[k % 3]);
    pycass_stats stats;
    char what[80];
    for (int mode = 0; mode < 3; mode += few ? 2 : 1) { /* on with fixed lengths, on, auto */
      snprintf(what, sizeof what, "%s, mode %d, draft of %d, T = %g", pycass_model_kernel(m), mode, k,
               (double)sampling->temperature);
      generate(s, sampling, (pycass_speculation){mode < 2 ? PYCASS_SPEC_ON : PYCASS_SPEC_AUTO, k, mode == 0, 0}, got, N_GEN);
      check_same(want, got, N_GEN, what);
      pycass_session_stats(s, &stats);
      CHECK(stats.tokens == N_GEN && stats.accepted <= stats.drafted, "%s: statistics", what);
      if (mode == 0)
        total_drafted += stats.drafted, total_accepted += stats.accepted;
    }
    pycass_session_free(s);
  }
}

static void test_speculation(pycass_model *m, bool few) {
  pycass_sampling o = pycass_sampling_default();
  check_speculation(m, &o, few);
  o.temperature = 0.8f, o.seed = 5;
  check_speculation(m, &o, true);
  o.top_k = 20, o.top_p = 0.9f, o.min_p = 0.02f, o.repeat_penalty = 1.2f, o.frequency_penalty = 0.1f, o.repeat_last_n = -1;
  check_speculation(m, &o, true);
}

/* ---- look-ups --------------------------------------------------------------------------------------- */

enum { N_COPY = 100, FEW = 3 };

/* Text of a few tokens only, so that there is always something to look up, right or wrong. */
static pycass_sampling few_tokens(float temperature) {
  static const int32_t id[FEW] = {5, 9, 14};
  static const float bias[FEW] = {60, 60, 58};
  pycass_sampling o = pycass_sampling_default();
  o.temperature = temperature, o.seed = 11, o.bias_ids = id, o.bias = bias, o.n_bias = FEW;
  return o;
}

/* Continues from the session's tokens until n more are there. */
static void take(pycass_session *s, pycass_token *out, size_t n, uint32_t capacity) {
  for (size_t done = 0; done < n;) {
    size_t got = 0;
    OK(pycass_session_next(s, out + done, min_size(1 + random_below(capacity), n - done), &got));
    done += got;
  }
}

/* Back to some earlier place, in this session or by a saved state in another one, and on from there. */
static void check_rewinds(pycass_session *s, pycass_session *other, const pycass_token *want) {
  int32_t ids[N_PROMPT + N_COPY];
  pycass_token got[N_COPY];
  memcpy(ids, prompt, sizeof prompt);
  for (size_t i = 0; i < N_COPY; i++)
    ids[N_PROMPT + i] = want[i].id;
  for (int turn = 0; turn < 6; turn++) {
    size_t at = random_below(N_COPY - 20), size = pycass_session_state_size(s);
    uint8_t *state = malloc(size);
    OK(pycass_session_save_state(s, state, size));
    OK(pycass_session_load_state(other, state, size));
    free(state);
    pycass_session *on = turn % 2 ? other : s;
    OK(pycass_session_prompt(on, ids, N_PROMPT + at, 0, NULL, NULL));
    take(on, got, 20, 40);
    check_same(want + at, got, 20, "after a rewind");
  }
}

static void test_lookups(pycass_model *m, bool has_draft, bool few) {
  pycass_token want[N_COPY], got[N_COPY];
  pycass_session *s = new_session(m, N_PROMPT + N_COPY - 1, few ? 1 : 2, 0); /* the last token is not evaluated */
  pycass_session *other = new_session(m, N_PROMPT + N_COPY, 1, 0);
  uint64_t n_drafted = 0;
  pycass_session_record(other, 1);
  for (int t = 0; t < 2; t++) {
    pycass_sampling o = few_tokens((float)t * 8);
    generate(s, &o, (pycass_speculation){PYCASS_SPEC_OFF, 1, 0, 1}, want, N_COPY);
    for (int32_t k = 1; k <= 16; k = k * 3 + 1)
      for (int mode = 0; mode < 3; mode++) { /* always, where it pays, auto */
        char what[80];
        pycass_stats stats;
        pycass_speculation spec = {mode < 2 ? PYCASS_SPEC_ON : PYCASS_SPEC_AUTO, k, mode == 0, 1};
        snprintf(what, sizeof what, "look-ups, mode %d, draft of %d, T = %d", mode, k, 8 * t);
        generate(s, &o, spec, got, N_COPY);
        check_same(want, got, N_COPY, what);
        pycass_session_stats(s, &stats);
        CHECK(stats.ngram_accepted <= stats.ngram_drafted && stats.ngram_drafted <= stats.drafted &&
                  stats.ngram_accepted <= stats.accepted && stats.drafted - stats.ngram_drafted <= (uint64_t)k * stats.steps,
              "%s: statistics", what);
        CHECK(mode || (stats.ngram_accepted > 0 && (t == 0 || stats.ngram_accepted < stats.ngram_drafted)),
              "%s: %llu of %llu accepted: the test did not see both", what, (unsigned long long)stats.ngram_accepted,
              (unsigned long long)stats.ngram_drafted);
        n_drafted += stats.drafted - stats.ngram_drafted;
        OK(pycass_session_configure(other, &o, &spec));
        check_rewinds(s, other, want);
      }
  }
  CHECK((n_drafted > 0) == has_draft, "%llu tokens by the draft", (unsigned long long)n_drafted);
  pycass_session_free(s), pycass_session_free(other);
}

/* ---- logits ------------------------------------------------------------------------------------------ */

static void test_batches(pycass_model *m, bool few) {
  enum { N = 90 };
  size_t v = n_vocab(m);
  int32_t ids[N];
  for (int i = 0; i < N; i++)
    ids[i] = (int32_t)random_below((uint32_t)v);
  float *want = malloc(N * v * sizeof *want), *got = malloc(N * v * sizeof *got), *draft = malloc(N * v * sizeof *draft);
  pycass_session *s = new_session(m, N, 1, 0);
  OK(pycass_session_eval(s, ids, N, want));
  OK(pycass_session_trim(s, 0));
  for (size_t i = 0; i < N; i++)
    OK(pycass_session_eval_draft(s, ids + i, 1, draft + i * v));
  pycass_session_free(s);
  static const uint32_t batch[] = {1, 7, 33, 512};
  for (int i = 0; i < (few ? 4 : 8); i++) {
    uint32_t threads = few ? 1 : some_threads(i);
    s = new_session(m, N, threads, batch[i % 4]);
    for (size_t done = 0; done < N;) {
      size_t n = min_size(1 + random_below(40), N - done);
      OK(pycass_session_eval(s, ids + done, n, got + done * v));
      done += n;
    }
    CHECK(memcmp(want, got, N * v * sizeof *want) == 0, "%u threads, batch %u: other logits", threads, batch[i % 4]);
    OK(pycass_session_trim(s, 0));
    OK(pycass_session_eval_draft(s, ids, N, got)); /* the cache must stay the target's */
    CHECK(memcmp(draft, got, N * v * sizeof *got) == 0, "%u threads, batch %u: other drafts", threads, batch[i % 4]);
    OK(pycass_session_trim(s, N - 1));
    OK(pycass_session_eval(s, ids + N - 1, 1, got));
    CHECK(memcmp(want + (N - 1) * v, got, v * sizeof *got) == 0, "the draft changed the cache");
    pycass_session_free(s);
  }
  free(want), free(got), free(draft);
}

/* ---- bookkeeping ------------------------------------------------------------------------------------- */

static void check_tokens(const pycass_session *s, const int32_t *want, size_t n) {
  int32_t got[300];
  CHECK(pycass_session_tokens(s, NULL, 0) == n, "%zu tokens, not %zu", pycass_session_tokens(s, NULL, 0), n);
  pycass_session_tokens(s, got, 300);
  CHECK(memcmp(got, want, n * sizeof *got) == 0, "other tokens");
}

static void test_misuse(pycass_model *m) {
  enum { WRONG = 1 };
  pycass_session *s = new_session(m, 64, 1, 0);
  pycass_token t[4];
  size_t n;
  int32_t v = (int32_t)n_vocab(m), bad[][2] = {{-1, 0}, {0, v}, {INT32_MAX, 0}, {0, INT32_MIN}};
  pycass_sampling o = pycass_sampling_default();
  pycass_speculation spec = pycass_speculation_default();
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_next(s, t, 4, &n)); /* nothing to continue */
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_eval(s, prompt, 0, NULL));
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_prompt(s, prompt, 0, 0, NULL, NULL));
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_trim(s, 1));
  OK(pycass_session_trim(s, 0));
  OK(pycass_session_eval(s, prompt, N_PROMPT, NULL));
  for (int i = 0; i < 4; i++) {
    REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_eval(s, bad[i], 2, NULL));
    REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_prompt(s, bad[i], 2, 0, NULL, NULL));
    check_tokens(s, prompt, N_PROMPT);
  }
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_next(s, t, 0, &n));
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_next(s, NULL, 4, &n));
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_trim(s, N_PROMPT + 1));
  for (int32_t k = -1; k <= 18; k += 19) {
    spec.draft_max = k;
    REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_configure(s, &o, &spec));
  }
  spec = (pycass_speculation){(pycass_spec_mode)7, 4, 0, 0};
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_configure(s, &o, &spec));
  spec = pycass_speculation_default(), o.temperature = NAN;
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_configure(s, &o, &spec));
  OK(pycass_session_next(s, t, 1, &n));
  pycass_session_free(s), pycass_session_free(NULL), pycass_model_free(NULL);
  pycass_session_options silly[] = {{.n_ctx = (1u << 24) + 1}, {.n_ctx = UINT32_MAX}, {.n_batch = 4097},
                                    {.n_threads = 257}, {.n_threads_batch = UINT32_MAX}};
  for (size_t i = 0; i < sizeof silly / sizeof *silly; i++)
    REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_new(m, &silly[i], &s));
}

/* Random operations against a list of tokens; in the end the logits equal those of a fresh session. */
static void test_random_walk(pycass_model *m, int n_steps) {
  enum { CTX = 60 };
  int32_t model[CTX + 32], v = (int32_t)n_vocab(m);
  size_t n = 0, row = (size_t)v;
  pycass_session *s = new_session(m, CTX, 1, 0), *fresh = new_session(m, CTX, 1, 0);
  pycass_speculation spec = {PYCASS_SPEC_ON, 4, 1, 1};
  pycass_sampling o = pycass_sampling_default();
  o.temperature = 1;
  float *want = malloc(row * sizeof *want), *got = malloc(row * sizeof *got);
  OK(pycass_session_configure(s, &o, &spec));
  for (int step = 0; step < n_steps; step++) {
    int32_t ids[CTX + 1];
    size_t k = random_below(12), reused = 0;
    for (size_t i = 0; i < CTX + 1; i++)
      ids[i] = (int32_t)random_below((uint32_t)v);
    switch (random_below(6)) {
    case 0:
      k = min_size(k, n);
      OK(pycass_session_trim(s, n - k));
      n -= k;
      break;
    case 1: {
      pycass_status status = pycass_session_eval(s, ids, k, NULL), expected = !k ? PYCASS_ERR_INVALID_ARGUMENT
                                                                      : n + k > CTX ? PYCASS_ERR_CONTEXT_FULL : PYCASS_OK;
      CHECK(status == expected, "eval of %zu after %zu: %s", k, n, pycass_status_string(status));
      for (size_t i = 0; status == PYCASS_OK && i < k; i++)
        model[n++] = ids[i];
      break;
    }
    case 2: { /* a prompt that shares a beginning */
      size_t same = n ? random_below((uint32_t)min_size(n, CTX) + 1) : 0, len = same + 1 + k;
      memcpy(ids, model, same * sizeof *ids);
      if (len > CTX)
        break;
      int done = 0;
      do /* interruptible */
        OK(pycass_session_prompt(s, ids, len, 1 + random_below(5), &reused, &done));
      while (!done);
      memcpy(model, ids, len * sizeof *ids);
      n = len;
      break;
    }
    case 3: { /* through a saved state, pending token and all */
      size_t size = pycass_session_state_size(s);
      uint8_t *state = malloc(size);
      OK(pycass_session_save_state(s, state, size));
      OK(pycass_session_trim(s, 0));
      OK(pycass_session_load_state(s, state, size));
      n = pycass_session_tokens(s, NULL, 0);
      free(state);
      break;
    }
    default: {
      pycass_token t[8];
      size_t n_out = 0;
      pycass_status status = pycass_session_next(s, t, 1 + k % 8, &n_out);
      if (n > CTX)
        CHECK(status != PYCASS_OK, "a token past the end");
      for (size_t i = 0; status == PYCASS_OK && i < n_out; i++)
        model[n++] = t[i].id;
    }
    }
    check_tokens(s, model, n);
    CHECK(n <= CTX + 1, "%zu tokens in a context of %d", n, CTX);
  }
  n = min_size(n, CTX - 1);
  OK(pycass_session_trim(s, n));
  OK(pycass_session_eval(s, prompt, 1, got));
  model[n++] = prompt[0];
  OK(pycass_session_prompt(fresh, model, n - 1 + (n == 1), 0, NULL, NULL));
  OK(pycass_session_trim(fresh, n - 1));
  OK(pycass_session_eval(fresh, prompt, 1, want));
  CHECK(memcmp(want, got, row * sizeof *want) == 0, "the cache is not what a fresh session has");
  free(want), free(got);
  pycass_session_free(s), pycass_session_free(fresh);
}

static void test_prompt_reuse(pycass_model *m) {
  pycass_session *s = new_session(m, 64, 1, 0);
  size_t reused;
  int done;
  int32_t other[N_PROMPT];
  OK(pycass_session_prompt(s, prompt, N_PROMPT, 4, &reused, &done));
  CHECK(reused == 0 && !done, "%zu reused", reused);
  OK(pycass_session_prompt(s, prompt, N_PROMPT, 0, &reused, &done));
  CHECK(reused == 4 && done, "%zu reused", reused);
  OK(pycass_session_prompt(s, prompt, N_PROMPT, 0, &reused, &done));
  CHECK(reused == N_PROMPT && done, "%zu reused", reused); /* logits and all */
  OK(pycass_session_prompt(s, prompt, 5, 0, &reused, &done));
  CHECK(reused == 4, "%zu reused", reused); /* the last one's logits are gone */
  memcpy(other, prompt, sizeof other), other[2] = 7;
  OK(pycass_session_prompt(s, other, N_PROMPT, 0, &reused, &done));
  CHECK(reused == 2 && done, "%zu reused", reused);
  check_tokens(s, other, N_PROMPT);
  pycass_session_free(s);
}

/* ---- the end of the context ---------------------------------------------------------------------------- */

static size_t fill_context(pycass_model *m, uint32_t n_ctx, size_t n_prompt, pycass_spec_mode mode, int ngram,
                           int32_t *out) {
  pycass_session *s = new_session(m, n_ctx, 1, 0);
  pycass_sampling o = pycass_sampling_default();
  pycass_speculation spec = {mode, 5, 1, ngram};
  int32_t ids[64];
  for (size_t i = 0; i < 64; i++)
    ids[i] = prompt[i % N_PROMPT];
  OK(pycass_session_configure(s, &o, &spec));
  pycass_status status = pycass_session_prompt(s, ids, n_prompt, 0, NULL, NULL);
  CHECK(status == (n_prompt > n_ctx ? PYCASS_ERR_CONTEXT_FULL : PYCASS_OK), "prompt of %zu in %u", n_prompt, n_ctx);
  REFUSED(PYCASS_ERR_CONTEXT_FULL, pycass_session_eval(s, ids, n_ctx + 1, NULL));
  size_t total = 0;
  while (status == PYCASS_OK) {
    pycass_token t[32];
    size_t n = 0;
    status = pycass_session_next(s, t, 32, &n);
    for (size_t i = 0; status == PYCASS_OK && i < n; i++)
      out[total++] = t[i].id;
  }
  CHECK(status == PYCASS_ERR_CONTEXT_FULL, "%s", pycass_status_string(status));
  /* still usable */
  OK(pycass_session_trim(s, 0));
  OK(pycass_session_eval(s, ids, 1, NULL));
  pycass_session_free(s);
  return total;
}

static void test_context_full(pycass_model *m) {
  for (uint32_t n_ctx = 1; n_ctx <= 30; n_ctx += 1 + n_ctx / 3)
    for (size_t n = n_ctx > 3 ? n_ctx - 3 : 1; n <= n_ctx + 1; n++) {
      int32_t plain[64], spec[64];
      size_t n_plain = fill_context(m, n_ctx, n, PYCASS_SPEC_OFF, 0, plain), want = n > n_ctx ? 0 : n_ctx + 1 - n;
      for (int ngram = 0; ngram < 2; ngram++) {
        size_t n_spec = fill_context(m, n_ctx, n, PYCASS_SPEC_ON, ngram, spec);
        CHECK(n_plain == want && n_spec == want, "n_ctx %u, prompt %zu: %zu and %zu tokens", n_ctx, n, n_plain, n_spec);
        CHECK(memcmp(plain, spec, want * sizeof *plain) == 0, "n_ctx %u, prompt %zu: other tokens", n_ctx, n);
      }
    }
}

/* ---- saved state --------------------------------------------------------------------------------------- */

enum { AT_VERSION = 8, AT_MODEL = 12, AT_TOKENS = 16, AT_CRC = 20, STATE_HEAD = 32 };

/* Loads from an exact-size buffer at an odd address. */
static pycass_status load_odd(pycass_session *s, const uint8_t *state, size_t size) {
  uint8_t *p = malloc(size + 1);
  memcpy(p + 1, state, size);
  pycass_status status = pycass_session_load_state(s, p + 1, size);
  free(p);
  return status;
}

static void reseal_state(uint8_t *state, size_t size) {
  put_u32(state + AT_CRC, pycass_crc32c(0, state + STATE_HEAD, size - STATE_HEAD));
}

static uint8_t *make_state(pycass_session *s, size_t n, size_t *size) {
  OK(pycass_session_trim(s, 0));
  for (size_t i = 0; i < n; i++)
    OK(pycass_session_eval(s, prompt + i % N_PROMPT, 1, NULL));
  *size = pycass_session_state_size(s);
  uint8_t *state = malloc(*size);
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_save_state(s, state, *size - 1));
  OK(pycass_session_save_state(s, state, *size));
  return state;
}

static void test_state_damage(pycass_model *m) {
  pycass_session *s = new_session(m, 16, 1, 0), *t = new_session(m, 16, 1, 0);
  size_t size;
  uint8_t *state = make_state(s, 5, &size);
  int32_t before[2] = {7, 8};
  OK(pycass_session_eval(t, before, 2, NULL));
  for (size_t n = 0; n < size; n++)
    CHECK(load_odd(t, state, n) == PYCASS_ERR_CORRUPT, "cut at %zu", n);
  for (size_t i = 0; i < size; i++) {
    uint8_t flip = (uint8_t)(1 << random_below(8));
    state[i] ^= flip;
    pycass_status status = load_odd(t, state, size);
    CHECK(status != PYCASS_OK, "byte %zu changed and taken", i);
    if (i >= STATE_HEAD || (i >= AT_CRC && i < AT_CRC + 4))
      CHECK(status == PYCASS_ERR_CHECKSUM, "byte %zu: %s", i, pycass_status_string(status));
    check_tokens(t, before, 2); /* a refused state changes nothing */
    state[i] ^= flip;
  }
  static const struct { size_t at; uint32_t value; pycass_status want; } fields[] = {
      {0, 0, PYCASS_ERR_CORRUPT}, {AT_VERSION, 2, PYCASS_ERR_STATE_MISMATCH}, {AT_MODEL, 1, PYCASS_ERR_STATE_MISMATCH},
      {AT_TOKENS, 4, PYCASS_ERR_CORRUPT}, {AT_TOKENS, 6, PYCASS_ERR_CORRUPT}, {AT_TOKENS, 17, PYCASS_ERR_CONTEXT_FULL},
      {AT_TOKENS, UINT32_MAX, PYCASS_ERR_CONTEXT_FULL}, {AT_TOKENS, 0x80000000u, PYCASS_ERR_CONTEXT_FULL},
      {24, 1, PYCASS_ERR_CORRUPT}, {28, 1, PYCASS_ERR_CORRUPT}, {STATE_HEAD, UINT32_MAX, PYCASS_ERR_INVALID_ARGUMENT},
      {STATE_HEAD + 16, 75, PYCASS_ERR_INVALID_ARGUMENT}, {STATE_HEAD + 16, 74, PYCASS_OK}};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    put_u32(state + fields[i].at, fields[i].value);
    reseal_state(state, size);
    pycass_status status = load_odd(t, state, size);
    CHECK(status == fields[i].want, "field at %zu = %u: %s", fields[i].at, fields[i].value, pycass_status_string(status));
    free(state), state = make_state(s, 5, &size);
  }
  free(state);
  pycass_session_free(s), pycass_session_free(t);
}

/* A cache of any bits (NaN, infinities) under right checksums: odd numbers, no harm, and nothing of them stays behind. */
static void test_state_any_cache(pycass_model *m) {
  pycass_session *s = new_session(m, 32, 2, 0);
  size_t v = 3 * n_vocab(m);
  float *want = malloc(v * sizeof *want), *got = malloc(v * sizeof *got);
  OK(pycass_session_eval(s, prompt, 3, want));
  OK(pycass_session_trim(s, 0));
  pycass_sampling o = pycass_sampling_default();
  pycass_speculation spec = {PYCASS_SPEC_ON, 4, 1, 0};
  pycass_token t[16];
  size_t size, n;
  for (int i = 0; i < 6; i++) {
    o.temperature = (float)(i % 2);
    OK(pycass_session_configure(s, &o, &spec));
    uint8_t *state = make_state(s, 6, &size);
    for (size_t k = STATE_HEAD + 24; k < size; k++)
      state[k] = i < 2 ? (uint8_t)random_u32() : i < 4 ? 0xff : k % 2 ? 0x7f : 0x80;
    reseal_state(state, size);
    OK(load_odd(s, state, size));
    OK(pycass_session_eval(s, prompt, 3, NULL));
    for (int k = 0; k < 3; k++)
      OK(pycass_session_next(s, t, 5, &n));
    OK(pycass_session_trim(s, 0));
    OK(pycass_session_eval(s, prompt, 3, got));
    CHECK(memcmp(want, got, v * sizeof *got) == 0, "what an odd cache gave lives on");
    OK(pycass_session_trim(s, 0));
    free(state);
  }
  free(want), free(got);
  pycass_session_free(s);
}

/* Encoded blocks of keys and values of any bits: the same bits come back, and using them does no harm. */
static void test_encoded_any_cache(pycass_model *m) {
  enum { N = 230 };
  for (int i = 0; i < 12; i++) {
    pycass_session *s = NULL;
    pycass_kv kv = i % 3 == 0 ? PYCASS_KV_NEST : i % 3 == 1 ? PYCASS_KV_CASS1 : PYCASS_KV_CASS2;
    OK(pycass_session_new(m, &(pycass_session_options){.n_ctx = 900, .n_threads = 1 + (uint32_t)i % 2, .kv = kv}, &s));
    size_t size, n = N, got;
    for (size_t k = 0; k < n; k++)
      OK(pycass_session_eval(s, &(int32_t){(int32_t)random_below(70)}, 1, NULL));
    uint8_t *state = malloc(size = pycass_session_state_size(s)), *back = malloc(size);
    OK(pycass_session_save_state(s, state, size));
    for (size_t k = STATE_HEAD + 4 * n; k < size; k++)
      state[k] = i / 3 == 0 ? (uint8_t)random_u32() : i / 3 == 1 ? 0xff : i / 3 == 2 ? 0 : k % 2 ? 0x7f : 0x80;
    reseal_state(state, size);
    OK(load_odd(s, state, size));
    OK(pycass_session_save_state(s, back, size));
    CHECK(kv == PYCASS_KV_CASS2 || memcmp(state, back, size) == 0, "kind %d: other bits came back", (int)kv);
    pycass_kv_stats stats;
    pycass_session_kv_stats(s, &stats);
    CHECK(stats.encoded == 192 && stats.plain == N - 192, "%zu of %d positions are encoded", stats.encoded, N);
    pycass_token t[16];
    for (int k = 0; k < 8; k++) {
      OK(pycass_session_eval(s, prompt, 3, NULL));
      OK(pycass_session_next(s, t, 5, &got));
    }
    for (size_t keep = 200; keep > 0; keep -= 50) {
      OK(pycass_session_trim(s, keep));
      OK(pycass_session_save_state(s, back, pycass_session_state_size(s)));
    }
    free(state), free(back);
    pycass_session_free(s);
  }
}

static void test_state_resumes(pycass_model *m, pycass_model *other) {
  pycass_session *a = new_session(m, 64, 1, 0), *b = new_session(m, 32, 2, 3), *c = new_session(other, 64, 1, 0);
  size_t size, v = n_vocab(m), n;
  uint8_t *state = make_state(a, 6, &size);
  float *want = malloc(v * sizeof *want), *got = malloc(v * sizeof *got);
  pycass_token t[4];
  OK(pycass_session_load_state(b, state, size));
  check_tokens(b, prompt, 6);
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_session_next(b, t, 4, &n)); /* no logits in a state */
  OK(pycass_session_eval(a, prompt + 6, 1, want));
  OK(pycass_session_eval(b, prompt + 6, 1, got));
  CHECK(memcmp(want, got, v * sizeof *got) == 0, "other logits after a saved state");
  REFUSED(PYCASS_ERR_STATE_MISMATCH, pycass_session_load_state(c, state, size));
  OK(pycass_session_trim(a, 0));
  uint8_t empty[STATE_HEAD];
  CHECK(pycass_session_state_size(a) == STATE_HEAD, "an empty state");
  OK(pycass_session_save_state(a, empty, STATE_HEAD));
  OK(pycass_session_load_state(b, empty, STATE_HEAD));
  check_tokens(b, prompt, 0);
  free(want), free(got), free(state);
  pycass_session_free(a), pycass_session_free(b), pycass_session_free(c);
}

/* A draft that is the target itself is always right, if it has the keys and values of the looked up tokens before it:
 * where it reads a row of the cache that is not written yet, it finds NaN here. */
static void test_draft_after_lookups(void) {
  pycass_model *m = load_model(TINY_RAW, NULL);
  m->has_draft = true;
  pycass_session *s = new_session(m, 200, 1, 0);
  size_t size, n;
  uint8_t *state = make_state(s, 200, &size);
  memset(state + STATE_HEAD + 200 * sizeof(int32_t), 0xff, size - STATE_HEAD - 200 * sizeof(int32_t));
  reseal_state(state, size);
  pycass_sampling o = few_tokens(2);
  pycass_token text[N_COPY], out[32];
  generate(s, &o, (pycass_speculation){PYCASS_SPEC_OFF, 1, 0, 0}, text, N_COPY);
  int32_t ids[N_PROMPT + N_COPY];
  memcpy(ids, prompt, sizeof prompt);
  int n_after = 0;
  for (size_t i = 0; i < N_COPY; i++) {
    OK(pycass_session_load_state(s, state, size));
    OK(pycass_session_configure(s, &o, &(pycass_speculation){PYCASS_SPEC_ON, 1 + (int)i % 16, 1, 1}));
    OK(pycass_session_trim(s, 0));
    OK(pycass_session_prompt(s, ids, N_PROMPT + i, 0, NULL, NULL));
    OK(pycass_session_next(s, out, 1, &n)); /* from the prompt's logits */
    OK(pycass_session_next(s, out + 1, 31, &n));
    check_same(text + i, out, min_size(1 + n, N_COPY - i), "after a cache of NaN");
    pycass_stats stats;
    pycass_session_stats(s, &stats);
    CHECK(stats.accepted == stats.drafted || stats.accepted % 4 != 3, "guess %d, the draft's, was wrong",
          (int)stats.accepted);
    n_after += stats.accepted > 3;
    ids[N_PROMPT + i] = text[i].id;
  }
  CHECK(n_after > 5, "%d times the draft followed right look-ups", n_after);
  free(state);
  pycass_session_free(s);
  pycass_model_free(m);
}

/* ---- hostile models ------------------------------------------------------------------------------------ */

static void test_odd_weights(void) {
  static const uint16_t odd[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f, 0x0001, 0xffff};
  for (int kind = 0; kind < N_TINY; kind++)
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
      TinyModel tiny = tiny_model(kind);
      char path[256];
      tiny.odd_weight = odd[i];
      tiny_write(&tiny, path);
      pycass_model *m = NULL;
      OK(pycass_model_load(path, NULL, &m));
      pycass_token want[N_GEN], got[N_GEN];
      pycass_session *s = new_session(m, 0, 1, 0);
      pycass_sampling o = pycass_sampling_default();
      o.temperature = (float)(i % 2);
      generate(s, &o, (pycass_speculation){PYCASS_SPEC_OFF, 1, 0, 0}, want, 12);
      generate(s, &o, (pycass_speculation){PYCASS_SPEC_ON, 4, 1, 0}, got, 12);
      for (int k = 0; k < 12; k++)
        CHECK(want[k].id == got[k].id, "weights of %04x: token %d", odd[i], k);
      pycass_session_free(s);
      pycass_model_free(m);
      unlink(path);
    }
}

static void test_model_options(void) {
  pycass_model *m = NULL;
  REFUSED(PYCASS_ERR_KERNEL, pycass_model_load(model_path[0], &(pycass_model_options){.kernel = "none"}, &m));
  REFUSED(PYCASS_ERR_IO, pycass_model_load("/nonexistent", NULL, &m));
  REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_model_load(NULL, NULL, &m));
  float rope[5] = {1, 0.5f, 0.2f, 0.1f, 0};
  for (int i = 0; i < 3; i++) {
    float factor[] = {0, NAN, INFINITY};
    pycass_model_options o = {.rope_inv_freq = rope, .rope_attention_factor = factor[i]};
    REFUSED(PYCASS_ERR_INVALID_ARGUMENT, pycass_model_load(model_path[0], &o, &m));
  }
  /* other rope: other logits, and states that do not fit */
  pycass_model *plain = load_model(0, NULL), *changed = NULL;
  OK(pycass_model_load(model_path[0], &(pycass_model_options){.loading = PYCASS_LOAD_READ, .rope_inv_freq = rope,
                                                              .rope_attention_factor = 1.2f}, &changed));
  pycass_session *a = new_session(plain, 16, 1, 0), *b = new_session(changed, 16, 1, 0);
  size_t size;
  uint8_t *state = make_state(a, 4, &size);
  REFUSED(PYCASS_ERR_STATE_MISMATCH, pycass_session_load_state(b, state, size));
  free(state);
  pycass_session_free(a), pycass_session_free(b);
  pycass_model_free(plain), pycass_model_free(changed);
}

static void test_model(int kind, const char *kernel) {
  pycass_model *m = load_model(kind, kernel);
  CHECK(strcmp(pycass_model_kernel(m), kernel) == 0, "%s came for %s", pycass_model_kernel(m), kernel);
  bool few = kind > 0 || strcmp(kernel, "scalar") == 0; /* which is slow */
  test_speculation(m, few);
  test_batches(m, few);
  if (kind >= TINY_CASS1) { /* nothing but their products is their own */
    pycass_model_free(m);
    return;
  }
  test_lookups(m, kind != TINY_RAW, few);
  test_prompt_reuse(m);
  test_random_walk(m, few ? 100 : 400);
  test_context_full(m);
  if (!few) {
    pycass_model *other = load_model(1, kernel);
    test_misuse(m);
    test_state_damage(m);
    test_state_any_cache(m);
    test_encoded_any_cache(m);
    test_state_resumes(m, other);
    pycass_model_free(other);
  }
  pycass_model_free(m);
}

/* The same weights as raw, lossless and not: equal logits but for the latter's. */
static void test_codecs_agree(const char *kernel) {
  enum { N = 40 };
  float *logits[3];
  for (int i = 0; i < 3; i++) {
    pycass_model *m = load_model(TINY_RAW + i, kernel);
    pycass_session *s = new_session(m, N, 2, 0);
    int32_t ids[N];
    for (int t = 0; t < N; t++)
      ids[t] = t * 7 % 70;
    logits[i] = malloc(sizeof(float) * N * 75);
    OK(pycass_session_eval(s, ids, N, logits[i]));
    pycass_session_free(s), pycass_model_free(m);
  }
  bool same_order = strcmp(kernel, "amx") != 0;
  CHECK((memcmp(logits[0], logits[1], sizeof(float) * N * 75) == 0) == same_order, "%s: cass1 and raw", kernel);
  CHECK(memcmp(logits[0], logits[2], sizeof(float) * N * 75) != 0, "%s: cass2 rounds nothing", kernel);
  double error = 0, all = 0;
  for (int i = 0; i < N * 75; i++)
    error += pow((double)(logits[0][i] - logits[2][i]), 2), all += pow((double)logits[0][i], 2);
  CHECK(error < 0.02 * all, "%s: cass2's logits are off by %g of 1", kernel, sqrt(error / all));
  for (int i = 0; i < 3; i++)
    free(logits[i]);
}

int main(void) {
  const char *kernel;
  int runs;
  for (int kind = 0; kind < N_TINY; kind++) {
    TinyModel tiny = tiny_model(kind);
    tiny_write(&tiny, model_path[kind]);
  }
  for (size_t i = 0; (kernel = pycass_kernel_name(i, &runs)) != NULL; i++)
    if (runs)
      test_codecs_agree(kernel);
  for (size_t i = 0; (kernel = pycass_kernel_name(i, &runs)) != NULL; i++)
    for (int kind = 0; runs && kind < N_TINY; kind++)
      test_model(kind, kernel);
  test_draft_after_lookups();
  test_odd_weights();
  test_model_options();
  CHECK(total_accepted > total_drafted / 20 && total_accepted < total_drafted * 19 / 20,
        "%llu of %llu drafted tokens were accepted: the tests did not see both", (unsigned long long)total_accepted,
        (unsigned long long)total_drafted);
  for (int kind = 0; kind < N_TINY; kind++)
    unlink(model_path[kind]);
  printf("ok: %llu of %llu drafted tokens accepted\n", (unsigned long long)total_accepted,
         (unsigned long long)total_drafted);
  return 0;
}
