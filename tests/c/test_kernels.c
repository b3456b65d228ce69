/* Every kernel set that this machine runs against the scalar one, bit for bit. */
#include "kernel_cases.h"

enum { MAX_SETS = 8 };
static const Kernels *scalar, *sets[MAX_SETS];
static int n_sets;

static void find_sets(void) {
  const char *name;
  int runs;
  for (size_t i = 0; (name = pycass_kernel_name(i, &runs)) != NULL; i++) {
    const Kernels *k = NULL;
    pycass_status status = kernels_select(name, &k);
    CHECK(runs ? status == PYCASS_OK : status == PYCASS_ERR_KERNEL, "%s: status %d", name, (int)status);
    CHECK(!runs || strcmp(k->name, name) == 0, "%s was forced, %s came", name, k->name);
    printf("%s: %s\n", name, runs ? "runs" : "this machine cannot run it");
    if (runs && strcmp(name, "scalar") == 0)
      scalar = k;
    else if (runs)
      sets[n_sets++] = k;
  }
  CHECK(scalar, "no scalar set");
  for (int s = 0; s < n_sets; s++)
    for (size_t at = 0; at < sizeof(Kernels); at += sizeof(void *))
      CHECK(((void *const *)(const void *)sets[s])[at / sizeof(void *)], "%s: entry %zu is empty", sets[s]->name, at);
  for (size_t at = 0; at < sizeof(Kernels); at += sizeof(void *))
    CHECK(((void *const *)(const void *)scalar)[at / sizeof(void *)], "scalar: entry %zu is empty", at);
}

static void test_select(void) {
  const Kernels *k = NULL;
  CHECK(kernels_select("no such set", &k) == PYCASS_ERR_KERNEL && !k, "an unknown name was taken");
  CHECK(strstr(pycass_error_detail(), "scalar"), "the error does not list the sets: %s", pycass_error_detail());
  setenv("PYCASS_KERNEL", "scalar", 1);
  CHECK(kernels_select(NULL, &k) == PYCASS_OK && k == scalar, "PYCASS_KERNEL was ignored");
  setenv("PYCASS_KERNEL", "bogus", 1);
  CHECK(kernels_select(NULL, &k) == PYCASS_ERR_KERNEL, "a bogus PYCASS_KERNEL was taken");
  unsetenv("PYCASS_KERNEL");
  CHECK(kernels_select(NULL, &k) == PYCASS_OK, "no default set");
}

/* ---- decoding -------------------------------------------------------------------------------------- */

static void check_tiles(const Matrix *w, const char *what) {
  for (size_t t = 0; t < matrix_tiles(w); t++) {
    TileWords want, got;
    nest_decode_tile(w, t, want);
    for (int s = 0; s < n_sets; s++) {
      memset(got, 0x55, sizeof got);
      sets[s]->nest_decode_tile(w, t, got);
      CHECK(memcmp(want, got, sizeof got) == 0, "%s, %s: %u x %u, tile %zu", sets[s]->name, what, w->rows, w->cols, t);
    }
  }
}

static void test_decode(void) {
  for (int kind = 0; kind < N_KIND; kind++)
    for (int i = 0; i < 12; i++) {
      uint32_t rows = 1 + random_below(70), cols = 1 + random_below(300);
      Case t = case_make(PYCASS_CODEC_NEST, kind, rows, cols);
      uint16_t *bits = malloc(sizeof *bits * rows * cols);
      matrix_bits(&t.w, 0, t.w.rows, bits);
      CHECK(memcmp(bits, t.bits, sizeof *bits * rows * cols) == 0, "scalar, %s: other bits", kind_name[kind]);
      free(bits);
      check_tiles(&t.w, kind_name[kind]);
      case_free(&t);
    }
}

/* Calls the product for some ranges of blocks in turn. */
static void by_ranges(const Kernels *k, float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, bool draft) {
  for (uint32_t block = 0; block < w->n_block;) {
    uint32_t end = block + 1 + random_below(w->n_block - block);
    (draft ? k->matmul_draft : k->matmul)(y, ldy, w, acts, m, block, end);
    block = end;
  }
}

