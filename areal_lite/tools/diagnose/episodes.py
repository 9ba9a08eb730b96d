"""What a diagnosis reads of a run: facts of its training episodes, and the curves of its metrics."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_lite.tools.foreign_files import read_records
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.last_answer import model_folders, plain_tokenizer
from areal_lite.tools.inspect.plot import curve

MAX_LINES = 20_000
"""Dumped lines that are read, some seconds' worth; of more, whole groups at random, the same each time."""
REPEATED, GARBLED, ALIKE, QUOTE = 0.5, 0.05, 0.9, 40
"""Where facts of an answer begin: repeated 4-grams (seq-rep-4 of arXiv:1908.04319; 0.01 in human text), characters that
are no text, Jaccard index of the words of two answers, and characters of a quotation."""
MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_PAST_END = re.compile(r"(?:<\|(?:im_end|eot_id|end|endoftext|eos)\|>|<end_of_turn>)\s*[^\s<]")
Curves = dict[str, list[tuple[int, float]]]
"""Values by name, in the order of their steps or versions."""
Facts = dict[str, float]
"""Facts of an episode, without those that are unknown: shares, and 0 or 1, but for ``version``, ``group`` (number),
``reward``, ``tokens`` (trained) and products of deviations from the means of the group."""
Record = Mapping[str, Any]
Spelling = tuple[Mapping[int, str], Mapping[int, str], frozenset[str]]
"""Tokens by id of the run's tokenizer, those of the model's own if that is another, and markers such as ``<|im_start|>``
in the chat template; each empty where unknown."""


def read_run(dumps: Dumps, run: str, filter: str = "") -> tuple[list[Facts], Curves]:
    """Return the training episodes of ``run`` that match ``filter``, and its metrics."""
    chosen = f"not scope=eval-rollout status!=cancelled {filter and f'({filter})'}"
    part = 1 + (dumps.count(chosen) or 0) // MAX_LINES
    rows = (
        row for row in dumps.rows(chosen) if row["run"] == run and zlib.crc32(repr(row["group"]).encode()) % part == 0
    )
    groups = groupby(dumps.records(rows), lambda record: (record["version"], record.get("group_id")))
    spelling, episodes = read_spelling(dumps.runs[run]), list[Facts]()
    for number, (_, records) in enumerate(groups):
        members: dict[Any, list[Record]] = {}
        for record in records:
            members.setdefault(record.get("member_idx", record["id"]), []).append(record)
        found = [episode_facts(lines, spelling) | {"group": number} for lines in members.values()]
        episodes += with_group_facts(found, [answer_of(lines[0]["turns"]) for lines in members.values()])
    metrics = list(read_records(path)) if (path := dumps.runs[run] / "metrics.jsonl").is_file() else []
    return episodes, {name: points for name in set().union(*metrics) if (points := curve(metrics, name))}


def read_spelling(root: Path) -> Spelling:
    named, model = model_folders(root)
    tokenizer = plain_tokenizer(named, root)
    own = plain_tokenizer(model, root) if tokenizer is not None and named != model else None
    known = [{} if each is None else {id: token for token, id in each.get_vocab().items()} for each in (tokenizer, own)]
    return known[0], known[1], frozenset(MARKER.findall(str(getattr(tokenizer, "chat_template", ""))))


def episode_facts(lines: Sequence[Record], spelling: Spelling) -> Facts:
    """Return what the lines of an episode say; facts of its text are those of the first, and need text."""
    first, turns, (tokens, own, markers) = lines[0], lines[0]["turns"], spelling
    calls = [turn for turn in turns if turn.get("role") == "assistant"]
    masks = [(turn.get("role"), sum(turn.get("loss_mask") or ())) for line in lines for turn in line["turns"]]
    rewards, trained = [line["reward"] for line in lines if line.get("reward") is not None], sum(n for _, n in masks)
    ids = [id for turn in turns for id in turn.get("ids") or ()]
    facts: Facts = {"version": first["version"] or 0, "tokens": trained, "failed": first.get("status") == "failed"}
    facts["cut"] = any(turn.get("stop_reason") == "length" for turn in calls)
    facts |= {"reward": fmean(rewards)} if rewards else {}
    facts |= {f"failed_{first['error_kind']}": 1.0} if first.get("error_kind") else {}
    facts |= {"untrained": not trained} if first.get("status") == "accepted" else {}
    facts |= {"unsampled": sum(n for role, n in masks if role != "assistant") / trained} if trained else {}
    if ids and own:
        facts["foreign"] = sum(tokens.get(id) != own.get(id) for id in ids) / len(ids)
    answer = answer_of(turns)
    if answer is None:
        return facts
    last, prompt = calls[-1].get("ids") or [], "".join(turn.get("text") or "" for turn in turns if turn not in calls)
    grams, asked = list(zip(*(last[start:] for start in range(4)), strict=False)), set(MARKER.findall(prompt))
    unknown = bool(tokens) and not asked <= set(tokens.values())
    return facts | {
        **{"empty": not answer, "quoted": len(answer) >= QUOTE and answer in prompt},
        "repeated": len(last) >= 20 and 1 - len(set(grams)) / len(grams) > REPEATED,
        "past_end": any(_PAST_END.search(turn["text"]) is not None for turn in calls),
        "garbled": answer.count("\ufffd") > GARBLED * max(1, len(answer)),
        "template": unknown or bool(markers and not asked & markers),
    }


def answer_of(turns: Sequence[Record]) -> str | None:
    """Return the text that the model wrote, without markers; None without a call or its text."""
    texts = [turn.get("text") for turn in turns if turn.get("role") == "assistant"]
    return None if not texts or None in texts else MARKER.sub("", "\n".join(filter(None, texts))).strip()


def with_group_facts(found: list[Facts], answers: Sequence[str | None]) -> list[Facts]:
    """Return the episodes of a group with what only the group says: equal rewards, length and reward, like answers."""
    rewarded = [facts for facts in found if "reward" in facts]
    if len(rewarded) > 1:
        means = {name: fmean(facts[name] for facts in rewarded) for name in ("reward", "tokens")}
        flat = len({facts["reward"] for facts in rewarded}) == 1
        for facts in rewarded:
            reward, length = (facts[name] - mean for name, mean in means.items())
            facts |= {"covariance": reward * length, "reward_variance": reward**2, "token_variance": length**2}
            facts["flat"] = flat
    words = [frozenset((answer or "").lower().split()) for answer in answers]
    for place, (facts, own) in enumerate(zip(found, words, strict=True)):
        others = [other for other in words[:place] + words[place + 1 :] if other]
        if own and others:
            facts["duplicate"] = any(len(own & other) >= ALIKE * len(own | other) for other in others)
    return found
