"""AlexNet on digits, SGD with momentum: 489 MB of state."""

import sys

from arguments import main

if __name__ == "__main__":
    sys.exit(main("alexnet", sys.argv[1:]))