/* The target product of a matrix that scalar code can read is the same from every set, amx apart, whatever its bytes. */
static void check_damaged_product(const Matrix *w, uint32_t m) {
  size_t ld = (size_t)w->n_group * NEST_COLS, ldy = (size_t)w->n_block * NEST_ROWS;
  float *x = random_acts(m, w->cols, ld), *want = calloc(m * ldy, sizeof *want), *got = calloc(m * ldy, sizeof *got);
  Acts acts = acts_of(scalar, x, ld, m, w);
  by_ranges(scalar, want, ldy, w, &acts, m, false);
  for (int s = 0; s < n_sets; s++) {
    if (strcmp(sets[s]->name, "amx") == 0)
      continue;
    by_ranges(sets[s], got, ldy, w, &acts, m, false);
    CHECK(same_floats(want, got, m * ldy), "%s: a damaged matrix, %u x %u, m = %u", sets[s]->name, w->rows, w->cols, m);
  }
  free(x), free(want), free(got), acts_free(&acts);
}

/* Planes and records of any bytes: the same bits from every set, and no read outside the buffers (for address
 * sanitizer). */
static void test_damaged_planes(void) {
  for (int i = 0; i < 120; i++) {
    Matrix w = matrix_shape(PYCASS_CODEC_NEST, 1 + random_below(40), 1 + random_below(300));
    size_t tiles = matrix_tiles(&w), offsets = 4 * (tiles + 1), records = random_below(3) ? random_below(900) : 0;
    size_t size = offsets + records + NEST_SIDE_SLACK;
    uint8_t *a = malloc(512 * tiles), *x = malloc(16 * tiles), *b = malloc(768 * tiles);
    uint8_t *side = malloc(NEST_MAX_ESCAPES + size); /* escapes may be taken from before the part */
    static const uint8_t fill[] = {0x00, 0x77, 0xff, 0x88, 0x70, 0x07, 0x10};
    static const uint8_t near57[] = {0x7, 0xd, 0x6, 0x4}; /* nibbles that mostly have a T bit */
    for (size_t k = 0; k < 512 * tiles; k++) {
      a[k] = i % 8 == 7 ? (uint8_t)random_u32() : i % 8 == 6 ? fill[random_below(7)] : fill[i % 8 % 7];
      if (i % 8 == 5)
        a[k] = (uint8_t)(near57[random_below(4)] | near57[random_below(4)] << 4);
    }
    for (size_t k = 0; k < 768 * tiles; k++)
      b[k] = (uint8_t)random_u32();
    for (size_t k = 0; k < 16 * tiles; k++)
      x[k] = (uint8_t)random_u32();
    int ones = i / 8 % 3;
    for (size_t k = 0; k < NEST_MAX_ESCAPES + size; k++)
      side[k] = (uint8_t)(ones == 1 ? 0xff : ones == 2 ? 0 : random_u32());
    uint32_t at = (uint32_t)offsets;
    for (size_t t = 0; t <= tiles; t++) {
      memcpy(side + NEST_MAX_ESCAPES + 4 * t, &at, 4);
      at += random_below((uint32_t)(offsets + records) - at + 1) * (t > 0 || random_below(2));
    }
    w.a = a, w.x = x, w.b = b, w.side = side + NEST_MAX_ESCAPES;
    memcpy(side + NEST_MAX_ESCAPES, &(uint32_t){(uint32_t)offsets}, 4);
    CHECK(nest_check_side(w.side, size, tiles) == PYCASS_OK, "%s", pycass_error_detail());
    check_tiles(&w, "damaged");
    check_damaged_product(&w, 1 + random_below(12));
    free(a), free(x), free(b), free(side);
  }
}

/* Records that have more or fewer nibbles than plane A asks for, or other flags. */
static void test_damaged_headers(void) {
  for (int i = 0; i < 60; i++) {
    Case t = case_make(PYCASS_CODEC_NEST, i % 2 ? ZEROS : GAUSS, 40, 200);
    for (size_t k = 0; k < matrix_tiles(&t.w); k++) {
      uint8_t *record = t.side + load_u32(t.side + 4 * k);
      if (random_below(2))
        record[0] ^= (uint8_t)(1u << random_below(8));
      if (random_below(2))
        record[1] = (uint8_t)((record[1] & 7u) | (random_u32() & 0xf8u)); /* flags, and bits that mean nothing */
    }
    check_tiles(&t.w, "damaged header");
    check_damaged_product(&t.w, 1 + random_below(12));
    case_free(&t);
  }
}

