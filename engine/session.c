/* Sessions: tokens, their cache, and the decode loop. The loop is at the end, in pycass_session_next. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "backend.h"
#include "sampler.h"
#include "spec.h"

enum { DEFAULT_CTX = 4096, DEFAULT_BATCH = 512, MAX_BATCH = 4096, LOGITS_ROWS = SPEC_MAX_GUESS + 1 };

struct pycass_session {
  pycass_model *model;
  const Backend *backend; /* the model's */
  Pool *pool;
  uint32_t n_threads, n_threads_batch;
  uint32_t n_ctx, n_batch;
  KvCache kv;
  State state;
  int32_t *tokens;     /* [n_ctx + 1] */
  size_t n_tokens;     /* known */
  size_t n_past;       /* evaluated: in the cache; n_tokens or n_tokens - 1 */
  const float *logits; /* of the last evaluated token; NULL: not there */
  Sampler sampler;
  Policy policy;
  bool record;
  double *sum, *square; /* of activations, during pycass_session_observe */
  pycass_stats stats;
};

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- making and freeing ------------------------------------------------------------------------- */

static pycass_status choose_options(pycass_session *s, const pycass_session_options *given) {
  pycass_session_options o = given ? *given : (pycass_session_options){0};
  uint32_t train = s->model->config.n_ctx_train;
  s->n_ctx = o.n_ctx ? o.n_ctx : train < DEFAULT_CTX ? train : DEFAULT_CTX;
  s->n_threads = o.n_threads ? o.n_threads : pool_physical_cores();
  s->n_threads_batch = o.n_threads_batch ? o.n_threads_batch : s->n_threads;
  s->n_batch = o.n_batch ? o.n_batch : DEFAULT_BATCH;
  if (s->n_batch > MAX_BATCH)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "a batch of %u tokens; 1 to %d are possible", s->n_batch, MAX_BATCH);
  if (s->n_ctx > 1u << 24)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "a context of %u tokens; at most %u are possible", s->n_ctx, 1u << 24);
  if (s->n_batch > s->n_ctx)
    s->n_batch = s->n_ctx;
  if (s->n_batch < SPEC_MAX_GUESS + 1)
    s->n_batch = SPEC_MAX_GUESS + 1; /* a verification is one pass */
  return PYCASS_OK;
}

static pycass_status start(pycass_session *s, const pycass_session_options *o) {
  const pycass_config *c = &s->model->config;
  RETURN_IF(choose_options(s, o));
  uint32_t threads = s->n_threads > s->n_threads_batch ? s->n_threads : s->n_threads_batch;
  RETURN_IF(pool_new(threads, &s->pool));
  pycass_kv codec = o ? o->kv : PYCASS_KV_AUTO;
  if ((unsigned)codec > PYCASS_KV_CASS2)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no such kind of KV cache: %d", (int)codec);
  RETURN_IF(kv_init(&s->kv, c, s->n_ctx, codec));
  RETURN_IF(s->backend->start(&s->state, &s->kv, s->model, s->n_batch, LOGITS_ROWS, threads));
  RETURN_IF(sampler_init(&s->sampler, s->model->kernels, c->n_token));
  s->tokens = cass_alloc(((size_t)s->n_ctx + 1) * sizeof *s->tokens);
  if (!s->tokens)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a session");
  pycass_speculation speculation = pycass_speculation_default();
  policy_init(&s->policy, &speculation, s->model->has_draft);
  return PYCASS_OK;
}

pycass_status pycass_session_new(pycass_model *model, const pycass_session_options *o, pycass_session **out) {
  pycass_session *s = calloc(1, sizeof *s);
  if (!s)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a session");
  s->model = model, s->backend = model->backend;
  pycass_status status = start(s, o);
  if (status != PYCASS_OK) {
    pycass_session_free(s);
    return status;
  }
  *out = s;
  return PYCASS_OK;
}

void pycass_session_free(pycass_session *s) {
  if (!s)
    return;
  pool_free(s->pool);
  s->backend->end(&s->state, &s->kv);
  kv_free(&s->kv);
  sampler_free(&s->sampler);
  cass_free(s->tokens);
  free(s);
}

