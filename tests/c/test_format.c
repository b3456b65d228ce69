/* The container: what a good file gives back, and the documented status of every bad one. */
#include "check.h"
#include "tiny_cass.h"

/* ---- a small file ----------------------------------------------------------------------------------- */

static uint16_t vector_bits[37], raw_bits[7 * 30], nest_bits[20 * 70];

static void small_builder(CassBuilder *b) {
  pycass_config c = {.family = 1, .n_vocab = 10, .n_token = 9, .n_ctx_train = 64, .n_embd = 37, .n_ff = 8, .n_layer = 1,
                     .n_head = 4, .n_head_kv = 2, .head_dim = 6, .rms_eps = 1e-5f, .rope_attention_factor = 1};
  *b = (CassBuilder){0};
  cass_config(b, &c);
  cass_tensor(b, "vector", PYCASS_CODEC_RAW, 37, 0, vector_bits);
  cass_tensor(b, "nest", PYCASS_CODEC_NEST, 20, 70, nest_bits);
  cass_tensor(b, "raw", PYCASS_CODEC_RAW, 7, 30, raw_bits);
  bytes_put(&b->section[SECTION_JSON], "{\"x\": 1}", 8);
}

static uint8_t *small_file(size_t *size) {
  CassBuilder b;
  small_builder(&b);
  return cass_finish(&b, size);
}

/* Opens, decodes whatever there is, closes. */
static pycass_status try_file(const uint8_t *data, size_t size) {
  pycass_file *f = NULL;
  pycass_status status = pycass_file_open_buffer(data, size, &f);
  if (status != PYCASS_OK) {
    CHECK(!f && pycass_error_detail()[0], "an error without a reason");
    return status;
  }
  for (size_t i = 0; i < pycass_file_tensor_count(f); i++) {
    pycass_tensor_info t;
    CHECK(pycass_file_tensor(f, i, &t) == PYCASS_OK, "tensor %zu", i);
    size_t n = t.shape[0] * (t.n_dims == 2 ? t.shape[1] : 1);
    uint16_t *out = malloc(2 * n);
    CHECK(pycass_file_tensor_bf16(f, i, 0, t.n_dims == 2 ? t.shape[0] : 1, out, n) == PYCASS_OK, "%s", pycass_error_detail());
    free(out);
  }
  pycass_file_close(f);
  return PYCASS_OK;
}

static void check_status(const uint8_t *data, size_t size, pycass_status want, const char *what, uint64_t value) {
  uint8_t *exact = exact_copy(data, size);
  pycass_status got = try_file(exact, size);
  CHECK(got == want, "%s %llu: %s (%s), not %s", what, (unsigned long long)value, pycass_status_string(got),
        got ? pycass_error_detail() : "", pycass_status_string(want));
  free(exact);
}

/* ---- good files ------------------------------------------------------------------------------------- */

static void check_tensor(const pycass_file *f, const char *name, const uint16_t *want, uint64_t rows, uint64_t cols) {
  size_t i = 0, n = rows * (cols ? cols : 1);
  pycass_tensor_info t = {0};
  while (pycass_file_tensor(f, i, &t) == PYCASS_OK && strcmp(t.name, name) != 0)
    i++;
  CHECK(t.name && strcmp(t.name, name) == 0, "no tensor %s", name);
  CHECK(t.shape[0] == rows && t.shape[1] == cols && t.n_dims == 1 + (cols != 0), "%s: shape", name);
  CHECK(t.bf16_crc32c == pycass_crc32c(0, want, 2 * n), "%s: checksum", name);
  uint16_t *got = malloc(2 * n);
  uint64_t end = cols ? rows : 1, width = cols ? cols : rows;
  CHECK(pycass_file_tensor_bf16(f, i, 0, end, got, n + 1) == PYCASS_ERR_INVALID_ARGUMENT, "%s: a wrong size", name);
  CHECK(pycass_file_tensor_bf16(f, i, 1, end + 1, got, n) == PYCASS_ERR_INVALID_ARGUMENT, "%s: a row too many", name);
  CHECK(pycass_file_tensor_bf16(f, i, UINT64_MAX, 0, got, width) == PYCASS_ERR_INVALID_ARGUMENT, "%s: rows backwards", name);
  CHECK(pycass_file_tensor_bf16(f, i, 0, end, got, n) == PYCASS_OK && memcmp(got, want, 2 * n) == 0, "%s: bits", name);
  for (uint64_t r0 = 0; r0 < end; r0++)
    for (uint64_t r1 = r0; r1 <= end; r1++) {
      memset(got, 0x55, 2 * n);
      CHECK(pycass_file_tensor_bf16(f, i, r0, r1, got, (r1 - r0) * width) == PYCASS_OK &&
                memcmp(got, want + r0 * width, 2 * (r1 - r0) * width) == 0,
            "%s: rows %llu to %llu", name, (unsigned long long)r0, (unsigned long long)r1);
    }
  free(got);
}

