"""Checks of single groups: masks, log-probs, versions, shared turns, members."""

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
import numpy as np
from areal_lite.api.image_span import ImageSpan, check_images, images_of
from areal_lite.rollout.dumps.dump_lines import UNTRAINED
from areal_lite.tools.foreign_files import read_inside
from areal_lite.tools.verify.verify_run import EVALUATION, TRAINING, DumpedGroup, Record, Run, differs, some


def columns_fit(record: Record) -> Iterator[str]:
    """Every column has an entry per token, and turns follow each other."""
    at, first_answer = 0, None
    for index, turn in enumerate(record["turns"]):
        length = len(turn["ids"])
        names = ("loss_mask", "logprobs", "versions") if turn["role"] == "assistant" else ("loss_mask",)
        for name in (*names, *(["rewards"] if "rewards" in turn else [])):
            if len(turn.get(name) or ()) != length:
                yield f"turn {index} has {length} ids and {len(turn.get(name) or ())} {name}"
        if turn["start"] != at:
            yield f"turn {index} starts at {turn['start']}, but {at} tokens come before it"
        if turn["role"] == "assistant" and first_answer is None:
            first_answer = at
        at += length
    if record["seqlen"] != at:
        yield f"seqlen is {record['seqlen']}, but its turns have {at} tokens"
    by_token = [number for turn in record["turns"] for number in turn.get("rewards") or ()]
    if by_token and differs(record.get("reward"), math.fsum(by_token)):
        yield f"the reward is {record['reward']}, and its tokens' rewards sum to {math.fsum(by_token)}"
    if record["prompt_len"] != (at if first_answer is None else first_answer):
        yield f"prompt_len is {record['prompt_len']}, but the first answer begins at {first_answer}"


def only_sampled_tokens_train(record: Record) -> Iterator[str]:
    """The mask is 1 only in answers, and a partly trained answer is masked where its tokens are too old."""
    for index, turn in enumerate(record["turns"]):
        mask, trained = turn["loss_mask"], sum(turn["loss_mask"])
        if trained and turn["role"] != "assistant":
            yield f"turn {index} ({turn['role']}) trains {trained} tokens that the model did not sample"
        elif 0 < trained < len(mask):
            versions = turn.get("versions") or [-1] * len(mask)
            kept = [version for version, on in zip(versions, mask, strict=False) if on]
            masked = [version for version, on in zip(versions, mask, strict=False) if not on]
            if max(masked, default=-1) >= min(kept, default=-1):
                yield f"turn {index} trains {trained} of {len(mask)} sampled tokens, and the others are not older"
    if record["turns"] and (record["turns"][0]["loss_mask"] or [0])[0]:
        yield "the first token trains, which nothing predicts"


def logprobs_are_numbers(record: Record) -> Iterator[str]:
    """Recorded log-probs of trained tokens are finite and at most 0."""
    for index, turn in enumerate(record["turns"]):
        pairs = zip(turn.get("logprobs") or (), turn["loss_mask"], strict=False)
        recorded = (logprob for logprob, on in pairs if on and logprob is not None)
        if wrong := [logprob for logprob in recorded if not -math.inf < logprob <= 1e-3]:
            yield f"turn {index} trains tokens with the log-probs {some(wrong)}"


def versions_fit(record: Record) -> Iterator[str]:
    """``head_version`` and ``tail_version`` are those of the trained tokens."""
    pairs = (zip(turn.get("versions") or (), turn["loss_mask"], strict=False) for turn in record["turns"])
    known = [version for version, on in itertools.chain.from_iterable(pairs) if on and version >= 0]
    found = (min(known), max(known)) if known else (None, None)
    labelled = (record["head_version"], record["tail_version"])
    if labelled != found:
        yield f"head and tail version are {labelled}, but its trained tokens have {found}"


def outcome_is_consistent(record: Record) -> Iterator[str]:
    """An accepted line has a finite reward and no error; a broken one has a kind of failure."""
    status, reward = record["status"], record.get("reward")
    if status == "accepted":
        if reward is None or not math.isfinite(reward):
            yield f"it is accepted, and its reward is {reward}"
        if record.get("error") is not None or record.get("error_kind") is not None:
            yield "it is accepted, and has an error"
    elif status not in ("rejected", "failed", "cancelled", UNTRAINED):
        yield f"its status is {status!r}"
    elif (status in ("rejected", UNTRAINED)) != (record.get("error_kind") is None):
        yield f"it is {status}, and its kind of failure is {record.get('error_kind')}"
    trains = reward is not None or any(sum(turn["loss_mask"]) for turn in record["turns"])
    if status in ("failed", UNTRAINED) and trains:
        yield f"it is {status}, and has a reward or trains tokens"


LINE_CHECKS: dict[str, Callable[[Record], Iterator[str]]] = {
    "columns": columns_fit,
    "mask": only_sampled_tokens_train,
    "log-probs": logprobs_are_numbers,
    "versions": versions_fit,
    "outcome": outcome_is_consistent,
}


def members_are_whole(group: DumpedGroup, run: Run) -> Iterator[str]:
    """The lines of a group are numbered without gaps, agree on the group, and have all its episodes."""
    samples = [record["sample_idx"] for record in group.records]
    if samples != list(range(len(samples))):
        yield f"its lines have the sample_idx {some(samples)}"
    for name in ("group_id", "start_version", "timings"):
        if any(record.get(name) != group.records[0].get(name) for record in group.records):
            yield f"its lines differ in {name}"
    members = sorted({record["member_idx"] for record in group.records})
    sizes = set()
    is_branch = "continues" in (group.records[0].get("extra") or {})  # of `areal-lite continue`, which has its own size
    if run.rl is not None and group.scope in (TRAINING, EVALUATION) and not is_branch:
        sizes = {run.rl.rollout.group_size} if group.scope == TRAINING else {run.rl.evaluation.group_size, 1}
    if members != list(range(len(members))) or (sizes and len(members) not in sizes):
        yield f"it has the episodes {some(members)}, and a group has {' or '.join(map(str, sizes or {len(members)}))}"


