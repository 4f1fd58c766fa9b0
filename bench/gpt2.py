"""GPT-2 (124 M) on Python source, AdamW: 1.5 GB of state."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("gpt2", sys.argv[1:]))
