/* The public header alone, as pedantic C11. */
#include "pycass.h"

int main(void) {
  pycass_session_free(0), pycass_model_free(0), pycass_file_close(0);
  return pycass_status_string(PYCASS_OK)[0] != 'o' || !pycass_version()[0];
}