def shared_turns_agree(group: DumpedGroup, run: Run) -> Iterator[str]:
    """Lines of an episode have the same tokens in a shared turn, and one of them trains it at most."""
    shared = ("role", "parent_idx", "start", "ids", "logprobs", "versions")
    episodes: dict[Any, list[Record]] = {}
    for record in group.records:
        episodes.setdefault(record["member_idx"], []).append(record)
    for member, records in episodes.items():
        turns: dict[int, Any] = {}
        trained: dict[int, Sequence[int]] = {}
        for record in records:
            parent = None
            for place, turn in enumerate(record["turns"]):
                index, mask = turn["turn_idx"], turn["loss_mask"]
                if turn["parent_idx"] != parent:
                    where = f"line {record['sample_idx']}: turn {place}"
                    yield f"{where} follows turn_idx {turn['parent_idx']}, not {parent}"
                parent = index
                same = {name: turn.get(name) for name in shared}
                if turns.setdefault(index, same) != same:
                    yield f"lines of episode {member} differ in turn {index}"
                before = trained.get(index, [0] * len(mask))
                if any(one and other for one, other in zip(before, mask, strict=False)):
                    yield f"lines of episode {member} train turn {index} twice"
                trained[index] = [one or other for one, other in zip(before, mask, strict=False)]


def folder_fits(group: DumpedGroup, run: Run) -> Iterator[str]:
    """The folder is named by the newest trained version, and no version is newer than the run's last."""
    tails = [record["tail_version"] for record in group.records if record["tail_version"] is not None]
    expected = max(tails, default=group.start)
    if group.scope in (TRAINING, EVALUATION) and group.version != expected:
        yield f"it is in the folder of version {group.version}, and its newest trained token has version {expected}"
    last = max((record["step"] for record in run.metrics), default=None)
    if last is not None and run.complete and expected > last:
        yield f"its tokens have version {expected}, and the run made {last} steps"


def reward_is_the_sum_of_its_parts(group: DumpedGroup, run: Run) -> Iterator[str]:
    """With ``rollout.rewards.weights``, a reward is the weighted sum of its named parts."""
    weights = None if run.rl is None else run.rl.rollout.rewards.weights
    for record in group.records if weights else ():
        parts = {name: (record.get("counts") or {}).get(f"reward/{name}") for name in weights or ()}
        lines = sum(other["member_idx"] == record["member_idx"] for other in group.records)
        if record["status"] != "accepted" or None in parts.values() or lines > 1 or run.rl.reward_model:  # type: ignore[union-attr]
            continue
        total = math.fsum(weights[name] * part for name, part in parts.items() if part is not None)  # type: ignore[index]
        if not math.isclose(total, record["reward"], rel_tol=1e-6, abs_tol=1e-6):
            yield f"the reward is {record['reward']}, and its parts sum to {total}"


def texts_are_of_their_ids(group: DumpedGroup, run: Run) -> Iterator[str]:
    """Texts are what the run's tokenizer makes of the ids."""

    @lru_cache  # members share a prompt
    def text_of(ids: tuple[int, ...]) -> str:
        return str(run.tokenizer.decode(list(ids)))

    for record in group.records if run.tokenizer is not None else ():
        ids, length = [id for turn in record["turns"] for id in turn["ids"]], record["prompt_len"]
        parts = [("prompt", record["prompt"], ids[:length]), ("completion", record["completion"], ids[length:])]
        parts += [(f"turn {index}", turn["text"], turn["ids"]) for index, turn in enumerate(record["turns"])]
        wrong = [name for name, text, part in parts if text is not None and text != text_of(tuple(part))]
        if wrong and record["prompt"] is not None:  # else the writer had no tokenizer
            yield f"line {record['sample_idx']}: the text of {some(wrong)} is not that of its ids"


def images_are_their_files(group: DumpedGroup, run: Run) -> Iterator[str]:
    """Images are inside their turns and do not train; each has a file of its digest, with the shape of its grid."""

    @lru_cache  # members share a prompt, and turns an image
    def fault_of(span: ImageSpan) -> str:
        png = read_inside(run.root / "images" / f"{span.sha256}.png", run.root)
        if (found := hashlib.sha256(png).hexdigest()) != span.sha256:
            return f"has changed: its sha256 is {found}"
        (width, height), (_, rows, columns) = struct.unpack(">II", png[16:24]), span.grid
        if width * rows != height * columns or math.prod(span.grid) % span.length:
            return f"has {width} x {height} pixels, and the grid {list(span.grid)} with {span.length} tokens"
        return ""

    for record in group.records:
        for index, turn in enumerate(record["turns"]):
            images = images_of(turn.get("images", []))
            check_images(images, len(turn["ids"]), np.array(turn["loss_mask"]))
            for span in images:
                if fault := fault_of(span._replace(offset=0)):
                    yield f"line {record['sample_idx']}: image {span.sha256}.png of turn {index} {fault}"
                if len(set(turn["ids"][span.offset : span.end])) > 1:
                    yield f"line {record['sample_idx']}: the tokens of an image in turn {index} differ"


GROUP_CHECKS: dict[str, Callable[[DumpedGroup, Run], Iterator[str]]] = {
    "members": members_are_whole,
    "shared turns": shared_turns_agree,
    "folder": folder_fits,
    "reward parts": reward_is_the_sum_of_its_parts,
    "texts": texts_are_of_their_ids,
    "images": images_are_their_files,
}
