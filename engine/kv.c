#include "kv.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "codec_cass.h"

static void *reserve(size_t size) {
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static size_t plain_size(const KvCache *kv) { return kv_plain_bytes(kv, kv->n_ctx) / 2; }

pycass_status kv_init(KvCache *kv, const pycass_config *c, uint32_t n_ctx, pycass_kv codec) {
  *kv = (KvCache){.n_layer = c->n_layer, .n_head = c->n_head_kv, .head_dim = c->head_dim, .n_ctx = n_ctx, .codec = codec};
  kv->exposed = UINT32_MAX;
  kv->k = reserve(plain_size(kv)), kv->v = reserve(plain_size(kv));
  kv->block = calloc((size_t)(n_ctx / KV_BLOCK + 1) * kv->n_layer, sizeof *kv->block);
  if (!kv->k || !kv->v || !kv->block)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a KV cache of %u tokens (%zu bytes)", n_ctx,
                     kv_plain_bytes(kv, n_ctx));
  return PYCASS_OK;
}

void kv_free(KvCache *kv) {
  if (kv->k)
    munmap(kv->k, plain_size(kv));
  if (kv->v)
    munmap(kv->v, plain_size(kv));
  for (size_t i = 0; kv->block && i < (size_t)(kv->n_ctx / KV_BLOCK + 1) * kv->n_layer; i++)
    free(kv->block[i].data);
  free(kv->block);
  *kv = (KvCache){0};
}

/* Gives back the pages of positions before `end` of all plain keys and values that lie in [from, end) wholly. */
static void release(KvCache *kv, uint32_t from, uint32_t end) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (uint32_t l = 0; l < kv->n_layer; l++)
    for (uint32_t h = 0; h < kv->n_head; h++)
      for (int which = 0; which < 2; which++) {
        uint16_t *base = which == KV_KEYS ? kv->k : kv->v;
        uintptr_t a = (uintptr_t)(base + kv_at(kv, l, h, from)), b = (uintptr_t)(base + kv_at(kv, l, h, end));
        uintptr_t first = (uintptr_t)(base + kv_at(kv, l, h, 0));
        a = a / page * page >= first ? a / page * page : (a + page - 1) / page * page; /* what precedes is encoded, too */
        b = b / page * page;
        if (a < b)
          madvise((void *)a, b - a, MADV_DONTNEED);
      }
}

/* ---- a block's part of a layer ------------------------------------------------------------------ */

/* Data of a part begin with the offsets of what the draft reads and of the rest, for each head's keys and values. nest: A and X,
 * then B, are the first (keys' drafts read B, too); the rest is the side part. cass1, cass2: speculation and verification. */
static inline size_t unit_of(uint32_t head, int which) { return 2 * (size_t)head + (size_t)which; }
static inline size_t table_bytes(const KvCache *kv) { return round_up(16 * (size_t)kv->n_head, CASS_ALIGN); }
static inline size_t n_tile(const KvCache *kv) { return (kv->head_dim + NEST_ROWS - 1) / NEST_ROWS; }
enum { SLACK = 128 }; /* vector decoders read so far past a record */

typedef struct Sizes {
  size_t first, rest; /* bounds */
} Sizes;

static bool is_nest(const KvCache *kv) { return kv->codec == PYCASS_KV_NEST; }
static pycass_codec cass_codec(const KvCache *kv) {
  return kv->codec == PYCASS_KV_CASS2 ? PYCASS_CODEC_CASS2 : PYCASS_CODEC_CASS1;
}

static Sizes unit_bounds(const KvCache *kv) {
  if (is_nest(kv))
    return (Sizes){(512 + 768) * n_tile(kv) + round_up(16 * n_tile(kv), CASS_ALIGN), nest_columns_bound(n_tile(kv))};
  pycass_cass_sizes s = {0};
  pycass_cass_bound(KV_BLOCK, kv->head_dim, &s);
  return (Sizes){s.speculation_bound, s.verification_bound};
}

/* Planes of a head's keys or values, in the order in which they are read together. */
static Matrix nest_unit(const KvCache *kv, const uint8_t *first, const uint8_t *rest) {
  Matrix m = matrix_shape(PYCASS_CODEC_NEST, kv->head_dim, KV_BLOCK);
  m.x = first, m.a = first + round_up(16 * n_tile(kv), CASS_ALIGN), m.b = m.a + 512 * n_tile(kv), m.side = rest;
  return m;
}

