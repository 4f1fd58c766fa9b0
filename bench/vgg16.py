"""VGG-16 on digits, SGD with momentum: 1.1 GB of state, most of it in one layer."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("vgg16", sys.argv[1:]))
