/* The KV cache. The newest positions are plain BF16, [layer][kv head][position][head_dim]; older ones may be encoded, in
 * blocks of 64 positions, each of which is encoded once and never changed (docs/format.md, "Blocks of the KV cache").
 * Memory grows with the tokens: plain pages are touched as positions are written and given back when a block is encoded. */
#ifndef CASS_KV_H
#define CASS_KV_H

#include "kernels.h"

enum { KV_BLOCK = 64, KV_PLAIN = 32 }; /* positions of a block; of the newest ones that stay plain, at least */
enum { KV_HEAD_MOST = 1024 };          /* format.c: the largest head_dim */

/* One layer's part of a block: for each head its keys, then its values, and where they begin. */
typedef struct KvBlock {
  uint8_t *data;
  uint32_t bytes, draft_bytes; /* draft_bytes: of them the draft reads */
} KvBlock;

typedef struct KvCache {
  uint16_t *k, *v;
  uint32_t n_layer, n_head, head_dim, n_ctx;
  pycass_kv codec;
  uint32_t encoded;     /* positions, whole blocks */
  KvBlock *block;       /* [n_ctx / KV_BLOCK][n_layer] */
  size_t encoded_bytes, encoded_draft_bytes;
  uint32_t exposed;     /* number of a block that is plain, too; UINT32_MAX: none */
  void *device;         /* a backend's that keeps all elsewhere; then k, v and block stay empty */
} KvCache;

pycass_status kv_init(KvCache *kv, const pycass_config *c, uint32_t n_ctx, pycass_kv codec);
void kv_free(KvCache *kv);

/* Element offset of a position's [head_dim] values in k and v. */
static inline size_t kv_at(const KvCache *kv, uint32_t layer, uint32_t head, uint32_t pos) {
  return (((size_t)layer * kv->n_head + head) * kv->n_ctx + pos) * kv->head_dim;
}
/* Bytes of n plain positions; of the first n positions as they are held; of them what a pass reads. */
static inline size_t kv_plain_bytes(const KvCache *kv, size_t n) {
  return 2 * sizeof(uint16_t) * n * kv->n_layer * kv->n_head * kv->head_dim;
}
static inline size_t kv_bytes(const KvCache *kv, size_t n) {
  return kv->encoded_bytes + kv_plain_bytes(kv, n > kv->encoded ? n - kv->encoded : 0);
}
static inline size_t kv_read_bytes(const KvCache *kv, size_t n, bool draft) {
  return kv_bytes(kv, n) - (draft ? kv->encoded_bytes - kv->encoded_draft_bytes : 0);
}

/* Writes a position's key and value of a head, [head_dim] each, as BF16; those of cass2 lose bits, the same ones wherever a block
 * begins. */
void kv_put(KvCache *kv, const Kernels *kernels, uint32_t layer, uint32_t head, uint32_t pos, const float *k, const float *v);

/* Whether the first n positions hold another block to encode. */
bool kv_due(const KvCache *kv, uint32_t n);
/* Encodes that block's part of a layer; layers may be encoded at the same time. False if there is no memory. */
bool kv_encode(KvCache *kv, uint32_t layer);
/* Ends encoding that block: with done = true it counts from now on, otherwise all stays plain. */
void kv_encoded(KvCache *kv, bool done);

enum { KV_KEYS, KV_VALUES };
/* Columns [c0, c1) of a block's keys or values, which begins at position KV_BLOCK block: plain ones where they lie, otherwise
 * decoded into scratch [KV_BLOCK][head_dim, rounded up to 16]. c0 is a multiple of 16. */
typedef struct KvRows {
  const uint16_t *row;
  size_t stride;
} KvRows;
KvRows kv_rows(const KvCache *kv, const Kernels *kernels, uint32_t layer, uint32_t head, int which, uint32_t block, bool draft,
               uint32_t c0, uint32_t c1, uint16_t *scratch);

/* The same of a nest block for a draft that multiplies without decoding: the matrix [head_dim][KV_BLOCK]. False if the block is
 * not such a one; then kv_rows has it. */
bool kv_draft_unit(const KvCache *kv, uint32_t layer, uint32_t head, int which, uint32_t block, uint32_t c0, uint32_t c1,
                   Matrix *out);

/* Keeps the first n positions: of a block that n cuts, plain. */
void kv_trim(KvCache *kv, uint32_t n);
/* Makes the encoded block plain, too, until kv_hide: a draft may then write into it. */
void kv_expose(KvCache *kv, uint32_t block);
void kv_hide(KvCache *kv);
/* Copies positions [from, from + n) out, exact, and back to plain ones; buffer of kv_plain_bytes(n). */
void kv_save(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out);
void kv_restore(KvCache *kv, uint32_t from, uint32_t n, const uint8_t *in);

#endif