static void test_good(void) {
  size_t size, len;
  uint8_t *data = small_file(&size);
  pycass_file *f;
  CHECK(pycass_file_open_buffer(data, size, &f) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_file_verify(f) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_file_tensor_count(f) == 3, "%zu tensors", pycass_file_tensor_count(f));
  check_tensor(f, "vector", vector_bits, 37, 0), check_tensor(f, "raw", raw_bits, 7, 30);
  check_tensor(f, "nest", nest_bits, 20, 70);
  const char *json = pycass_file_json(f, &len);
  CHECK(len == 8 && memcmp(json, "{\"x\": 1}", 8) == 0, "json");
  const pycass_config *c = pycass_file_config(f);
  CHECK(c->n_vocab == 10 && c->head_dim == 6 && c->rms_eps == 1e-5f && c->flags == 0, "config");
  CHECK(pycass_file_rope_inv_freq(f)[0] == 1, "rope");
  pycass_tensor_info t;
  CHECK(pycass_file_tensor(f, 3, &t) == PYCASS_ERR_INVALID_ARGUMENT, "tensor 3 of 3");
  CHECK(pycass_file_tensor_bf16(f, SIZE_MAX, 0, 1, vector_bits, 1) == PYCASS_ERR_INVALID_ARGUMENT, "tensor 2^64 - 1");
  pycass_file_close(f), pycass_file_close(NULL);
  CHECK(pycass_file_open_buffer(data + 1, size - 1, &f) == PYCASS_ERR_INVALID_ARGUMENT, "an unaligned buffer");
  CHECK(pycass_file_open_buffer(NULL, 0, &f) == PYCASS_ERR_INVALID_ARGUMENT, "no buffer");
  free(data);
}

static void test_paths(void) {
  pycass_file *f = NULL;
  CHECK(pycass_file_open("/nonexistent/x.cass", &f) == PYCASS_ERR_IO, "a missing file");
  CHECK(strstr(pycass_error_detail(), "/nonexistent/x.cass"), "the detail names no path: %s", pycass_error_detail());
  CHECK(pycass_file_open("/", &f) == PYCASS_ERR_IO, "a directory");
  CHECK(pycass_file_open("/dev/null", &f) == PYCASS_ERR_IO, "a device");
  CHECK(pycass_file_open(NULL, &f) == PYCASS_ERR_INVALID_ARGUMENT, "no path");
}

/* ---- truncation and trailing bytes ------------------------------------------------------------------- */

static void test_truncation(void) {
  size_t size;
  uint8_t *data = small_file(&size);
  for (size_t n = 0; n < size; n++)
    check_status(data, n, n < 8 ? PYCASS_ERR_NOT_CASS : PYCASS_ERR_TRUNCATED, "cut at", n);
  /* the same with a header that agrees */
  for (size_t n = 4096; n < size; n++) {
    put_u64(data + 16, n);
    put_u32(data + 4092, pycass_crc32c(0, data, 4092));
    check_status(data, n, PYCASS_ERR_CORRUPT, "shortened to", n);
  }
  free(data);
}

static void test_trailing(void) {
  size_t size;
  uint8_t *data = small_file(&size), *longer = calloc(1, size + 5000);
  memcpy(longer, data, size);
  static const size_t extra[] = {1, 2, 63, 64, 4096, 5000};
  for (size_t i = 0; i < 6; i++) {
    put_u64(longer + 16, size), cass_reseal(longer, size);
    check_status(longer, size + extra[i], PYCASS_ERR_TRAILING, "trailing bytes", extra[i]);
    put_u64(longer + 16, size + extra[i]), cass_reseal(longer, size);
    check_status(longer, size + extra[i], PYCASS_ERR_CORRUPT, "unowned bytes", extra[i]);
  }
  free(data), free(longer);
}

