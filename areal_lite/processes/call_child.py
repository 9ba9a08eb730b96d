"""The child process of a :class:`~areal_lite.processes.call_pool.CallPool`: answers one call at a time.

Its first imports are few, because a pool starts it while an episode waits. Each request is a pickle: an object to load,
or arguments to call it with. Each reply is JSON (:mod:`areal_lite.processes.channel`).
"""

import pickle
import resource
import socket
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any
from areal_lite.processes.channel import describe, encode_reply, framed, read_message


def main(descriptor: int, memory_bytes: int) -> None:
    """Serve the socket with this number until the other side closes it; 0 bytes of memory are no limit."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    if memory_bytes:
        # Not RLIMIT_AS: libraries that are only mapped, CUDA's say, are no bomb.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        if (oom := Path("/proc/self/oom_score_adj")).exists():
            oom.write_text("1000")
    requests = connection.makefile("rb")
    targets: dict[bytes, Callable[..., Any]] = {}
    while (message := read_message(requests)) is not None:
        try:
            key, load, call = pickle.loads(message)  # nosec B301 # sent by the run's process
            value = None
            if load is not None:
                preparation, pickled = load
                spawn.prepare(preparation)
                targets[key] = pickle.loads(pickled)  # nosec B301 # sent by the run's process
            else:
                args, kwargs = pickle.loads(call)  # nosec B301 # sent by the run's process
                value = targets[key](*args, **kwargs)
            reply = encode_reply(["value", value])
        except BaseException as error:  # SystemExit too: the exception is the answer
            reply = encode_reply(["error", describe(error)])
        connection.sendall(framed(reply))
