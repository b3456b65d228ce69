/* Look-ups: where the last tokens of a text stood before, what followed there is a guess that costs nothing to make. */
#ifndef CASS_LOOKUP_H
#define CASS_LOOKUP_H

#include "base.h"

enum { LOOKUP_LONGEST = 16 }; /* longer matches count as this long */

typedef struct Match {
  uint32_t length; /* how many of the last tokens are the same there; 0: they never stood before */
  size_t at;       /* index of the token that followed */
} Match;

/* The longest match of the end of tokens [n] further up, and of equally long ones the latest.
 *
 * A plain scan: a few microseconds for thousands of tokens, beside the tens of milliseconds of a step, and there is no
 * index to keep right when sessions are trimmed or restored. */
Match look_up(const int32_t *tokens, size_t n);

#endif