static Sizes encode_unit(const KvCache *kv, const uint16_t *rows, int which, uint8_t *first, uint8_t *rest) {
  if (is_nest(kv)) {
    Matrix m = nest_unit(kv, first, rest);
    memset(first, 0, (size_t)(m.a - first));
    size_t side = nest_encode_columns(rows, kv->head_dim, kv->head_dim, which == KV_KEYS, (uint8_t *)(uintptr_t)m.a,
                                      (uint8_t *)(uintptr_t)m.x, (uint8_t *)(uintptr_t)m.b, rest);
    return (Sizes){unit_bounds(kv).first, side};
  }
  Sizes s = {0};
  pycass_cass_params params = {.prune = 0.4f, .mantissa_bits = 3, .half = 1};
  pycass_status status = pycass_cass_encode(cass_codec(kv), &params, rows, KV_BLOCK, kv->head_dim, NULL, first, &s.first, rest,
                                            &s.rest, NULL);
  return status == PYCASS_OK ? s : (Sizes){0};
}

static size_t unit_draft_bytes(const KvCache *kv, int which, Sizes s) {
  return is_nest(kv) && which == KV_VALUES ? s.first - 768 * n_tile(kv) : s.first;
}

bool kv_due(const KvCache *kv, uint32_t n) {
  return kv->codec != PYCASS_KV_RAW && n >= kv->encoded + KV_BLOCK + KV_PLAIN;
}

bool kv_encode(KvCache *kv, uint32_t layer) {
  Sizes most = unit_bounds(kv);
  size_t room = round_up(most.first, CASS_ALIGN) + round_up(most.rest, CASS_ALIGN);
  KvBlock *block = &kv->block[(size_t)(kv->encoded / KV_BLOCK) * kv->n_layer + layer];
  uint8_t *work = malloc(table_bytes(kv) + 2 * (size_t)kv->n_head * room + SLACK);
  if (!work)
    return false;
  size_t end = table_bytes(kv), draft = 0;
  for (uint32_t h = 0; h < kv->n_head; h++)
    for (int which = 0; which < 2; which++) {
      const uint16_t *rows = (which == KV_KEYS ? kv->k : kv->v) + kv_at(kv, layer, h, kv->encoded);
      size_t rest = end + round_up(most.first, CASS_ALIGN);
      Sizes s = encode_unit(kv, rows, which, work + end, work + rest);
      uint32_t at[2] = {(uint32_t)end, (uint32_t)(end + round_up(s.first, CASS_ALIGN))};
      memmove(work + at[1], work + rest, s.rest);
      memcpy(work + 8 * unit_of(h, which), at, sizeof at);
      draft += unit_draft_bytes(kv, which, s);
      end = round_up(at[1] + s.rest, CASS_ALIGN);
    }
  memset(work + end, 0, SLACK);
  block->data = aligned_alloc(CASS_ALIGN, round_up(end + SLACK, CASS_ALIGN));
  if (block->data)
    memcpy(block->data, work, end + SLACK);
  free(work);
  block->bytes = (uint32_t)(end + SLACK), block->draft_bytes = (uint32_t)draft;
  return block->data != NULL;
}

static void drop_block(KvCache *kv, uint32_t block) {
  for (uint32_t l = 0; l < kv->n_layer; l++) {
    KvBlock *b = &kv->block[(size_t)block * kv->n_layer + l];
    free(b->data);
    *b = (KvBlock){0};
  }
}

void kv_encoded(KvCache *kv, bool done) {
  uint32_t block = kv->encoded / KV_BLOCK;
  if (!done) {
    drop_block(kv, block);
    return;
  }
  for (uint32_t l = 0; l < kv->n_layer; l++) {
    const KvBlock *b = &kv->block[(size_t)block * kv->n_layer + l];
    kv->encoded_bytes += b->bytes, kv->encoded_draft_bytes += b->draft_bytes;
  }
  kv->encoded += KV_BLOCK;
  release(kv, kv->encoded - KV_BLOCK, kv->encoded);
}

/* ---- reading ------------------------------------------------------------------------------------ */

