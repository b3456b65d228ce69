/* Attention: scores of all positions, softmax, mix of the values. A few tokens go through the cache together, so that an encoded
 * block is decoded once for all of them. Where there is little to see, a thread does all three for a KV head; where there is
 * much, all threads share the positions of the scores and then the columns of the mix. No result depends on that. */
#include "attend.h"

#include <math.h>

enum { TOKENS = 8, COLUMNS = 32, LITTLE = 768 }; /* tokens together; columns of a piece of the mix; positions */

/* A few tokens, and heads that share a KV head. */
typedef struct Work {
  const Pass *p;
  uint32_t layer, token, n_token, kv_head, head, n_head;
  float *scores;      /* [n_token][n_head][ld] */
  size_t ld;
  uint16_t *scratch;  /* the thread's, for decoded rows */
} Work;

static uint32_t group_of(const pycass_config *c) { return c->n_head / c->n_head_kv; }
static size_t little_ld(void) { return LITTLE + 64; }

size_t attend_scores_size(const pycass_config *c, uint32_t n_ctx, uint32_t n_threads) {
  size_t apart = (size_t)n_threads * TOKENS * group_of(c) * little_ld();
  size_t together = (size_t)TOKENS * c->n_head * round_up((size_t)n_ctx + 16, 64);
  return apart > together ? apart : together;
}

/* Positions that a token of the work sees. */
static uint32_t seen(const Work *w, uint32_t t) { return w->p->pos + w->token + t + 1; }
static uint32_t pieces(const Work *w) { return (seen(w, w->n_token - 1) + KV_BLOCK - 1) / KV_BLOCK; }

static AttentionArgs args_of(const Work *w, uint32_t t) {
  const pycass_config *c = &w->p->model->config;
  size_t at = (size_t)(w->token + t) * w->p->state->ld_q + (size_t)w->head * c->head_dim;
  return (AttentionArgs){.q = w->p->state->q + at,
                         .n_head = w->n_head,
                         .head_dim = c->head_dim,
                         .scale = 1.0f / sqrtf((float)c->head_dim),
                         .scores = w->scores + (size_t)t * w->n_head * w->ld,
                         .ld_scores = w->ld,
                         .out = w->p->state->att + at};
}

/* Of a block's positions those that a token sees. */
static uint32_t in_block(const Work *w, uint32_t t, uint32_t block) {
  uint32_t n = seen(w, t), first = block * KV_BLOCK;
  return n <= first ? 0 : n - first < KV_BLOCK ? n - first : KV_BLOCK;
}

static KvRows rows_of(const Work *w, int which, uint32_t block, uint32_t c0, uint32_t c1) {
  return kv_rows(w->p->kv, w->p->model->kernels, w->layer, w->kv_head, which, block, w->p->draft, c0, c1, w->scratch);
}

static bool draft_unit(const Work *w, int which, uint32_t block, uint32_t c0, uint32_t c1, Matrix *out) {
  return w->p->draft && kv_draft_unit(w->p->kv, w->layer, w->kv_head, which, block, c0, c1, out);
}

static void score(const Work *w, uint32_t block) {
  uint32_t head_dim = w->p->model->config.head_dim;
  Matrix draft;
  if (draft_unit(w, KV_KEYS, block, 0, head_dim, &draft)) { /* seen by all: it is older than the pass */
    for (uint32_t t = 0; t < w->n_token; t++) {
      AttentionArgs a = args_of(w, t);
      w->p->model->kernels->scores_draft(&a, &draft, block * KV_BLOCK);
    }
    return;
  }
  KvRows keys = rows_of(w, KV_KEYS, block, 0, head_dim);
  for (uint32_t t = 0; t < w->n_token; t++) {
    AttentionArgs a = args_of(w, t);
    uint32_t n = in_block(w, t, block);
    if (n)
      w->p->model->kernels->scores(&a, keys.row, keys.stride, block * KV_BLOCK, n);
  }
}

