"""ResNet-18 on digits, SGD with momentum: 94 MB of state."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("resnet18", sys.argv[1:]))