uint32_t pycass_session_n_ctx(const pycass_session *s) { return s->n_ctx; }
uint32_t pycass_session_n_threads(const pycass_session *s) { return s->n_threads; }
size_t pycass_session_kv_bytes(const pycass_session *s) { return kv_bytes(&s->kv, s->n_past); }
void pycass_session_kv_stats(const pycass_session *s, pycass_kv_stats *out) {
  *out = (pycass_kv_stats){s->n_past - s->kv.encoded, s->kv.encoded, s->kv.encoded_bytes, s->kv.encoded_draft_bytes};
}
void pycass_session_record(pycass_session *s, int on) { s->record = on != 0; }
void pycass_session_stats(const pycass_session *s, pycass_stats *out) { *out = s->stats; }

size_t pycass_session_tokens(const pycass_session *s, int32_t *out, size_t capacity) {
  if (out)
    memcpy(out, s->tokens, min_size(capacity, s->n_tokens) * sizeof *out);
  return s->n_tokens;
}

pycass_status pycass_session_trim(pycass_session *s, size_t n) {
  if (n > s->n_tokens)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cannot keep %zu of %zu tokens", n, s->n_tokens);
  if (n < s->n_past) {
    s->n_past = n, s->logits = NULL;
    s->backend->kv_trim(&s->kv, (uint32_t)n);
  }
  if (n < s->n_tokens && n == s->n_past)
    s->logits = NULL; /* a draft or a later row may have overwritten them */
  s->n_tokens = n;
  return PYCASS_OK;
}

/* ---- evaluation --------------------------------------------------------------------------------- */

static pycass_status check_ids(const pycass_session *s, const int32_t *ids, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (ids[i] < 0 || (uint32_t)ids[i] >= s->model->config.n_vocab)
      return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "token %d at %zu; the model has tokens 0..%u", ids[i], i,
                       s->model->config.n_vocab - 1);
  return PYCASS_OK;
}

/* Refuses n more tokens while there is still memory for what is there. The system is asked now and then, for the tokens until
 * the next time; encoding makes them smaller later. */
static pycass_status check_memory(const pycass_session *s, size_t n) {
  enum { STRIDE = 256 };
  if (s->kv.device) /* has it all */
    return PYCASS_OK;
  size_t ahead = round_up(s->n_tokens + n, STRIDE) - s->n_tokens, bytes = kv_plain_bytes(&s->kv, ahead);
  if (s->n_tokens / STRIDE != (s->n_tokens + n) / STRIDE && loader_memory_available("") < bytes)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for %zu more tokens behind %zu: their keys and values take %zu MiB", n,
                     s->n_tokens, bytes >> 20);
  return PYCASS_OK;
}

static pycass_status check_room(const pycass_session *s, size_t n) {
  if (s->n_tokens > s->n_ctx || n > s->n_ctx - s->n_tokens)
    return cass_fail(PYCASS_ERR_CONTEXT_FULL, "%zu tokens do not fit: the context holds %u tokens and %zu are used", n,
                     s->n_ctx, s->n_tokens);
  return check_memory(s, n);
}

/* Tokens [pos, pos + n) of the session through the draft or the target; the last n_logits rows of logits. */
static Pass pass_of(pycass_session *s, size_t pos, size_t n, size_t n_logits) {
  return (Pass){.model = s->model,
                .state = &s->state,
                .kv = &s->kv,
                .pool = s->pool,
                .ids = s->tokens + pos,
                .n = (uint32_t)n,
                .pos = (uint32_t)pos,
                .n_logits = (uint32_t)n_logits};
}

static void run(pycass_session *s, bool draft, size_t pos, size_t n, size_t n_logits, uint32_t n_threads) {
  Pass pass = pass_of(s, pos, n, n_logits);
  pass.draft = draft, pass.n_threads = n_threads;
  if (!draft)
    pass.sum = s->sum, pass.square = s->square;
  s->backend->forward(&pass);
}