/* Sections 2..4 cut at every length, in files that are sound otherwise. */
static void test_short_sections(void) {
  for (int i = SECTION_CONFIG; i <= SECTION_DIRECTORY; i++)
    for (size_t n = 0;; n++) {
      CassBuilder b;
      size_t size;
      small_builder(&b);
      if (n >= b.section[i].n) {
        free(cass_finish(&b, &size));
        break;
      }
      b.section[i].n = n;
      uint8_t *data = cass_finish(&b, &size);
      check_status(data, size, PYCASS_ERR_CORRUPT, i == SECTION_CONFIG ? "config of" : "directory of", n);
      free(data);
    }
}

/* ---- damage ------------------------------------------------------------------------------------------ */

/* Every byte changed: found on opening, or for weights by verify. */
static void test_flips(void) {
  size_t size;
  uint8_t *data = small_file(&size);
  size_t weights_end = load_u64(data + 32 + 32 + 8) + load_u64(data + 32 + 32 + 16);
  for (size_t i = 0; i < size; i++) {
    data[i] ^= (uint8_t)(1 << random_below(8));
    pycass_file *f = NULL;
    pycass_status status = pycass_file_open_buffer(data, size, &f);
    bool weight = i >= 4096 && i < weights_end;
    if (weight && status == PYCASS_OK) {
      status = pycass_file_verify(f);
      CHECK(status == PYCASS_ERR_CHECKSUM, "byte %zu: verify says %s", i, pycass_status_string(status));
    } else if (!weight) {
      pycass_status want = i < 8 ? PYCASS_ERR_NOT_CASS : i < 12 ? PYCASS_ERR_VERSION : PYCASS_ERR_CHECKSUM;
      CHECK(status == want || (i >= 4096 && status == PYCASS_ERR_CORRUPT), "byte %zu: %s", i, pycass_status_string(status));
    }
    pycass_file_close(f);
    free(data), data = small_file(&size);
  }
  free(data);
}

/* Every byte of the structure set to hostile values with right checksums: any status, no crash. */
static void test_hostile_bytes(void) {
  static const uint8_t to[] = {0x00, 0x01, 0x3f, 0x40, 0x7f, 0x80, 0xff};
  size_t size;
  uint8_t *data = small_file(&size);
  size_t from = load_u64(data + 32 + 64 + 8); /* CONFIG */
  for (size_t i = 0; i < size; i = i == 191 ? from : i + 1)
    for (size_t k = 0; k < sizeof to; k++) {
      uint8_t *bad = exact_copy(data, size);
      bad[i] = to[k];
      cass_reseal(bad, size);
      try_file(bad, size);
      free(bad);
    }
  free(data);
}

/* ---- fields ------------------------------------------------------------------------------------------ */

typedef struct Field {
  const char *what;
  size_t at; /* from the start of its region */
  int bytes;
  uint64_t value;
  pycass_status want;
} Field;

static void check_fields(size_t region, const Field *fields, size_t n) {
  for (size_t i = 0; i < n; i++) {
    size_t size;
    uint8_t *data = small_file(&size);
    memcpy(data + region + fields[i].at, &fields[i].value, (size_t)fields[i].bytes);
    cass_reseal(data, size);
    check_status(data, size, fields[i].want, fields[i].what, fields[i].value);
    free(data);
  }
}
#define CHECK_FIELDS(region, fields) check_fields(region, fields, sizeof fields / sizeof *fields)

#define BAD PYCASS_ERR_CORRUPT
#define UNKNOWN PYCASS_ERR_UNSUPPORTED

static void test_header_fields(void) {
  static const Field f[] = {{"version", 8, 4, 0, PYCASS_ERR_VERSION},
                            {"version", 8, 4, 1, PYCASS_ERR_VERSION},
                            {"version", 8, 4, 3, PYCASS_ERR_VERSION},
                            {"version", 8, 4, UINT32_MAX, PYCASS_ERR_VERSION},
                            {"header size", 12, 4, 4095, BAD},
                            {"header size", 12, 4, UINT32_MAX, BAD},
                            {"file size", 16, 8, 0, PYCASS_ERR_TRAILING},
                            {"file size", 16, 8, UINT64_MAX, PYCASS_ERR_TRUNCATED},
                            {"file size", 16, 8, INT64_MAX, PYCASS_ERR_TRUNCATED},
                            {"sections", 24, 4, 4, BAD},
                            {"sections", 24, 4, 6, BAD},
                            {"reserved", 28, 4, 1, BAD},
                            {"reserved", 192, 1, 1, BAD},
                            {"reserved", 4091, 1, 1, BAD}};
  CHECK_FIELDS(0, f);
}