/* Records that end before the T bits that plane A asks for: all tiles have the same one, and all but the last end where it
 * begins. What follows is read all the same. */
static void test_short_records(void) {
  for (int i = 0; i < 8; i++) {
    Case t = case_make(PYCASS_CODEC_NEST, TOP, 40, 200); /* a T bit for every weight, and no nibbles */
    size_t tiles = matrix_tiles(&t.w), first = 4 * (tiles + 1);
    for (size_t k = 0; k < tiles; k++)
      put_u32(t.side + 4 * k, (uint32_t)first);
    for (size_t k = first + NEST_HEADER; k < first + NEST_HEADER + NEST_TILE / 8; k++)
      t.side[k] = (uint8_t)random_u32();
    check_tiles(&t.w, "short record");
    check_damaged_product(&t.w, 1 + (uint32_t)i % 3);
    case_free(&t);
  }
}

/* ---- cass tiles ------------------------------------------------------------------------------------ */

static void check_cass_tiles(const Matrix *w, const char *what) {
  for (uint32_t block = 0; block < w->n_block; block++)
    for (int s = 0; s < n_sets; s++) {
      CassReader want, got;
      cass_reader_init(&want, w, block), cass_reader_init(&got, w, block);
      for (uint32_t g = 0; g < w->n_group; g++) {
        TileWords a, b;
        scalar->cass_next_tile(&want, a), sets[s]->cass_next_tile(&got, b);
        CHECK(memcmp(a, b, sizeof a) == 0, "%s, %s: codec %d, block %u, tile %u, b = %u, flags %u, draft %d", sets[s]->name, what,
              (int)w->codec, block, g, w->spec[0], w->spec[1], !w->ver);
      }
    }
}

static void check_cass(const Matrix *w, const char *what) {
  Matrix draft = cass_draft_view(w);
  check_cass_tiles(w, what), check_cass_tiles(&draft, what);
}

/* Noise, zeros, ones or single bits in the segments, and other numbers of exponent blocks. */
static void damage_part(uint8_t *part, size_t size, size_t table, uint32_t n_block) {
  int how = (int)random_below(5);
  for (size_t i = round_up(table + (n_block + 1) * CASS_ENTRY, CASS_ALIGN); i < size; i++)
    part[i] = how == 0 ? (uint8_t)random_u32() : how == 1 ? 0 : how == 2 ? 0xff : random_below(60) ? part[i] : (uint8_t)random_u32();
  for (uint32_t b = 0; how == 4 && b < n_block; b++)
    put_u32(part + table + b * CASS_ENTRY + 4, random_below(5));
}

static void test_cass(void) {
  for (int i = 0; i < 400; i++) {
    pycass_codec codec = i % 2 ? PYCASS_CODEC_CASS1 : PYCASS_CODEC_CASS2;
    pycass_cass_params params = {(float)random_below(100) / 101, random_below(8), random_below(2), 0};
    params.pruned_raw = i % 2 && random_below(4) == 0;
    int kind = (int)random_below(N_KIND);
    Case t = case_make_cass(codec, &params, kind, 1 + random_below(50), 1 + random_below(400));
    check_cass(&t.w, kind_name[kind]);
    damage_part(t.spec, t.spec_size, CASS_HEADER, t.w.n_block), damage_part(t.ver, t.ver_size, 0, t.w.n_block);
    check_cass(&t.w, "damaged");
    case_free(&t);
  }
}

/* ---- products -------------------------------------------------------------------------------------- */

