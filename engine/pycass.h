/* pycass: lossless self-speculative inference from one .cass file. The public C API.
 *
 * Every function that can fail returns a pycass_status; pycass_error_detail() then says in words what
 * happened (per thread, valid until the next failing call on that thread). Output pointers are written
 * only on PYCASS_OK. Handles are opaque; every *_free and *_close accepts NULL.
 *
 * Untrusted input: pycass_file_open, pycass_file_open_buffer, pycass_model_load and
 * pycass_session_load_state accept arbitrary bytes and answer with a status. Weight sections are checked
 * against their checksums by pycass_file_verify only; decoding damaged weights gives wrong numbers, never
 * an access outside of the file.
 *
 * A file is mapped: it must not be shortened or rewritten in place while it is open (replacing it by rename is fine).
 *
 * Threads: a pycass_file and a pycass_model may be shared between threads; a pycass_session may be used by
 * one thread at a time.
 */
#ifndef PYCASS_H
#define PYCASS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PYCASS_API __attribute__((visibility("default")))
#else
#define PYCASS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------- */

/* The values are part of the ABI: append only. */
typedef enum pycass_status {
  PYCASS_OK = 0,
  PYCASS_ERR_INVALID_ARGUMENT = 1, /* a parameter is out of its range */
  PYCASS_ERR_OUT_OF_MEMORY = 2,
  PYCASS_ERR_IO = 3,           /* open, stat, map: errno's text is in the detail */
  PYCASS_ERR_NOT_CASS = 4,     /* the magic is missing */
  PYCASS_ERR_VERSION = 5,      /* a format version this build does not read */
  PYCASS_ERR_TRUNCATED = 6,    /* shorter than its header says */
  PYCASS_ERR_TRAILING = 7,     /* longer than its header says */
  PYCASS_ERR_CORRUPT = 8,      /* sizes, offsets or values contradict each other */
  PYCASS_ERR_CHECKSUM = 9,     /* a section's CRC-32C differs */
  PYCASS_ERR_UNSUPPORTED = 10, /* a codec, data type or shape this build does not run */
  PYCASS_ERR_CONTEXT_FULL = 11,
  PYCASS_ERR_STATE_MISMATCH = 12, /* a saved state of another model or format */
  PYCASS_ERR_KERNEL = 13,         /* the forced kernel set does not exist or cannot run on this machine */
  PYCASS_ERR_DEVICE = 14          /* no library or driver for the GPU, or it failed */
} pycass_status;

PYCASS_API const char *pycass_status_string(pycass_status status); /* a short English phrase */
PYCASS_API const char *pycass_error_detail(void);                  /* never NULL */
PYCASS_API const char *pycass_version(void);                       /* "0.1.0" */

/* ---- files -------------------------------------------------------------------------------------- */

typedef struct pycass_file pycass_file;

/* The hyperparameters of a decoder-only transformer (docs/format.md, section CONFIG). */
typedef struct pycass_config {
  uint32_t family;       /* 1 llama, 2 qwen2, 3 qwen3; information, the tensors decide */
  uint32_t n_vocab;      /* rows of the embedding */
  uint32_t n_token;      /* ids below this may be sampled; the rest are padding rows */
  uint32_t n_ctx_train;  /* longest context the model was made for */
  uint32_t n_embd;
  uint32_t n_ff;
  uint32_t n_layer;
  uint32_t n_head;       /* query heads */
  uint32_t n_head_kv;    /* divides n_head */
  uint32_t head_dim;     /* even */
  uint32_t flags;        /* PYCASS_FLAG_* */
  float rms_eps;
  float rope_attention_factor; /* multiplies cos and sin (yarn); 1 otherwise */
} pycass_config;

#define PYCASS_FLAG_TIED_EMBEDDING 1u /* the output matrix is the embedding */
#define PYCASS_FLAG_ROUNDED 2u        /* some source values were rounded on conversion, to BF16 or by cass2 */
#define PYCASS_FLAG_QUANTIZED 4u      /* the source was a quantised file; its values rounded are the target */

typedef enum pycass_codec {
  PYCASS_CODEC_RAW = 0,
  PYCASS_CODEC_NEST = 1,
  PYCASS_CODEC_CASS1 = 2,
  PYCASS_CODEC_CASS2 = 3 /* near-lossless: tensors decode to the source's values rounded in groups */
} pycass_codec;