/* All rows of a block. */
static void cass_rows(const Matrix *m, const Kernels *kernels, uint16_t *out, size_t stride) {
  for (uint32_t block = 0; block < m->n_block; block++, out += NEST_ROWS * stride) {
    CassReader reader;
    cass_reader_init(&reader, m, block);
    for (uint32_t g = 0; g < m->n_group; g++) {
      TileWords tile;
      kernels->cass_next_tile(&reader, tile);
      for (uint32_t k = 0; k < NEST_COLS && g * NEST_COLS + k < m->cols; k++)
        for (uint32_t r = 0; r < NEST_ROWS; r++)
          out[r * stride + g * NEST_COLS + k] = tile[k / 8 * 2 + k % 2][tile_word(r, k % 8 / 2)];
    }
  }
}

static Matrix nest_block(const KvCache *kv, uint32_t layer, uint32_t head, int which, uint32_t block) {
  const uint8_t *data = kv->block[(size_t)block * kv->n_layer + layer].data, *entry = data + 8 * unit_of(head, which);
  return nest_unit(kv, data + load_u32(entry), data + load_u32(entry + 4));
}

/* The block after this one, or this one if there is none: blocks lie anywhere, so hardware does not foresee them. */
static Matrix next_block(const KvCache *kv, uint32_t layer, uint32_t head, int which, uint32_t block) {
  return nest_block(kv, layer, head, which, block + 1 < kv->encoded / KV_BLOCK ? block + 1 : block);
}

static inline void fetch(const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i += CASS_ALIGN)
    __builtin_prefetch(p + i, 0, 2);
}

KvRows kv_rows(const KvCache *kv, const Kernels *kernels, uint32_t layer, uint32_t head, int which, uint32_t block, bool draft,
               uint32_t c0, uint32_t c1, uint16_t *scratch) {
  if (block >= kv->encoded / KV_BLOCK || block == kv->exposed) {
    size_t at = kv_at(kv, layer, head, block * KV_BLOCK) + c0;
    return (KvRows){(which == KV_KEYS ? kv->k : kv->v) + at, kv->head_dim};
  }
  size_t stride = round_up(kv->head_dim, NEST_ROWS);
  if (is_nest(kv)) {
    enum { RECORD = 180 }; /* bytes, about */
    Matrix m = nest_block(kv, layer, head, which, block), next = next_block(kv, layer, head, which, block);
    size_t t0 = c0 / NEST_ROWS, t1 = (c1 + NEST_ROWS - 1) / NEST_ROWS;
    fetch(next.x, (size_t)(next.a - next.x));
    for (size_t t = t0; t < t1; t++) { /* fetching all at once would stall */
      fetch(next.a + 512 * t, 512), fetch(next.b + 768 * t, 768), fetch(next.side + 4 * n_tile(kv) + RECORD * t, RECORD);
      kernels->nest_columns(&m, t, t + 1, scratch + NEST_ROWS * (t - t0), stride);
    }
    return (KvRows){scratch, stride};
  }
  const uint8_t *data = kv->block[(size_t)block * kv->n_layer + layer].data, *entry = data + 8 * unit_of(head, which);
  Matrix m = matrix_shape(cass_codec(kv), KV_BLOCK, kv->head_dim);
  m.spec = data + load_u32(entry), m.ver = draft ? NULL : data + load_u32(entry + 4);
  cass_rows(&m, kernels, scratch, stride);
  return (KvRows){scratch + c0, stride};
}

/* Whether the draft's product of scores can take a block's keys. */
static bool moderate(const KvCache *kv, const uint8_t *group) {
  uint8_t most = 0;
  for (uint32_t c = 0; c < kv->head_dim; c++)
    most = group[c] > most ? group[c] : most;
  return most <= KEY_MOST_G && kv->head_dim <= KEY_DIM_MOST;
}

bool kv_draft_unit(const KvCache *kv, uint32_t layer, uint32_t head, int which, uint32_t block, uint32_t c0, uint32_t c1,
                   Matrix *out) {
  if (!is_nest(kv) || block >= kv->encoded / KV_BLOCK || block == kv->exposed)
    return false;
  Matrix next = next_block(kv, layer, head, which, block);
  size_t t0 = c0 / NEST_ROWS, n = (c1 + NEST_ROWS - 1) / NEST_ROWS - t0;
  fetch(next.x, (size_t)(next.a - next.x)), fetch(next.a + 512 * t0, 512 * n);
  fetch(next.b + 768 * t0, which == KV_KEYS ? 768 * n : 0);
  *out = nest_block(kv, layer, head, which, block);
  return which == KV_VALUES || moderate(kv, out->x);
}