/* Files of the version before are about, so the reason says what to do. */
static void test_older_version(void) {
  size_t size;
  uint8_t *data = small_file(&size);
  data[8] = 1, cass_reseal(data, size);
  check_status(data, size, PYCASS_ERR_VERSION, "version", 1);
  const char *detail = pycass_error_detail();
  CHECK(strstr(detail, "version 1") && strstr(detail, "version 2") && strstr(detail, "convert"), "%s", detail);
  free(data);
}

static void test_section_fields(void) {
  static const Field f[] = {{"type", 0, 4, 0, BAD},          {"type", 0, 4, 99, BAD},
                            {"offset", 8, 8, 0, BAD},        {"offset", 8, 8, UINT64_MAX, BAD},
                            {"offset", 8, 8, UINT64_MAX - 4095, BAD}, {"offset", 8, 8, UINT64_MAX - 63, BAD},
                            {"offset", 8, 8, 1, BAD},        {"offset", 8, 8, (uint64_t)1 << 63, BAD},
                            {"size", 16, 8, UINT64_MAX, BAD}, {"size", 16, 8, UINT64_MAX - 4095, BAD},
                            {"size", 16, 8, (uint64_t)1 << 63, BAD}, {"reserved", 24, 8, 1, BAD},
                            {"reserved", 31, 1, 0x80, BAD}};
  for (size_t i = 0; i < N_SECTION; i++)
    CHECK_FIELDS(32 + 32 * i, f);
}

static size_t section_offset(int i) {
  size_t size;
  uint8_t *data = small_file(&size);
  size_t at = load_u64(data + 40 + 32 * i);
  free(data);
  return at;
}

static void test_config_fields(void) {
  enum { NAN_BITS = 0x7fc00000, INF_BITS = 0x7f800000, ONE = 0x3f800000 };
  static const Field f[] = {
      {"n_vocab", 4, 4, 0, BAD},      {"n_vocab", 4, 4, (1u << 24) + 1, BAD}, {"n_token", 8, 4, 0, BAD},
      {"n_token", 8, 4, 11, BAD},     {"n_token", 8, 4, 10, PYCASS_OK},       {"n_ctx_train", 12, 4, 0, BAD},
      {"n_ctx_train", 12, 4, (1u << 24) + 1, BAD}, {"n_embd", 16, 4, 0, BAD}, {"n_embd", 16, 4, (1u << 16) + 1, BAD},
      {"n_ff", 20, 4, 0, BAD},        {"n_ff", 20, 4, UINT32_MAX, BAD},       {"n_layer", 24, 4, 0, BAD},
      {"n_layer", 24, 4, 1025, BAD},  {"n_head", 28, 4, 0, BAD},              {"n_head", 28, 4, 1025, BAD},
      {"n_head", 28, 4, 3, BAD},      {"n_head_kv", 32, 4, 0, BAD},           {"n_head_kv", 32, 4, 3, BAD},
      {"n_head_kv", 32, 4, 5, BAD},   {"n_head_kv", 32, 4, 4, PYCASS_OK},     {"head_dim", 36, 4, 0, BAD},
      {"head_dim", 36, 4, 5, BAD},    {"head_dim", 36, 4, 4, BAD},            {"head_dim", 36, 4, 8, BAD},
      {"head_dim", 36, 4, 1026, BAD}, {"head_dim", 36, 4, UINT32_MAX - 1, BAD}, {"rms_eps", 44, 4, 0, BAD},
      {"rms_eps", 44, 4, NAN_BITS, BAD}, {"rms_eps", 44, 4, 0xbf800000, BAD}, {"attention factor", 48, 4, 0, BAD},
      {"attention factor", 48, 4, NAN_BITS, BAD}, {"attention factor", 48, 4, INF_BITS, BAD},
      {"reserved", 52, 1, 1, BAD},    {"reserved", 63, 1, 1, BAD},            {"inv_freq", 64, 4, NAN_BITS, BAD},
      {"inv_freq", 72, 4, INF_BITS, BAD}, {"inv_freq", 72, 4, 0xbf800000, BAD}, {"inv_freq", 72, 4, ONE, PYCASS_OK}};
  CHECK_FIELDS(section_offset(SECTION_CONFIG), f);
}