typedef struct pycass_tensor_info {
  const char *name; /* the Hugging Face name; lives as long as the file */
  pycass_codec codec;
  uint32_t n_dims; /* 1 or 2 */
  uint64_t shape[2];
  uint64_t speculation_bytes;
  uint64_t verification_bytes;
  uint32_t bf16_crc32c; /* of the BF16 values that the tensor decodes to, row-major little-endian: the source's, but for cass2 */
} pycass_tensor_info;

PYCASS_API pycass_status pycass_file_open(const char *path, pycass_file **out);
/* The buffer is borrowed, 64-byte aligned, and must outlive the file. */
PYCASS_API pycass_status pycass_file_open_buffer(const void *data, size_t size, pycass_file **out);
PYCASS_API void pycass_file_close(pycass_file *file);
PYCASS_API const pycass_config *pycass_file_config(const pycass_file *file);
PYCASS_API const float *pycass_file_rope_inv_freq(const pycass_file *file); /* [head_dim / 2] */
PYCASS_API const char *pycass_file_json(const pycass_file *file, size_t *len); /* UTF-8, not terminated */
PYCASS_API size_t pycass_file_tensor_count(const pycass_file *file);
PYCASS_API pycass_status pycass_file_tensor(const pycass_file *file, size_t index, pycass_tensor_info *out);
/* Decodes the original bits (of cass2 what is left of them) of rows [row0, row1), row-major, n values in all. A vector is one row. */
PYCASS_API pycass_status pycass_file_tensor_bf16(const pycass_file *file, size_t index, uint64_t row0, uint64_t row1,
                                                 uint16_t *out, size_t n);
/* A part's bytes as they lie in the file (docs/format.md: part types), or NULL; they live as long as the file. */
PYCASS_API const uint8_t *pycass_file_tensor_part(const pycass_file *file, size_t index, uint32_t type, size_t *size);
/* Checks the checksum of every section. */
PYCASS_API pycass_status pycass_file_verify(const pycass_file *file);

/* ---- codecs, for writers of files ---------------------------------------------------------------- */

PYCASS_API uint32_t pycass_crc32c(uint32_t crc, const void *data, size_t size); /* start with 0; chains */
/* src -> BF16, to nearest even; NaN stays NaN. Returns how many values were not exactly representable. */
PYCASS_API size_t pycass_bf16_from_f32(uint16_t *dst, const float *src, size_t n);
PYCASS_API size_t pycass_bf16_from_f16(uint16_t *dst, const uint16_t *src, size_t n);
/* Index of the first value that is Inf or NaN, or n. */
PYCASS_API size_t pycass_bf16_find_nonfinite(const uint16_t *v, size_t n);

/* nest (docs/format.md, "nest"): sizes in bytes of the parts of a [rows, cols] matrix. */
typedef struct pycass_nest_sizes {
  size_t a, x;    /* speculation data: cells, group exponents */
  size_t b;       /* verification data: mantissa bits 5..0 */
  size_t side_bound; /* the side part is at most this long */
} pycass_nest_sizes;
PYCASS_API pycass_status pycass_nest_bound(uint64_t rows, uint64_t cols, pycass_nest_sizes *out);
/* w [rows][cols] row-major BF16. The parts are caller-owned, of the sizes above; *side_size <= side_bound. */
PYCASS_API pycass_status pycass_nest_encode(const uint16_t *w, uint64_t rows, uint64_t cols, uint8_t *a, uint8_t *x,
                                            uint8_t *b, uint8_t *side, size_t *side_size);
/* What activations of calibration text say about a matrix's inputs (docs/format.md, "Hot columns and draft bias"). */
typedef struct pycass_nest_calibration {
  const uint32_t *hot;     /* [n_hot] columns kept exact for the draft, ascending; n_hot: 0, 16, 32, 48 or 64 */
  size_t n_hot;
  const float *importance; /* [cols] weights of the columns' squared errors when group exponents are chosen, finite and not
                              negative; NULL: all 1 */
  const float *mean;       /* [cols] mean activations, finite: asks for a draft bias; NULL: none */
} pycass_nest_calibration;
/* The same with calibration (NULL: none) and two parts more, which may be NULL where they are not asked for:
 * hot [ceil(rows / 16)][n_hot / 4][64] and bias [ceil(rows / 16) * 16]. */