static void check_matmul(const Case *t, const char *what, uint32_t m, bool draft) {
  const Matrix *w = &t->w;
  size_t ldx = (size_t)w->n_group * NEST_COLS + 16 * random_below(2);
  size_t ldy = (size_t)w->n_block * NEST_ROWS + random_below(3), n = (size_t)(m - 1) * ldy + w->n_block * NEST_ROWS;
  float *x = random_acts(m, w->cols, ldx), *want = calloc(n, sizeof *want);
  Acts acts = acts_of(scalar, x, ldx, m, w);
  by_ranges(scalar, want, ldy, w, &acts, m, draft);
  for (int s = 0; s < n_sets; s++) {
    float *got = calloc(n, sizeof *got);
    if (strcmp(sets[s]->name, "amx") != 0 || draft || matrix_is_cass(w)) {
      by_ranges(sets[s], got, ldy, w, &acts, m, draft);
      CHECK(same_floats(want, got, n), "%s, %s, codec %d: %u x %u, m = %u, draft %d, %u hot", sets[s]->name, what,
            (int)w->codec, w->rows, w->cols, m, draft, w->n_hot);
    }
    free(got);
  }
  free(x), free(want), acts_free(&acts);
}

static void test_matmul(void) {
  for (uint32_t m = 1; m <= 22; m++)
    for (int i = 0; i < 6; i++) {
      int kind = i < N_KIND ? (int)((m + (uint32_t)i) % N_KIND) : GAUSS;
      uint32_t rows = 1 + random_below(70), cols = 1 + random_below(300);
      if (i == 0 && m % 4 == 0)
        rows = 64, cols = 256;
      uint32_t tokens = m == 21 ? 64 : m == 22 ? 65 : m;
      Case nest = case_make(PYCASS_CODEC_NEST, kind, rows, cols), raw = case_make(PYCASS_CODEC_RAW, kind, rows, cols);
      check_matmul(&nest, kind_name[kind], tokens, false);
      check_matmul(&raw, kind_name[kind], tokens, false);
      check_matmul(&nest, kind_name[kind], tokens, true);
      Case hot = case_make_hot(kind, rows, cols, 16 * (m % 5));
      check_matmul(&hot, kind_name[kind], tokens, false);
      check_matmul(&hot, kind_name[kind], tokens, true);
      pycass_cass_params params = {0.4f, 3, 1, 0};
      Case cass = case_make_cass(m % 2 ? PYCASS_CODEC_CASS1 : PYCASS_CODEC_CASS2, &params, kind, rows, cols);
      check_matmul(&cass, kind_name[kind], tokens, false);
      cass.w = cass_draft_view(&cass.w);
      check_matmul(&cass, "cass draft", tokens, false);
      case_free(&nest), case_free(&raw), case_free(&hot), case_free(&cass);
    }
  /* rows long enough for the draft to take them in pieces */
  Case wide = case_make(PYCASS_CODEC_NEST, GAUSS, 17, 64 * 700 + 5);
  uint32_t some[] = {1, 2, 5, 17};
  for (int i = 0; i < 4; i++)
    check_matmul(&wide, "wide", some[i], true);
  check_matmul(&wide, "wide", 3, false);
  case_free(&wide);
}

/* ---- the rest --------------------------------------------------------------------------------------- */

static float odd_float(void) {
  static const float some[] = {0.0f,  -0.0f,   1e-40f,  -1e-40f, 1e38f,    -1e38f,
                               88.0f, -88.0f, -120.0f, 1e-6f,   INFINITY, NAN};
  return random_below(20) ? random_gauss() * 3.0f : some[random_below(sizeof some / sizeof *some)];
}

static void fill(float *x, size_t n, bool odd) {
  for (size_t i = 0; i < n; i++)
    x[i] = odd ? odd_float() : random_gauss();
}

