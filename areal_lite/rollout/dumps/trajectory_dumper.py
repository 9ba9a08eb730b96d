"""Dumps every ended group as JSONL, off the event loop.

A file is one group, ``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``, with one line
per sequence; docs/trajectories.md has the fields. Guarantees that a file is whole or absent and is never written again,
that the queue is bounded, and that a group which the disk did not take is an error.
"""

import contextlib
import fcntl
import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
import orjson
from areal_lite.api.trajectory import Group, scope_name
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import StorageError
from areal_lite.files.incarnation import Incarnation
from areal_lite.processes.channel import decode_reply, framed, read_message
from areal_lite.processes.child_process import start_python
from areal_lite.rollout.dumps.packed_group import File, Report, pack_group

logger = logging.getLogger(__name__)
MAX_QUEUED = 2**26  # bytes of queued groups at which no further group may start; those that run still join the queue
GATHER_S = 0.1  # seconds in which ended groups gather, unless many wait already: each batch interrupts the event loop
MANY = 1024  # groups that are many
BATCH_BYTES = 2**20  # packed groups of one batch, beyond one group
PIPE_BYTES = 2**20  # size of the pipe to the process
MAX_REPORT = 2**20  # largest report in bytes; it may hold a traceback
REPORT_S = 10.0  # seconds between the log lines of a close that waits
FLUSH_S = 10.0  # most seconds of a flush
STALLED_S = 60.0  # seconds without a written group after which close gives up
_MAX_DIGITS = 15  # longer numbers are names that a user chose


