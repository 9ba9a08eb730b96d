"""The process that makes text of ended groups and writes the dump files.

``trajectory_dumper`` starts it and sends it packed groups. Packing takes a few microseconds per episode; turns and text
take ten times that, and in the run's process would contend with the event loop for the interpreter lock. Guarantees
that a file is whole or absent, and is never written again. Each file is noted in a chain of hashes beside it, so that
``areal-lite verify`` sees a change. Each writer begins its own chain in each folder: after a kill, nothing is repaired.

Its input is messages (:mod:`areal_lite.processes.channel`): the tokenizer's path with each line's ``extra``, then
batches, lists of :data:`File`. An empty message ends it, and not the end of the pipe, which a program that an agent
forked may hold open. Its output is a :class:`Report` after each part of a batch.
"""

import itertools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from typing import Any
import orjson
from areal_lite.processes.channel import encode_reply, framed, read_message
from areal_lite.rollout.dumps.dump_lines import CHAIN, dump_lines, dump_text
from areal_lite.rollout.dumps.packed_group import File, Report, unpack_group

REPORT_S = 0.1  # seconds after which files are reported before their batch is complete


def main(requests: int, reports: int) -> None:
    """Write what comes from the pipe ``requests`` until its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: what is queued is still written
    with open(requests, "rb") as batches, open(reports, "wb", buffering=0) as answers:

        def report(each: Report) -> None:
            answers.write(framed(encode_reply(each)))

        path, extra = pickle.loads(read_message(batches) or b"")  # nosec B301 # sent by the run's process
        tokenizer, chain = _tokenizer(path), Chain()
        while batch := read_message(batches):
            _write_batch(pickle.loads(batch), tokenizer, extra, report, chain)  # nosec B301 # sent by the run's process
        os._exit(0)  # every file and report is written; an orderly exit would only keep the run waiting


def _tokenizer(path: str | None) -> Any:
    """Return the tokenizer, loaded without torch, which would take two seconds and 250 MB more."""
    if path is None:
        return None
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing
    from areal_lite.data.chat.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _write_batch(
    batch: list[File], tokenizer: Any, extra: dict[str, Any] | None, report: Callable[[Report], object], chain: "Chain"
) -> None:
    written, reported = 0, time.monotonic()
    for folder, name, packed in batch:
        try:
            group, row = unpack_group(packed)
            text = dump_text(dump_lines(group, tokenizer, row=row, extra=extra))
        except Exception:
            report(Report(written=written, no_text=traceback.format_exc()))
            written = 0
            continue
        try:
            chain.add(write_file(folder, name, text), text)
        except OSError as error:
            report(Report(written=written, errno=error.errno or 1, size=len(text)))
            return
        written += 1
        if time.monotonic() > reported + REPORT_S:
            report(Report(written=written))
            written, reported = 0, time.monotonic()
    if written:
        report(Report(written=written))


def write_file(folder: str, name: str, text: bytes) -> str:
    """Write ``folder/name.jsonl``, or ``name.1.jsonl`` if that is there, ...; return its path, or leave nothing."""
    unfinished = f"{folder}/.unfinished-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        descriptor = os.open(unfinished, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        descriptor = os.open(unfinished, flags, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        path, numbers = f"{folder}/{name}.jsonl", itertools.count(1)
        while os.access(path, os.F_OK):  # the user has given an id twice
            path = f"{folder}/{name}.{next(numbers)}.jsonl"
        os.rename(unfinished, path)  # noqa: PTH104
        return path
    except OSError:
        os.unlink(unfinished)  # noqa: PTH108
        raise


class Chain:
    """Notes the files of this process: per folder a file of lines, each with the hash of the line before it."""

    def __init__(self) -> None:
        self._name = f"{CHAIN}{time.time_ns()}-{os.getpid()}"
        self._last: dict[str, bytes] = {}  # the last note by folder

    def add(self, path: str, text: bytes) -> None:
        folder, _, file = path.rpartition("/")
        note = {"file": file, "sha256": sha256(text).hexdigest()}
        note["previous"] = sha256(self._last.get(folder, b"")).hexdigest()
        self._last[folder] = line = orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE)
        with open(f"{folder}/{self._name}", "ab") as chain:  # noqa: PTH123
            chain.write(line)