/* The directory: head of 8; "vector": 32 + 6 + 1 part; "nest": 32 + 4 + 4 parts; "raw": 32 + 3 + 1 part. */
enum { VECTOR = 8, VECTOR_PART = VECTOR + 38, NEST = VECTOR_PART + 32, NEST_PART = NEST + 36, RAW = NEST_PART + 128,
       RAW_PART = RAW + 35 };

static void test_directory_fields(void) {
  static const Field f[] = {
      {"tensors", 0, 4, 0, BAD}, {"tensors", 0, 4, 2, BAD}, {"tensors", 0, 4, 4, BAD}, {"tensors", 0, 4, UINT32_MAX, BAD},
      {"reserved", 4, 4, 1, BAD}, {"name length", NEST, 2, 0, BAD}, {"name length", NEST, 2, 256, BAD},
      {"name length", NEST, 2, 65535, BAD}, {"name length", NEST, 2, 5, BAD}, {"codec", NEST + 2, 1, 2, BAD}, {"codec", NEST + 2, 1, 3, BAD}, {"codec", NEST + 2, 1, 4, UNKNOWN},
      {"codec", NEST + 2, 1, 255, UNKNOWN}, {"codec", NEST + 2, 1, 0, BAD}, {"codec", RAW + 2, 1, 1, BAD},
      {"codec of a vector", VECTOR + 2, 1, 1, BAD}, {"codec of a vector", VECTOR + 2, 1, 2, BAD}, {"dimensions", NEST + 3, 1, 0, BAD}, {"dimensions", NEST + 3, 1, 1, BAD},
      {"dimensions", NEST + 3, 1, 3, BAD}, {"dimensions", VECTOR + 3, 1, 2, BAD}, {"parts", NEST + 4, 1, 0, BAD},
      {"parts", NEST + 4, 1, 3, BAD}, {"parts", NEST + 4, 1, 5, BAD}, {"parts", NEST + 4, 1, 17, BAD},
      {"parts", RAW + 4, 1, 16, BAD}, {"reserved", NEST + 5, 1, 1, BAD}, {"reserved", NEST + 7, 1, 1, BAD},
      {"rows", NEST + 8, 8, 0, BAD}, {"rows", NEST + 8, 8, 33, BAD}, {"rows", NEST + 8, 8, 1u << 28, BAD},
      {"rows", NEST + 8, 8, (1u << 28) + 1, BAD}, {"rows", NEST + 8, 8, INT64_MAX, BAD},
      {"rows", NEST + 8, 8, UINT64_MAX, BAD}, {"rows", NEST + 8, 8, ((uint64_t)1 << 32) + 20, BAD},
      {"columns", NEST + 16, 8, 0, BAD}, {"columns", NEST + 16, 8, 129, BAD}, {"columns", NEST + 16, 8, INT64_MAX, BAD},
      {"columns of a vector", VECTOR + 16, 8, 1, BAD}, {"size of a vector", VECTOR + 8, 8, 36, BAD},
      {"rows of raw", RAW + 8, 8, 8, BAD}, {"checksum", NEST + 24, 4, 1, PYCASS_OK}, {"reserved", NEST + 28, 4, 1, BAD},
      {"name", NEST + 32, 1, 7, BAD}, {"name", NEST + 32, 1, 0, BAD}, {"name", NEST + 32, 1, 0x7f, BAD},
      {"part type", NEST_PART, 4, 0, UNKNOWN}, {"part type", NEST_PART, 4, 24, UNKNOWN},
      {"part type", NEST_PART, 4, 0x7fffffff, UNKNOWN}, {"part type", NEST_PART, 4, 0x80000010, BAD},
      {"part type", NEST_PART, 4, 17, BAD}, {"part type", NEST_PART, 4, 1, BAD}, {"part type", RAW_PART, 4, 16, BAD},
      {"section", NEST_PART + 4, 4, 0, BAD}, {"section", NEST_PART + 4, 4, 2, BAD}, {"section", NEST_PART + 4, 4, 3, BAD},
      {"section", NEST_PART + 4, 4, UINT32_MAX, BAD}, {"offset", NEST_PART + 8, 8, 1, BAD},
      {"offset", NEST_PART + 8, 8, 1 << 20, BAD}, {"offset", NEST_PART + 8, 8, UINT64_MAX - 63, BAD},
      {"offset", NEST_PART + 8, 8, (uint64_t)1 << 63, BAD}, {"offset", NEST_PART + 8, 8, 0, BAD},
      {"size", NEST_PART + 16, 8, 2047, BAD}, {"size", NEST_PART + 16, 8, UINT64_MAX, BAD},
      {"size", NEST_PART + 16, 8, UINT64_MAX - 4095, BAD}, {"reserved", NEST_PART + 24, 8, 1, BAD},
      {"offset of raw", RAW_PART + 8, 8, 0, BAD}, {"offset of raw", RAW_PART + 8, 8, 128, BAD},
      {"size of raw", RAW_PART + 16, 8, 418, BAD}};
  CHECK_FIELDS(section_offset(SECTION_DIRECTORY), f);
}