typedef struct Encoding {
  KvCache *kv;
  atomic_bool failed;
} Encoding;

static void encode_thread(void *arg, uint32_t thread, uint32_t n_threads) {
  Encoding *e = arg;
  for (uint32_t layer = thread; layer < e->kv->n_layer; layer += n_threads)
    if (!kv_encode(e->kv, layer))
      e->failed = true;
}

/* Encodes what is old enough. Without memory for that all stays plain. */
static void encode_old(pycass_session *s, uint32_t n_threads) {
  while (kv_due(&s->kv, (uint32_t)s->n_past)) {
    Encoding e = {.kv = &s->kv};
    pool_run(s->pool, n_threads, encode_thread, &e);
    kv_encoded(&s->kv, !e.failed);
    if (e.failed)
      return;
  }
}

static const float *logits_row(const pycass_session *s, size_t i) { return s->state.logits + i * s->state.ld_vocab; }

/* Evaluates known tokens from n_past up to end. logits [end - n_past][n_vocab], or NULL: of the last one only, in
 * the session. */
static void advance(pycass_session *s, size_t end, float *logits) {
  double t0 = now_ms();
  size_t n_vocab = s->model->config.n_vocab;
  while (s->n_past < end) {
    size_t n = min_size(end - s->n_past, logits ? min_size(s->n_batch, LOGITS_ROWS) : s->n_batch);
    size_t rows = s->sum ? 0 : logits ? n : s->n_past + n == end;
    run(s, false, s->n_past, n, rows, s->n_threads_batch);
    for (size_t i = 0; logits && i < n; i++, logits += n_vocab)
      memcpy(logits, logits_row(s, i), n_vocab * sizeof *logits);
    s->n_past += n;
    s->logits = rows ? logits_row(s, rows - 1) : NULL;
    s->stats.prompt_tokens += n;
    encode_old(s, s->n_threads_batch);
  }
  s->stats.prompt_ms += now_ms() - t0;
}

static pycass_status append(pycass_session *s, const int32_t *ids, size_t n) {
  if (!n)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no tokens to evaluate");
  RETURN_IF(check_ids(s, ids, n));
  RETURN_IF(check_room(s, n));
  if (s->n_past < s->n_tokens)
    advance(s, s->n_tokens, NULL);
  memcpy(s->tokens + s->n_tokens, ids, n * sizeof *ids);
  s->n_tokens += n;
  return PYCASS_OK;
}

pycass_status pycass_session_eval(pycass_session *s, const int32_t *ids, size_t n, float *logits) {
  RETURN_IF(append(s, ids, n));
  advance(s, s->n_tokens, logits);
  return s->backend->status(&s->kv);
}

pycass_status pycass_session_observe(pycass_session *s, const int32_t *ids, size_t n, double *sum, double *square) {
  if (!sum || !square)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no room for the activations' sums");
  if (s->kv.device)
    return cass_fail(PYCASS_ERR_UNSUPPORTED, "activations are observed on the CPU only");
  RETURN_IF(append(s, ids, n));
  s->sum = sum, s->square = square;
  advance(s, s->n_tokens, NULL);
  s->sum = s->square = NULL;
  return PYCASS_OK;
}

pycass_status pycass_session_eval_draft(pycass_session *s, const int32_t *ids, size_t n, float *logits) {
  size_t n_vocab = s->model->config.n_vocab;
  if (!logits)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no room for the draft's logits");
  RETURN_IF(append(s, ids, n));
  size_t first = s->n_tokens - n;
  advance(s, s->n_tokens, NULL);
  for (size_t i = first, some; i < s->n_tokens; i += some) { /* of one block of the cache */
    some = min_size(min_size(s->n_tokens - i, KV_BLOCK - i % KV_BLOCK), min_size(s->n_batch, LOGITS_ROWS));
    kv_expose(&s->kv, (uint32_t)i / KV_BLOCK);
    Pass pass = pass_of(s, i, some, some);
    pass.draft = pass.apart = true, pass.n_threads = s->n_threads_batch;
    s->backend->forward(&pass);
    for (size_t row = 0; row < some; row++, logits += n_vocab)
      memcpy(logits, logits_row(s, row), n_vocab * sizeof *logits);
  }
  kv_hide(&s->kv);
  s->logits = NULL; /* the draft's are there now */
  return s->backend->status(&s->kv);
}

