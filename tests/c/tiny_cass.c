#include "tiny_cass.h"

#include <unistd.h>

#include "check.h"

/* ---- bytes ----------------------------------------------------------------------------------------- */

void bytes_put(Bytes *b, const void *data, size_t n) {
  if (b->n + n > b->capacity) {
    b->capacity = 2 * (b->n + n) + 64;
    b->p = realloc(b->p, b->capacity);
    CHECK(b->p, "no memory");
  }
  if (data && n)
    memcpy(b->p + b->n, data, n);
  else if (n)
    memset(b->p + b->n, 0, n);
  b->n += n;
}

void bytes_pad(Bytes *b, size_t to) { bytes_put(b, NULL, round_up(b->n, to) - b->n); }

static void put4(Bytes *b, uint32_t v) { bytes_put(b, &v, 4); }
static void put8(Bytes *b, uint64_t v) { bytes_put(b, &v, 8); }

/* ---- sections -------------------------------------------------------------------------------------- */

void cass_config(CassBuilder *b, const pycass_config *c) {
  Bytes *s = &b->section[SECTION_CONFIG];
  bytes_put(s, c, 44);
  bytes_put(s, &c->rms_eps, 4), bytes_put(s, &c->rope_attention_factor, 4);
  bytes_put(s, NULL, 12);
  for (uint32_t i = 0; i < c->head_dim / 2; i++) {
    float f = powf(10000.0f, -2.0f * (float)i / (float)c->head_dim);
    bytes_put(s, &f, 4);
  }
}

static void put_part(CassBuilder *b, uint32_t type, int section, const void *data, size_t n) {
  Bytes *s = &b->section[section], *d = &b->section[SECTION_DIRECTORY];
  bytes_pad(s, CASS_ALIGN);
  put4(d, type), put4(d, (uint32_t)section + 1), put8(d, s->n), put8(d, n), put8(d, 0);
  bytes_put(s, data, n);
}

static size_t builder_hot(const CassBuilder *b, uint32_t cols) { return b->calibrated && cols >= HOT_UNIT ? HOT_UNIT : 0; }

static void put_nest_parts(CassBuilder *b, uint32_t rows, uint32_t cols, const uint16_t *w) {
  pycass_nest_sizes n;
  CHECK(pycass_nest_bound(rows, cols, &n) == PYCASS_OK, "%s", pycass_error_detail());
  uint8_t *all = malloc(n.a + n.x + n.b + n.side_bound);
  size_t padded = round_up(rows, NEST_ROWS), n_hot = builder_hot(b, cols);
  uint32_t hot[HOT_UNIT];
  uint16_t *hot_words = calloc(padded * n_hot + 1, 2);
  float *mean = calloc(cols, sizeof *mean), *bias = calloc(padded, sizeof *bias);
  CHECK(all && hot_words && mean && bias, "no memory");
  for (uint32_t i = 0; i < n_hot; i++)
    hot[i] = i * cols / HOT_UNIT;
  for (uint32_t k = 0; k < cols; k++)
    mean[k] = 0.1f * (float)(k % 7) - 0.2f;
  pycass_nest_calibration c = {hot, n_hot, NULL, mean};
  uint8_t *pa = all, *px = pa + n.a, *pb = px + n.x, *side = pb + n.b;
  size_t side_size;
  CHECK(pycass_nest_encode_calibrated(w, rows, cols, b->calibrated ? &c : NULL, pa, px, pb, side, &side_size, hot_words,
                                      bias) == PYCASS_OK,
        "%s", pycass_error_detail());
  put_part(b, PART_NEST_A, SECTION_SPECULATION, pa, n.a), put_part(b, PART_NEST_X, SECTION_SPECULATION, px, n.x);
  put_part(b, PART_NEST_B, SECTION_VERIFICATION, pb, n.b);
  put_part(b, PART_NEST_SIDE, SECTION_VERIFICATION, side, side_size);
  if (n_hot) {
    put_part(b, PART_NEST_HOT, SECTION_SPECULATION, hot, 4 * n_hot);
    put_part(b, PART_NEST_HOT_WORDS, SECTION_SPECULATION, hot_words, 2 * padded * n_hot);
  }
  if (b->calibrated)
    put_part(b, PART_NEST_BIAS, SECTION_SPECULATION, bias, padded * sizeof *bias);
  free(all), free(hot_words), free(mean), free(bias);
}

static void put_cass_parts(CassBuilder *b, pycass_codec codec, uint32_t rows, uint32_t cols, const uint16_t *w) {
  pycass_cass_params params = {.prune = 0.4f, .mantissa_bits = 3, .half = 1};
  pycass_cass_sizes n;
  size_t spec_size, ver_size;
  CHECK(pycass_cass_bound(rows, cols, &n) == PYCASS_OK, "%s", pycass_error_detail());
  uint8_t *spec = malloc(n.speculation_bound), *ver = malloc(n.verification_bound);
  CHECK(spec && ver, "no memory");
  CHECK(pycass_cass_encode(codec, &params, w, rows, cols, NULL, spec, &spec_size, ver, &ver_size, NULL) == PYCASS_OK, "%s",
        pycass_error_detail());
  put_part(b, PART_CASS_SPEC, SECTION_SPECULATION, spec, spec_size);
  put_part(b, PART_CASS_VER, SECTION_VERIFICATION, ver, ver_size);
  free(spec), free(ver);
}

