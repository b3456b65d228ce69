/* The CUDA backend: loads libpycass_cuda.so, whose table of functions kernels_cuda/backend.h has, copies weights to the GPU, and
 * computes passes there as forward.c does here. Keys and values stay on the GPU, as plain rows; tokens go there and logits come
 * back. One stream: what is asked for later happens later. */
#include "backend.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels_cuda/backend.h"

/* ---- the library -------------------------------------------------------------------------------- */

static const char library_name[] = "libpycass_cuda.so";

/* Where the library is: $PYCASS_CUDA_LIB, or beside the one that holds this code. Otherwise the system may find it. */
static void library_path(char *out, size_t size) {
  const char *given = getenv("PYCASS_CUDA_LIB");
  Dl_info here;
  snprintf(out, size, "%s", given && *given ? given : library_name);
  if ((given && *given) || !dladdr(&cuda_backend, &here) || !here.dli_fname)
    return;
  const char *slash = strrchr(here.dli_fname, '/');
  char beside[4096];
  int n = snprintf(beside, sizeof beside, "%.*s%s", slash ? (int)(slash + 1 - here.dli_fname) : 0, here.dli_fname, library_name);
  FILE *f = n < (int)sizeof beside && slash ? fopen(beside, "rb") : NULL;
  if (!f)
    return;
  fclose(f);
  snprintf(out, size, "%s", beside);
}

/* The library stays loaded: the driver's threads do not like to lose their code. */
static pycass_status open_library(const PycassCuda **out) {
  char path[4096];
  library_path(path, sizeof path);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return cass_fail(PYCASS_ERR_DEVICE, "no library for CUDA (build with PYCASS_CUDA=ON, or set PYCASS_CUDA_LIB): %s", dlerror());
  const PycassCuda *(*table)(void);
  void *symbol = dlsym(library, "pycass_cuda");
  memcpy(&table, &symbol, sizeof table); /* ISO C has no cast for it */
  const PycassCuda *cuda = symbol ? table() : NULL;
  if (!cuda || cuda->size != sizeof *cuda)
    return cass_fail(PYCASS_ERR_DEVICE, "%s is of another version of pycass", path);
  *out = cuda;
  return PYCASS_OK;
}

static pycass_status describe(int index, const PycassCuda **cuda, CudaDevice *out) {
  RETURN_IF(open_library(cuda));
  int error = (*cuda)->describe(index, out);
  return error ? cass_fail(PYCASS_ERR_DEVICE, "no GPU: %s", (*cuda)->error_text(error)) : PYCASS_OK;
}

pycass_status cuda_probe(void) {
  const PycassCuda *cuda;
  CudaDevice device;
  return describe(0, &cuda, &device);
}

pycass_status pycass_device_info(int index, pycass_device *out) {
  const PycassCuda *cuda;
  CudaDevice d;
  RETURN_IF(describe(index, &cuda, &d));
  *out = (pycass_device){.major = d.major, .minor = d.minor, .free_bytes = d.free_bytes, .total_bytes = d.total_bytes};
  snprintf(out->name, sizeof out->name, "%s", d.name);
  return PYCASS_OK;
}

/* ---- buffers ------------------------------------------------------------------------------------ */

/* What was allocated together, and the first error, after which nothing more is asked of the GPU. */
typedef struct Device {
  const PycassCuda *cuda;
  int error;
  void **buffer;
  size_t n_buffer, bytes;
} Device;

/* A call of the table. */
#define DO(d, call)                                                                                                    \
  do {                                                                                                                 \
    if (!(d)->error)                                                                                                   \
      (d)->error = (d)->cuda->call;                                                                                    \
  } while (0)

enum { OUT_OF_MEMORY = 2 }; /* cudaErrorMemoryAllocation */

static void set_error(Device *d, int error) { d->error = d->error ? d->error : error; }

static pycass_status device_status(const Device *d) {
  if (!d->error)
    return PYCASS_OK;
  if (d->error == OUT_OF_MEMORY)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "the GPU has no room for %zu MiB", d->bytes >> 20);
  return cass_fail(PYCASS_ERR_DEVICE, "the GPU failed: %s", d->cuda->error_text(d->error));
}

