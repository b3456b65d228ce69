// The public header as C++: it compiles, and links without mangled names.
#include "pycass.h"

int main() {
  pycass_file *file = nullptr;
  pycass_sampling sampling = pycass_sampling_default();
  return pycass_file_open("/nonexistent", &file) != PYCASS_ERR_IO || sampling.temperature != 0;
}
