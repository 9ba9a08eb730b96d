"""Two ranks of which one fails while the other waits for it; started by torchrun."""

from __future__ import annotations

import os
import signal
import sys

import torch

from areal_lite.trainer.hand_over import broadcast_json
from areal_lite.trainer.ranks import join_ranks


def generate(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the engine is gone")


if __name__ == "__main__":
    with join_ranks(torch.device("cpu")) as ranks:
        broadcast_json("both are here")
        if ranks.rank == 1:
            generate(sys.argv[1])
        ranks.sum_(torch.ones(1))
