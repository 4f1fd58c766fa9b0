# The compiled module, as cffi makes it from csrc/include/lightckpt.h: it carries no types. Only
# lightckpt/_core.py imports it and gives its functions typed names.

from typing import Any

ffi: Any
lib: Any
