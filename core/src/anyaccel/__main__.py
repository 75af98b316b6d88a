"""``python -m anyaccel`` is the command ``anyaccel``."""

import sys

from anyaccel.cli import main

if __name__ == "__main__":
    sys.exit(main())
