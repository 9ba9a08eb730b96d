"""Episodes as text in the terminal: what the model read and wrote (in colour), with printable characters only."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
import orjson
from rich.console import Console
from rich.text import Text
from areal_lite.files.safe_text import json_printable, printable
from areal_lite.tools.inspect.dumped_images import marked_text

STATUS_STYLE = {"accepted": "green", "rejected": "yellow", "failed": "red", "cancelled": "dim", "untrained": "dim"}
_UNBROKEN = 10_000
_ROLE_STYLE = {"assistant": "cyan", "prompt": "dim"}


def stdout_console(**settings: Any) -> Console:
    """Return a console on standard output; it breaks lines on a terminal, never in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, **settings)


def print_note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr)


def json_line(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of JSON, its unprintable characters escaped."""
    return json_printable(orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS).decode())


def episode_text(record: Mapping[str, Any], root: Path) -> Iterator[Text]:
    """Yield the lines of one record of :class:`~.dumps.Dumps`, of the run in the folder ``root``."""
    status = str(record.get("status"))
    versions = f"{record.get('head_version')}..{record.get('tail_version')}"
    of_episode = f" of {record['episode_reward']}" if "episode_reward" in record else ""
    yield Text.assemble(
        ("── ", "dim"),
        printable(f"task {record.get('task_id')} episode {record.get('sample_idx')}  "),
        (printable(status), STATUS_STYLE.get(status, "")),
        printable(f"  reward {record.get('reward')}{of_episode}  {record.get('seqlen')} tokens  versions {versions}"),
    )
    if isinstance(parent := (record.get("extra") or {}).get("continues"), dict):
        yield Text(printable("continues " + ", ".join(f"{name} {value}" for name, value in parent.items())), "dim")
    if record.get("error_kind"):
        yield Text(printable(f"{record['error_kind']}: {record.get('error_type') or 'stopped'}"), "red")
    if record.get("error"):
        yield Text(printable(str(record["error"])), "red")
    if facts := record.get("reward_extra"):
        yield Text(printable(", ".join(f"{name} {value}" for name, value in facts.items())), "dim")
    for turn in record["turns"]:
        role = str(turn.get("role"))
        mask = turn.get("loss_mask") or []
        facts = [f"{len(turn.get('ids') or mask)} tokens", f"{sum(mask)} trained", turn.get("stop_reason")]
        if turn.get("latency_s") is not None:
            facts.append(f"{turn['latency_s']:.2f} s")
        name = f"{role} {turn['agent']}" if turn.get("agent") else role
        yield Text(printable(f"{name} ({', '.join(str(fact) for fact in facts if fact)})"), "bold")
        has_text = turn.get("text") is not None
        text = printable(marked_text(turn, root)) if has_text else "no text: the run had no tokenizer"
        yield Text(text, _ROLE_STYLE.get(role, ""))
    for process in record.get("processes") or ():
        yield from _process_lines(process)
    yield Text()


def _process_lines(process: Mapping[str, Any]) -> Iterator[Text]:
    command = " ".join(map(str, process.get("command") or ()))
    how = "killed" if process.get("timed_out") else f"exit status {process.get('returncode')}"
    yield Text(printable(f"process ({how}, {process.get('seconds') or 0:.2f} s): {command}"), "bold")
    for name in ("stdout", "stderr"):
        if process.get(name):
            yield Text(printable(f"{name}:\n{process[name]}"), "dim")
