#include <stdlib.h>

#include "format.h"

#include "codec_cass.h"

static const uint8_t magic[8] = {0x89, 'C', 'A', 'S', 'S', '\r', '\n', 0x1a};
enum { HEADER_SIZE = 4096, VERSION = 2, ENTRY_SIZE = 32, MAX_DIM = 1 << 28 };
static const char *const section_name[N_SECTION] = {"speculation", "verification", "config", "directory", "json"};

/* ---- header ------------------------------------------------------------------------------------- */

static bool all_zero(const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (p[i])
      return false;
  return true;
}

static pycass_status check_header(const uint8_t *data, size_t size) {
  if (size < sizeof magic || memcmp(data, magic, sizeof magic) != 0)
    return cass_fail(PYCASS_ERR_NOT_CASS, "this is not a .cass file");
  if (size < 12)
    return cass_fail(PYCASS_ERR_TRUNCATED, "the file ends in its header");
  uint32_t version = load_u32(data + 8);
  if (version != VERSION)
    return cass_fail(PYCASS_ERR_VERSION, "the file has format version %u, this build reads version %u: %s", version,
                     VERSION, version < VERSION ? "convert the model again" : "it needs a newer pycass");
  if (size < HEADER_SIZE)
    return cass_fail(PYCASS_ERR_TRUNCATED, "the file ends in its header");
  if (pycass_crc32c(0, data, HEADER_SIZE - 4) != load_u32(data + HEADER_SIZE - 4))
    return cass_fail(PYCASS_ERR_CHECKSUM, "the header's checksum is wrong");
  if (load_u32(data + 12) != HEADER_SIZE || load_u32(data + 24) != N_SECTION || load_u32(data + 28) ||
      !all_zero(data + 32 + N_SECTION * ENTRY_SIZE, HEADER_SIZE - 4 - 32 - N_SECTION * ENTRY_SIZE))
    return cass_fail(PYCASS_ERR_CORRUPT, "the header contradicts itself");
  uint64_t stated = load_u64(data + 16);
  if (size < stated)
    return cass_fail(PYCASS_ERR_TRUNCATED, "the file has %zu of its %llu bytes", size, (unsigned long long)stated);
  if (size > stated)
    return cass_fail(PYCASS_ERR_TRAILING, "the file has %llu bytes too many", (unsigned long long)(size - stated));
  return PYCASS_OK;
}

static pycass_status parse_sections(const uint8_t *data, size_t size, Format *f) {
  uint64_t end = HEADER_SIZE;
  for (uint32_t i = 0; i < N_SECTION; i++) {
    const uint8_t *e = data + 32 + i * ENTRY_SIZE;
    uint64_t offset = load_u64(e + 8), bytes = load_u64(e + 16), align = i < 2 ? 4096 : CASS_ALIGN;
    if (load_u32(e) != i + 1 || load_u64(e + 24) || offset % align || offset < end || offset - end >= align ||
        offset > size || bytes > size - offset || !all_zero(data + end, offset - end))
      return cass_fail(PYCASS_ERR_CORRUPT, "the %s section lies where it cannot", section_name[i]);
    f->section[i] = (Section){load_u32(e + 4), data + offset, bytes};
    end = offset + bytes;
  }
  if (end != size)
    return cass_fail(PYCASS_ERR_CORRUPT, "the last section does not end the file");
  return PYCASS_OK;
}

static pycass_status check_section(const Format *f, int i) {
  const Section *s = &f->section[i];
  if (pycass_crc32c(0, s->data, s->size) != s->crc)
    return cass_fail(PYCASS_ERR_CHECKSUM, "the %s section's checksum is wrong: the file is damaged", section_name[i]);
  return PYCASS_OK;
}

pycass_status format_verify(const Format *f) {
  for (int i = 0; i < N_SECTION; i++)
    RETURN_IF(check_section(f, i));
  return PYCASS_OK;
}

/* ---- config ------------------------------------------------------------------------------------- */

