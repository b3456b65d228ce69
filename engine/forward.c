/* The CPU backend. All threads run pass_thread; it reads from top to bottom like the model's formula, and each
 * barrier ends a phase whose results other threads need. Work is divided in a fixed way that no result depends on:
 * products by blocks of 16 rows, which go to whoever is free, the rest by tokens, heads or groups of
 * columns. */
#include "attend.h"
#include "backend.h"

#include <math.h>

/* ---- working memory ----------------------------------------------------------------------------- */

size_t state_widest(const pycass_config *c) {
  size_t q = (size_t)c->n_head * c->head_dim, n = c->n_embd > c->n_ff ? c->n_embd : c->n_ff;
  return round_up(n > q ? n : q, NEST_COLS);
}

pycass_status state_shape(State *s, const pycass_model *m, uint32_t n_batch, uint32_t n_logits) {
  const pycass_config *c = &m->config;
  *s = (State){.n_batch = n_batch, .n_logits = n_logits};
  s->ld_embd = (uint32_t)round_up(c->n_embd, 64), s->ld_ff = (uint32_t)round_up(c->n_ff, 64);
  s->ld_q = (uint32_t)round_up((size_t)c->n_head * c->head_dim, 64);
  s->ld_kv = (uint32_t)round_up((size_t)c->n_head_kv * c->head_dim, 64);
  s->ld_vocab = (uint32_t)round_up(c->n_vocab, 64);
  s->logits = cass_alloc((size_t)n_logits * s->ld_vocab * sizeof(float));
  return s->logits ? PYCASS_OK : cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for %u rows of logits", n_logits);
}

static pycass_status state_init(State *s, const pycass_model *m, uint32_t n_batch, uint32_t n_logits, uint32_t n_ctx,
                                uint32_t n_threads) {
  const pycass_config *c = &m->config;
  size_t wide = state_widest(c), b = n_batch;
  RETURN_IF(state_shape(s, m, n_batch, n_logits));
  s->ld_scores = round_up((size_t)n_ctx + 16, 64), s->ld_head = (uint32_t)round_up(c->head_dim, NEST_ROWS);
  struct {
    float **p;
    size_t n;
  } want[] = {{&s->x, b * s->ld_embd},
              {&s->h, b * s->ld_embd},
              {&s->q, b * s->ld_q},
              {&s->k, b * s->ld_kv},
              {&s->v, b * s->ld_kv},
              {&s->att, b * s->ld_q},
              {&s->gate, b * s->ld_ff},
              {&s->up, b * s->ld_ff},
              {&s->cos_sin, b * c->head_dim},
              {&s->scores, attend_scores_size(c, n_ctx, n_threads)},
              {&s->acts.scale, b * wide / NEST_COLS}};
  bool ok = true;
  for (size_t i = 0; i < sizeof want / sizeof *want; i++)
    ok &= (*want[i].p = cass_alloc(want[i].n * sizeof(float))) != NULL;
  ok &= (s->acts.panels = cass_alloc(round_up(b, PANEL_TOKENS) * wide * sizeof(uint16_t))) != NULL;
  ok &= (s->acts.hot = cass_alloc(round_up(b, PANEL_TOKENS) * NEST_COLS * sizeof(uint16_t))) != NULL;
  ok &= (s->kv_rows = cass_alloc((size_t)n_threads * KV_BLOCK * s->ld_head * sizeof(uint16_t))) != NULL;
  ok &= (s->acts.q = cass_alloc(b * wide)) != NULL;
  ok &= (s->acts.sum = cass_alloc(b * wide / NEST_COLS * sizeof(int32_t))) != NULL;
  if (ok)
    return PYCASS_OK;
  state_free(s);
  return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for batches of %u tokens", n_batch);
}

void state_free(State *s) {
  void *all[] = {s->x,       s->h,      s->q,      s->k,           s->v,        s->att,    s->gate,       s->up,
                 s->cos_sin, s->logits, s->scores, s->acts.panels, s->acts.hot, s->acts.q, s->acts.scale, s->acts.sum,
                 s->kv_rows};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    cass_free(all[i]);
  *s = (State){0};
}

/* ---- dividing work ------------------------------------------------------------------------------ */

/* A product that this pass owes: y = W x for m tokens. */
typedef struct Product {
  const Matrix *w;
  float *y;
  size_t ldy;
} Product;