static void check_vectors(const Kernels *k, uint32_t n) {
  float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
  float *want = malloc(n * sizeof *x), *got = malloc(n * sizeof *x);
  uint16_t *w = malloc(n * sizeof *w), *w2 = malloc(n * sizeof *w);
  fill(x, n, true), fill(y, n, false);
#define SAME(what, fn, ...)                                                                                            \
  memcpy(want, x, n * sizeof *x), memcpy(got, x, n * sizeof *x);                                                       \
  scalar->fn(want, __VA_ARGS__), k->fn(got, __VA_ARGS__);                                                              \
  CHECK(same_floats(want, got, n), "%s, " what ", n = %u", k->name, n)
  for (uint32_t i = 0; i < n; i++)
    w[i] = bf16_from_f32(random_gauss());
  SAME("swiglu", swiglu, y, n);
  SAME("add", add, y, n);
  SAME("add_bf16", add_bf16, w, n);
  SAME("rmsnorm", rmsnorm, y, w, n, 1e-6f);
  SAME("rmsnorm of odd values", rmsnorm, x, w, n, 1e-6f);
  SAME("rope", rope, 1, n / 2 * 2, y);
  scalar->to_bf16(w, x, n), k->to_bf16(w2, x, n);
  CHECK(memcmp(w, w2, n * sizeof *w) == 0, "%s, to_bf16, n = %u", k->name, n);
  float top[2] = {scalar->max(x, n), k->max(x, n)}, top_y = scalar->max(y, n);
  float sum[2] = {scalar->sum_exp(y, n, top_y), k->sum_exp(y, n, top_y)};
  CHECK(same_floats(top, top + 1, 1) && same_floats(sum, sum + 1, 1), "%s, max or sum_exp, n = %u", k->name, n);
  free(x), free(y), free(want), free(got), free(w), free(w2);
}

/* NaN, infinities and zeros of both signs where a maximum is taken; the softmax pads its scores. */
static void check_odd_scores(const Kernels *k, uint32_t n, bool zeros) {
  float *x = malloc((n + 16) * sizeof *x), *want = malloc((n + 16) * sizeof *x), *got = malloc((n + 16) * sizeof *x);
  for (uint32_t i = 0; i < n; i++)
    x[i] = zeros ? (random_below(2) ? 0.0f : -0.0f) : odd_float();
  memcpy(want, x, n * sizeof *x), memcpy(got, x, n * sizeof *x);
  float top[2] = {scalar->max(x, n), k->max(x, n)};
  CHECK(f32_bits(top[0]) == f32_bits(top[1]), "%s, max, n = %u", k->name, n);
  float sum[2] = {scalar->sum_exp(x, n, top[0]), k->sum_exp(x, n, top[0])};
  scalar->softmax(want, n), k->softmax(got, n);
  CHECK(same_floats(sum, sum + 1, 1) && same_floats(want, got, n), "%s, sum_exp or softmax, n = %u", k->name, n);
  free(x), free(want), free(got);
}

/* All of attention, the positions and columns in pieces of random size. */
static void by_pieces(const Kernels *k, AttentionArgs a, const uint16_t *keys, const uint16_t *values, size_t stride,
                      uint32_t n_pos) {
  for (uint32_t p = 0, n; p < n_pos; p += n) {
    n = 1 + random_below(n_pos - p);
    k->scores(&a, keys + p * stride, stride, p, n);
  }
  for (uint32_t h = 0; h < a.n_head; h++)
    k->softmax(a.scores + h * a.ld_scores, n_pos);
  for (uint32_t c0 = 0, c1; c0 < a.head_dim; c0 = c1) {
    c1 = a.head_dim % 16 ? a.head_dim : c0 + 16 * (1 + random_below((a.head_dim - c0) / 16));
    for (uint32_t p = 0, n; p < n_pos; p += n) {
      n = 1 + random_below(n_pos - p);
      k->mix(&a, values + p * stride + c0, stride, p, n, c0, c1);
    }
  }
}

