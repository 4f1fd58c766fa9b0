"""Inception-V3 on digits, SGD with momentum: 218 MB of state in many small tensors."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("inception_v3", sys.argv[1:]))
