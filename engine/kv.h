/* The KV cache: BF16, [layer][kv head][position][head_dim]. Memory is touched as positions are written. */
#ifndef CASS_KV_H
#define CASS_KV_H

#include "base.h"

typedef struct KvCache {
  uint16_t *k, *v;
  uint32_t n_layer, n_head, head_dim, n_ctx;
  size_t bytes; /* of k and v together */
} KvCache;

pycass_status kv_init(KvCache *kv, const pycass_config *c, uint32_t n_ctx);
void kv_free(KvCache *kv);

/* Element offset of a position's [head_dim] values in k and v. */
static inline size_t kv_at(const KvCache *kv, uint32_t layer, uint32_t head, uint32_t pos) {
  return (((size_t)layer * kv->n_head + head) * kv->n_ctx + pos) * kv->head_dim;
}
/* Bytes of n positions. */
static inline size_t kv_bytes(const KvCache *kv, size_t n) {
  return 2 * sizeof(uint16_t) * n * kv->n_layer * kv->n_head * kv->head_dim;
}
/* Copies positions [from, from + n) out and back; buffer of kv_bytes(n). */
void kv_save(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out);
void kv_restore(KvCache *kv, uint32_t from, uint32_t n, const uint8_t *in);

#endif