static void *room(Device *d, size_t size) {
  void *p = NULL, **list = realloc(d->buffer, (d->n_buffer + 1) * sizeof *list);
  if (!list) {
    set_error(d, OUT_OF_MEMORY);
    return NULL;
  }
  d->buffer = list;
  d->bytes += size;
  DO(d, alloc(&p, size));
  if (p)
    d->buffer[d->n_buffer++] = p;
  return p;
}

static void *copy_of(Device *d, const void *host, size_t size) {
  if (!host)
    return NULL;
  void *p = room(d, size);
  DO(d, upload(p, host, size, NULL));
  return p;
}

static void device_free(Device *d) {
  for (size_t i = 0; i < d->n_buffer; i++)
    d->cuda->release(d->buffer[i]);
  free(d->buffer);
  *d = (Device){0};
}

/* ---- weights ------------------------------------------------------------------------------------ */

/* A model's Layer (model.h) on the GPU. */
typedef struct CudaLayer {
  const uint16_t *attn_norm, *ffn_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias;
  CudaMatrix q, k, v, o, gate, up, down;
} CudaLayer;

typedef struct Weights {
  Device device;
  CudaLayer *layer;
  CudaMatrix embedding, output;
  const uint16_t *norm;
  const float *inv_freq;
} Weights;

static uint64_t *hot_masks(const Matrix *m) {
  uint64_t *mask = calloc(m->n_group, sizeof *mask);
  for (uint32_t i = 0; mask && i < m->n_hot; i++)
    mask[m->hot[i] / NEST_COLS] |= (uint64_t)1 << m->hot[i] % NEST_COLS;
  return mask;
}

static void copy_hot(Device *d, CudaMatrix *w, const Matrix *m) {
  uint64_t *mask = hot_masks(m);
  w->n_hot = m->n_hot;
  w->hot = copy_of(d, m->hot, m->n_hot * sizeof *m->hot);
  w->hot_words = copy_of(d, m->hot_words, (size_t)m->n_block * m->n_hot * NEST_ROWS * sizeof *m->hot_words);
  w->hot_mask = copy_of(d, mask, m->n_group * sizeof *mask);
  if (!mask)
    set_error(d, OUT_OF_MEMORY);
  DO(d, wait(NULL)); /* mask is this function's */
  free(mask);
}

/* Planes go as they lie in the file. */
static CudaMatrix copy_matrix(Device *d, const Matrix *m) {
  CudaMatrix w = {.rows = m->rows, .cols = m->cols, .n_block = m->n_block, .n_group = m->n_group};
  size_t tiles = matrix_tiles(m);
  if (m->codec == PYCASS_CODEC_RAW) {
    w.codec = CUDA_RAW;
    w.raw = copy_of(d, m->raw, sizeof *m->raw * m->rows * m->cols);
    return w;
  }
  w.codec = CUDA_NEST;
  w.a = copy_of(d, m->a, 512 * tiles);
  w.x = copy_of(d, m->x, round_up(16 * tiles, CASS_ALIGN));
  w.b = copy_of(d, m->b, 768 * tiles);
  w.side = copy_of(d, m->side, load_u32(m->side + 4 * tiles) + (size_t)NEST_SIDE_SLACK);
  w.bias = copy_of(d, m->bias, NEST_ROWS * m->n_block * sizeof *m->bias);
  if (m->n_hot)
    copy_hot(d, &w, m);
  uint8_t *form = room(d, tiles);
  DO(d, find_form(form, &w, NULL));
  w.form = form;
  return w;
}