/* ---- parts ------------------------------------------------------------------------------------------- */

static void check_builder(CassBuilder *b, pycass_status want, const char *what) {
  size_t size;
  uint8_t *data = cass_finish(b, &size);
  check_status(data, size, want, what, 0);
  free(data);
}

/* One more part at the end of "raw". */
static void add_part(CassBuilder *b, uint32_t type, uint32_t section, uint64_t offset, uint64_t size) {
  Bytes *d = &b->section[SECTION_DIRECTORY];
  uint8_t part[32] = {0};
  put_u32(part, type), put_u32(part + 4, section), put_u64(part + 8, offset), put_u64(part + 16, size);
  d->p[RAW + 4]++;
  bytes_put(d, part, 32);
}

static void test_extra_parts(void) {
  CassBuilder b;
  small_builder(&b);
  size_t speculation = b.section[0].n;
  bytes_pad(&b.section[0], 64), bytes_put(&b.section[0], NULL, 100);
  add_part(&b, 0x80000007u, 1, round_up(speculation, 64), 100);
  check_builder(&b, PYCASS_OK, "an ignorable part");
  small_builder(&b);
  bytes_pad(&b.section[0], 64), bytes_put(&b.section[0], NULL, 100);
  add_part(&b, 7, 1, round_up(speculation, 64), 100);
  check_builder(&b, PYCASS_ERR_UNSUPPORTED, "a critical part of unknown type");
  small_builder(&b);
  add_part(&b, 0x80000007u, 1, 0, 64);
  check_builder(&b, BAD, "an ignorable part over another part");
  small_builder(&b);
  add_part(&b, 0x80000007u, 2, UINT64_MAX - 63, 64);
  check_builder(&b, BAD, "an ignorable part outside");
  small_builder(&b);
  bytes_pad(&b.section[0], 64), bytes_put(&b.section[0], NULL, 200);
  add_part(&b, 0x80000007u, 1, round_up(speculation, 64), 10);
  add_part(&b, 0x80000007u, 1, round_up(speculation, 64) + 64, 10);
  check_builder(&b, BAD, "one ignorable type twice");
  small_builder(&b);
  add_part(&b, PART_RAW, 1, load_u64(b.section[SECTION_DIRECTORY].p + RAW_PART + 8), 420);
  check_builder(&b, BAD, "a raw part twice");
}

static void test_names(void) {
  CassBuilder b;
  small_builder(&b);
  cass_tensor(&b, "raw", PYCASS_CODEC_RAW, 7, 30, raw_bits);
  check_builder(&b, BAD, "one name twice");
  small_builder(&b);
  char longest[256];
  memset(longest, 'n', 255), longest[255] = 0;
  cass_tensor(&b, longest, PYCASS_CODEC_RAW, 7, 30, raw_bits);
  check_builder(&b, PYCASS_OK, "a name of 255");
  small_builder(&b);
  cass_tensor(&b, "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", PYCASS_CODEC_RAW, 7, 30, raw_bits);
  check_builder(&b, PYCASS_OK, "a name in UTF-8");
}