/* Row blocks [from, to) of a product. */
static void multiply_blocks(const Pass *p, const Product *product, uint32_t m, uint32_t from, uint32_t to) {
  const Kernels *kernels = p->model->kernels;
  const Matrix *w = product->w, view = cass_draft_view(w);
  bool draft = p->draft && !w->draft_full;
  if (draft && w->codec == PYCASS_CODEC_NEST)
    kernels->matmul_draft(product->y, product->ldy, w, &p->state->acts, m, from, to);
  else
    kernels->matmul(product->y, product->ldy, draft ? &view : w, &p->state->acts, m, from, to);
}

/* Products of m tokens' activations, the ones made last by ready(): their row blocks are one list, shared out piece by
 * piece. */
static void multiply(const Pass *p, const Product *list, int n, uint32_t m) {
  uint32_t total = 0, from, to;
  for (int i = 0; i < n; i++)
    total += list[i].w->n_block;
  while (pool_claim(p->pool, total, &from, &to))
    for (int i = 0, first = 0; i < n; first += (int)list[i++].w->n_block) {
      uint32_t low = (uint32_t)first, high = low + list[i].w->n_block;
      if (from < high && to > low)
        multiply_blocks(p, &list[i], m, from > low ? from - low : 0, (to < high ? to : high) - low);
    }
}

/* Puts the hot columns of groups r aside: into the product's token i, and zeros in their place. Returns how many;
 * saved [HOT_MOST]. */
static uint32_t take_hot(const Pass *p, uint32_t i, float *row, const Matrix *w, Range r, float *saved) {
  uint32_t n = 0;
  for (uint32_t c = 0; c < w->n_hot; c++)
    if (w->hot[c] / NEST_COLS >= r.from && w->hot[c] / NEST_COLS < r.to) {
      float *x = &row[w->hot[c]];
      p->state->acts.hot[panel_at(i, 1, 0) + c / 4 * PANEL_TOKENS * 4 + c % 4] = bf16_from_f32(*x * PANEL_SCALE);
      saved[n++] = *x, *x = 0;
    }
  return n;
}

static void put_back_hot(float *row, const Matrix *w, Range r, const float *saved) {
  for (uint32_t c = 0; c < w->n_hot; c++)
    if (w->hot[c] / NEST_COLS >= r.from && w->hot[c] / NEST_COLS < r.to)
      row[w->hot[c]] = *saved++;
}

/* Groups r of a row of activations, of the product's token i, as w and all matrices of the same input want them. Columns from
 * w->cols on are made zero: a NaN there would spoil every sum, padding weights or not. */
static void ready(const Pass *p, uint32_t i, float *row, const Matrix *w, Range r) {
  const Kernels *kernels = p->model->kernels;
  float saved[HOT_MOST];
  const Acts *a = &p->state->acts;
  float *x = row + (size_t)r.from * NEST_COLS;
  if (r.to == w->n_group)
    memset(row + w->cols, 0, ((size_t)w->n_group * NEST_COLS - w->cols) * sizeof *row);
  uint32_t n_hot = take_hot(p, i, row, w, r, saved);
  if (!p->draft || p->model->draft_reads_panels)
    kernels->round(a->panels + panel_at(i, w->n_group, r.from), x, r.to - r.from);
  if (p->draft) {
    size_t at = (size_t)i * w->n_group + r.from;
    Acts part = {.q = a->q + at * NEST_COLS, .scale = a->scale + at, .sum = a->sum + at};
    kernels->quantize(&part, x, 0, 1, r.to - r.from);
  }
  if (n_hot && p->sum)
    put_back_hot(row, w, r, saved);
}

/* ---- calibration -------------------------------------------------------------------------------- */

/* Where a layer's inputs lie among the channels (pycass.h). */
enum { IN_QKV, IN_O, IN_FFN, IN_DOWN, N_IN };

static size_t channel_at(const pycass_config *c, uint32_t layer, int input) {
  size_t q = (size_t)c->n_head * c->head_dim, at[N_IN] = {0, c->n_embd, c->n_embd + q, 2 * (size_t)c->n_embd + q};
  return layer * (at[IN_DOWN] + c->n_ff) + at[input];
}

size_t pycass_model_n_channel(const pycass_model *m) {
  return channel_at(&m->config, m->config.n_layer, 0) + m->config.n_embd;
}

/* Adds rows of n activations to the channels from at on; threads share the columns. */
static void observe(const Pass *p, size_t at, const float *rows, size_t ld, uint32_t n, Range columns) {
  if (!p->sum)
    return;
  for (uint32_t i = 0; i < p->n; i++)
    for (uint32_t k = columns.from; k < columns.to && k < n; k++) {
      double x = rows[i * ld + k];
      p->sum[at + k] += x, p->square[at + k] += x * x;
    }
}