static CudaLayer copy_layer(Device *d, const pycass_config *c, const Layer *l) {
  size_t e = c->n_embd * sizeof(uint16_t), head = c->head_dim * sizeof(uint16_t);
  return (CudaLayer){.attn_norm = copy_of(d, l->attn_norm, e),
                     .ffn_norm = copy_of(d, l->ffn_norm, e),
                     .q_norm = copy_of(d, l->q_norm, head),
                     .k_norm = copy_of(d, l->k_norm, head),
                     .q_bias = copy_of(d, l->q_bias, c->n_head * head),
                     .k_bias = copy_of(d, l->k_bias, c->n_head_kv * head),
                     .v_bias = copy_of(d, l->v_bias, c->n_head_kv * head),
                     .q = copy_matrix(d, &l->q),
                     .k = copy_matrix(d, &l->k),
                     .v = copy_matrix(d, &l->v),
                     .o = copy_matrix(d, &l->o),
                     .gate = copy_matrix(d, &l->gate),
                     .up = copy_matrix(d, &l->up),
                     .down = copy_matrix(d, &l->down)};
}

/* The kernels take what docs/cuda.md says. */
static pycass_status check_fits(const pycass_model *m) {
  if (m->config.head_dim > CUDA_MOST_HEAD_DIM)
    return cass_fail(PYCASS_ERR_UNSUPPORTED, "the CUDA kernels take heads of at most %d, and the model's have %u",
                     CUDA_MOST_HEAD_DIM, m->config.head_dim);
  const Format *f = &m->file->format;
  for (size_t i = 0; i < f->n_tensor; i++)
    if (matrix_is_cass(&f->tensor[i].matrix))
      return cass_fail(PYCASS_ERR_UNSUPPORTED, "there are no CUDA kernels for the codecs cass1 and cass2 (%s): convert to nest",
                       f->tensor[i].name);
  return PYCASS_OK;
}

static void copy_weights(Weights *w, const pycass_model *m) {
  const pycass_config *c = &m->config;
  Device *d = &w->device;
  for (uint32_t i = 0; i < c->n_layer; i++)
    w->layer[i] = copy_layer(d, c, &m->layer[i]);
  w->norm = copy_of(d, m->norm, c->n_embd * sizeof *m->norm);
  w->inv_freq = copy_of(d, m->rope_inv_freq, c->head_dim / 2 * sizeof *m->rope_inv_freq);
  w->embedding = copy_matrix(d, &m->embedding);
  w->output = c->flags & PYCASS_FLAG_TIED_EMBEDDING ? w->embedding : copy_matrix(d, &m->output);
  DO(d, wait(NULL));
}

pycass_status cuda_load(const pycass_model *m, void **weights) {
  const PycassCuda *cuda;
  CudaDevice device;
  RETURN_IF(describe(0, &cuda, &device));
  RETURN_IF(check_fits(m));
  Weights *w = calloc(1, sizeof *w);
  CudaLayer *layer = calloc(m->config.n_layer, sizeof *layer);
  if (!w || !layer) {
    free(w), free(layer);
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for %u layers", m->config.n_layer);
  }
  w->device.cuda = cuda, w->layer = layer;
  copy_weights(w, m);
  pycass_status status = device_status(&w->device);
  if (status == PYCASS_OK)
    *weights = w;
  else
    cuda_unload(w);
  return status;
}

void cuda_unload(void *weights) {
  Weights *w = weights;
  if (!w)
    return;
  device_free(&w->device);
  free(w->layer);
  free(w);
}

/* ---- sessions ----------------------------------------------------------------------------------- */

/* State (forward.h) and cache (kv.h) on the GPU. */
typedef struct Session {
  Device device;
  float *x, *h, *q, *k, *v, *att, *gate, *up, *cos_sin, *logits;
  float *work;              /* attend's, for attend_tokens tokens */
  uint32_t attend_tokens;
  CudaActs acts;
  int *ids;                 /* [n_batch] */
  uint32_t *pos, *host_pos; /* [n_batch] their positions, there and here */
  uint16_t *k_cache, *v_cache;
} Session;

static float *floats(Device *d, size_t n) { return room(d, n * sizeof(float)); }

