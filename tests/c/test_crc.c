/* CRC-32C: known values, the instruction against the tables, chaining, and no read past the end. */
#include "check.h"

uint32_t cass_crc32c_tables(uint32_t crc, const void *data, size_t size);

static uint32_t bit_by_bit(const uint8_t *p, size_t n) {
  uint32_t c = 0xffffffffu;
  while (n--) {
    c ^= *p++;
    for (int k = 0; k < 8; k++)
      c = c >> 1 ^ (0x82F63B78u & (0u - (c & 1u)));
  }
  return ~c;
}

/* From RFC 3720, B.4, and the check value of the catalogues. */
static void test_known(void) {
  uint8_t b[48];
  CHECK(pycass_crc32c(0, "", 0) == 0, "empty");
  CHECK(pycass_crc32c(0, "123456789", 9) == 0xE3069283u, "check value");
  memset(b, 0, 32);
  CHECK(pycass_crc32c(0, b, 32) == 0x8A9136AAu, "32 zeros");
  memset(b, 0xff, 32);
  CHECK(pycass_crc32c(0, b, 32) == 0x62A8AB43u, "32 ones");
  for (int i = 0; i < 32; i++)
    b[i] = (uint8_t)i;
  CHECK(pycass_crc32c(0, b, 32) == 0x46DD794Eu, "ascending");
}

static void test_sizes(void) {
  for (size_t n = 0; n < 300; n++)
    for (size_t skip = 0; skip < 9; skip++) {
      uint8_t *b = malloc(n + skip + !(n + skip)); /* ends where the data end */
      for (size_t i = 0; i < n + skip; i++)
        b[i] = (uint8_t)random_u32();
      uint32_t want = bit_by_bit(b + skip, n);
      CHECK(pycass_crc32c(0, b + skip, n) == want, "size %zu, offset %zu", n, skip);
      CHECK(cass_crc32c_tables(0, b + skip, n) == want, "tables: size %zu, offset %zu", n, skip);
      free(b);
    }
}

static void test_chain(void) {
  uint8_t b[1000];
  for (size_t i = 0; i < sizeof b; i++)
    b[i] = (uint8_t)random_u32();
  uint32_t want = bit_by_bit(b, sizeof b);
  for (size_t cut = 0; cut <= sizeof b; cut++) {
    size_t rest = sizeof b - cut;
    CHECK(pycass_crc32c(pycass_crc32c(0, b, cut), b + cut, rest) == want, "cut at %zu", cut);
    CHECK(cass_crc32c_tables(pycass_crc32c(0, b, cut), b + cut, rest) == want, "mixed, cut at %zu", cut);
  }
}

int main(void) {
  test_known();
  test_sizes();
  test_chain();
  printf("ok\n");
  return 0;
}