/* ---- phases ------------------------------------------------------------------------------------- */

static void embed(const Pass *p, uint32_t i) {
  const pycass_config *c = &p->model->config;
  State *s = p->state;
  float *x = s->x + (size_t)i * s->ld_embd, *cos_sin = s->cos_sin + (size_t)i * c->head_dim;
  const Matrix *rows = &p->model->embedding;
  if (p->draft && !rows->draft_full && !matrix_is_cass(rows)) /* a row costs nothing, and pruned it would be missed */
    matrix_row_draft(rows, (uint32_t)p->ids[i], x);
  else
    matrix_row_decode(rows, (uint32_t)p->ids[i], p->model->kernels->nest_decode_tile, x);
  for (uint32_t j = 0; j < c->head_dim / 2; j++) {
    /* the angle is a float product, as in the implementations that models are trained with */
    float angle = (float)(p->pos + i) * p->model->rope_inv_freq[j];
    cos_sin[j] = (float)cos((double)angle) * c->rope_attention_factor;
    cos_sin[c->head_dim / 2 + j] = (float)sin((double)angle) * c->rope_attention_factor;
  }
}

/* h = norm(x), after x += h if there is something to add; ready for w, a product whose first token is the given one */
static void add_norm(const Pass *p, uint32_t i, bool add, const uint16_t *weight, const Matrix *w, uint32_t first) {
  const pycass_config *c = &p->model->config;
  State *s = p->state;
  float *x = s->x + (size_t)i * s->ld_embd, *h = s->h + (size_t)i * s->ld_embd;
  if (add)
    p->model->kernels->add(x, h, c->n_embd);
  p->model->kernels->rmsnorm(h, x, weight, c->n_embd, c->rms_eps);
  ready(p, i - first, h, w, (Range){0, w->n_group});
}

static void norm_heads(const Pass *p, float *x, uint32_t n_head, const uint16_t *weight) {
  const pycass_config *c = &p->model->config;
  for (uint32_t h = 0; weight && h < n_head; h++)
    p->model->kernels->rmsnorm(x + (size_t)h * c->head_dim, x + (size_t)h * c->head_dim, weight, c->head_dim,
                               c->rms_eps);
}

/* Bias, head norms, rope; then the token's keys and values go to the cache. */
static void finish_qkv(const Pass *p, uint32_t i, const Layer *l, uint32_t layer) {
  const pycass_config *c = &p->model->config;
  const Kernels *kernels = p->model->kernels;
  State *s = p->state;
  float *q = s->q + (size_t)i * s->ld_q, *k = s->k + (size_t)i * s->ld_kv, *v = s->v + (size_t)i * s->ld_kv;
  const float *cos_sin = s->cos_sin + (size_t)i * c->head_dim;
  if (l->q_bias)
    kernels->add_bf16(q, l->q_bias, (size_t)c->n_head * c->head_dim);
  if (l->k_bias)
    kernels->add_bf16(k, l->k_bias, (size_t)c->n_head_kv * c->head_dim);
  if (l->v_bias)
    kernels->add_bf16(v, l->v_bias, (size_t)c->n_head_kv * c->head_dim);
  norm_heads(p, q, c->n_head, l->q_norm);
  norm_heads(p, k, c->n_head_kv, l->k_norm);
  kernels->rope(q, c->n_head, c->head_dim, cos_sin);
  kernels->rope(k, c->n_head_kv, c->head_dim, cos_sin);
  for (uint32_t h = 0; h < c->n_head_kv && !p->apart; h++)
    kv_put(p->kv, kernels, layer, h, p->pos + i, k + (size_t)h * c->head_dim, v + (size_t)h * c->head_dim);
}

/* gate = silu(gate) * up for a range of column groups of one token */
static void activate(const Pass *p, uint32_t i, const Matrix *down, Range r) {
  State *s = p->state;
  size_t at = (size_t)i * s->ld_ff + (size_t)r.from * NEST_COLS;
  p->model->kernels->swiglu(s->gate + at, s->up + at, (size_t)(r.to - r.from) * NEST_COLS);
  ready(p, i, s->gate + (size_t)i * s->ld_ff, down, r);
}

