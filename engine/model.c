#include "backend.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct Binder {
  pycass_model *m;
  const pycass_model_options *options; /* may be NULL */
  size_t used; /* tensors bound so far */
} Binder;

static pycass_status find(Binder *b, const char *name, uint64_t rows, uint64_t cols, bool required, const Tensor **out) {
  const Tensor *t = format_find(&b->m->file->format, name);
  *out = t;
  if (!t)
    return required ? cass_fail(PYCASS_ERR_UNSUPPORTED, "tensor %s is missing", name) : PYCASS_OK;
  if (t->info.shape[0] != rows || t->info.shape[1] != cols)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s has shape %llu x %llu, not %llu x %llu", name,
                     (unsigned long long)t->info.shape[0], (unsigned long long)t->info.shape[1],
                     (unsigned long long)rows, (unsigned long long)cols);
  b->used++;
  return PYCASS_OK;
}

static bool is_listed(const pycass_model_options *o, const char *name) {
  for (size_t i = 0; o && i < o->n_draft_full; i++)
    if (strcmp(o->draft_full[i], name) == 0)
      return true;
  return false;
}

static pycass_status bind_matrix(Binder *b, const char *name, uint64_t rows, uint64_t cols, Matrix *out) {
  const Tensor *t;
  RETURN_IF(find(b, name, rows, cols, true, &t));
  *out = t->matrix;
  out->draft_full = is_listed(b->options, name);
  bool full = out->draft_full || out->codec == PYCASS_CODEC_RAW;
  uint64_t total = t->info.speculation_bytes + t->info.verification_bytes;
  b->m->has_draft |= !full;
  b->m->draft_reads_panels |= full || matrix_is_cass(out);
  b->m->draft_bytes += full ? total : t->info.speculation_bytes;
  b->m->target_bytes += total;
  return PYCASS_OK;
}

/* Matrices that get the same activations keep the same columns apart. */
static pycass_status check_same_hot(const Matrix *a, const Matrix *b, uint32_t layer) {
  if (a->n_hot != b->n_hot || (a->n_hot && memcmp(a->hot, b->hot, a->n_hot * sizeof *a->hot) != 0))
    return cass_fail(PYCASS_ERR_CORRUPT, "layer %u: matrices of one input have different hot columns", layer);
  return PYCASS_OK;
}

static pycass_status bind_vector(Binder *b, const char *name, uint64_t n, bool required, const uint16_t **out) {
  const Tensor *t;
  RETURN_IF(find(b, name, n, 0, required, &t));
  *out = NULL;
  if (!t)
    return PYCASS_OK;
  *out = t->matrix.raw;
  b->m->draft_bytes += 2 * n, b->m->target_bytes += 2 * n;
  return PYCASS_OK;
}

static pycass_status bind_layer(Binder *b, uint32_t i, Layer *l) {
  const pycass_config *c = &b->m->config;
  uint64_t e = c->n_embd, q = (uint64_t)c->n_head * c->head_dim, kv = (uint64_t)c->n_head_kv * c->head_dim;
  char name[96];
#define NAME(suffix) (snprintf(name, sizeof name, "model.layers.%u." suffix, i), name)
  RETURN_IF(bind_vector(b, NAME("input_layernorm.weight"), e, true, &l->attn_norm));
  RETURN_IF(bind_vector(b, NAME("post_attention_layernorm.weight"), e, true, &l->ffn_norm));
  RETURN_IF(bind_vector(b, NAME("self_attn.q_norm.weight"), c->head_dim, false, &l->q_norm));
  RETURN_IF(bind_vector(b, NAME("self_attn.k_norm.weight"), c->head_dim, false, &l->k_norm));
  RETURN_IF(bind_vector(b, NAME("self_attn.q_proj.bias"), q, false, &l->q_bias));
  RETURN_IF(bind_vector(b, NAME("self_attn.k_proj.bias"), kv, false, &l->k_bias));
  RETURN_IF(bind_vector(b, NAME("self_attn.v_proj.bias"), kv, false, &l->v_bias));
  RETURN_IF(bind_matrix(b, NAME("self_attn.q_proj.weight"), q, e, &l->q));
  RETURN_IF(bind_matrix(b, NAME("self_attn.k_proj.weight"), kv, e, &l->k));
  RETURN_IF(bind_matrix(b, NAME("self_attn.v_proj.weight"), kv, e, &l->v));
  RETURN_IF(bind_matrix(b, NAME("self_attn.o_proj.weight"), e, q, &l->o));
  RETURN_IF(bind_matrix(b, NAME("mlp.gate_proj.weight"), c->n_ff, e, &l->gate));
  RETURN_IF(bind_matrix(b, NAME("mlp.up_proj.weight"), c->n_ff, e, &l->up));
  RETURN_IF(bind_matrix(b, NAME("mlp.down_proj.weight"), e, c->n_ff, &l->down));
#undef NAME
  RETURN_IF(check_same_hot(&l->q, &l->k, i));
  RETURN_IF(check_same_hot(&l->q, &l->v, i));
  RETURN_IF(check_same_hot(&l->gate, &l->up, i));
  if (!l->q_norm != !l->k_norm)
    return cass_fail(PYCASS_ERR_CORRUPT, "layer %u has only one of q_norm and k_norm", i);
  return PYCASS_OK;
}