/* Two tensors that share their bytes, wholly or in part. */
static void test_overlap(void) {
  for (uint64_t at = 0; at < 7; at++) {
    CassBuilder b;
    small_builder(&b);
    Bytes *d = &b.section[SECTION_DIRECTORY];
    size_t raw_at = load_u64(d->p + RAW_PART + 8);
    bytes_pad(&b.section[0], 64);
    size_t end = b.section[0].n;
    bytes_put(&b.section[0], NULL, 420);
    put_u64(d->p + RAW_PART + 8, end - 64 * at);
    bool clear = end - 64 * at >= raw_at; /* nothing lies behind the old place of raw */
    check_builder(&b, clear ? PYCASS_OK : BAD, "raw moved");
  }
}

/* A side part longer than its records is allowed, but nothing else may lie in it. */
static void test_padding_owned(void) {
  CassBuilder b;
  small_builder(&b);
  Bytes *d = &b.section[SECTION_DIRECTORY], *v = &b.section[SECTION_VERIFICATION];
  uint8_t *side = d->p + NEST_PART + 3 * 32;
  bytes_put(v, NULL, 256);
  put_u64(side + 16, load_u64(side + 16) + 256);
  check_builder(&b, PYCASS_OK, "a longer side part");
  small_builder(&b);
  d = &b.section[SECTION_DIRECTORY], v = &b.section[SECTION_VERIFICATION], side = d->p + NEST_PART + 3 * 32;
  uint64_t end = load_u64(side + 8) + load_u64(side + 16);
  bytes_put(v, NULL, 256);
  put_u64(side + 16, load_u64(side + 16) + 256);
  add_part(&b, 0x80000001u, 2, end + 64, 64);
  check_builder(&b, BAD, "a part in the end of a side part");
}

/* A nest tensor whose side offsets are damaged is refused on opening. */
static void test_side(void) {
  size_t size;
  uint8_t *data = small_file(&size);
  size_t directory = section_offset(SECTION_DIRECTORY), verification = section_offset(SECTION_VERIFICATION);
  size_t side = verification + load_u64(data + directory + NEST_PART + 3 * 32 + 8);
  for (size_t i = 0; i <= 4; i++) {
    uint8_t *bad = exact_copy(data, size);
    put_u32(bad + side + 4 * i, UINT32_MAX);
    check_status(bad, size, BAD, "side offset", i);
    free(bad);
  }
  free(data);
}

/* Many tensors: the directory is searched by name, so order in the file does not matter. */
static void test_many(void) {
  CassBuilder b;
  char name[32];
  size_t size;
  small_builder(&b);
  for (uint32_t i = 0; i < 500; i++) {
    uint16_t v = (uint16_t)i;
    snprintf(name, sizeof name, "t%u", i * 7919 % 500);
    cass_tensor(&b, name, PYCASS_CODEC_RAW, 1, 0, &v);
  }
  uint8_t *data = cass_finish(&b, &size);
  Format f;
  CHECK(format_parse(data, size, &f) == PYCASS_OK, "%s", pycass_error_detail());
  for (uint32_t i = 0; i < 500; i++) {
    snprintf(name, sizeof name, "t%u", i * 7919 % 500);
    const Tensor *t = format_find(&f, name);
    CHECK(t && t->matrix.raw[0] == i, "%s", name);
  }
  CHECK(!format_find(&f, "t500") && !format_find(&f, "") && !format_find(&f, "zzz"), "a tensor that is not there");
  format_free(&f);
  free(data);
}

int main(void) {
  for (size_t i = 0; i < 37; i++)
    vector_bits[i] = (uint16_t)random_u32();
  for (size_t i = 0; i < 7 * 30; i++)
    raw_bits[i] = (uint16_t)random_u32();
  for (size_t i = 0; i < 20 * 70; i++)
    nest_bits[i] = (uint16_t)(random_below(10) ? bf16_from_f32(0.02f * random_gauss()) : random_u32());
  test_good();
  test_paths();
  test_truncation();
  test_trailing();
  test_short_sections();
  test_flips();
  test_hostile_bytes();
  test_header_fields();
  test_older_version();
  test_section_fields();
  test_config_fields();
  test_directory_fields();
  test_extra_parts();
  test_names();
  test_overlap();
  test_padding_owned();
  test_side();
  test_many();
  printf("ok\n");
  return 0;
}
