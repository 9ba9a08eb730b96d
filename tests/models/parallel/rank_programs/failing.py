"""Two ranks: one fails or hangs while the other waits for it; started by torchrun."""

from __future__ import annotations
import os
import signal
import sys
import threading
from datetime import timedelta
import torch
from areal_lite.cli import stop_signals
from areal_lite.models.parallel import ranks
from areal_lite.models.parallel.ranks import broadcast_json
from areal_lite.runs import stopping

stop_signals.STOP_SECONDS = 0.5
ranks._TIMEOUT = timedelta(seconds=8)  # long enough to meet on a loaded machine


def generate(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        threading.Event().wait()
    raise RuntimeError("the engine is gone")


if __name__ == "__main__":
    stop_signals.stop_on_signals()
    with ranks.join_ranks(torch.device("cpu")) as here, stopping.finishing():
        broadcast_json("both are here")
        if here.rank == 1:
            generate(sys.argv[1])
        here.sum_(torch.ones(1))