static void make_state(Session *s, const State *t, const pycass_config *c) {
  Device *d = &s->device;
  size_t b = t->n_batch, groups = b * (state_widest(c) / NEST_COLS);
  s->x = floats(d, b * t->ld_embd), s->h = floats(d, b * t->ld_embd);
  s->q = floats(d, b * t->ld_q), s->k = floats(d, b * t->ld_kv), s->v = floats(d, b * t->ld_kv);
  s->att = floats(d, b * t->ld_q), s->gate = floats(d, b * t->ld_ff), s->up = floats(d, b * t->ld_ff);
  s->cos_sin = floats(d, b * c->head_dim), s->logits = floats(d, (size_t)t->n_logits * t->ld_vocab);
  s->acts = (CudaActs){.panels = room(d, groups * NEST_COLS * sizeof(uint16_t)),
                       .hot = room(d, b * HOT_MOST * sizeof(uint16_t)),
                       .q = room(d, groups * 2 * NEST_COLS),
                       .scale = floats(d, groups)};
  s->ids = room(d, b * sizeof *s->ids), s->pos = room(d, b * sizeof *s->pos);
}

/* A layer's cache. */
static CudaKv layer_cache(const Session *s, const KvCache *kv, uint32_t n_head, uint32_t layer) {
  size_t at = kv_at(kv, layer, 0, 0);
  return (CudaKv){.k = s->k_cache + at, .v = s->v_cache + at, .n_head = n_head, .n_head_kv = kv->n_head,
                  .head_dim = kv->head_dim, .n_ctx = kv->n_ctx};
}

static void make_cache(Session *s, const KvCache *kv, const pycass_config *c, uint32_t n_batch) {
  enum { WORK = 1 << 24 }; /* floats for attend: more tokens than fit go by turns */
  Device *d = &s->device;
  size_t bytes = kv_plain_bytes(kv, kv->n_ctx) / 2;
  s->k_cache = room(d, bytes), s->v_cache = room(d, bytes);
  DO(d, zero(s->k_cache, bytes, NULL)); /* rows that nobody wrote meet scores of 0, and must not be NaN */
  DO(d, zero(s->v_cache, bytes, NULL));
  CudaKv all = layer_cache(s, kv, c->n_head, 0);
  size_t one = cuda_attend_work(&all, 1, kv->n_ctx), n = WORK / one < 1 ? 1 : min_size(WORK / one, n_batch);
  s->attend_tokens = (uint32_t)n;
  s->work = floats(d, n * one);
}

static pycass_status cuda_start(State *t, KvCache *kv, const pycass_model *m, uint32_t n_batch, uint32_t n_logits,
                                uint32_t n_threads) {
  (void)n_threads;
  if (kv->codec == PYCASS_KV_AUTO)
    kv->codec = PYCASS_KV_RAW;
  if (kv->codec != PYCASS_KV_RAW)
    return cass_fail(PYCASS_ERR_UNSUPPORTED, "on a GPU keys and values are kept as they are: only raw is possible");
  RETURN_IF(state_shape(t, m, n_batch, n_logits));
  Session *s = kv->device = calloc(1, sizeof *s);
  if (!s)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a session");
  s->device.cuda = ((const Weights *)m->weights)->device.cuda;
  s->host_pos = calloc(n_batch, sizeof *s->host_pos);
  if (!s->host_pos)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for batches of %u tokens", n_batch);
  make_state(s, t, &m->config);
  make_cache(s, kv, &m->config, n_batch);
  DO(&s->device, wait(NULL));
  return device_status(&s->device);
}

static void cuda_end(State *t, KvCache *kv) {
  Session *s = kv->device;
  if (s) {
    device_free(&s->device);
    free(s->host_pos);
  }
  free(s);
  kv->device = NULL;
  state_free(t);
}

static pycass_status cuda_status(const KvCache *kv) { return device_status(&((const Session *)kv->device)->device); }

/* ---- a pass ------------------------------------------------------------------------------------- */

/* A product that this pass owes, as forward.c's: w is the GPU's, like y. */
typedef struct Product {
  const Matrix *like;
  const CudaMatrix *w;
  float *y;
  uint32_t ldy;
} Product;