pycass_status pycass_session_prompt(pycass_session *s, const int32_t *ids, size_t n, size_t max_eval, size_t *n_reused,
                                    int *done) {
  if (!n)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "the prompt is empty");
  if (n > s->n_ctx)
    return cass_fail(PYCASS_ERR_CONTEXT_FULL, "the prompt has %zu tokens but the context holds %u", n, s->n_ctx);
  RETURN_IF(check_ids(s, ids, n));
  size_t same = 0, most = min_size(s->n_past, s->logits && s->n_past == n ? n : n - 1);
  while (same < most && s->tokens[same] == ids[same])
    same++;
  if (same < n || s->n_past != n) { /* else all is there, logits too */
    same = min_size(same, n - 1);
    RETURN_IF(pycass_session_trim(s, same));
  }
  s->n_tokens = same;
  RETURN_IF(check_memory(s, n - same));
  size_t end = max_eval && max_eval < n - same ? same + max_eval : n;
  memcpy(s->tokens + same, ids + same, (end - same) * sizeof *ids);
  s->n_tokens = end;
  if (end > same)
    advance(s, end, NULL);
  if (n_reused)
    *n_reused = same;
  if (done)
    *done = end == n;
  return s->backend->status(&s->kv);
}

/* ---- decoding ----------------------------------------------------------------------------------- */

pycass_status pycass_session_configure(pycass_session *s, const pycass_sampling *sampling,
                                       const pycass_speculation *speculation) {
  if ((unsigned)speculation->mode > PYCASS_SPEC_AUTO || speculation->draft_max < 1 ||
      speculation->draft_max > SPEC_MAX_DRAFT)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "draft_max = %d; it must be in 1..%d", speculation->draft_max,
                     SPEC_MAX_DRAFT);
  RETURN_IF(sampler_configure(&s->sampler, sampling));
  policy_init(&s->policy, speculation, s->model->has_draft);
  s->stats = (pycass_stats){0};
  return PYCASS_OK;
}

/* Chooses the token after the session's tokens from a row of target logits, and appends it. */
static int32_t choose(pycass_session *s, const float *logits, pycass_token *out) {
  int32_t id = sampler_pick(&s->sampler, logits, s->tokens, s->n_tokens);
  *out = (pycass_token){.id = id};
  if (s->record) {
    out->logits_crc32c = pycass_crc32c(0, logits, s->model->config.n_vocab * sizeof *logits);
    out->logprob = sampler_logprob(&s->sampler, logits, id);
  }
  s->tokens[s->n_tokens++] = id;
  return id;
}

/* The draft's choice of the next token. It has no keys and values yet from position *evaluated on: of the pending token
 * and of what was looked up since. They are made in the same pass. */
static int32_t draft_token(pycass_session *s, size_t *evaluated, float *confidence) {
  double t0 = now_ms();
  run(s, true, *evaluated, s->n_tokens - *evaluated, 1, s->n_threads);
  *evaluated = s->n_tokens;
  const float *logits = logits_row(s, 0);
  int32_t id = sampler_pick(&s->sampler, logits, s->tokens, s->n_tokens);
  if (!s->policy.options.draft_fixed)
    *confidence = expf(sampler_logprob(&s->sampler, logits, id));
  double ms = now_ms() - t0;
  policy_saw_draft(&s->policy, ms);
  s->stats.draft_ms += ms;
  s->stats.bytes_read += s->model->draft_bytes + kv_read_bytes(&s->kv, s->n_tokens, true);
  return id;
}

/* Appends up to most guessed tokens behind the pending one: looked up further up in the text, or the draft's. Only the
 * cache rows of positions that verification writes again are touched. */