/* The checksum of what the tensor decodes to. */
static uint32_t crc_of(pycass_codec codec, uint32_t rows, uint32_t cols, const uint16_t *w) {
  size_t n = sizeof *w * rows * (cols ? cols : 1);
  uint16_t *copy = malloc(n);
  CHECK(copy, "no memory");
  memcpy(copy, w, n);
  if (codec == PYCASS_CODEC_CASS2)
    pycass_cass2_round(copy, rows, cols);
  uint32_t crc = pycass_crc32c(0, copy, n);
  free(copy);
  return crc;
}

void cass_tensor(CassBuilder *b, const char *name, pycass_codec codec, uint32_t rows, uint32_t cols,
                 const uint16_t *w) {
  Bytes *d = &b->section[SECTION_DIRECTORY];
  if (!d->n)
    bytes_put(d, NULL, 8);
  size_t n_name = strlen(name), values = (size_t)rows * (cols ? cols : 1);
  const uint8_t n_parts[] = {1, (uint8_t)(4 + b->calibrated + 2 * (builder_hot(b, cols) > 0)), 2, 2};
  uint8_t head[8] = {(uint8_t)n_name, (uint8_t)(n_name >> 8), (uint8_t)codec, cols ? 2 : 1, n_parts[codec]};
  bytes_put(d, head, 8);
  put8(d, rows), put8(d, cols);
  put4(d, crc_of(codec, rows, cols, w)), put4(d, 0);
  bytes_put(d, name, n_name);
  if (codec == PYCASS_CODEC_RAW)
    put_part(b, PART_RAW, SECTION_SPECULATION, w, values * 2);
  else if (codec == PYCASS_CODEC_NEST)
    put_nest_parts(b, rows, cols, w);
  else
    put_cass_parts(b, codec, rows, cols, w);
  put_u32(d->p, ++b->n_tensor);
}

/* ---- the file -------------------------------------------------------------------------------------- */

void cass_reseal(uint8_t *file, size_t size) {
  if (size < 4096)
    return;
  for (int i = 0; i < N_SECTION; i++) {
    uint8_t *e = file + 32 + 32 * i;
    uint64_t offset = load_u64(e + 8), bytes = load_u64(e + 16);
    if (offset <= size && bytes <= size - offset)
      put_u32(e + 4, pycass_crc32c(0, file + offset, bytes));
  }
  put_u32(file + 4092, pycass_crc32c(0, file, 4092));
}

uint8_t *cass_finish(CassBuilder *b, size_t *size) {
  static const uint8_t start[16] = {0x89, 'C', 'A', 'S', 'S', '\r', '\n', 0x1a, 2, 0, 0, 0, 0, 16, 0, 0};
  Bytes f = {0};
  bytes_put(&f, start, 16);
  bytes_put(&f, NULL, 4096 - 16);
  put_u32(f.p + 24, N_SECTION);
  for (uint32_t i = 0; i < N_SECTION; i++) {
    bytes_pad(&f, i < 2 ? 4096 : CASS_ALIGN);
    put_u32(f.p + 32 + 32 * i, i + 1);
    put_u64(f.p + 40 + 32 * i, f.n), put_u64(f.p + 48 + 32 * i, b->section[i].n);
    bytes_put(&f, b->section[i].n ? b->section[i].p : NULL, b->section[i].n);
    free(b->section[i].p);
  }
  put_u64(f.p + 16, f.n);
  cass_reseal(f.p, f.n);
  uint8_t *file = exact_copy(f.p, f.n);
  *size = f.n;
  free(f.p);
  *b = (CassBuilder){0};
  return file;
}

/* ---- models ---------------------------------------------------------------------------------------- */

TinyModel tiny_model(int kind) {
  static const pycass_codec codec[N_TINY] = {PYCASS_CODEC_NEST, PYCASS_CODEC_NEST,  PYCASS_CODEC_NEST, PYCASS_CODEC_NEST,
                                             PYCASS_CODEC_RAW,  PYCASS_CODEC_CASS1, PYCASS_CODEC_CASS2};
  TinyModel m = {.codec = codec[kind], .seed = 7 + (uint32_t)(kind < TINY_RAW ? kind : TINY_RAW)};
  m.config = (pycass_config){.family = kind > TINY_QWEN3 ? 1 : (uint32_t)kind + 1, .n_vocab = 75, .n_token = 70,
                             .n_ctx_train = 256, .n_embd = 40, .n_ff = 72, .n_layer = 2, .n_head = 6, .n_head_kv = 2,
                             .head_dim = 10, .rms_eps = 1e-5f, .rope_attention_factor = 1};
  if (kind == TINY_QWEN3)
    m.config.head_dim = 16, m.config.n_embd = 64, m.config.flags = PYCASS_FLAG_TIED_EMBEDDING;
  m.calibrated = kind == TINY_HOT, m.qkv_bias = kind == TINY_QWEN2, m.head_norm = kind == TINY_QWEN3;
  return m;
}

