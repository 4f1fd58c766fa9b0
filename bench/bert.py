"""BERT-large (335 M) on Python source, AdamW: 4 GB of state."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("bert", sys.argv[1:]))