void kv_put(KvCache *kv, const Kernels *kernels, uint32_t layer, uint32_t head, uint32_t pos, const float *k, const float *v) {
  uint16_t *key = kv->k + kv_at(kv, layer, head, pos), *value = kv->v + kv_at(kv, layer, head, pos);
  kernels->to_bf16(key, k, kv->head_dim), kernels->to_bf16(value, v, kv->head_dim);
  if (kv->codec == PYCASS_KV_CASS2)
    pycass_cass2_round(key, 1, kv->head_dim), pycass_cass2_round(value, 1, kv->head_dim);
}

/* Decodes rows [from, to) of an encoded block of a head, exact, into out [..][head_dim]. */
static void exact_rows(const KvCache *kv, uint32_t layer, uint32_t head, int which, uint32_t from, uint32_t to, uint16_t *out) {
  static const Kernels scalar = {.nest_columns = nest_columns, .cass_next_tile = cass_next_tile};
  uint16_t scratch[KV_BLOCK * KV_HEAD_MOST];
  KvRows r = kv_rows(kv, &scalar, layer, head, which, from / KV_BLOCK, false, 0, kv->head_dim, scratch);
  for (uint32_t p = from; p < to; p++, out += kv->head_dim)
    memcpy(out, r.row + (p % KV_BLOCK) * r.stride, kv->head_dim * sizeof *out);
}

/* ---- changing what is encoded ------------------------------------------------------------------- */

/* Positions [block begin, n) of an encoded block become plain. */
static void make_plain(KvCache *kv, uint32_t block, uint32_t n) {
  uint32_t from = block * KV_BLOCK;
  for (uint32_t l = 0; l < kv->n_layer && n > from; l++)
    for (uint32_t h = 0; h < kv->n_head; h++) {
      exact_rows(kv, l, h, KV_KEYS, from, n, kv->k + kv_at(kv, l, h, from));
      exact_rows(kv, l, h, KV_VALUES, from, n, kv->v + kv_at(kv, l, h, from));
    }
}

void kv_trim(KvCache *kv, uint32_t n) {
  while (kv->encoded > n) {
    uint32_t block = kv->encoded / KV_BLOCK - 1;
    make_plain(kv, block, n);
    for (uint32_t l = 0; l < kv->n_layer; l++) {
      const KvBlock *b = &kv->block[(size_t)block * kv->n_layer + l];
      kv->encoded_bytes -= b->bytes, kv->encoded_draft_bytes -= b->draft_bytes;
    }
    drop_block(kv, block);
    kv->encoded -= KV_BLOCK;
  }
}

void kv_expose(KvCache *kv, uint32_t block) {
  if (block >= kv->encoded / KV_BLOCK || block == kv->exposed)
    return;
  kv_hide(kv);
  make_plain(kv, block, (block + 1) * KV_BLOCK);
  kv->exposed = block;
}

void kv_hide(KvCache *kv) {
  if (kv->exposed != UINT32_MAX)
    release(kv, kv->exposed * KV_BLOCK, (kv->exposed + 1) * KV_BLOCK);
  kv->exposed = UINT32_MAX;
}

void kv_save(const KvCache *kv, uint32_t from, uint32_t n, uint8_t *out) {
  size_t row = kv->head_dim * sizeof(uint16_t);
  for (uint32_t l = 0; l < kv->n_layer; l++)
    for (uint32_t h = 0; h < kv->n_head; h++)
      for (int which = 0; which < 2; which++)
        for (uint32_t p = from, end; p < from + n; p = end) {
          end = (uint32_t)min_size((p / KV_BLOCK + 1) * KV_BLOCK, from + n);
          if (p < kv->encoded && p / KV_BLOCK != kv->exposed)
            exact_rows(kv, l, h, which, p, end, (uint16_t *)(void *)out);
          else
            memcpy(out, (which == KV_KEYS ? kv->k : kv->v) + kv_at(kv, l, h, p), (end - p) * row);
          out += (end - p) * row;
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