PYCASS_API pycass_status pycass_nest_encode_calibrated(const uint16_t *w, uint64_t rows, uint64_t cols,
                                                       const pycass_nest_calibration *calibration, uint8_t *a, uint8_t *x,
                                                       uint8_t *b, uint8_t *side, size_t *side_size, uint16_t *hot,
                                                       float *bias);
/* The draft's values of a nest matrix as float32 [rows][cols]; the encoder's own parts as input. */
PYCASS_API pycass_status pycass_nest_decode_draft(const uint8_t *a, const uint8_t *x, uint64_t rows, uint64_t cols,
                                                  float *out);

/* cass1 and cass2 (docs/format.md, "Codecs cass1 and cass2"). */
typedef struct pycass_cass_params {
  float prune;            /* in [0, 1): the part of each row that the draft does without */
  uint32_t mantissa_bits; /* 0..7: of a kept weight, that the draft reads */
  uint32_t half;          /* 1: the draft takes the other bits for 1000.., 0: for zeros */
  uint32_t pruned_raw;    /* cass1: 1 stores pruned weights as 16 bits, 0 codes their exponents */
} pycass_cass_params;
typedef struct pycass_cass_sizes {
  size_t speculation_bound, verification_bound; /* the parts are at most this long, in bytes */
} pycass_cass_sizes;
/* What an encoder saw, summed over calls: [0] kept weights, [1] pruned ones. */
typedef struct pycass_cass_stats {
  uint64_t count[2][256];    /* weights of each exponent */
  uint64_t exponent_bits[2]; /* taken by their exponents, escape bytes aside */
} pycass_cass_stats;
PYCASS_API pycass_status pycass_cass_bound(uint64_t rows, uint64_t cols, pycass_cass_sizes *out);
/* w [rows][cols] row-major BF16; norms [cols], not negative, weigh the columns when weights are chosen for the draft (NULL:
 * all alike). The parts are caller-owned, of the sizes above; *spec_size and *ver_size become their true ones. stats may be
 * NULL. PYCASS_ERR_INVALID_ARGUMENT for parameters, norms or sizes out of range. */
PYCASS_API pycass_status pycass_cass_encode(pycass_codec codec, const pycass_cass_params *params, const uint16_t *w,
                                            uint64_t rows, uint64_t cols, const float *norms, uint8_t *spec,
                                            size_t *spec_size, uint8_t *ver, size_t *ver_size, pycass_cass_stats *stats);
/* What cass2 leaves of values, in place; encoding does that first. */
PYCASS_API void pycass_cass2_round(uint16_t *w, uint64_t rows, uint64_t cols);
/* BF16 words of a matrix [rows][cols]: the target's or, with ver = NULL, the draft's. Safe on any bytes:
 * PYCASS_ERR_CORRUPT if their tables do not fit. */
PYCASS_API pycass_status pycass_cass_decode(pycass_codec codec, const uint8_t *spec, size_t spec_size, const uint8_t *ver,
                                            size_t ver_size, uint64_t rows, uint64_t cols, uint16_t *out);

/* ---- models ------------------------------------------------------------------------------------- */

typedef struct pycass_model pycass_model;

/* How a file's bytes come to memory. In huge pages they stream by a fifth faster, mapped they are shared with other
 * processes. AUTO maps them and, if there is room for a copy, moves them to huge pages in the background; READ does that
 * before it returns. */
typedef enum pycass_loading { PYCASS_LOAD_AUTO, PYCASS_LOAD_MAP, PYCASS_LOAD_READ } pycass_loading;

typedef struct pycass_model_options {
  const char *kernel;    /* "scalar", "avx2", "avx512", "avx512bf16", "amx"; NULL: $PYCASS_KERNEL, else the best that runs */
  pycass_loading loading;
  int mlock;             /* keep the weights resident */
  const float *rope_inv_freq; /* [head_dim / 2], replaces the file's; NULL: the file's */
  float rope_attention_factor; /* goes with rope_inv_freq */
  const char *const *draft_full; /* [n_draft_full] names of tensors that the draft reads as the target does */
  size_t n_draft_full;
  const char *device;    /* "cpu" or NULL; "cuda": the first GPU, or an error; "auto": a GPU if that works, else the CPU */
} pycass_model_options;

