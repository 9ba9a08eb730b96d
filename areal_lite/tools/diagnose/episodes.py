"""What a diagnosis reads of a run: facts of its training episodes, and the curves of its metrics."""

import contextlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import StatisticsError, correlation
from typing import Any
import orjson
from areal_lite.api.failure import FailureKind
from areal_lite.tools.foreign_files import has_plain_files, read_inside, read_records
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.filters import parse
from areal_lite.tools.inspect.last_answer import model_folders
from areal_lite.tools.inspect.plot import curve

MAX_LINES = 20_000
"""Dumped lines that are read, some seconds' worth; of more, whole groups at random, the same each time."""
REPEATED, GARBLED, ALIKE, QUOTE = 0.5, 0.05, 0.9, 40
"""Where facts of an answer begin: repeated 4-grams (seq-rep-4 of arXiv:1908.04319), characters that
are no text, Jaccard index of the words of two answers, and characters of a quotation."""
MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_PAST_END = re.compile(r"(?:<\|(?:im_end|eot_id|end|endoftext|eos)\|>|<end_of_turn>)\s*[^\s<]")
Curves = dict[str, list[tuple[int, float]]]
"""Values by name, in the order of their steps or versions."""
Facts = dict[str, float]
"""Facts of an episode, without those that are unknown: shares, and 0 or 1, but for ``version``, ``group`` (number),
``reward``, ``tokens`` (trained) and ``length_correlation`` (of the group)."""
Record = Mapping[str, Any]
Spelling = tuple[Mapping[str, int], frozenset[int], frozenset[str]]
"""Ids by token, ids that the model's own tokenizer gives to another token, and markers of the chat template."""


def mean(values: Iterable[float]) -> float:
    """Return the mean; unlike the standard library's it is infinite, and no error, for numbers that no run has."""
    known = list(values)
    return sum(known) / len(known)


def read_run(dumps: Dumps, run: str, filter: str = "") -> tuple[list[Facts], Curves]:
    """Return the training episodes of ``run`` that match ``filter``, and its metrics."""
    chosen = f"not scope=eval-rollout status!=cancelled {filter and f'({filter})'}"
    part = 1 + (dumps.run(run).count(parse(chosen)) or 0) // MAX_LINES
    matching = dumps.run(run).select(parse(chosen))
    rows = (row for row in matching if zlib.crc32(repr(row["group"]).encode()) % part == 0)
    groups = groupby(dumps.records(rows), lambda record: (record["version"], record.get("group_id")))
    spelling, episodes = read_spelling(dumps.runs[run]), list[Facts]()
    for number, (_, records) in enumerate(groups):
        members: dict[Any, list[Record]] = {}
        for record in records:
            place = record.get("member_idx")
            members.setdefault(record["id"] if place is None else place, []).append(record)
        found = [episode_facts(lines, spelling) | {"group": number} for lines in members.values()]
        episodes += with_group_facts(found, [answer_of(lines[0]["turns"]) for lines in members.values()])
    metrics = list(read_records(path)) if (path := dumps.runs[run] / "metrics.jsonl").is_file() else []
    return episodes, {name: points for name in set().union(*metrics) if (points := curve(metrics, name))}


def read_spelling(root: Path) -> Spelling:
    """Return what the tokenizers of the run say, read as text; all empty if they are not files of this machine."""
    named, model = model_folders(root)
    named = named if named.is_dir() else root / "model"
    tokens = _vocabulary(named, root)
    own = _vocabulary(model, root) if named != model else {}
    template = _text(named / "chat_template.jinja", root)
    with contextlib.suppress(ValueError, AttributeError):
        template += str(orjson.loads(_text(named / "tokenizer_config.json", root)).get("chat_template"))
    foreign = frozenset(id for token, id in tokens.items() if own and own.get(token) != id)
    return tokens, foreign, frozenset(MARKER.findall(template))