class TrajectoryDumper:
    """A queue of packed groups, and a process that writes them as text (:mod:`.dump_writer`). Its thread calls
    ``on_change`` when ``behind`` has ended or ``error`` is set. ``extra`` is the ``extra`` of every line."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        on_change: Callable[[], object] = lambda: None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = config.run_dir
        self._incarnation = Incarnation(self.root)
        self.behind = False  # no group may start: the queue was full and more than half is left, or the disk failed
        self.error: StorageError | None = None  # why nothing is written any more
        self.failures = 0  # groups that have no JSON form; they change no outcome
        self._ended = self._written = self._wanted = 0
        """Groups that have ended, that are files, and that a flush waits for: the first so many of those that ended."""
        self._left_bytes = 0
        self._warned = self._closing = False
        self._on_change = on_change
        if config.tokenizer_path is not None:
            load_tokenizer(config.tokenizer_path)  # the process does too, and has nobody to tell
        self._queue: deque[File] = deque()
        self._changed = threading.Condition()  # guards all of the above; held for microseconds
        reads, writes = os.pipe()
        reports, answers = os.pipe()
        self._pipe, self._reports = os.fdopen(writes, "wb"), os.fdopen(reports, "rb")
        try:
            self._process = start_python("areal_lite.rollout.dumps.dump_writer", [reads, answers])
        finally:
            os.close(reads)
            os.close(answers)
        with contextlib.suppress(OSError):  # beyond the user's limit: a batch then wakes both sides for each page
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._send((config.tokenizer_path, orjson.loads(orjson.dumps(extra))))
        self._thread = threading.Thread(target=self._main, name="areal-lite-dumper", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """Pack and queue ``group``; returns in microseconds."""
        self._ended += 1
        if self.error is not None:
            return
        try:
            packed = pack_group(group)
        except Exception as error:
            self._leave_out(str(group.task_id), error)
            return
        version = group.start_version if group.tail_version is None else group.tail_version
        with self._changed:
            self._queue.append((f"{self.root}/{scope_name(group.is_eval)}/{version}", str(group.task_id), packed))
            self._left_bytes += len(packed)
            self.behind = self.behind or self._left_bytes >= MAX_QUEUED
            if len(self._queue) == 1:  # after it, the thread lets groups gather: waking it would interrupt the loop
                self._changed.notify_all()
        if self.behind and not self._warned:
            self._warned = True
            logger.warning(
                "rollout waits for the disk: %d ended groups are not yet dumped below %s", self._left, self.root
            )

    def flush(self) -> None:
        """Return once the groups that have ended are written, or nothing more can be, or after ``FLUSH_S``."""
        with self._changed:
            wanted = self._wanted = self._ended
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= wanted or self.error is not None, FLUSH_S)

    def close(self) -> None:
        """Write what is queued; end thread and process. A StorageError if the disk failed or stalled."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._join()
        except KeyboardInterrupt:
            logger.warning("stopped: %d ended groups are not dumped below %s", self._left, self.root)
            raise
        finally:
            error = self.error
            self._process.kill()  # if it still runs
        if self.failures:
            logger.warning("%d ended groups could not be dumped below %s", self.failures, self.root)
        if not self._left:
            return
        missing = f"{self._left} ended groups are not dumped below {self.root}"
        if error is None:
            raise StorageError(f"{missing}: the disk took none of them in {STALLED_S:g} s: is it still mounted?")
        error.add_note(missing)
        raise error

    def _join(self) -> None:
        left, since = self._left, time.monotonic()
        self._thread.join(timeout=1.0)
        while self._thread.is_alive() and time.monotonic() < since + STALLED_S:
            logger.warning("waiting for the disk: %d ended groups are not yet dumped below %s", self._left, self.root)
            self._thread.join(timeout=REPORT_S)
            if self._left < left:
                left, since = self._left, time.monotonic()

    @property
    def _done(self) -> int:
        return self._written + self.failures

    @property
    def _left(self) -> int:
        return self._ended - self._done

    def _main(self) -> None:
        while files := self._next_batch():
            if self.error is None:
                self._write(files)
            with self._changed:
                self._left_bytes -= sum(len(packed) for _, _, packed in files)
                caught_up = self.behind and self._left_bytes <= MAX_QUEUED // 2
                self.behind = self.error is not None or (self.behind and not caught_up)
                self._changed.notify_all()
            if caught_up or self.error is not None:
                self._on_change()
        with contextlib.suppress(BrokenPipeError), self._reports, self._pipe:
            self._pipe.write(framed(b""))
        self._process.wait()

    def _next_batch(self) -> list[File]:
        """Let groups gather, and return the first of them; none at the end."""
        files: list[File] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(
                lambda: self._closing or self._done < self._wanted or len(self._queue) >= MANY, GATHER_S
            )
            while self._queue and size < BATCH_BYTES:
                files.append(self._queue.popleft())
                size += len(files[-1][2])
        return files

    def _leave_out(self, name: str, why: Exception | str) -> None:
        """Count a group without a JSON form, which must not end the run."""
        with self._changed:
            self.failures += 1
        if self.failures == 1:
            logger.error("group %s could not be dumped; further failures are only counted: %s", name, why)

    def _write(self, files: list[File]) -> None:
        done = 0
        try:
            self._incarnation.check()
            self._send(files)
            while done < len(files):
                report = Report(*decode_reply(read_message(self._reports, max_bytes=MAX_REPORT) or b"")[0])
                self._written += report.written
                done += report.written
                if report.no_text is not None:
                    self._leave_out(files[done][1], report.no_text)
                    done += 1
                elif report.errno:
                    folder, name, _ = files[done]
                    self.error = StorageError(
                        f"the dump {folder}/{name}.jsonl ({report.size} bytes) cannot be written: "
                        f"{os.strerror(report.errno)}: free disk space or fix the folder's permissions, or set "
                        "rollout.dump_to_file: false"
                    )
                    return
        except StorageError as error:
            self.error = error
        except ConnectionError:
            self.error = StorageError(
                f"the process that writes dumps below {self.root} was killed: free memory, or set "
                "rollout.dump_to_file: false"
            )
        except Exception as error:  # of a network's disk, for instance: the run must not wait for this thread
            self.error = StorageError(f"dumps below {self.root} cannot be written: {error}")

    def _send(self, message: Any) -> None:
        self._pipe.write(framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        self._pipe.flush()


def next_task_id(root: Path) -> int:
    """Return the task id after those of all dumps below ``root``."""
    names = (path.name.partition(".")[0] for path in root.glob("*rollout/*/*.jsonl"))
    return max((int(name) for name in names if name.isdecimal() and len(name) <= _MAX_DIGITS), default=-1) + 1