static uint64_t weight_state;
static float weight_gauss(void) { /* a sum of uniforms: apart from the tests' own stream, so that files do not vary */
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    weight_state = weight_state * 6364136223846793005u + 1442695040888963407u;
    sum += (float)(weight_state >> 40) / 16777216.0f - 0.5f;
  }
  return 1.73f * sum;
}

static void put_random(CassBuilder *b, const TinyModel *m, const char *name, uint32_t rows, uint32_t cols, float mean,
                       float deviation) {
  size_t n = (size_t)rows * (cols ? cols : 1);
  uint16_t *w = malloc(2 * n);
  CHECK(w, "no memory");
  for (size_t i = 0; i < n; i++)
    w[i] = m->odd_weight && i % 97 == 5 ? m->odd_weight : bf16_from_f32(mean + deviation * weight_gauss());
  if (rows == m->config.n_vocab) /* padding rows that would win if they could be sampled */
    for (size_t i = (size_t)m->config.n_token * cols; i < n; i++)
      w[i] = bf16_from_f32(8 * bf16_to_f32(w[i]));
  cass_tensor(b, name, cols ? m->codec : PYCASS_CODEC_RAW, rows, cols, w);
  free(w);
}

static void put_layer(CassBuilder *b, const TinyModel *m, uint32_t layer) {
  const pycass_config *c = &m->config;
  uint32_t q = c->n_head * c->head_dim, kv = c->n_head_kv * c->head_dim;
  float d = 1.0f / sqrtf((float)c->n_embd);
  struct {
    const char *name;
    uint32_t rows, cols;
    bool there;
    float mean, deviation;
  } t[] = {{"input_layernorm.weight", c->n_embd, 0, true, 1, 0.1f},
           {"post_attention_layernorm.weight", c->n_embd, 0, true, 1, 0.1f},
           {"self_attn.q_proj.weight", q, c->n_embd, true, 0, d},
           {"self_attn.k_proj.weight", kv, c->n_embd, true, 0, d},
           {"self_attn.v_proj.weight", kv, c->n_embd, true, 0, d},
           {"self_attn.o_proj.weight", c->n_embd, q, true, 0, d},
           {"mlp.gate_proj.weight", c->n_ff, c->n_embd, true, 0, d},
           {"mlp.up_proj.weight", c->n_ff, c->n_embd, true, 0, d},
           {"mlp.down_proj.weight", c->n_embd, c->n_ff, true, 0, d},
           {"self_attn.q_proj.bias", q, 0, m->qkv_bias, 0, 0.3f},
           {"self_attn.k_proj.bias", kv, 0, m->qkv_bias, 0, 0.3f},
           {"self_attn.v_proj.bias", kv, 0, m->qkv_bias, 0, 0.3f},
           {"self_attn.q_norm.weight", c->head_dim, 0, m->head_norm, 1, 0.1f},
           {"self_attn.k_norm.weight", c->head_dim, 0, m->head_norm, 1, 0.1f}};
  for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%u.%s", layer, t[i].name);
    if (t[i].there)
      put_random(b, m, name, t[i].rows, t[i].cols, t[i].mean, t[i].deviation);
  }
}

uint8_t *tiny_file(const TinyModel *m, size_t *size) {
  CassBuilder b = {0};
  const pycass_config *c = &m->config;
  static const char json[] = "{\"name\": \"tiny\", \"eos_token_ids\": [1]}";
  weight_state = m->seed, b.calibrated = m->calibrated;
  cass_config(&b, c);
  put_random(&b, m, "model.embed_tokens.weight", c->n_vocab, c->n_embd, 0, 1);
  for (uint32_t i = 0; i < c->n_layer; i++)
    put_layer(&b, m, i);
  put_random(&b, m, "model.norm.weight", c->n_embd, 0, 1, 0.1f);
  if (!(c->flags & PYCASS_FLAG_TIED_EMBEDDING))
    put_random(&b, m, "lm_head.weight", c->n_vocab, c->n_embd, 0, 0.5f);
  bytes_put(&b.section[SECTION_JSON], json, sizeof json - 1);
  return cass_finish(&b, size);
}

void tiny_write(const TinyModel *m, char *path) {
  const char *dir = getenv("TMPDIR");
  snprintf(path, 256, "%s/pycass-tiny-XXXXXX", dir && *dir ? dir : "/tmp");
  int fd = mkstemp(path);
  CHECK(fd >= 0, "no temporary file %s", path);
  size_t size, done = 0;
  uint8_t *file = tiny_file(m, &size);
  while (done < size) {
    ssize_t n = write(fd, file + done, size - done);
    CHECK(n > 0, "cannot write %s", path);
    done += (size_t)n;
  }
  close(fd);
  free(file);
}