static void check_attention(const Kernels *k, uint32_t n_pos, uint32_t head_dim) {
  uint32_t n_head = 1 + random_below(9);
  size_t stride = head_dim * 2, n = (n_pos - 1) * stride + head_dim, n_out = (size_t)n_head * head_dim;
  size_t ld_scores = n_pos + 16 + random_below(5), n_scores = (n_head - 1) * ld_scores + n_pos + 16;
  uint16_t *keys = malloc(n * sizeof *keys), *values = malloc(n * sizeof *values);
  for (size_t i = 0; i < n; i++)
    keys[i] = bf16_from_f32(random_gauss() * 3.0f), values[i] = bf16_from_f32(random_gauss());
  float *q = malloc(n_out * sizeof *q), *want = malloc(n_out * sizeof *q), *got = malloc(n_out * sizeof *q);
  float *scores = malloc(n_scores * sizeof *scores);
  fill(q, n_out, false);
  AttentionArgs args = {.q = q, .n_head = n_head, .head_dim = head_dim, .scale = 1.0f / sqrtf((float)head_dim),
                        .scores = scores, .ld_scores = ld_scores, .out = want};
  scalar->scores(&args, keys, stride, 0, n_pos);
  for (uint32_t h = 0; h < n_head; h++)
    scalar->softmax(scores + h * ld_scores, n_pos);
  scalar->mix(&args, values, stride, 0, n_pos, 0, head_dim);
  args.out = got;
  by_pieces(k, args, keys, values, stride, n_pos);
  CHECK(same_floats(want, got, n_out), "%s, attention, %u heads of %u, %u positions", k->name, n_head, head_dim, n_pos);
  for (uint32_t h = 0; h < n_head; h++) { /* a head alone */
    AttentionArgs one = args;
    one.n_head = 1, one.q += (size_t)h * head_dim, one.out += (size_t)h * head_dim;
    by_pieces(k, one, keys, values, stride, n_pos);
  }
  CHECK(same_floats(want, got, n_out), "%s, attention, heads one by one, %u positions", k->name, n_pos);
  free(keys), free(values), free(q), free(want), free(got), free(scores);
}

/* Scores of the draft, from a block that was encoded: as the specification has them, and near those of the keys. */
static void check_draft_scores(const Kernels *k, const Matrix *w, const uint16_t *v, size_t stride, int kind) {
  enum { HEADS = 8, LD = 100 };
  uint32_t n_channel = (uint32_t)w->rows, n_head = 1 + random_below(HEADS);
  float *q = malloc(HEADS * n_channel * sizeof *q), want[HEADS * LD] = {0}, got[HEADS * LD] = {0};
  bool odd = random_below(4) == 0;
  fill(q, HEADS * n_channel, odd);
  AttentionArgs a = {.q = q, .n_head = n_head, .head_dim = n_channel, .scale = 0.25f, .scores = want, .ld_scores = LD};
  scalar->scores_draft(&a, w, 16);
  a.scores = got;
  k->scores_draft(&a, w, 16);
  CHECK(same_floats(want, got, HEADS * LD), "%s, %s: other draft scores", k->name, kind_name[kind]);
  for (uint32_t h = 0; kind == 0 && !odd && h < n_head; h++)
    for (uint32_t p = 0; p < 64; p++) {
      double exact = 0, bound = 0;
      for (uint32_t c = 0; c < n_channel; c++) {
        double x = q[h * n_channel + c] * (double)a.scale;
        exact += x * bf16_to_f32(v[p * stride + c]);
        bound += fabs(x) * ldexp(4, (int)w->x[c] - 127 - 6); /* of a key: 4 units for CELL_SMALL, 2 for the others */
      }
      float s = got[h * LD + 16 + p];
      CHECK(fabs(s - exact) <= 1.01 * bound, "%s: score %g for %g, bound %g", k->name, s, exact, bound);
    }
  free(q);
}

/* Blocks of a KV cache: what was encoded comes back. */
static void check_columns(const Kernels *k, int kind, uint32_t n_channel, bool top) {
  size_t tiles = (n_channel + 15) / 16, stride = n_channel + random_below(3), ld = 16 * tiles + random_below(3);
  uint16_t *v = malloc(64 * stride * 2), *got = calloc(64 * ld, 2);
  for (size_t i = 0; i < 64 * stride; i++)
    v[i] = random_weight(kind);
  uint8_t *a = malloc(512 * tiles), *x = malloc(16 * tiles), *b = malloc(768 * tiles);
  uint8_t *side = calloc(1, nest_columns_bound(tiles) + 128);
  size_t size = nest_encode_columns(v, stride, n_channel, top, a, x, b, side);
  CHECK(size <= nest_columns_bound(tiles), "%s: %zu bytes", kind_name[kind], size);
  Matrix w = matrix_shape(PYCASS_CODEC_NEST, n_channel, 64);
  w.a = a, w.x = x, w.b = b, w.side = side;
  for (size_t t0 = 0; t0 < tiles; t0++) {
    k->nest_columns(&w, t0, tiles, got, ld);
    for (size_t p = 0; p < 64; p++)
      CHECK(memcmp(got + p * ld, v + p * stride + 16 * t0, 2 * (n_channel - 16 * t0)) == 0, "%s, %s: other bits", k->name,
            kind_name[kind]);
  }
  bool moderate = n_channel <= KEY_DIM_MOST;
  for (uint32_t c = 0; c < n_channel; c++)
    moderate &= x[c] <= KEY_MOST_G;
  if (top && moderate) /* as keys are encoded */
    check_draft_scores(k, &w, v, stride, kind);
  free(v), free(got), free(a), free(x), free(b), free(side);
}