/* options may be NULL. */
PYCASS_API pycass_status pycass_model_load(const char *path, const pycass_model_options *options, pycass_model **out);
PYCASS_API void pycass_model_free(pycass_model *model); /* after its sessions */
PYCASS_API const pycass_file *pycass_model_file(const pycass_model *model);
PYCASS_API const char *pycass_model_kernel(const pycass_model *model);
/* What computes: "cpu" or "cuda". *note (may be NULL): why not the GPU, where "auto" chose the CPU; otherwise "". */
PYCASS_API const char *pycass_model_device(const pycass_model *model, const char **note);
/* GPUs by number, as the driver has them, of which "cuda" takes the first (CUDA_VISIBLE_DEVICES chooses). PYCASS_ERR_DEVICE past
 * the last one, or if there is no library or driver. */
typedef struct pycass_device {
  char name[256];
  int major, minor; /* compute capability */
  size_t free_bytes, total_bytes;
} pycass_device;
PYCASS_API pycass_status pycass_device_info(int index, pycass_device *out);
/* Kernel sets built in, best first; NULL past the end. *runs: whether this machine can run it. */
PYCASS_API const char *pycass_kernel_name(size_t index, int *runs);

/* ---- sessions: a KV cache, its tokens, threads ---------------------------------------------------- */

typedef struct pycass_session pycass_session;

/* How older keys and values are kept (docs/format.md, "Blocks of the KV cache"). */
typedef enum pycass_kv {
  PYCASS_KV_AUTO,  /* raw; nest if a whole context would take more than half of the memory that is available */
  PYCASS_KV_RAW,   /* BF16 */
  PYCASS_KV_NEST,  /* lossless, about .7 of BF16; the draft reads less than half */
  PYCASS_KV_CASS1, /* lossless, the paper's Cassandra-1; slow in software */
  PYCASS_KV_CASS2  /* near-lossless: 8 bits of magnitude relative to the largest of 32; slow in software */
} pycass_kv;

typedef struct pycass_session_options {
  uint32_t n_ctx;           /* 0: the model's, but at most 4096 unless asked for */
  uint32_t n_threads;       /* 0: physical cores */
  uint32_t n_threads_batch; /* for prompts; 0: as n_threads */
  uint32_t n_batch;         /* tokens per prompt forward pass, 1..4096; 0: 512 */
  pycass_kv kv;
} pycass_session_options;

PYCASS_API pycass_status pycass_session_new(pycass_model *model, const pycass_session_options *options,
                                            pycass_session **out);
PYCASS_API void pycass_session_free(pycass_session *session);
PYCASS_API uint32_t pycass_session_n_ctx(const pycass_session *session);
PYCASS_API uint32_t pycass_session_n_threads(const pycass_session *session);
PYCASS_API size_t pycass_session_kv_bytes(const pycass_session *session); /* that hold the cache of its tokens */
/* The same by kind: positions in plain BF16 and encoded ones; bytes of the latter, and of these what the draft reads. */
typedef struct pycass_kv_stats {
  size_t plain, encoded, encoded_bytes, draft_bytes;
} pycass_kv_stats;
PYCASS_API void pycass_session_kv_stats(const pycass_session *session, pycass_kv_stats *out);
/* The session's tokens: evaluated ones and, after pycass_session_next, one more that is not evaluated yet. */
PYCASS_API size_t pycass_session_tokens(const pycass_session *session, int32_t *out, size_t capacity);
/* Keeps the first n tokens. */
PYCASS_API pycass_status pycass_session_trim(pycass_session *session, size_t n);

/* Appends n tokens with the target. logits [n][n_vocab] or NULL. At least one token; PYCASS_ERR_CONTEXT_FULL
 * (and nothing done) when they do not fit. */
PYCASS_API pycass_status pycass_session_eval(pycass_session *session, const int32_t *ids, size_t n, float *logits);
/* The same, but logits [n][n_vocab] are the draft's: row i is what the draft computes for ids[i] on the
 * target's exact cache of everything before it, as in the first draft step of speculation. */
PYCASS_API pycass_status pycass_session_eval_draft(pycass_session *session, const int32_t *ids, size_t n, float *logits);
/* Makes the session's tokens equal ids[0..n), reusing the longest common prefix of the cache; *n_reused (may
 * be NULL) says how long that was. Afterwards pycass_session_next continues from ids. To stay interruptible
 * it evaluates at most max_eval tokens per call (0: all) and sets *done. */
PYCASS_API pycass_status pycass_session_prompt(pycass_session *session, const int32_t *ids, size_t n, size_t max_eval,
                                               size_t *n_reused, int *done);

