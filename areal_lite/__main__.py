"""``areal-lite``, and ``python -m areal_lite``."""

import os
import sys


def main() -> int:
    """Run the command line in a process whose order of sets is that of any other: rows and starts follow from it."""
    if "PYTHONHASHSEED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    from areal_lite.cli import main as cli  # not before: it takes longer than the second start of Python

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