static void check_quantize(const Kernels *k, uint32_t m, uint32_t n_group, int kind) {
  size_t ldx = n_group * NEST_COLS + 3, n = (size_t)m * n_group;
  float *x = calloc(m * ldx, sizeof *x);
  for (size_t i = 0; i < m * ldx; i++)
    x[i] = kind == 0 ? random_gauss() : kind == 1 ? 0.0f : kind == 2 ? 1e-41f * random_gauss() :
           kind == 3 ? 1e30f * random_gauss() : odd_float();
  Matrix w = matrix_shape(PYCASS_CODEC_NEST, 1, n_group * NEST_COLS);
  Acts want = acts_of(scalar, x, ldx, m, &w), got = acts_of(k, x, ldx, m, &w);
  CHECK(memcmp(want.q, got.q, n * NEST_COLS) == 0 && memcmp(want.sum, got.sum, n * sizeof *got.sum) == 0 &&
            same_floats(want.scale, got.scale, n), "%s, quantize, kind %d", k->name, kind);
  free(x), acts_free(&want), acts_free(&got);
}

static void check_round(const Kernels *k, uint32_t n_group) {
  size_t n = (size_t)n_group * NEST_COLS;
  float *x = malloc(n * sizeof *x);
  fill(x, n, true);
  Matrix w = matrix_shape(PYCASS_CODEC_NEST, 1, n_group * NEST_COLS);
  Acts want = acts_of(scalar, x, n, 1, &w), got = acts_of(k, x, n, 1, &w);
  CHECK(memcmp(want.panels, got.panels, n * PANEL_TOKENS * 2) == 0, "%s, round, %u groups", k->name, n_group);
  free(x), acts_free(&want), acts_free(&got);
}

static void test_ops(const Kernels *k) {
  for (uint32_t n_group = 1; n_group < 9; n_group++)
    check_round(k, n_group);
  for (uint32_t n = 1; n < 80; n++)
    check_vectors(k, n), check_odd_scores(k, n, n % 3 == 0);
  check_vectors(k, 1537), check_vectors(k, 8960);
  for (uint32_t n_pos = 1; n_pos < 40; n_pos++)
    check_attention(k, n_pos, 64);
  uint32_t dims[] = {2, 10, 16, 18, 36, 80, 96, 128, 256, 258, 1024};
  for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
    check_attention(k, 1 + random_below(70), dims[i]);
  check_attention(k, 1003, 128), check_attention(k, 4001, 64);
  for (int kind = 0; kind < N_KIND; kind++)
    for (uint32_t n_channel = 1; n_channel < 100; n_channel += 1 + random_below(30))
      check_columns(k, kind, n_channel, false), check_columns(k, kind, n_channel, true);
  check_columns(k, 0, 128, true), check_columns(k, 0, 256, true);
  for (int kind = 0; kind < 5; kind++)
    check_quantize(k, 3, 1 + random_below(9), kind);
}

int main(void) {
  flush_denormals();
  find_sets();
  test_select();
  test_decode();
  test_damaged_planes();
  test_damaged_headers();
  test_short_records();
  test_cass();
  test_matmul();
  for (int s = 0; s < n_sets; s++)
    test_ops(sets[s]);
  printf("ok\n");
  return 0;
}