static pycass_status check_range(const char *what, uint32_t v, uint32_t low, uint32_t high) {
  if (v < low || v > high)
    return cass_fail(PYCASS_ERR_CORRUPT, "config: %s = %u is not in %u..%u", what, v, low, high);
  return PYCASS_OK;
}

static pycass_status check_config(const pycass_config *c) {
  RETURN_IF(check_range("n_vocab", c->n_vocab, 1, 1u << 24));
  RETURN_IF(check_range("n_token", c->n_token, 1, c->n_vocab));
  RETURN_IF(check_range("n_ctx_train", c->n_ctx_train, 1, 1u << 24));
  RETURN_IF(check_range("n_embd", c->n_embd, 1, 1u << 16));
  RETURN_IF(check_range("n_ff", c->n_ff, 1, 1u << 20));
  RETURN_IF(check_range("n_layer", c->n_layer, 1, 1024));
  RETURN_IF(check_range("n_head", c->n_head, 1, 1024));
  RETURN_IF(check_range("n_head_kv", c->n_head_kv, 1, c->n_head));
  RETURN_IF(check_range("head_dim", c->head_dim, 2, 1024));
  if (c->n_head % c->n_head_kv || c->head_dim % 2)
    return cass_fail(PYCASS_ERR_CORRUPT, "config: %u heads over %u of dimension %u do not divide", c->n_head,
                     c->n_head_kv, c->head_dim);
  if (!(c->rms_eps > 0) || !(c->rms_eps < 1) || !(c->rope_attention_factor > 0) || !(c->rope_attention_factor < 1e6f))
    return cass_fail(PYCASS_ERR_CORRUPT, "config: rms_eps or rope_attention_factor is out of range");
  return PYCASS_OK;
}

static pycass_status parse_config(Format *f) {
  const Section *s = &f->section[SECTION_CONFIG];
  if (s->size < 64)
    return cass_fail(PYCASS_ERR_CORRUPT, "config: the section is too short");
  uint32_t v[11];
  memcpy(v, s->data, sizeof v);
  f->config = (pycass_config){v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10],
                              f32_from_bits(load_u32(s->data + 44)), f32_from_bits(load_u32(s->data + 48))};
  RETURN_IF(check_config(&f->config));
  if (s->size != 64 + (size_t)2 * f->config.head_dim || !all_zero(s->data + 52, 12))
    return cass_fail(PYCASS_ERR_CORRUPT, "config: the section has the wrong size");
  f->rope_inv_freq = (const float *)(const void *)(s->data + 64);
  for (uint32_t i = 0; i < f->config.head_dim / 2; i++)
    if (!(f->rope_inv_freq[i] >= 0 && f->rope_inv_freq[i] <= 1e3f))
      return cass_fail(PYCASS_ERR_CORRUPT, "config: rope_inv_freq[%u] is out of range", i);
  return PYCASS_OK;
}

/* ---- directory ---------------------------------------------------------------------------------- */

typedef struct Cursor {
  const uint8_t *p;
  size_t left;
} Cursor;

static const uint8_t *take(Cursor *c, size_t n) {
  if (n > c->left)
    return NULL;
  const uint8_t *p = c->p;
  c->p += n, c->left -= n;
  return p;
}

typedef struct Part {
  const uint8_t *data;
  uint64_t size;
} Part;
enum { RAW, A, X, B, SIDE, HOT, HOT_WORDS, BIAS, SPEC, VER, N_PART_KIND };
static const struct {
  uint32_t type;
  int section;
} part_kind[N_PART_KIND] = {{PART_RAW, 0},       {PART_NEST_A, 0},   {PART_NEST_X, 0},         {PART_NEST_B, 1},
                            {PART_NEST_SIDE, 1}, {PART_NEST_HOT, 0}, {PART_NEST_HOT_WORDS, 0}, {PART_NEST_BIAS, 0},
                            {PART_CASS_SPEC, 0}, {PART_CASS_VER, 1}};

