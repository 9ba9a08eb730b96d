"""Read trajectory dumps, which are JSON lines, with only the standard library.

    python examples/05_read_the_dump.py [FOLDER]     # of a run, its dumps, or runs; default: runs/demo of `make demo`

docs/trajectories.md describes every field; schemas 1 and 2 read alike.
"""

from __future__ import annotations
import json
import sys
from collections import Counter
from pathlib import Path


def main(folder: str = "runs/demo") -> None:
    dumps = (path for path in Path(folder).resolve().rglob("*.jsonl") if path.match("*rollout/*/*.jsonl"))
    paths = sorted(dumps, key=lambda path: path.stat().st_mtime)
    if not paths:
        raise SystemExit(f"no dumps below {folder}: run `make demo`, or set rollout.dump_to_file: true")
    lines = [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]
    print(f"{len(paths)} groups, {len(lines)} lines: {dict(Counter(line['status'] for line in lines))}")

    rewards_by_version: dict[int, list[float]] = {}
    for line in lines:
        if line["reward"] is not None and line["tail_version"] is not None:
            rewards_by_version.setdefault(line["tail_version"], []).append(line["reward"])
    for version, rewards in sorted(rewards_by_version.items()):
        print(f"version {version}: mean reward {sum(rewards) / len(rewards):.3f} over {len(rewards)}")

    last = lines[-1]
    print(f"\ntask {last['task_id']} episode {last['member_idx']}: {last['status']}, reward {last['reward']}")
    for turn in last["turns"]:
        trained = sum(turn["loss_mask"])
        text = f"  {turn['role']}: {len(turn['ids'])} tokens, {trained} trained"
        if "logprobs" in turn:
            logprobs = [each for each in turn["logprobs"] if each is not None]
            text += f", mean log-prob {sum(logprobs) / max(1, len(logprobs)):.2f}"
            text += f", versions {sorted(set(turn['versions']))}, ended by {turn.get('stop_reason')}"
        print(text)
        print(f"    {turn['text']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
