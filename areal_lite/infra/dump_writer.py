"""The program that writes dump files; :mod:`areal_lite.infra.trajectory_dumper` starts it and sends it their text.

It is a process of its own because a thread would contend with the event loop for the interpreter lock at every system
call. Guarantees that a file is whole or absent, and is never written again. Imports little, so it starts in 20 ms.

Its input, the descriptor in ``argv[1]``, is batches: 8 bytes of length, then a marshalled list of (folder, name, text);
a length of 0 ends it. Its output is lines: N for N more written files, or -N if the next one failed with errno N.
"""

from __future__ import annotations

import itertools
import marshal
import os
import signal
import sys
import time

REPORT_S = 0.1
"""Seconds after which files are reported before their batch is complete."""


def main() -> None:
    """Write batches until the end, or until a file cannot be written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: what is queued is still written
    with os.fdopen(int(sys.argv[1]), "rb") as batches:
        while length := int.from_bytes(batches.read(8), "little"):
            written, reported = 0, time.monotonic()
            for folder, name, text in marshal.loads(batches.read(length)):
                try:
                    write_file(folder, name, text)
                except OSError as error:
                    report(written)
                    report(-(error.errno or 1))
                    return
                written += 1
                if time.monotonic() > reported + REPORT_S:
                    report(written)
                    written, reported = 0, time.monotonic()
            report(written)


def report(number: int) -> None:
    """Write a line of output."""
    if number:
        os.write(1, b"%d\n" % number)


def write_file(folder: str, name: str, text: bytes) -> None:
    """Write ``folder/name.jsonl``, or ``name.1.jsonl`` if that is there, ...; leave nothing if that fails."""
    unfinished = f"{folder}/.unfinished-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        descriptor = os.open(unfinished, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        descriptor = os.open(unfinished, flags, 0o644)
    try:
        try:
            while text:  # a write may be short
                text = text[os.write(descriptor, text) :]
        finally:
            os.close(descriptor)
        path, numbers = f"{folder}/{name}.jsonl", itertools.count(1)
        while os.access(path, os.F_OK):  # the user has given an id twice
            path = f"{folder}/{name}.{next(numbers)}.jsonl"
        os.rename(unfinished, path)  # noqa: PTH104
    except OSError:
        os.unlink(unfinished)  # noqa: PTH108
        raise


if __name__ == "__main__":
    main()