static pycass_status parse_part(const Format *f, Tensor *t, const uint8_t *e, Part parts[N_PART_KIND]) {
  uint32_t type = load_u32(e), section = load_u32(e + 4) - 1;
  uint64_t offset = load_u64(e + 8), size = load_u64(e + 16);
  if (section > 1 || load_u64(e + 24) || offset % CASS_ALIGN || offset > f->section[section].size ||
      size > f->section[section].size - offset)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: a part lies outside of its section", t->name);
  *(section ? &t->info.verification_bytes : &t->info.speculation_bytes) += size;
  if (type >> 31)
    return PYCASS_OK;
  for (int i = 0; i < N_PART_KIND; i++)
    if (type == part_kind[i].type) {
      if ((int)section != part_kind[i].section)
        return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: part %u is in the wrong section", t->name, type);
      parts[i] = (Part){f->section[section].data + offset, size};
      return PYCASS_OK;
    }
  return cass_fail(PYCASS_ERR_UNSUPPORTED, "tensor %s: part type %u is unknown to this build", t->name, type);
}

static pycass_status bind_raw(Tensor *t, const Part p[N_PART_KIND], int n_known) {
  Matrix *m = &t->matrix;
  if (n_known != 1 || !p[RAW].data || p[RAW].size != (uint64_t)m->rows * m->cols * 2)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: a raw tensor of this shape has other parts", t->name);
  m->raw = (const uint16_t *)(const void *)p[RAW].data;
  return PYCASS_OK;
}

/* Hot columns and draft bias, where there are some. */
static pycass_status bind_calibration(Tensor *t, const Part p[N_PART_KIND]) {
  Matrix *m = &t->matrix;
  uint64_t rows = (uint64_t)m->n_block * NEST_ROWS, n_hot = p[HOT].size / 4;
  if (p[HOT].data) {
    m->hot = (const uint32_t *)(const void *)p[HOT].data, m->n_hot = (uint32_t)n_hot;
    m->hot_words = (const uint16_t *)(const void *)p[HOT_WORDS].data;
    if (!n_hot || p[HOT].size % 4 || nest_check_hot(m->hot, n_hot, m->cols) != PYCASS_OK || p[HOT_WORDS].size != rows * n_hot * 2)
      return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: its hot columns are damaged", t->name);
  }
  if (p[BIAS].data && p[BIAS].size != rows * 4)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: its draft bias has the wrong size", t->name);
  m->bias = (const float *)(const void *)p[BIAS].data;
  return PYCASS_OK;
}

static pycass_status bind_nest(Tensor *t, const Part p[N_PART_KIND], int n_known) {
  Matrix *m = &t->matrix;
  pycass_nest_sizes s;
  RETURN_IF(pycass_nest_bound(m->rows, m->cols, &s));
  int n_needed = 4 + 2 * (p[HOT].data != NULL) + (p[BIAS].data != NULL);
  if (t->info.n_dims != 2 || n_known != n_needed || p[RAW].data || !p[HOT].data != !p[HOT_WORDS].data || p[A].size != s.a ||
      p[X].size != s.x || p[B].size != s.b || p[SIDE].size > s.side_bound)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: a nest tensor of this shape has other parts", t->name);
  m->a = p[A].data, m->x = p[X].data, m->b = p[B].data, m->side = p[SIDE].data;
  if (nest_check_side(m->side, p[SIDE].size, matrix_tiles(m)) != PYCASS_OK)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: its side offsets are damaged", t->name);
  return bind_calibration(t, p);
}

static pycass_status bind_cass(Tensor *t, const Part p[N_PART_KIND], int n_known) {
  Matrix *m = &t->matrix;
  if (t->info.n_dims != 2 || n_known != 2 || !p[SPEC].data || !p[VER].data)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: a cass tensor has other parts", t->name);
  m->spec = p[SPEC].data, m->ver = p[VER].data;
  if (cass_check_parts(m, p[SPEC].size, p[VER].size) != PYCASS_OK)
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: a part's header or table is damaged", t->name);
  return PYCASS_OK;
}

