/* What computes a model's passes and keeps its sessions' keys and values: the CPU (forward.c), or a GPU (cuda.c). */
#ifndef CASS_BACKEND_H
#define CASS_BACKEND_H

#include "forward.h"

typedef struct Backend {
  const char *name;
  /* A session's working memory: state, and what kv, made by kv_init, needs beyond that. end frees it, also after a start that
   * failed. */
  pycass_status (*start)(State *state, KvCache *kv, const pycass_model *m, uint32_t n_batch, uint32_t n_logits,
                         uint32_t n_threads);
  void (*end)(State *state, KvCache *kv);
  /* Writes keys and values of the n tokens at pos .. pos + n - 1, unless apart; logits are in state.logits. */
  void (*forward)(const Pass *pass);
  void (*kv_trim)(KvCache *kv, uint32_t n); /* these as in kv.h */
  void (*kv_save)(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out);
  void (*kv_restore)(KvCache *kv, uint32_t from, uint32_t n, const uint8_t *in);
  /* Whether all of the above since start came true: passes do not tell, since a GPU that has failed stays so. */
  pycass_status (*status)(const KvCache *kv);
} Backend;

extern const Backend cpu_backend, cuda_backend;

/* PYCASS_OK if there is a library, and a GPU that answers. */
pycass_status cuda_probe(void);
/* Copies the weights of a model that is bound; PYCASS_ERR_UNSUPPORTED if the kernels cannot take it. */
pycass_status cuda_load(const pycass_model *m, void **weights);
void cuda_unload(void *weights);

#endif
