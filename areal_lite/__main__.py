"""``python -m areal_lite`` is ``areal-lite``."""

import sys
from areal_lite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
