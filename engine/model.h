/* A model: the file's tensors under the names that the forward pass uses. Everything is borrowed from the map. */
#ifndef CASS_MODEL_H
#define CASS_MODEL_H

#include "kernels.h"
#include "loader.h"

typedef struct Layer {
  const uint16_t *attn_norm, *ffn_norm;      /* [n_embd] */
  const uint16_t *q_norm, *k_norm;           /* [head_dim], or NULL */
  const uint16_t *q_bias, *k_bias, *v_bias;  /* [n_head head_dim], [n_head_kv head_dim] x 2, or NULL */
  Matrix q, k, v;                            /* [n_head head_dim, n_embd], [n_head_kv head_dim, n_embd] x 2 */
  Matrix o;                                  /* [n_embd, n_head head_dim] */
  Matrix gate, up;                           /* [n_ff, n_embd] */
  Matrix down;                               /* [n_embd, n_ff] */
} Layer;

struct pycass_model {
  pycass_file *file;
  const Kernels *kernels;
  pycass_config config;
  float *rope_inv_freq; /* [head_dim / 2] */
  Matrix embedding;     /* [n_vocab, n_embd] */
  Layer *layer;         /* [n_layer] */
  const uint16_t *norm; /* [n_embd] */
  Matrix output;        /* [n_vocab, n_embd]; the embedding when tied */
  uint64_t draft_bytes, target_bytes; /* of weights that one pass reads */
  bool has_draft;       /* some matrix is coded, so a draft reads less than the target */
  bool draft_reads_panels; /* some matrix is not, or the draft reads it in full */
  const struct Backend *backend;
  void *weights;        /* the backend's copy; NULL: the CPU reads the map */
  char device_note[512]; /* why it is the CPU's though a GPU would have been taken */
};

#endif
