/* A fuzz target is one function, as libFuzzer wants it; drive.c calls it without libFuzzer. */
#ifndef CASS_FUZZ_H
#define CASS_FUZZ_H

#include "check.h"
#include "tiny_cass.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Nothing larger is decoded or run. */
enum { FUZZ_MAX_VALUES = 1 << 20 };

#endif