static pycass_status bind(pycass_model *m, const pycass_model_options *o) {
  const pycass_config *c = &m->config;
  Binder b = {m, o, 0};
  m->layer = calloc(c->n_layer, sizeof *m->layer);
  if (!m->layer)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for %u layers", c->n_layer);
  for (uint32_t i = 0; i < c->n_layer; i++)
    RETURN_IF(bind_layer(&b, i, &m->layer[i]));
  RETURN_IF(bind_vector(&b, "model.norm.weight", c->n_embd, true, &m->norm));
  bool tied = c->flags & PYCASS_FLAG_TIED_EMBEDDING;
  uint64_t draft = m->draft_bytes, target = m->target_bytes;
  RETURN_IF(bind_matrix(&b, "model.embed_tokens.weight", c->n_vocab, c->n_embd, &m->embedding));
  if (!tied) { /* a pass looks up a few rows of the embedding, but reads all of the output */
    m->draft_bytes = draft, m->target_bytes = target;
    RETURN_IF(bind_matrix(&b, "lm_head.weight", c->n_vocab, c->n_embd, &m->output));
  } else {
    m->output = m->embedding;
  }
  if (b.used != m->file->format.n_tensor)
    return cass_fail(PYCASS_ERR_UNSUPPORTED, "the file has %zu tensors of which this build knows %zu",
                     m->file->format.n_tensor, b.used);
  return PYCASS_OK;
}

static pycass_status check_draft_full(const pycass_model *m, const pycass_model_options *o) {
  for (size_t i = 0; o && i < o->n_draft_full; i++)
    if (!format_find(&m->file->format, o->draft_full[i]))
      return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "draft_full: there is no tensor %s", o->draft_full[i]);
  return PYCASS_OK;
}

static pycass_status set_rope(pycass_model *m, const pycass_model_options *o) {
  uint32_t n = m->config.head_dim / 2;
  const float *from = o && o->rope_inv_freq ? o->rope_inv_freq : m->file->format.rope_inv_freq;
  m->rope_inv_freq = cass_alloc(n * sizeof(float));
  if (!m->rope_inv_freq)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the rope frequencies");
  memcpy(m->rope_inv_freq, from, n * sizeof(float));
  if (o && o->rope_inv_freq) {
    if (!(o->rope_attention_factor > 0) || !(o->rope_attention_factor < 1e6f))
      return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "rope_attention_factor = %g", (double)o->rope_attention_factor);
    m->config.rope_attention_factor = o->rope_attention_factor;
  }
  return PYCASS_OK;
}

/* The GPU, if one is asked for; in place of an error with "auto" the CPU, and a note. */
static pycass_status choose_backend(pycass_model *m, const char *device) {
  if (strcmp(device, "cpu") == 0)
    return PYCASS_OK;
  pycass_status status = cuda_load(m, &m->weights);
  if (status == PYCASS_OK)
    m->backend = &cuda_backend;
  else if (strcmp(device, "auto") == 0)
    snprintf(m->device_note, sizeof m->device_note, "%s", pycass_error_detail());
  return m->device_note[0] ? PYCASS_OK : status;
}

static pycass_status load(pycass_model *m, const char *path, const pycass_model_options *o) {
  const char *device = o && o->device ? o->device : "cpu";
  if (strcmp(device, "cpu") != 0 && strcmp(device, "cuda") != 0 && strcmp(device, "auto") != 0)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no device %s; there are cpu, cuda and auto", device);
  RETURN_IF(kernels_select(o ? o->kernel : NULL, &m->kernels));
  pycass_loading loading = o ? o->loading : PYCASS_LOAD_AUTO;
  if (o && o->mlock && loading == PYCASS_LOAD_AUTO)
    loading = PYCASS_LOAD_READ; /* pages that come later would not be locked */
  if (strcmp(device, "cpu") != 0 && loading == PYCASS_LOAD_AUTO && cuda_probe() == PYCASS_OK)
    loading = PYCASS_LOAD_MAP; /* read once */
  RETURN_IF(loader_open(path, loading, &m->file));
  m->config = m->file->format.config;
  RETURN_IF(bind(m, o));
  RETURN_IF(check_draft_full(m, o));
  RETURN_IF(set_rope(m, o));
  RETURN_IF(choose_backend(m, device));
  return o && o->mlock ? loader_lock(m->file) : PYCASS_OK;
}

pycass_status pycass_model_load(const char *path, const pycass_model_options *options, pycass_model **out) {
  pycass_model *m = calloc(1, sizeof *m);
  if (!m)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a model");
  m->backend = &cpu_backend;
  pycass_status status = load(m, path, options);
  if (status != PYCASS_OK) {
    pycass_model_free(m);
    return status;
  }
  *out = m;
  return PYCASS_OK;
}

void pycass_model_free(pycass_model *m) {
  if (!m)
    return;
  cuda_unload(m->weights);
  pycass_file_close(m->file);
  cass_free(m->rope_inv_freq);
  free(m->layer);
  free(m);
}

const pycass_file *pycass_model_file(const pycass_model *m) { return m->file; }
const char *pycass_model_kernel(const pycass_model *m) { return m->kernels->name; }
const char *pycass_model_device(const pycass_model *m, const char **note) {
  if (note)
    *note = m->device_note;
  return m->backend->name;
}
