"""The process that makes text of ended groups and writes the dump files.

``trajectory_dumper`` starts it and sends it packed groups. Packing takes a few microseconds per episode; turns and text
take ten times that, and in the run's process would contend with the event loop for the interpreter lock. Guarantees
that a file is whole or absent, and is never written again.

Its input is messages (:mod:`areal_lite.processes.channel`): the tokenizer's path with each line's ``extra``, then
batches, lists of :data:`File`. An empty message ends it, and not the end of the pipe, which a program that an agent
forked may hold open. Its output is a :class:`Report` after each part of a batch.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from areal_lite.api import record_codec as codec
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory, Turn, TurnRole
from areal_lite.api.turn_tree import link_turns, turn_sources
from areal_lite.processes.channel import encode_reply, framed, read_message
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text, row_json

File = tuple[str, str, bytes]  # folder and name of a file, and its group; see pack_group
REPORT_S = 0.1  # seconds after which files are reported before their batch is complete


class Report(NamedTuple):
    written: int  # files that were written
    no_text: str | None = None  # why the file after them was left out: the traceback, if its group has no JSON form
    errno: int = 0  # why the file after them could not be written, and nothing more is; 0 if nothing failed
    size: int = 0  # bytes of that file


def main(requests: int, reports: int) -> None:
    """Write what comes from the pipe ``requests`` until its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: what is queued is still written
    with open(requests, "rb") as batches, open(reports, "wb", buffering=0) as answers:

        def report(each: Report) -> None:
            answers.write(framed(encode_reply(each)))

        path, extra = pickle.loads(read_message(batches) or b"")
        tokenizer = _tokenizer(path)
        while batch := read_message(batches):
            _write_batch(pickle.loads(batch), tokenizer, extra, report)
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
    batch: list[File], tokenizer: Any, extra: dict[str, Any] | None, report: Callable[[Report], object]
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
            write_file(folder, name, text)
        except OSError as error:
            report(Report(written=written, errno=error.errno or 1, size=len(text)))
            return
        written += 1
        if time.monotonic() > reported + REPORT_S:
            report(Report(written=written))
            written, reported = 0, time.monotonic()
    if written:
        report(Report(written=written))


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


_GROUP = codec.Form("task_id", "group_id", "rejection", "is_eval", "start_version", "queued_s", "run_s", "finished_at")
_TURN = codec.Form(
    *("parent", "start", "stop_reason", "started", "latency_s", "text", "agent", "server"),
    *("ids", "loss_mask", "logprobs", "versions"),
    num_columns=4,
)
_CALL = codec.Form(
    *("output_tokens", "output_logprobs", "output_versions"), *("stop_reason", "latency", "started", "rid", "server")
)


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs: a pickle, because it goes from the run to a child."""
    columns: codec.Columns = []
    trajectories = [
        (codec.pack_records(each), codec.pack_trajectory(each, columns), _pack_turns(each, columns))
        for each in group.trajectories
    ]
    plain = _GROUP.pack(group, columns), group.status.value, trajectories, row_json(group.data), columns
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    own, status, trajectories, row, columns = pickle.loads(packed)
    parts = [_unpack_trajectory(plain, columns) for plain in trajectories]
    return Group(**_GROUP.unpack(own, columns), status=EpisodeStatus(status), data={}, trajectories=parts), row


def _pack_turns(trajectory: Trajectory, columns: codec.Columns) -> codec.Plain:
    sources = turn_sources(trajectory)
    if sources is None:  # the turns are made, and the calls may be gone
        turns = [(turn.role.value, _TURN.pack(turn, columns)) for turn in trajectory.turns]
        return turns, [sequence.place for sequence in trajectory.sequences]
    chains, calls = sources
    every = {id(call): call for call in itertools.chain(*chains, calls)}
    numbers = {key: number for number, key in enumerate(every)}
    chained = [[numbers[id(call)] for call in chain] for chain in chains]
    return [*map(_pack_call, every.values())], chained, [numbers[id(call)] for call in calls]


def _unpack_trajectory(plain: codec.Plain, columns: codec.Columns) -> Trajectory:
    records, ended, origin = plain
    trajectory = codec.unpack_trajectory(ended, columns)
    for name, value in codec.unpack_records(records).items():
        setattr(trajectory, name, value)
    if len(origin) == 2:
        turns, places = origin
        trajectory.turns = [Turn(role=TurnRole(role), **_TURN.unpack(own, columns)) for role, own in turns]
        for sequence, place in zip(trajectory.sequences, places, strict=True):
            sequence.place = place
    else:
        every, chained, calls = origin
        made = [_unpack_call(*own) for own in every]
        chains = [[made[number] for number in chain] for chain in chained]
        link_turns(trajectory, chains, [made[number] for number in calls])
    return trajectory


def _pack_call(call: ModelResponse) -> codec.Plain:
    prompt = call.prompt  # pickle writes a list once, also if many calls share it
    return prompt.ids, prompt.length, call.metadata.get("agent"), _CALL.pack(call, [])


def _unpack_call(ids: list[int], length: int, agent: Any, own: codec.Plain) -> ModelResponse:
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **_CALL.unpack(own, ()))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))