def _vocabulary(folder: Path, root: Path) -> dict[str, int]:
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        saved = orjson.loads(_text(folder / "tokenizer.json", root))
        known = saved["model"]["vocab"]
        pairs = known.items() if isinstance(known, dict) else ((token, id) for id, (token, _) in enumerate(known))
        added = {token["content"]: int(token["id"]) for token in saved["added_tokens"]}
        return {str(token): int(id) for token, id in pairs} | added
    return {}


def _text(path: Path, root: Path) -> str:
    with contextlib.suppress(OSError):
        if has_plain_files(path.parent, root):
            return read_inside(path, Path("/")).decode(errors="replace")
    return ""


def calls_of(turns: Sequence[Record]) -> list[Record]:
    """Return the model calls of a line; if none was recorded, what its loss mask separates."""
    answers = [turn for turn in turns if turn.get("role") == "assistant"]
    return [turn for turn in answers if turn.get("started") is not None] or answers


def episode_facts(lines: Sequence[Record], spelling: Spelling) -> Facts:
    """Return what the lines of an episode say; facts of its text are those of the first, and need text."""
    first, turns, (tokens, foreign, markers) = lines[0], lines[0]["turns"], spelling
    calls, ids = calls_of(turns), [id for turn in turns for id in turn.get("ids") or ()]
    rewards = [r for line in lines if (r := line.get("episode_reward", line.get("reward"))) is not None]
    trained, sampled = (
        sum(sum(turn.get("loss_mask") or ()) for line in lines for turn in chosen(line["turns"]))
        for chosen in (list, calls_of)
    )
    facts: Facts = {"version": first["version"] or 0, "tokens": trained}
    facts["cut"] = any(turn.get("stop_reason") == "length" for turn in calls)
    facts |= {"reward": mean(rewards)} if rewards else {}
    facts |= {f"failed_{kind}": first.get("error_kind") == kind for kind in FailureKind}
    facts |= {"untrained": not trained} if first.get("status") == "accepted" else {}
    facts |= {"unsampled": 1 - sampled / trained} if trained else {}
    facts |= {"foreign": sum(id in foreign for id in ids) / len(ids)} if ids else {}
    if (answer := answer_of(turns)) is None:
        return facts
    last, prompt = calls[-1].get("ids") or [], "".join(turn.get("text") or "" for turn in turns[:1])
    grams, asked = list(zip(*(last[start:] for start in range(4)), strict=False)), set(MARKER.findall(prompt))
    unknown = bool(tokens) and not asked <= tokens.keys()
    return facts | {
        **{"empty": not answer, "quoted": len(answer) >= QUOTE and answer in prompt},
        "repeated": len(last) >= 20 and 1 - len(set(grams)) / len(grams) > REPEATED,
        "past_end": any(_PAST_END.search(turn["text"]) is not None for turn in calls),
        "garbled": answer.count("\ufffd") > GARBLED * max(1, len(answer)),
        "template": unknown or bool(markers and not asked & markers),
    }


def answer_of(turns: Sequence[Record]) -> str | None:
    """Return the text that the model wrote, without markers; None without a call or its text."""
    texts = [turn.get("text") for turn in calls_of(turns)]
    return None if not texts or None in texts else MARKER.sub("", "\n".join(filter(None, texts))).strip()


def with_group_facts(found: list[Facts], answers: Sequence[str | None]) -> list[Facts]:
    """Return the episodes of a group with what only the group says: equal rewards, length and reward, like answers."""
    rewarded = [facts for facts in found if "reward" in facts]
    rewards, lengths = ([facts[name] for facts in rewarded] for name in ("reward", "tokens"))
    if len(rewarded) > 1:
        shared: Facts = {"flat": len(set(rewards)) == 1}
        with contextlib.suppress(StatisticsError, OverflowError):  # constant rewards or lengths
            shared["length_correlation"] = correlation(rewards, lengths)
        for facts in rewarded:
            facts |= shared
    words = [frozenset((answer or "").lower().split()) for answer in answers]
    for place, (facts, own) in enumerate(zip(found, words, strict=True)):
        others = [other for other in words[:place] + words[place + 1 :] if other]
        if own and others:
            facts["duplicate"] = any(len(own & other) >= ALIKE * len(own | other) for other in others)
    return found
