"""The environment that torchrun gives to each process; readable before torch is loaded."""

import os


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first rank under torchrun."""
    return os.environ.get("RANK", "0") == "0"
