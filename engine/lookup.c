#include "lookup.h"

Match look_up(const int32_t *tokens, size_t n) {
  Match best = {0};
  for (size_t at = n; at-- > 1 && best.length < LOOKUP_LONGEST;) {
    if (tokens[at - 1] != tokens[n - 1])
      continue;
    uint32_t length = 1;
    while (length < LOOKUP_LONGEST && length < at && tokens[at - 1 - length] == tokens[n - 1 - length])
      length++;
    if (length > best.length)
      best = (Match){length, at};
  }
  return best;
}