static Draft guess(pycass_session *s, uint32_t most) {
  Draft d = {0};
  size_t evaluated = s->n_past;
  for (; d.n < most; d.n++) {
    Match match = s->policy.options.ngram ? look_up(s->tokens, s->n_tokens) : (Match){0};
    Source source = policy_next(&s->policy, &d, match.length);
    if (source == FROM_NOWHERE)
      break;
    int32_t id = source == FROM_LOOKUP ? s->tokens[match.at] : draft_token(s, &evaluated, &d.confidence[d.n]);
    if (source == FROM_LOOKUP)
      d.match[d.n] = match.length, d.n_lookup++;
    s->tokens[s->n_tokens++] = id;
  }
  return d;
}

/* One target pass over the pending token and n_guess guessed ones. Emits the target's own choices: the accepted guesses,
 * which equal them, and one more. */
static size_t verify(pycass_session *s, uint32_t n_guess, pycass_token *out) {
  double t0 = now_ms();
  int32_t guessed[SPEC_MAX_GUESS];
  size_t pending = s->n_past;
  memcpy(guessed, s->tokens + pending + 1, n_guess * sizeof *guessed);
  run(s, false, pending, n_guess + 1, n_guess + 1, s->n_threads);
  s->stats.bytes_read += s->model->target_bytes + kv_read_bytes(&s->kv, s->n_tokens, false);
  s->n_tokens = pending + 1;
  size_t n = 0;
  bool same = true;
  while (same) {
    int32_t id = choose(s, logits_row(s, n), &out[n]);
    same = n < n_guess && id == guessed[n];
    n++;
  }
  s->n_past = pending + n;
  s->logits = logits_row(s, n - 1);
  s->stats.verify_ms += now_ms() - t0;
  return n;
}

static void count(pycass_session *s, const Draft *d, size_t accepted) {
  s->stats.steps++;
  s->stats.drafted += d->n, s->stats.accepted += accepted;
  s->stats.ngram_drafted += d->n_lookup;
  for (size_t i = 0; i < accepted; i++)
    s->stats.ngram_accepted += d->match[i] > 0;
}

/* The last n tokens tell what look-ups of them would have been worth. */
static void learn_matches(pycass_session *s, size_t n) {
  for (size_t i = s->n_tokens - n; i < s->n_tokens; i++) {
    Match match = look_up(s->tokens, i);
    if (match.length)
      policy_saw_match(&s->policy, match.length, s->tokens[match.at] == s->tokens[i]);
  }
}

static void step(pycass_session *s, pycass_token *out, size_t capacity, size_t *n_out) {
  double t0 = now_ms(), verify0 = s->stats.verify_ms;
  uint32_t most = (uint32_t)min_size(min_size(capacity - 1, s->n_ctx - s->n_tokens), SPEC_MAX_GUESS);
  Draft d = {0};
  if (most && policy_guesses(&s->policy))
    d = guess(s, most);
  *n_out = verify(s, d.n, out);
  count(s, &d, *n_out - 1);
  if (s->policy.options.mode != PYCASS_SPEC_OFF && s->policy.options.ngram)
    learn_matches(s, *n_out);
  policy_saw_step(&s->policy, &d, (uint32_t)*n_out - 1, s->stats.verify_ms - verify0, now_ms() - t0);
}

pycass_status pycass_session_next(pycass_session *s, pycass_token *out, size_t capacity, size_t *n_out) {
  if (!out || !capacity || !n_out)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no room for a token");
  if (s->n_past == s->n_tokens && !s->logits)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "nothing to continue: evaluate a prompt first");
  if (s->n_tokens > s->n_ctx)
    return cass_fail(PYCASS_ERR_CONTEXT_FULL, "the context of %u tokens is full", s->n_ctx);
  RETURN_IF(check_memory(s, SPEC_MAX_GUESS + 1));
  double t0 = now_ms();
  if (s->n_past == s->n_tokens) {
    choose(s, s->logits, out);
    *n_out = 1;
  } else {
    step(s, out, capacity, n_out);
    encode_old(s, s->n_threads);
  }
  s->stats.tokens += *n_out;
  s->stats.decode_ms += now_ms() - t0;
  s->stats.spec_disabled = s->policy.disabled;
  s->stats.plain_ms_per_token = s->policy.verify_ms[1];
  s->stats.spec_ms_per_token = policy_spec_ms_per_token(&s->policy);
  return s->backend->status(&s->kv);
}

