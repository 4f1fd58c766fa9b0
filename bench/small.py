"""A GPT-2 of 4 M parameters on Python source, AdamW: 50 MB of state."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("small", sys.argv[1:]))
