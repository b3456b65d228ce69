#include "kv.h"

#include <sys/mman.h>

static void *reserve(size_t size) {
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

pycass_status kv_init(KvCache *kv, const pycass_config *c, uint32_t n_ctx) {
  *kv = (KvCache){.n_layer = c->n_layer, .n_head = c->n_head_kv, .head_dim = c->head_dim, .n_ctx = n_ctx};
  kv->bytes = kv_bytes(kv, n_ctx);
  kv->k = reserve(kv->bytes / 2), kv->v = reserve(kv->bytes / 2);
  if (!kv->k || !kv->v)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a KV cache of %u tokens (%zu bytes)", n_ctx, kv->bytes);
  return PYCASS_OK;
}

void kv_free(KvCache *kv) {
  if (kv->k)
    munmap(kv->k, kv->bytes / 2);
  if (kv->v)
    munmap(kv->v, kv->bytes / 2);
  *kv = (KvCache){0};
}

void kv_save(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out) {
  size_t bytes = (size_t)n * kv->head_dim * sizeof(uint16_t);
  for (uint32_t l = 0; l < kv->n_layer; l++)
    for (uint32_t h = 0; h < kv->n_head; h++) {
      memcpy(out, kv->k + kv_at(kv, l, h, from), bytes);
      memcpy(out + bytes, kv->v + kv_at(kv, l, h, from), bytes);
      out += 2 * bytes;
    }
}

void kv_restore(KvCache *kv, uint32_t from, uint32_t n, const uint8_t *in) {
  size_t bytes = (size_t)n * kv->head_dim * sizeof(uint16_t);
  for (uint32_t l = 0; l < kv->n_layer; l++)
    for (uint32_t h = 0; h < kv->n_head; h++) {
      memcpy(kv->k + kv_at(kv, l, h, from), in, bytes);
      memcpy(kv->v + kv_at(kv, l, h, from), in + bytes, bytes);
      in += 2 * bytes;
    }
}
