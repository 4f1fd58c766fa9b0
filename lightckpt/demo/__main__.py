"""``python -m lightckpt.demo``."""

import sys

from . import run

if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