/* The same of an encoded block for the draft: a product with int8 scores, by planes A and X alone. */
static void mix_draft(const Work *w, const Matrix *values, uint32_t block, uint32_t c0, uint32_t c1) {
  enum { HEADS = 8, MOST = KV_HEAD_MOST };
  const Kernels *kernels = w->p->model->kernels;
  int8_t q[HEADS * KV_BLOCK];
  float scale[HEADS], y[HEADS * MOST];
  int32_t sum[HEADS];
  for (uint32_t t = 0; t < w->n_token; t++) {
    AttentionArgs a = args_of(w, t);
    for (uint32_t h = 0, n; h < w->n_head; h += n) {
      n = (uint32_t)min_size(HEADS, w->n_head - h);
      Acts acts = {.q = q, .scale = scale, .sum = sum};
      kernels->quantize(&acts, a.scores + h * w->ld + block * KV_BLOCK, w->ld, n, 1);
      kernels->matmul_draft(y, MOST, values, &acts, n, c0 / NEST_ROWS, (c1 + NEST_ROWS - 1) / NEST_ROWS);
      for (uint32_t i = 0; i < n; i++) {
        float *out = a.out + (size_t)(h + i) * a.head_dim + c0;
        if (block == 0)
          memset(out, 0, (c1 - c0) * sizeof *out);
        kernels->add(out, y + i * MOST + c0, c1 - c0);
      }
    }
  }
}

static void mix(const Work *w, uint32_t c0, uint32_t c1) {
  for (uint32_t block = 0; block < pieces(w); block++) {
    Matrix draft;
    if (draft_unit(w, KV_VALUES, block, c0, c1, &draft)) {
      mix_draft(w, &draft, block, c0, c1);
      continue;
    }
    KvRows values = rows_of(w, KV_VALUES, block, c0, c1);
    for (uint32_t t = 0; t < w->n_token; t++) {
      AttentionArgs a = args_of(w, t);
      uint32_t n = in_block(w, t, block);
      if (n)
        w->p->model->kernels->mix(&a, values.row, values.stride, block * KV_BLOCK, n, c0, c1);
    }
  }
}

static void soften(const Work *w, uint32_t t, uint32_t head) {
  w->p->model->kernels->softmax(w->scores + ((size_t)t * w->n_head + head) * w->ld, seen(w, t));
}

/* ---- one thread for a KV head, or for some of its heads ------------------------------------------ */

static void attend_apart(Work w, uint32_t thread, uint32_t n_threads) {
  const pycass_config *c = &w.p->model->config;
  uint32_t chunks = (w.p->n + TOKENS - 1) / TOKENS, group = group_of(c), parts = 1;
  while (parts < group && (uint64_t)chunks * c->n_head_kv * parts < 2 * (uint64_t)n_threads)
    parts++; /* to give every thread some */
  uint32_t together = (group + parts - 1) / parts;
  parts = (group + together - 1) / together;
  w.scores += (size_t)thread * TOKENS * group * little_ld(), w.ld = little_ld();
  for (uint32_t unit = thread; unit < chunks * c->n_head_kv * parts; unit += n_threads) {
    uint32_t first = unit % parts * together;
    w.token = unit / parts / c->n_head_kv * TOKENS, w.n_token = (uint32_t)min_size(TOKENS, w.p->n - w.token);
    w.kv_head = unit / parts % c->n_head_kv, w.head = w.kv_head * group + first;
    w.n_head = (uint32_t)min_size(together, group - first);
    for (uint32_t block = 0; block < pieces(&w); block++)
      score(&w, block);
    for (uint32_t i = 0; i < w.n_token * w.n_head; i++)
      soften(&w, i / w.n_head, i % w.n_head);
    mix(&w, 0, c->head_dim);
  }
}

/* ---- all threads for a few tokens ---------------------------------------------------------------- */

static Work with_head(Work w, uint32_t kv_head) {
  w.kv_head = kv_head, w.head = kv_head * w.n_head;
  w.scores += (size_t)kv_head * TOKENS * w.n_head * w.ld;
  return w;
}

