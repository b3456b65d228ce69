#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base.h"

static _Thread_local char detail[512];

const char *pycass_error_detail(void) { return detail; }
const char *pycass_version(void) { return "0.1.0"; }

pycass_status cass_fail(pycass_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(detail, sizeof detail, format, args);
  va_end(args);
  return status;
}

const char *pycass_status_string(pycass_status status) {
  switch (status) {
  case PYCASS_OK: return "ok";
  case PYCASS_ERR_INVALID_ARGUMENT: return "invalid argument";
  case PYCASS_ERR_OUT_OF_MEMORY: return "out of memory";
  case PYCASS_ERR_IO: return "input/output error";
  case PYCASS_ERR_NOT_CASS: return "not a .cass file";
  case PYCASS_ERR_VERSION: return "unknown format version";
  case PYCASS_ERR_TRUNCATED: return "truncated file";
  case PYCASS_ERR_TRAILING: return "trailing bytes";
  case PYCASS_ERR_CORRUPT: return "corrupt file";
  case PYCASS_ERR_CHECKSUM: return "checksum mismatch";
  case PYCASS_ERR_UNSUPPORTED: return "unsupported";
  case PYCASS_ERR_CONTEXT_FULL: return "context full";
  case PYCASS_ERR_STATE_MISMATCH: return "state of another model";
  case PYCASS_ERR_KERNEL: return "kernel set not available";
  }
  return "unknown status";
}

void *cass_alloc(size_t size) {
  if (size > SIZE_MAX - CASS_ALIGN)
    return NULL;
  size = round_up(size ? size : 1, CASS_ALIGN);
  void *p = aligned_alloc(CASS_ALIGN, size);
  if (p)
    memset(p, 0, size);
  return p;
}

void cass_free(void *p) { free(p); }
