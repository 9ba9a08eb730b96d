"""``areal-lite export``: dumped episodes as training rows (SFT, DPO, OpenAI's fine-tuning) or as a Parquet table.

Guarantees that the file is whole or absent, that the chat template renders the exported messages to the text of the
episode, and that what is left out is counted by reason.
"""

import argparse
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal
import orjson
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import storing
from areal_lite.tools.export.conversation_text import ConversationReader, Message
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_text import print_note
from areal_lite.tools.inspect.filters import parse, terms
from areal_lite.tools.inspect.last_answer import last_answer, run_tokenizer
from areal_lite.tools.inspect.terminal import add_selection

Form = Literal["sft", "dpo", "openai", "parquet"]
_NEXT = {
    "sft": "train on them: areal-lite sft CONFIG.yaml train_dataset.path={file}",
    "dpo": "train on them: areal-lite dpo CONFIG.yaml train_dataset.path={file}",
    "openai": "the file is in the format of OpenAI's fine-tuning of chat models",
    "parquet": "read them: pyarrow.parquet.read_table('{file}')",
}
_FORMS: dict[Form, str] = {
    "sft": "rows of areal-lite sft: messages",
    "dpo": "rows of areal-lite dpo: the best against the worst answer of each group",
    "openai": "rows of OpenAI's fine-tuning of chat models",
    "parquet": "a table with a row per dumped line, tokens included",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    forms = parser.add_mutually_exclusive_group(required=True)
    for form, meaning in _FORMS.items():
        forms.add_argument(f"--{form}", type=Path, metavar="FILE", help=meaning)
    add = parser.add_argument
    add("--choose", choices=("best", "accepted"), default="best", help="of each group the best (default), or all")
    add("--keep-cut-off", action="store_true", help="also answers that ended at a limit of tokens")
    add("--tokenizer", metavar="PATH", help="tokenizer with the chat template (default: the run's)")


def run(options: argparse.Namespace) -> int:
    """Write the episodes of ``options.path`` to a file."""
    form, file = next((form, file) for form in _FORMS if (file := getattr(options, form)) is not None)
    filter = " ".join(options.filter)
    unfinished = file.with_name(f".unfinished-{os.getpid()}-{file.name}")
    with Dumps.open(options.path) as dumps:
        rows = _TrainingRows(dumps, form, filter, options)
        try:
            with storing(file, "name a file in a writable folder"):
                if form == "parquet":
                    count = _write_parquet(unfinished, dumps.records(dumps.rows(filter)))
                else:
                    count = _write_lines(unfinished, rows.dpo() if form == "dpo" else rows.sft())
                if not count:
                    reasons = ", ".join(f"{number} {reason}" for reason, number in rows.left_out.items())
                    raise ConfigError(f"nothing to export: {reasons or 'no accepted episode of the run matches'}")
                unfinished.replace(file)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        notes = dumps.notes()
    if rows.as_text:
        notes.append("rows have prompt and response as text: train with train_dataset.apply_chat_template=false")
    for note in (*notes, *(f"left out: {number} {reason}" for reason, number in rows.left_out.items())):
        print_note(note)
    print(f"{count} rows written to {file}; {_NEXT[form].format(file=file)}")
    return 0


class _TrainingRows:
    """Rows to train on, and the counts of skipped lines."""

    def __init__(self, dumps: Dumps, form: Form, filter: str, options: argparse.Namespace) -> None:
        self.dumps, self.form, self.filter, self.options = dumps, form, filter, options
        self.left_out: Counter[str] = Counter()
        self.readers: dict[str, tuple[Any, ConversationReader | None]] = {}
        self.as_text = False
        """True if rows have texts instead of messages, because the run has no chat template here."""

    def reader(self, run: str) -> tuple[Any, ConversationReader | None]:
        if run not in self.readers:
            tokenizer = run_tokenizer(self.dumps.runs[run], self.options.tokenizer)
            templated = tokenizer is not None and getattr(tokenizer, "chat_template", None)
            self.readers[run] = tokenizer, ConversationReader(tokenizer) if templated else None
        return self.readers[run]

    def messages(self, record: Mapping[str, Any]) -> list[Message] | None:
        """Return the messages of a line up to its last answer; None, counted, if it cannot be a training row."""
        tokenizer, reader = self.reader(record["run"])
        if (answer := last_answer(record, tokenizer)) is None:
            self.left_out["without an answer"] += 1
        elif answer.cut_off and not self.options.keep_cut_off:
            self.left_out["cut off, so training would add an end that the model never wrote (--keep-cut-off)"] += 1
        elif reader is not None:
            text = tokenizer.decode(answer.prompt_ids + answer.completion_ids)
            if (messages := reader.messages(text)) is not None and messages[-1]["role"] == "assistant":
                return messages
            self.left_out["that the chat template does not render to the same text from messages"] += 1
        elif self.form != "sft":
            raise ConfigError(
                f"{record['run']}: without the tokenizer of the run and its chat template there are no messages: name "
                "its folder with --tokenizer"
            )
        else:
            self.as_text = True
            return [{"role": "user", "content": answer.prompt}, {"role": "assistant", "content": answer.completion}]
        return None

    def groups(self) -> Iterator[list[Mapping[str, Any]]]:
        """Yield the lines of each group that may train, in the order of the dumps: of accepted training episodes,
        where the filter does not choose status and scope itself."""
        names = {term.key.name for term in terms(parse(self.filter))}
        defaults = {"status": "status=accepted", "scope": "scope!=eval-rollout"}
        chosen = [f"({self.filter})"] if self.filter.strip() else []
        chosen += [term for name, term in defaults.items() if name not in names]
        group = itemgetter("run", "scope", "version", "group", "task")
        for _, rows in itertools.groupby(self.dumps.rows(" ".join(chosen)), group):
            rewarded = (record for record in self.dumps.records(rows) if record.get("reward") is not None)
            yield [record | {"reward": record.get("episode_reward", record["reward"])} for record in rewarded]

    def sft(self) -> Iterator[Mapping[str, Any]]:
        for group in self.groups():
            ranked = sorted(
                group, key=lambda each: (-each["reward"], each.get("member_idx") or 0, -(each.get("seqlen") or 0))
            )  # of an episode's lines, the longest first
            usable = ((record, messages) for record in ranked if (messages := self.messages(record)) is not None)
            for record, messages in itertools.islice(usable, 1 if self.options.choose == "best" else None):
                row: dict[str, Any] = {"messages": messages}
                if self.as_text:
                    row = {"prompt": messages[0]["content"], "response": messages[1]["content"]}
                if self.form == "sft":
                    row |= {name: record[name] for name in ("id", "reward", "run")}
                yield row

    def dpo(self) -> Iterator[Mapping[str, Any]]:
        for group in self.groups():
            usable = [(record, messages) for record in group if (messages := self.messages(record)) is not None]
            if len({record["reward"] for record, _ in usable}) < 2:
                self.left_out["groups without two rewards"] += 1
                continue
            best, chosen = max(usable, key=lambda each: each[0]["reward"])
            worst, rejected = min(usable, key=lambda each: each[0]["reward"])
            if chosen[:-1] != rejected[:-1]:
                self.left_out["groups whose best and worst episode differ before the last answer"] += 1
            elif chosen == rejected:
                self.left_out["groups whose best and worst answers are equal"] += 1
            else:
                rewards = {"chosen_reward": best["reward"], "rejected_reward": worst["reward"]}
                answers = {"chosen": chosen[-1:], "rejected": rejected[-1:]}
                yield {"prompt": chosen[:-1], **answers, **rewards, "id": best["id"], "run": best["run"]}


def _write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    with file.open("wb") as stream:
        for count, row in enumerate(rows, 1):  # noqa: B007 -- the last number is the count
            stream.write(orjson.dumps(row) + b"\n")
    return count


# -- tables

EPISODE = {
    **dict.fromkeys(("run", "id", "scope", "task_id", "group_id", "status", "error", "error_kind"), "string"),
    **dict.fromkeys(("error_type", "prompt", "completion"), "string"),
    **dict.fromkeys(("version", "sample_idx", "member_idx", "seqlen", "prompt_len", "start_version"), "int64"),
    **dict.fromkeys(("head_version", "tail_version"), "int64"),
    **dict.fromkeys(("reward", "episode_reward", "finished_at"), "float64"),
}
"""Columns of a table of dumped lines, without its tokens, and their Arrow types."""


def arrow_tables(rows: Iterable[Mapping[str, Any]], schema: Any) -> Iterator[Any]:
    """Yield Arrow tables of some of the rows each, with the columns of ``schema``."""
    import pyarrow  # type: ignore[import-untyped]

    rows = iter(rows)
    while chunk := list(itertools.islice(rows, 1000)):
        yield pyarrow.Table.from_pylist(chunk, schema)


def episode_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of :data:`EPISODE` of a dumped line."""
    own = {"finished_at": (record.get("timings") or {}).get("finished_at"), "task_id": str(record["task_id"])}
    return {"episode_reward": record.get("reward")} | {name: record[name] for name in EPISODE if name in record} | own


def _write_parquet(file: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a row per dumped line: its fields, and one column per token column of its turns."""
    import pyarrow
    from pyarrow import parquet

    lists = dict.fromkeys(("input_ids", "loss_mask", "versions"), pyarrow.list_(pyarrow.int32()))
    schema = pyarrow.schema([*EPISODE.items(), *lists.items(), ("logprobs", pyarrow.list_(pyarrow.float64()))])
    count = 0
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in arrow_tables(map(_with_tokens, records), schema):
            writer.write_table(table)
            count += table.num_rows
    return count


def _with_tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    turns = record["turns"]
    return episode_row(record) | {
        "input_ids": [id for turn in turns for id in turn["ids"]],
        "loss_mask": [mask for turn in turns for mask in turn["loss_mask"]],
        "versions": [each for turn in turns for each in turn.get("versions") or [-1] * len(turn["ids"])],
        "logprobs": [each for turn in turns for each in turn.get("logprobs") or [0.0] * len(turn["ids"])],
    }
