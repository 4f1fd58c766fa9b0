"""Write the C source of ``lightckpt._ffi`` from the one header of the ABI.

The header that the compiler includes is the text that cffi parses, unchanged, so the declarations
that Python sees cannot drift from the ones that the library was built with; what the header may not
hold for that reason is said at its top. The result is in API mode: the compiler checks each
declaration, and every call runs without the GIL.

CMake runs this as ``build_ffi.py HEADER OUTPUT``; it needs nothing but cffi.
"""

import argparse
from pathlib import Path

import cffi

MODULE = "lightckpt._ffi"
PRELUDE = """\
#include <stdint.h>

#include "lightckpt.h"
"""


def write_source(header: Path, output: Path) -> None:
    """Write the module's C source to *output*, leaving the file alone where it is the same."""
    builder = cffi.FFI()
    builder.cdef(header.read_text(encoding="utf-8"))
    builder.set_source(MODULE, PRELUDE)
    builder.emit_c_code(str(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("header", type=Path, help="csrc/include/lightckpt.h")
    parser.add_argument("output", type=Path, help="the C file to write")
    arguments = parser.parse_args()
    write_source(arguments.header, arguments.output)


if __name__ == "__main__":
    main()