/* Activations, for calibration. Channels are the inputs of a model's products: per layer n_embd (of q, k, v), n_head head_dim
 * (o), n_embd (gate, up), n_ff (down), and at the end n_embd (output). */
PYCASS_API size_t pycass_model_n_channel(const pycass_model *model);
/* As pycass_session_eval without logits, and adds each token's activations and their squares to sum and square,
 * [n_channel] both. */
PYCASS_API pycass_status pycass_session_observe(pycass_session *session, const int32_t *ids, size_t n, double *sum,
                                                double *square);

/* Sampling. The token at a position is a function of the logits, the tokens before it, these numbers and the
 * position: Gumbel-max with noise from (seed, position, token). Speculation cannot change it. */
typedef struct pycass_sampling {
  float temperature;       /* 0: the most likely token */
  int32_t top_k;           /* 0: off */
  float top_p;             /* 1: off */
  float min_p;             /* 0: off */
  float repeat_penalty;    /* 1: off */
  float presence_penalty;  /* 0: off */
  float frequency_penalty; /* 0: off */
  int32_t repeat_last_n;   /* tokens that penalties look at; 0: none, -1: all */
  uint64_t seed;
  const int32_t *bias_ids; /* [n_bias] added to logits before anything else; copied */
  const float *bias;
  size_t n_bias;
} pycass_sampling;
PYCASS_API pycass_sampling pycass_sampling_default(void); /* greedy, everything off */

typedef enum pycass_spec_mode { PYCASS_SPEC_OFF = 0, PYCASS_SPEC_ON = 1, PYCASS_SPEC_AUTO = 2 } pycass_spec_mode;
typedef struct pycass_speculation {
  pycass_spec_mode mode; /* auto: measures, and turns drafting off when it does not pay */
  int32_t draft_max;     /* 1..16: tokens that the draft makes in a step */
  int32_t draft_fixed;   /* nonzero: always draft_max tokens, no adaptation, no early stop */
  int32_t ngram;         /* nonzero: what followed the last tokens where they stood before is guessed too. It is not
                            counted in draft_max; all guesses of a step are at most 31. With draft_fixed: wherever
                            there is such a place, but every fourth token is the draft's */
} pycass_speculation;
PYCASS_API pycass_speculation pycass_speculation_default(void); /* auto, 8, ngram */

/* Sets how pycass_session_next chooses, and clears the session's statistics. */
PYCASS_API pycass_status pycass_session_configure(pycass_session *session, const pycass_sampling *sampling,
                                                  const pycass_speculation *speculation);

typedef struct pycass_token {
  int32_t id;
  uint32_t logits_crc32c; /* of the target's n_vocab logits behind this token; 0 unless recorded */
  float logprob;          /* log softmax of those logits (no sampling options); 0 unless recorded */
} pycass_token;
/* One step: 1..capacity new tokens (1 <= capacity). They are appended to the session's tokens.
 * PYCASS_ERR_CONTEXT_FULL when there is no room for another one. */
PYCASS_API pycass_status pycass_session_next(pycass_session *session, pycass_token *out, size_t capacity, size_t *n_out);
/* Whether next fills logits_crc32c and logprob. */
PYCASS_API void pycass_session_record(pycass_session *session, int on);

typedef struct pycass_stats {
  uint64_t prompt_tokens;  /* evaluated, not reused */
  double prompt_ms;
  uint64_t tokens;         /* returned by next */
  double decode_ms;        /* spent in next */
  uint64_t steps;          /* target passes in next */
  uint64_t drafted, accepted; /* guessed tokens, and those that were right */
  uint64_t ngram_drafted, ngram_accepted; /* of these, looked up (pycass_speculation.ngram) */
  double draft_ms, verify_ms;
  uint64_t bytes_read;     /* weight and KV bytes owed by next's passes */
  int spec_disabled;       /* auto turned drafting off */
  double plain_ms_per_token, spec_ms_per_token; /* what auto measured; 0: not measured */
} pycass_stats;
PYCASS_API void pycass_session_stats(const pycass_session *session, pycass_stats *out);

/* Saved state: the evaluated tokens and their cache. Caller-owned buffer of the size given. */
PYCASS_API size_t pycass_session_state_size(const pycass_session *session);
PYCASS_API pycass_status pycass_session_save_state(const pycass_session *session, uint8_t *out, size_t size);
PYCASS_API pycass_status pycass_session_load_state(pycass_session *session, const uint8_t *data, size_t size);

#ifdef __cplusplus
}
#endif
#endif