/* Products of rows x: those that the draft takes its own way, and the others. */
static void multiply(Session *s, const Pass *p, const Product *list, uint32_t n, const float *x, uint32_t ldx, uint32_t m) {
  Device *d = &s->device;
  CudaProduct draft[CUDA_PRODUCTS], target[CUDA_PRODUCTS];
  uint32_t n_draft = 0, n_target = 0;
  for (uint32_t i = 0; i < n; i++) {
    bool by_draft = p->draft && !list[i].like->draft_full && list[i].w->codec == CUDA_NEST;
    CudaProduct *out = by_draft ? &draft[n_draft++] : &target[n_target++];
    *out = (CudaProduct){*list[i].w, list[i].y, list[i].ldy};
  }
  DO(d, ready(&s->acts, x, ldx, m, list->w, n_target > 0, n_draft > 0, NULL));
  if (n_draft)
    DO(d, matmul_draft(draft, n_draft, &s->acts, m, NULL));
  if (n_target)
    DO(d, matmul(target, n_target, &s->acts, m, NULL));
}

/* Reads the ids; angles of their positions. */
static void embed(Session *s, const Pass *p, const Weights *w) {
  const pycass_config *c = &p->model->config;
  Device *d = &s->device;
  bool draft = p->draft && !p->model->embedding.draft_full;
  for (uint32_t i = 0; i < p->n; i++)
    s->host_pos[i] = p->pos + i;
  DO(d, upload(s->ids, p->ids, p->n * sizeof *p->ids, NULL));
  DO(d, upload(s->pos, s->host_pos, p->n * sizeof *s->pos, NULL));
  DO(d, wait(NULL)); /* both may change as soon as the pass is asked for */
  DO(d, embed(s->x, p->state->ld_embd, s->ids, p->n, &w->embedding, draft, NULL));
  DO(d, angles(s->cos_sin, w->inv_freq, c->rope_attention_factor, s->pos, p->n, c->head_dim, NULL));
}

/* Attention of a layer whose queries, keys and values are products so far. */
static void attend(Session *s, const Pass *p, const CudaLayer *l, uint32_t layer) {
  const pycass_config *c = &p->model->config;
  const State *t = p->state;
  Device *d = &s->device;
  CudaKv kv = layer_cache(s, p->kv, c->n_head, layer);
  size_t at = kv_at(p->kv, layer, 0, 0);
  CudaHeads heads = {.q = s->q, .k = s->k, .v = s->v, .ld_q = t->ld_q, .ld_kv = t->ld_kv, .n_head = c->n_head,
                     .n_head_kv = c->n_head_kv, .head_dim = c->head_dim, .n_ctx = kv.n_ctx, .eps = c->rms_eps,
                     .q_bias = l->q_bias, .k_bias = l->k_bias, .v_bias = l->v_bias, .q_norm = l->q_norm, .k_norm = l->k_norm,
                     .k_cache = s->k_cache + at, .v_cache = s->v_cache + at};
  DO(d, finish_qkv(&heads, p->n, s->cos_sin, s->pos, NULL));
  for (uint32_t i = 0, some; i < p->n; i += some) {
    some = (uint32_t)min_size(p->n - i, s->attend_tokens);
    DO(d, attend(s->att + (size_t)i * t->ld_q, t->ld_q, s->q + (size_t)i * t->ld_q, t->ld_q, some, &kv, s->pos + i,
                 p->pos + i + some, p->draft, s->work, NULL));
  }
}

static void run_layer(Session *s, const Pass *p, const CudaLayer *l, uint32_t layer) {
  const pycass_config *c = &p->model->config;
  const State *t = p->state;
  const Layer *m = &p->model->layer[layer];
  Device *d = &s->device;
  DO(d, add_norm(s->h, s->x, t->ld_embd, p->n, layer > 0, l->attn_norm, c->n_embd, c->rms_eps, NULL));
  Product qkv[] = {{&m->q, &l->q, s->q, t->ld_q}, {&m->k, &l->k, s->k, t->ld_kv}, {&m->v, &l->v, s->v, t->ld_kv}};
  multiply(s, p, qkv, 3, s->h, t->ld_embd, p->n);
  attend(s, p, l, layer);
  multiply(s, p, &(Product){&m->o, &l->o, s->h, t->ld_embd}, 1, s->att, t->ld_q, p->n);
  DO(d, add_norm(s->h, s->x, t->ld_embd, p->n, true, l->ffn_norm, c->n_embd, c->rms_eps, NULL));
  Product mlp[] = {{&m->gate, &l->gate, s->gate, t->ld_ff}, {&m->up, &l->up, s->up, t->ld_ff}};
  multiply(s, p, mlp, 2, s->h, t->ld_embd, p->n);
  DO(d, swiglu(s->gate, s->up, t->ld_ff, p->n, c->n_ff, NULL));
  multiply(s, p, &(Product){&m->down, &l->down, s->h, t->ld_embd}, 1, s->gate, t->ld_ff, p->n);
}

