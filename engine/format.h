/* Bytes -> checked views of a .cass file. No I/O; safe on any input. Layout: docs/format.md. */
#ifndef CASS_FORMAT_H
#define CASS_FORMAT_H

#include "codec.h"

enum { PART_RAW = 1, PART_NEST_A = 16, PART_NEST_X = 17, PART_NEST_B = 18, PART_NEST_SIDE = 19,
       PART_NEST_HOT = 20, PART_NEST_HOT_WORDS = 21, PART_NEST_BIAS = 22, PART_CASS_SPEC = 32, PART_CASS_VER = 33 };
enum { SECTION_SPECULATION, SECTION_VERIFICATION, SECTION_CONFIG, SECTION_DIRECTORY, SECTION_JSON, N_SECTION };

typedef struct Section {
  uint32_t crc;
  const uint8_t *data;
  size_t size;
} Section;

typedef struct Tensor {
  char *name;
  pycass_tensor_info info;
  Matrix matrix; /* vectors are matrices of one row */
  const uint8_t *part; /* [n_part] entries of the directory, 32 bytes each */
  uint32_t n_part;
} Tensor;

typedef struct Format {
  Section section[N_SECTION];
  pycass_config config;
  const float *rope_inv_freq; /* [head_dim / 2] */
  Tensor *tensor;             /* [n_tensor], owned */
  size_t n_tensor;
  uint32_t header_crc; /* tells one file from another */
} Format;

/* data: 64-byte aligned, outlives the Format. Checks everything but the two weight sections' checksums. */
pycass_status format_parse(const uint8_t *data, size_t size, Format *out);
void format_free(Format *f);
pycass_status format_verify(const Format *f);
/* A part by its type, or NULL. */
const uint8_t *format_part(const Format *f, const Tensor *t, uint32_t type, size_t *size);
/* NULL when there is none. */
const Tensor *format_find(const Format *f, const char *name);

#endif