/* ---- saved state -------------------------------------------------------------------------------- */

/* Header: magic, version, the model's fingerprint, number of tokens, CRC-32C of the rest; then tokens and cache. */
enum { STATE_HEADER = 32, STATE_VERSION = 1 };
static const uint8_t state_magic[8] = {0x89, 'C', 'A', 'S', 'S', 'S', 'T', 0x1a};

size_t pycass_session_state_size(const pycass_session *s) {
  return STATE_HEADER + s->n_past * sizeof(int32_t) + kv_plain_bytes(&s->kv, s->n_past);
}

/* Rope settings change what a cache means, so they are part of what makes a model. */
static uint32_t fingerprint(const pycass_model *m) {
  uint32_t crc = pycass_crc32c(m->file->format.header_crc, m->rope_inv_freq, m->config.head_dim / 2 * sizeof(float));
  return pycass_crc32c(crc, &m->config.rope_attention_factor, sizeof(float));
}

pycass_status pycass_session_save_state(const pycass_session *s, uint8_t *out, size_t size) {
  if (size != pycass_session_state_size(s))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "the state has %zu bytes, not %zu", pycass_session_state_size(s), size);
  uint32_t head[6] = {STATE_VERSION, fingerprint(s->model), (uint32_t)s->n_past};
  uint8_t *body = out + STATE_HEADER;
  memcpy(body, s->tokens, s->n_past * sizeof(int32_t));
  s->backend->kv_save(&s->kv, 0, (uint32_t)s->n_past, body + s->n_past * sizeof(int32_t));
  head[3] = pycass_crc32c(0, body, size - STATE_HEADER);
  memcpy(out, state_magic, sizeof state_magic);
  memcpy(out + sizeof state_magic, head, sizeof head);
  return s->backend->status(&s->kv);
}

pycass_status pycass_session_load_state(pycass_session *s, const uint8_t *data, size_t size) {
  if (size < STATE_HEADER || memcmp(data, state_magic, sizeof state_magic) != 0)
    return cass_fail(PYCASS_ERR_CORRUPT, "this is not a saved state");
  uint32_t head[6];
  memcpy(head, data + sizeof state_magic, sizeof head);
  if (head[0] != STATE_VERSION || head[1] != fingerprint(s->model))
    return cass_fail(PYCASS_ERR_STATE_MISMATCH, "the state was saved from another model or version");
  size_t n = head[2];
  if (n > s->n_ctx)
    return cass_fail(PYCASS_ERR_CONTEXT_FULL, "the state has %zu tokens but the context holds %u", n, s->n_ctx);
  if (size != STATE_HEADER + n * sizeof(int32_t) + kv_plain_bytes(&s->kv, n) || head[4] || head[5])
    return cass_fail(PYCASS_ERR_CORRUPT, "the saved state has the wrong size");
  if (pycass_crc32c(0, data + STATE_HEADER, size - STATE_HEADER) != head[3])
    return cass_fail(PYCASS_ERR_CHECKSUM, "the saved state is damaged");
  for (size_t i = 0; i < n; i++) { /* data may have any alignment */
    int32_t id = (int32_t)load_u32(data + STATE_HEADER + i * sizeof id);
    RETURN_IF(check_ids(s, &id, 1));
  }
  memcpy(s->tokens, data + STATE_HEADER, n * sizeof(int32_t));
  s->backend->kv_trim(&s->kv, 0);
  s->backend->kv_restore(&s->kv, 0, (uint32_t)n, data + STATE_HEADER + n * sizeof(int32_t));
  s->n_tokens = s->n_past = n;
  s->logits = NULL;
  encode_old(s, s->n_threads_batch);
  return s->backend->status(&s->kv);
}
