/* What tests of the CUDA library share: matrices and activations on the device, in buffers of exactly their sizes. */
#ifndef CASS_DEVICE_H
#define CASS_DEVICE_H

#include "../../kernels_cuda/backend.h"
#include "../c/kernel_cases.h"

static const PycassCuda *cuda;
#define OK(call)                                                                                                               \
  do {                                                                                                                         \
    int error_ = (call);                                                                                                       \
    CHECK(!error_, "%s", cuda->error_text(error_));                                                                            \
  } while (0)

static inline void device_open(void) {
  cuda = pycass_cuda();
  CHECK(cuda->size == sizeof *cuda, "a library of another version");
}

static inline void *device_alloc(size_t size) {
  void *p = NULL;
  OK(cuda->alloc(&p, size));
  return p;
}
static inline void *device_copy(const void *host, size_t size) {
  if (!host)
    return NULL;
  void *p = device_alloc(size);
  OK(cuda->upload(p, host, size, NULL));
  OK(cuda->wait(NULL));
  return p;
}

typedef struct DeviceMatrix {
  CudaMatrix w;
} DeviceMatrix;

static inline DeviceMatrix device_matrix(const Case *t) {
  const Matrix *m = &t->w;
  size_t tiles = matrix_tiles(m), hot = (size_t)m->n_block * m->n_hot * 16;
  CudaMatrix w = {.codec = m->codec == PYCASS_CODEC_RAW ? CUDA_RAW : CUDA_NEST, .rows = m->rows, .cols = m->cols,
                  .n_block = m->n_block, .n_group = m->n_group, .n_hot = m->n_hot};
  if (w.codec == CUDA_RAW) {
    w.raw = device_copy(m->raw, sizeof(uint16_t) * m->rows * m->cols);
    return (DeviceMatrix){w};
  }
  w.a = device_copy(m->a, 512 * tiles), w.x = device_copy(m->x, round_up(16 * tiles, 64)), w.b = device_copy(m->b, 768 * tiles);
  w.side = device_copy(m->side, t->side_size);
  if (m->n_hot) {
    uint64_t *mask = calloc(m->n_group, sizeof *mask);
    for (uint32_t i = 0; i < m->n_hot; i++)
      mask[m->hot[i] / 64] |= (uint64_t)1 << m->hot[i] % 64;
    w.hot_mask = device_copy(mask, m->n_group * sizeof *mask), w.hot = device_copy(m->hot, m->n_hot * sizeof *m->hot);
    w.hot_words = device_copy(m->hot_words, 2 * hot);
    free(mask);
  }
  w.bias = device_copy(m->bias, 16 * m->n_block * sizeof *m->bias);
  uint8_t *form = device_alloc(tiles);
  OK(cuda->find_form(form, &w, NULL));
  w.form = form;
  return (DeviceMatrix){w};
}

static inline void device_matrix_free(DeviceMatrix *d) {
  const void *all[] = {d->w.raw, d->w.a, d->w.x, d->w.b, d->w.side, d->w.form, d->w.hot_words,
                       d->w.hot, d->w.hot_mask, d->w.bias};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i])
      OK(cuda->release((void *)(uintptr_t)all[i]));
}

typedef struct DeviceActs {
  CudaActs acts;
} DeviceActs;

static inline DeviceActs device_acts(const DeviceMatrix *d, const float *x, uint32_t ldx, uint32_t m, bool panels, bool q) {
  size_t n = (size_t)m * d->w.n_group;
  DeviceActs a = {{device_alloc(n * 128), device_alloc(m * 128), device_alloc(n * 128), device_alloc(n * sizeof(float))}};
  float *dx = device_copy(x, ((size_t)(m - 1) * ldx + d->w.cols) * sizeof *x);
  OK(cuda->ready(&a.acts, dx, ldx, m, &d->w, panels, q, NULL));
  OK(cuda->wait(NULL));
  OK(cuda->release(dx));
  return a;
}

static inline void device_acts_free(DeviceActs *a) {
  OK(cuda->release(a->acts.panels));
  OK(cuda->release(a->acts.hot));
  OK(cuda->release(a->acts.q));
  OK(cuda->release(a->acts.scale));
}

#endif
