"""How long a large run's dumps take to index, to open, to filter and to search, and how much memory that takes.

Writes a made-up run (groups of 8, one file each, lines of 192 tokens), then measures in processes of their own:
building the index, opening with the index present, the first page with its count for each of several filters and sort
keys, the first match and the whole of a text search, and a refresh. Figures are printed as JSON, times in seconds;
pairs are wall clock and CPU, which differ on a busy machine.

    python benchmarks/dump_index.py [--episodes 1000000] [--keep FOLDER] [--smoke]

Bars at a million episodes: open <= 1 s, any filter's first page <= 0.2 s with its count, flat memory.
"""

from __future__ import annotations
import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.tools.inspect.dumps import Dumps
from benchmarks.report import Figure, make_parser, write_figures

GROUP_SIZE = 8
GROUPS_PER_VERSION = 250
FILTERS = {
    "all": ("", "version"),
    "reward": ("reward<0.5", "version"),
    "several": ("reward<0.5 turns>3 tokens>1000 version>=4", "version"),
    "nothing": ("reward>2 or not tokens>0", "version"),
    "failed": ("status=failed error~Timeout", "version"),
    "error regex": (r'error~"Error: (row|line) \d*7\b"', "version"),
    "group": ("group=12", "version"),
    "stop": ("stop=length agent=main", "version"),
    "file": ("file~/9/", "version"),
    "by reward": ("turns>3", "-reward"),
    "by time": ("not status=accepted", "-finished"),
    "by tokens, all": ("", "tokens"),
}


def write_run(folder: Path, episodes: int) -> int:
    """Write a run's dumps and return their bytes."""
    draw = random.Random(0)
    words = [f"word{n}" for n in range(500)]
    ids = [draw.randrange(50_000) for _ in range(192)]
    logprobs = [-draw.random() for _ in range(64)]
    size = 0
    for task in range(-(-episodes // GROUP_SIZE)):
        version = task // GROUPS_PER_VERSION
        lines = []
        for member in range(GROUP_SIZE):
            is_failed = draw.random() < 0.1
            text = " ".join(draw.choices(words, k=60)) + (" needle" if draw.random() < 1e-5 else "")
            error = f"Traceback\\n  line {member}\\nTimeoutError: row {draw.randrange(200)}" if is_failed else None
            turns: list[dict[str, Any]] = [
                {"role": "prompt", "ids": ids[:128], "text": text[:300], "loss_mask": [0] * 128}
            ]
            for place in range(draw.randrange(1, 3)):
                turns += [{"role": "environment", "ids": [], "text": "go on", "loss_mask": []}] * place
                turns.append(
                    {
                        **{
                            "role": "assistant",
                            "turn_idx": place,
                            "ids": ids[128:],
                            "text": text,
                            "loss_mask": [1] * 64,
                        },
                        **{"logprobs": logprobs, "versions": [version] * 64, "agent": "main"},
                        "stop_reason": draw.choice(["stop", "length"]),
                    }
                )
            lines.append(
                {
                    **{"schema": 2, "task_id": task, "group_id": str(task), "sample_idx": member, "member_idx": member},
                    **{"status": "failed" if is_failed else "accepted", "error": error},
                    **{
                        "error_kind": "agent" if is_failed else None,
                        "error_type": "TimeoutError" if is_failed else None,
                    },
                    **{"seqlen": draw.randrange(100, 9000), "prompt_len": 128, "start_version": version},
                    **{
                        "head_version": version,
                        "tail_version": version,
                        "reward": None if is_failed else draw.random(),
                    },
                    **{"prompt": text[:300], "completion": text, "turns": turns, "counts": {}, "processes": []},
                    "timings": {
                        "queued_s": 0.1,
                        "run_s": draw.random() * 9,
                        "finished_at": 1.7e9 + task + draw.random(),
                    },
                }
            )
        path = folder / "rollout" / str(version) / f"{task}.jsonl"
        if task % GROUPS_PER_VERSION == 0:
            path.parent.mkdir(parents=True)
        content = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
        path.write_bytes(content)
        size += len(content)
    return size


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a call."""
    began, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - began, time.process_time() - cpu


def measure(folder: Path, part: str) -> dict[str, Any]:
    """Return the figures of one part, measured in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.perf_counter(), time.process_time()
    with Dumps.open(folder) as dumps:
        dumps.page()
        spent = time.perf_counter() - began, time.process_time() - cpu
        total = dumps.page(count_s=9).total
        figures: dict[str, Any] = {f"{part}_s": spent, "episodes": total}
        if part == "build":
            figures["index_mb"] = Path(dumps.summary()[0]["index"]).stat().st_size / 1e6
        else:
            figures |= {"page_s": {}, "page_cpu_s": {}}
            for name, (text, sort) in FILTERS.items():
                seconds = [timed(lambda text=text, sort=sort: dumps.page(text, sort=sort, count_s=9)) for _ in range(3)]
                figures["page_s"][name], figures["page_cpu_s"][name] = (
                    round(sorted(column)[1], 6) for column in zip(*seconds, strict=True)
                )
            uncounted = [name for name, (text, sort) in FILTERS.items() if dumps.page(text, sort=sort).total is None]
            figures["pages without count"] = uncounted
            figures["refresh_s"] = timed(dumps.refresh)
            figures["summary_s"] = timed(dumps.summary)
            figures["text_first_page_s"] = timed(lambda: list(dumps.rows("text~word7", limit=50)))
            figures["text_first_match_sorted_s"] = timed(lambda: next(dumps.rows("text~word7", sort="-reward")))
            figures["text_literal_all_s"] = timed(lambda: list(dumps.rows("text~needle")))
            if total is not None and total <= 200_000:
                figures["text_regex_all_s"] = timed(lambda: list(dumps.rows(r'text~"need.e$"')))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return figures | {"memory_mb": round((peak - before) / 1024)}


def _flat(figures: dict[str, Any]) -> list[Figure]:
    """Return the seconds of wall clock and the sizes."""
    build, opened = figures["build"], figures["open"]
    flat = [Figure("building the index", build["build_s"][0], "s"), Figure("index", build["index_mb"], "MB")]
    flat += [Figure(f"first page, {name}", seconds, "s") for name, seconds in opened["page_s"].items()]
    flat += [
        Figure(name.removesuffix("_s").replace("_", " "), seconds[0], "s")
        for name, seconds in opened.items()
        if name.endswith("_s") and name != "page_s" and name != "page_cpu_s"
    ]
    return flat


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the run there, or use the one that is there")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "PART"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), args.measure[1])))
        return
    folder = args.keep or Path(tempfile.mkdtemp())
    try:
        figures: dict[str, Any] = {}
        if not (folder / "rollout").exists():
            figures["dump_mb"] = write_run(folder, 2000 if args.smoke else args.episodes) / 1e6
        for part in ("build", "open"):
            command = [sys.executable, __file__, "--measure", str(folder), part]
            figures[part] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(json.dumps(figures, indent=1))
        write_figures(args.json, _flat(figures))
    finally:
        if args.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