/* The whole pass; its rows of logits, on the CPU again, from row on in the state. */
static void run_pass(Session *s, const Pass *p, uint32_t row) {
  const Weights *w = p->model->weights;
  const pycass_config *c = &p->model->config;
  const State *t = p->state;
  Device *d = &s->device;
  embed(s, p, w);
  for (uint32_t layer = 0; layer < c->n_layer; layer++)
    run_layer(s, p, &w->layer[layer], layer);
  if (!p->n_logits)
    return;
  float *x = s->x + (size_t)(p->n - p->n_logits) * t->ld_embd, *h = s->h + (size_t)(p->n - p->n_logits) * t->ld_embd;
  DO(d, add_norm(h, x, t->ld_embd, p->n_logits, true, w->norm, c->n_embd, c->rms_eps, NULL));
  multiply(s, p, &(Product){&p->model->output, &w->output, s->logits, t->ld_vocab}, 1, h, t->ld_embd, p->n_logits);
  DO(d, download(t->logits + (size_t)row * t->ld_vocab, s->logits, (size_t)p->n_logits * t->ld_vocab * sizeof(float), NULL));
}

/* ---- keys and values ---------------------------------------------------------------------------- */

static void cuda_trim(KvCache *kv, uint32_t n) { (void)kv, (void)n; } /* later rows are written before they are read */

static void cuda_save(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out) {
  Session *s = kv->device;
  size_t bytes = (size_t)n * kv->head_dim * sizeof(uint16_t);
  for (uint32_t l = 0; l < kv->n_layer && n; l++)
    for (uint32_t h = 0; h < kv->n_head; h++, out += 2 * bytes) {
      DO(&s->device, download(out, s->k_cache + kv_at(kv, l, h, from), bytes, NULL));
      DO(&s->device, download(out + bytes, s->v_cache + kv_at(kv, l, h, from), bytes, NULL));
    }
}

static void cuda_restore(KvCache *kv, uint32_t from, uint32_t n, const uint8_t *in) {
  Session *s = kv->device;
  size_t bytes = (size_t)n * kv->head_dim * sizeof(uint16_t);
  for (uint32_t l = 0; l < kv->n_layer && n; l++)
    for (uint32_t h = 0; h < kv->n_head; h++, in += 2 * bytes) {
      DO(&s->device, upload(s->k_cache + kv_at(kv, l, h, from), in, bytes, NULL));
      DO(&s->device, upload(s->v_cache + kv_at(kv, l, h, from), in + bytes, bytes, NULL));
    }
  DO(&s->device, wait(NULL));
}

/* A token's draft takes the place of its keys and values, which later tokens alone see: so the last token is the first. */
static void run_apart(Session *s, const Pass *p) {
  uint8_t *rows = malloc(kv_plain_bytes(p->kv, p->n));
  if (!rows) {
    set_error(&s->device, OUT_OF_MEMORY);
    return;
  }
  cuda_save(p->kv, p->pos, p->n, rows);
  for (uint32_t i = p->n; i-- > 0;) {
    Pass one = *p;
    one.ids += i, one.pos += i, one.n = one.n_logits = 1;
    run_pass(s, &one, i);
  }
  cuda_restore(p->kv, p->pos, p->n, rows);
  free(rows);
}

static void cuda_forward(const Pass *p) {
  Session *s = p->kv->device;
  if (p->apart)
    run_apart(s, p);
  else
    run_pass(s, p, 0);
}

const Backend cuda_backend = {"cuda", cuda_start, cuda_end, cuda_forward, cuda_trim, cuda_save, cuda_restore, cuda_status};
