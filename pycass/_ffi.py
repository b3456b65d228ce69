"""Writes the C source of the module `pycass._pycass` from the public header: `_ffi.py PYCASS_H OUT_C`.

cffi's API mode, out of line: the compiler checks every declaration against the header.
"""

import re
import sys


def declarations(header: str) -> str:
    """The header without preprocessor lines, comments and attributes, as cffi wants it."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r'extern "C" \{', "", text)
    constants = re.findall(r"^#define (PYCASS_FLAG_\w+) (\w+)", text, flags=re.M)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("PYCASS_API ", "").rstrip()
    text = text.removesuffix("}").rstrip()  # closes extern "C"
    return text + "\n" + "".join(f"#define {name} ...\n" for name, _ in constants)


def main(header_path: str, out_path: str) -> None:
    from cffi import FFI

    with open(header_path, encoding="utf-8") as f:
        header = f.read()
    ffi = FFI()
    ffi.cdef(declarations(header))
    ffi.set_source("pycass._pycass", '#include "pycass.h"')
    ffi.emit_c_code(out_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