static pycass_status parse_name(Tensor *t, const uint8_t *name, size_t n) {
  t->name = malloc(n + 1);
  if (!t->name)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the tensor directory");
  for (size_t i = 0; i < n; i++)
    t->name[i] = (char)(name[i] >= 0x20 && name[i] != 0x7f ? name[i] : '?'); /* safe to print */
  t->name[n] = 0;
  if (!n || memcmp(t->name, name, n) != 0)
    return cass_fail(PYCASS_ERR_CORRUPT, "a tensor's name is empty or has control characters");
  t->info.name = t->name;
  return PYCASS_OK;
}

static pycass_status parse_tensor(const Format *f, Cursor *c, Tensor *t) {
  const uint8_t *e = take(c, 32);
  size_t n_name = e ? e[0] | (size_t)e[1] << 8 : 0;
  const uint8_t *name = e ? take(c, n_name) : NULL;
  if (!name || n_name > 255)
    return cass_fail(PYCASS_ERR_CORRUPT, "the tensor directory ends too early");
  RETURN_IF(parse_name(t, name, n_name));
  uint32_t n_dims = e[3], n_parts = e[4];
  uint64_t shape[2] = {load_u64(e + 8), load_u64(e + 16)};
  if (n_dims < 1 || n_dims > 2 || n_parts < 1 || n_parts > 16 || !all_zero(e + 5, 3) || load_u32(e + 28) ||
      !shape[0] || shape[0] > MAX_DIM || shape[1] > MAX_DIM || (n_dims == 2) != (shape[1] != 0))
    return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: impossible shape or parts", t->name);
  if (e[2] > PYCASS_CODEC_CASS2)
    return cass_fail(PYCASS_ERR_UNSUPPORTED, "tensor %s: codec %u is unknown to this build", t->name, e[2]);
  t->info.codec = (pycass_codec)e[2], t->info.n_dims = n_dims, t->info.bf16_crc32c = load_u32(e + 24);
  t->info.shape[0] = shape[0], t->info.shape[1] = shape[1];
  t->matrix = n_dims == 2 ? matrix_shape(t->info.codec, (uint32_t)shape[0], (uint32_t)shape[1])
                          : matrix_shape(t->info.codec, 1, (uint32_t)shape[0]);
  Part parts[N_PART_KIND] = {{0}};
  int n_known = 0;
  t->part = c->p, t->n_part = n_parts;
  for (uint32_t i = 0; i < n_parts; i++) {
    const uint8_t *p = take(c, 32);
    if (!p)
      return cass_fail(PYCASS_ERR_CORRUPT, "the tensor directory ends too early");
    for (uint32_t k = 1; k <= i; k++)
      if (load_u32(p - 32 * k) == load_u32(p))
        return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s: part %u is there twice", t->name, load_u32(p));
    RETURN_IF(parse_part(f, t, p, parts));
    n_known += !(load_u32(p) >> 31);
  }
  if (matrix_is_cass(&t->matrix))
    return bind_cass(t, parts, n_known);
  return t->info.codec == PYCASS_CODEC_RAW ? bind_raw(t, parts, n_known) : bind_nest(t, parts, n_known);
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const Tensor *)a)->name, ((const Tensor *)b)->name);
}