static void pass_thread(const Pass *p, uint32_t thread, uint32_t n_threads) {
  const pycass_model *m = p->model;
  const pycass_config *c = &m->config;
  State *s = p->state;
  Range embd = share(s->ld_embd, thread, n_threads);

  for (uint32_t i = thread; i < p->n; i += n_threads)
    embed(p, i);
  for (uint32_t layer = 0; layer < c->n_layer; layer++) {
    const Layer *l = &m->layer[layer];

    for (uint32_t i = thread; i < p->n; i += n_threads)
      add_norm(p, i, layer > 0, l->attn_norm, &l->q, 0);
    pool_barrier(p->pool);
    observe(p, channel_at(c, layer, IN_QKV), s->h, s->ld_embd, c->n_embd, embd);
    Product qkv[] = {{&l->q, s->q, s->ld_q}, {&l->k, s->k, s->ld_kv}, {&l->v, s->v, s->ld_kv}};
    multiply(p, qkv, 3, p->n);
    pool_barrier(p->pool);
    for (uint32_t i = thread; i < p->n; i += n_threads)
      finish_qkv(p, i, l, layer);
    pool_barrier(p->pool);
    attend(p, layer, thread, n_threads);
    for (uint32_t i = 0; i < p->n; i++)
      ready(p, i, s->att + (size_t)i * s->ld_q, &l->o, share(l->o.n_group, thread, n_threads));
    pool_barrier(p->pool);
    observe(p, channel_at(c, layer, IN_O), s->att, s->ld_q, l->o.cols, share(s->ld_q, thread, n_threads));
    multiply(p, &(Product){&l->o, s->h, s->ld_embd}, 1, p->n);
    pool_barrier(p->pool);

    for (uint32_t i = thread; i < p->n; i += n_threads)
      add_norm(p, i, true, l->ffn_norm, &l->gate, 0);
    pool_barrier(p->pool);
    observe(p, channel_at(c, layer, IN_FFN), s->h, s->ld_embd, c->n_embd, embd);
    Product mlp[] = {{&l->gate, s->gate, s->ld_ff}, {&l->up, s->up, s->ld_ff}};
    multiply(p, mlp, 2, p->n);
    pool_barrier(p->pool);
    for (uint32_t i = 0; i < p->n; i++)
      activate(p, i, &l->down, share(s->ld_ff / NEST_COLS, thread, n_threads));
    pool_barrier(p->pool);
    observe(p, channel_at(c, layer, IN_DOWN), s->gate, s->ld_ff, c->n_ff, share(s->ld_ff, thread, n_threads));
    multiply(p, &(Product){&l->down, s->h, s->ld_embd}, 1, p->n);
    pool_barrier(p->pool);
  }
  if (!p->n_logits && !p->sum)
    return;
  uint32_t first = p->sum ? 0 : p->n - p->n_logits;
  for (uint32_t i = first + thread; i < p->n; i += n_threads)
    add_norm(p, i, true, m->norm, &m->output, first);
  pool_barrier(p->pool);
  observe(p, channel_at(c, c->n_layer, 0), s->h, s->ld_embd, c->n_embd, embd);
  if (p->sum)
    return;
  multiply(p, &(Product){&m->output, s->logits, s->ld_vocab}, 1, p->n_logits);
}

static void forward_thread(void *arg, uint32_t thread, uint32_t n_threads) {
  uint64_t denormals = flush_denormals();
  pass_thread(arg, thread, n_threads);
  restore_denormals(denormals);
}

static void forward(const Pass *pass) {
  pool_run(pass->pool, pass->n_threads, forward_thread, (void *)(uintptr_t)pass);
}

/* ---- the backend -------------------------------------------------------------------------------- */

static pycass_status start(State *s, KvCache *kv, const pycass_model *m, uint32_t n_batch, uint32_t n_logits,
                           uint32_t n_threads) {
  if (kv->codec == PYCASS_KV_AUTO) /* encoded, attention takes longer on CPUs: only where memory may become short */
    kv->codec = kv_plain_bytes(kv, kv->n_ctx) > loader_memory_available("") / 2 ? PYCASS_KV_NEST : PYCASS_KV_RAW;
  return state_init(s, m, n_batch, n_logits, kv->n_ctx, n_threads);
}

static void end(State *s, KvCache *kv) {
  (void)kv;
  state_free(s);
}

static pycass_status status(const KvCache *kv) {
  (void)kv;
  return PYCASS_OK;
}

const Backend cpu_backend = {"cpu", start, end, forward, kv_trim, kv_save, kv_restore, status};