/* Columns of a piece of the mix: all of a head, or fewer to give all threads the same. cass blocks are decoded by rows,
 * whatever columns are wanted. */
static uint32_t column_width(const KvCache *kv, uint32_t n_threads) {
  bool whole = kv->codec >= PYCASS_KV_CASS1 || kv->n_head % n_threads == 0;
  return whole ? kv->head_dim : COLUMNS;
}

static void attend_together(Work w, uint32_t thread, uint32_t n_threads) {
  const pycass_config *c = &w.p->model->config;
  uint32_t width = column_width(w.p->kv, n_threads), n_column = (c->head_dim + width - 1) / width;
  w.n_head = group_of(c), w.ld = w.p->state->ld_scores;
  for (w.token = 0; w.token < w.p->n; w.token += TOKENS) {
    w.n_token = (uint32_t)min_size(TOKENS, w.p->n - w.token);
    Range s = share(c->n_head_kv * pieces(&w), thread, n_threads);
    for (uint32_t i = s.from; i < s.to; i++) {
      Work one = with_head(w, i / pieces(&w));
      score(&one, i % pieces(&w));
    }
    pool_barrier(w.p->pool);
    s = share(c->n_head * w.n_token, thread, n_threads);
    for (uint32_t i = s.from; i < s.to; i++) {
      Work one = with_head(w, i / w.n_token / w.n_head);
      soften(&one, i % w.n_token, i / w.n_token % w.n_head);
    }
    pool_barrier(w.p->pool);
    s = share(c->n_head_kv * n_column, thread, n_threads);
    for (uint32_t i = s.from; i < s.to; i++) {
      Work one = with_head(w, i / n_column);
      uint32_t c0 = i % n_column * width;
      mix(&one, c0, (uint32_t)min_size(c0 + width, c->head_dim));
    }
    if (w.token + TOKENS < w.p->n)
      pool_barrier(w.p->pool); /* the next tokens' scores take the same place */
  }
}

/* ---- tokens that do not see each other ------------------------------------------------------------ */

/* One after the other, each with its own key and value in the cache for that time. */
static void attend_alone(Work w, uint32_t thread, uint32_t n_threads) {
  const pycass_config *c = &w.p->model->config;
  size_t row = c->head_dim * sizeof(uint16_t);
  uint16_t key[KV_HEAD_MOST], value[KV_HEAD_MOST];
  w.n_head = group_of(c), w.ld = w.p->state->ld_scores, w.n_token = 1;
  for (uint32_t kv_head = thread; kv_head < c->n_head_kv; kv_head += n_threads)
    for (w.token = 0; w.token < w.p->n; w.token++) {
      Work one = with_head(w, kv_head);
      uint16_t *k = w.p->kv->k + kv_at(w.p->kv, w.layer, kv_head, w.p->pos + w.token);
      uint16_t *v = w.p->kv->v + kv_at(w.p->kv, w.layer, kv_head, w.p->pos + w.token);
      memcpy(key, k, row), memcpy(value, v, row);
      size_t own = (size_t)w.token * w.p->state->ld_kv + kv_head * c->head_dim;
      kv_put(w.p->kv, w.p->model->kernels, w.layer, kv_head, w.p->pos + w.token, w.p->state->k + own, w.p->state->v + own);
      for (uint32_t block = 0; block < pieces(&one); block++)
        score(&one, block);
      for (uint32_t head = 0; head < one.n_head; head++)
        soften(&one, 0, head);
      mix(&one, 0, c->head_dim);
      memcpy(k, key, row), memcpy(v, value, row);
    }
}

void attend(const Pass *p, uint32_t layer, uint32_t thread, uint32_t n_threads) {
  State *s = p->state;
  Work w = {.p = p, .layer = layer, .scores = s->scores, .scratch = s->kv_rows + (size_t)thread * KV_BLOCK * s->ld_head};
  if (p->apart)
    attend_alone(w, thread, n_threads);
  else if (p->pos + p->n > LITTLE)
    attend_together(w, thread, n_threads);
  else
    attend_apart(w, thread, n_threads);
  pool_barrier(p->pool);
}
