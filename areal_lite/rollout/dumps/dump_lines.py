"""A group as JSON lines: one per sequence, one per conversation that is in none, and one per episode that left neither.
docs/trajectories.md has the fields."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
import numpy as np
import orjson
from areal_lite.api.image_span import plain_images
from areal_lite.api.trajectory import Group, ProcessRecord, TokenSequence, Trajectory, Turn, TurnRole
from areal_lite.files.safe_text import command_without_secrets, without_secrets

SCHEMA = 2  # version of the line format
CHAIN = ".chain-"  # prefix of the files beside dumps that note them; see dump_writer
_JSON = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
UNTRAINED = "untrained"
"""Status of a conversation that is in no sequence, as that of an opponent; one of an ended episode has its status."""
_RECORDED = ("logprobs", "versions")  # columns that a workflow may leave out


def dump_text(lines: Iterator[dict[str, Any]]) -> bytes:
    """Return the text of :func:`dump_lines`; a TypeError if a value has no JSON form."""
    return b"".join(orjson.dumps(line, option=_JSON) for line in lines)


def dump_lines(
    group: Group, tokenizer: Any = None, *, row: bytes | None = None, extra: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a group by ``member_idx``; ``tokenizer`` None leaves the texts that turns have, ``row`` is the
    dataset row as JSON, for the first line, ``extra`` that of each line."""
    timings = {"queued_s": round(group.queued_s, 6), "run_s": round(group.run_s, 6), "finished_at": group.finished_at}
    lines = ((t, i == 0, *each) for t in group.trajectories for i, each in enumerate(_paths(t)))
    for sample_idx, (trajectory, is_first, sequence, path) in enumerate(lines):
        turns = [trajectory.turns[place] for place in path]
        status: str = trajectory.status
        if sequence is None and trajectory.sequences:  # turns that it shares with a sequence train there
            turns = [replace(turn, loss_mask=np.zeros_like(turn.loss_mask)) for turn in turns]
            status = status if trajectory.failure else UNTRAINED
        seqlen = turns[-1].end if turns else 0
        prompt_len = trajectory.prompt_len(path)
        ids = [] if tokenizer is None else [token for turn in turns for token in turn.ids.tolist()]
        versions = None if sequence is None else sequence.trained_versions()
        failure = trajectory.failure
        error = group.rejection if failure is None else failure.text
        line: dict[str, Any] = {
            "schema": SCHEMA,
            "task_id": group.task_id,
            "group_id": group.group_id,
            "sample_idx": sample_idx,
            "member_idx": trajectory.member_idx,
            "status": status,
            "error": None if error is None else without_secrets(error),
            "error_kind": None if failure is None else failure.kind,
            "error_type": None if failure is None else failure.type or None,
            "seqlen": seqlen,
            "prompt_len": prompt_len,
            "start_version": group.start_version,
            "head_version": versions[0] if versions else None,
            "tail_version": versions[1] if versions else None,
            "reward": None if sequence is None else sequence.reward,
            "prompt": _decode(tokenizer, ids[:prompt_len]),
            "completion": _decode(tokenizer, ids[prompt_len:]),
            "turns": [_turn(turn, place, sequence, tokenizer) for turn, place in zip(turns, path, strict=True)],
            "counts": trajectory.counts,
            "reward_extra": trajectory.reward_extra,
            "processes": [_process(each) for each in trajectory.processes] if is_first else [],
            "timings": timings,
        }
        if sequence is not None and trajectory.reward != sequence.reward:
            line["episode_reward"] = trajectory.reward
        if sample_idx == 0:
            line["row"] = None if row is None else orjson.Fragment(row)
        if sequence is not None and (missing := [n for n in _RECORDED if getattr(sequence, n) is None]):
            line["missing"] = missing
        if extra is not None:
            line["extra"] = extra
        yield line


def _paths(trajectory: Trajectory) -> Iterator[tuple[TokenSequence | None, Sequence[int]]]:
    """Yield each sequence with its turns, then the turns of conversations that are in no sequence."""
    turns = trajectory.turns
    if not trajectory.sequences:  # the last thing that happened
        yield None, trajectory.path_to(len(turns) - 1) if turns else ()
        return
    for sequence in trajectory.sequences:
        yield sequence, sequence.path
    shown = {place for sequence in trajectory.sequences for place in sequence.path}
    parents = {turn.parent for turn in turns}
    for place in range(len(turns)):
        if place not in shown and place not in parents:
            yield None, trajectory.path_to(place)


def _turn(turn: Turn, place: int, sequence: TokenSequence | None, tokenizer: Any) -> dict[str, Any]:
    loss_mask, logprobs, versions = turn.loss_mask, turn.logprobs, turn.versions
    if sequence is not None:  # a turn that several sequences share trains in one of them, with that one's columns
        here = slice(turn.start, turn.end)
        loss_mask = sequence.loss_mask[here]
        if 1 in loss_mask.tobytes():
            logprobs = logprobs if sequence.logprobs is None else sequence.logprobs[here]
            versions = versions if sequence.versions is None else sequence.versions[here]
    line = {
        "role": turn.role,
        "turn_idx": place,
        "parent_idx": turn.parent,
        "start": turn.start,
        "ids": np.ascontiguousarray(turn.ids),
        "text": turn.text if tokenizer is None else _decode(tokenizer, turn.ids.tolist()),
        "loss_mask": _mask(loss_mask.tobytes()),
    }
    if turn.images:
        line["images"] = plain_images(turn.images)
    if turn.role is TurnRole.ASSISTANT:
        count = len(turn.ids)
        line["logprobs"] = [0.0] * count if logprobs is None else logprobs.astype(np.float64)
        line["versions"] = [-1] * count if versions is None else np.ascontiguousarray(versions)
        line["stop_reason"], line["started"], line["latency_s"] = turn.stop_reason, turn.started, turn.latency_s
        line["agent"] = turn.agent
        line["server"] = turn.server if turn.server is None or "@" not in turn.server else without_secrets(turn.server)
    if sequence is not None and sequence.token_rewards is not None:
        line["rewards"] = sequence.token_rewards[turn.start : turn.end].astype(np.float64)
    return line


def _process(process: ProcessRecord) -> dict[str, Any]:
    texts = {name: without_secrets(getattr(process, name)) for name in ("stdout", "stderr")}
    return asdict(process) | {"command": command_without_secrets(process.command), **texts}


def _mask(mask: bytes) -> Any:
    """Return a loss mask for orjson, ready-made if all entries are equal, as in most turns."""
    if 0 in mask and 1 in mask:
        return np.frombuffer(mask, np.int8)
    return orjson.Fragment(b"[%b]" % (b"%d," % (1 in mask) * len(mask))[:-1])


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