static pycass_status parse_directory(Format *f) {
  Cursor c = {f->section[SECTION_DIRECTORY].data, f->section[SECTION_DIRECTORY].size};
  const uint8_t *head = take(&c, 8);
  /* the smallest entry has 32 + 1 + 32 bytes: a hostile count cannot make us allocate much */
  if (!head || load_u32(head + 4) || !load_u32(head) || load_u32(head) > c.left / 65)
    return cass_fail(PYCASS_ERR_CORRUPT, "the tensor directory contradicts itself");
  size_t n = load_u32(head);
  f->tensor = calloc(n, sizeof *f->tensor);
  if (!f->tensor)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the tensor directory");
  while (f->n_tensor < n) {
    f->n_tensor++; /* first: format_free must see a half-parsed one */
    RETURN_IF(parse_tensor(f, &c, &f->tensor[f->n_tensor - 1]));
  }
  if (c.left)
    return cass_fail(PYCASS_ERR_CORRUPT, "the tensor directory has trailing bytes");
  qsort(f->tensor, n, sizeof *f->tensor, by_name);
  for (size_t i = 1; i < n; i++)
    if (by_name(&f->tensor[i - 1], &f->tensor[i]) == 0)
      return cass_fail(PYCASS_ERR_CORRUPT, "tensor %s is there twice", f->tensor[i].name);
  return PYCASS_OK;
}

const uint8_t *format_part(const Format *f, const Tensor *t, uint32_t type, size_t *size) {
  for (uint32_t i = 0; i < t->n_part; i++) {
    const uint8_t *e = t->part + 32 * (size_t)i;
    if (load_u32(e) == type) {
      *size = load_u64(e + 16);
      return f->section[load_u32(e + 4) - 1].data + load_u64(e + 8);
    }
  }
  return NULL;
}

static int by_address(const void *a, const void *b) {
  const Part *p = a, *q = b;
  return (p->data > q->data) - (p->data < q->data);
}

/* No weight is stored twice: parts may not overlap, known or not. A second walk over entries that are checked. */
static pycass_status check_overlap(const Format *f) {
  Cursor c = {f->section[SECTION_DIRECTORY].data, f->section[SECTION_DIRECTORY].size};
  Part *parts = calloc(c.left / 32, sizeof *parts);
  if (!parts)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the tensor directory");
  size_t n = 0;
  take(&c, 8);
  while (c.left) {
    const uint8_t *e = take(&c, 32);
    take(&c, e[0] | (size_t)e[1] << 8);
    for (uint32_t i = 0; i < e[4]; i++) {
      const uint8_t *p = take(&c, 32);
      parts[n] = (Part){f->section[load_u32(p + 4) - 1].data + load_u64(p + 8), load_u64(p + 16)};
      n += parts[n].size != 0;
    }
  }
  qsort(parts, n, sizeof *parts, by_address);
  bool overlap = false;
  for (size_t i = 1; i < n; i++)
    overlap |= parts[i - 1].data + parts[i - 1].size > parts[i].data;
  free(parts);
  return overlap ? cass_fail(PYCASS_ERR_CORRUPT, "parts of tensors overlap") : PYCASS_OK;
}

/* ---- the whole ---------------------------------------------------------------------------------- */

static pycass_status parse(const uint8_t *data, size_t size, Format *f) {
  RETURN_IF(check_header(data, size));
  RETURN_IF(parse_sections(data, size, f));
  f->header_crc = load_u32(data + HEADER_SIZE - 4);
  for (int i = SECTION_CONFIG; i < N_SECTION; i++)
    RETURN_IF(check_section(f, i));
  RETURN_IF(parse_config(f));
  RETURN_IF(parse_directory(f));
  return check_overlap(f);
}

pycass_status format_parse(const uint8_t *data, size_t size, Format *out) {
  *out = (Format){0};
  pycass_status status = parse(data, size, out);
  if (status != PYCASS_OK)
    format_free(out);
  return status;
}

void format_free(Format *f) {
  for (size_t i = 0; i < f->n_tensor; i++)
    free(f->tensor[i].name);
  free(f->tensor);
  *f = (Format){0};
}

const Tensor *format_find(const Format *f, const char *name) {
  size_t low = 0, high = f->n_tensor;
  while (low < high) {
    size_t mid = (low + high) / 2;
    int order = strcmp(name, f->tensor[mid].name);
    if (order == 0)
      return &f->tensor[mid];
    if (order < 0)
      high = mid;
    else
      low = mid + 1;
  }
  return NULL;
}
