"""Made-up runs for the page: agents with tools, branches, failures and metrics, and texts that try to be markup."""

from __future__ import annotations
import json
import math
import random
from pathlib import Path
from typing import Any
from tests.tools.inspect.dump_lines import write

EPOCH = 1_800_000_000.0
GROUP = 8
EVIL = (
    "<script>window.owned=1</script>",
    "<img src=x onerror='window.owned=1'>",
    "</script><script>window.owned=1</script>",
    "<svg onload=window.owned=1>",
    "<!--<script>window.owned=1//",
    "]]><iframe srcdoc='<script>parent.owned=1</script>'>",
    '" onmouseover="window.owned=1" autofocus onfocus=\'window.owned=1\'',
    "javascript:window.owned=1",
    "{{constructor.constructor('window.owned=1')()}}${window.owned=1}",
    "before\u2028window.owned=1\u2029after",
    "\u202eesrever\u202c \u2066isolate\u2069 \u200f",
    "\x1b[2J\x00\x07 \ufeff",
    "&lt;script&gt; &#60;b&#62; %3Cscript%3E",
)
"""Texts that must be shown as they are."""


def evil_record(text: str, task: int, member: int = 0) -> dict[str, Any]:
    """Return a line with ``text`` wherever a line can have text."""
    call = json.dumps({"name": text, "arguments": {"x": text}})
    turns = [
        _turn(0, None, "prompt", f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"),
        _turn(1, 0, "assistant", f"<think>{text}</think>{text}<tool_call>{call}</tool_call>", agent=text),
        _turn(2, 1, "environment", f"<tool_response>{text}</tool_response>"),
        _turn(3, 2, text, text),
    ]
    turns[1]["stop_reason"] = text
    process = {"command": [text], "returncode": 1, "timed_out": False, "seconds": 0.1, "stdout": text, "stderr": text}
    status = "failed" if member % 2 else "accepted"
    return _line(
        task, member, 0, turns, reward=None if member % 2 else 0.5, status=status, group=text, run_s=1.0, end=EPOCH
    ) | {
        **{"error": f"Traceback\n{text}", "error_kind": "agent", "error_type": text, "counts": {f"reward/{text}": 1.0}},
        **{"processes": [process], "prompt": text, "completion": text},
    }


def write_evil_run(root: Path) -> Path:
    """Write a run whose every text is one of :data:`EVIL`."""
    for place, text in enumerate(EVIL):
        lines = [evil_record(text, place, member) for member in range(2)]
        write(root / f"rollout/{place}/{place}.jsonl", *lines)
    metrics = [{"step": n, "time": EPOCH + n, "train/reward_mean": n / 9, f"train/{EVIL[1]}": n} for n in range(1, 9)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    return root


def write_run(root: Path, *, seed: int = 0, versions: int = 12, groups: int = 6, skill: float = 0.0) -> Path:
    """Write a run of a calculator agent that learns, and its metrics.jsonl."""
    draw = random.Random(seed)
    now, task = EPOCH, 0
    metrics: list[dict[str, Any]] = []
    for version in range(versions):
        good = 1 / (1 + math.exp(-(version - 5 + skill) / 2))
        begun, ends, rewards = now, [], []
        for _ in range(groups):
            start = now + draw.random() * 2
            rows = random.Random(task)
            numbers = [rows.randrange(10, 99) for _ in range(3)]
            lines, end = _group(draw, task, version, start, numbers, good)
            for line in lines:
                line["timings"] = {"queued_s": start - begun, "run_s": end - start, "finished_at": end}
            rewards += [line["reward"] for line in lines if line["reward"] is not None]
            ends.append(end)
            write(root / f"rollout/{version}/{task}.jsonl", *lines)
            task += 1
        wait, train, load = max(ends) - begun, 2.0 + draw.random(), 0.4
        now = max(ends) + train + load
        metrics.append(
            {
                **{"step": version + 1, "time": now, "train/reward_mean": sum(rewards) / max(1, len(rewards))},
                **{
                    "train/loss": draw.gauss(0, 0.02),
                    "train/entropy": 1.6 * math.exp(-version / 9) + draw.random() / 20,
                },
                **{"train/response_length_mean": 60 + 4 * version, "train/response_length_max": 120 + 5 * version},
                **{
                    "train/approx_kl": draw.random() / 100,
                    "train/staleness_mean": draw.random(),
                    "train/staleness_max": 1,
                },
                **{"train/tokens_per_second": 4000 + 80 * version, "train/engine_mismatch/log_prob_diff_mean": 0.03},
                **{"timing/step_s": wait + train + load, "timing/rollout_wait_s": wait, "timing/weight_update_s": load},
                **{"train/seconds_forward": train / 3, "train/seconds_backward": train / 2},
            }
        )
        if version % 4 == 3:
            metrics.append({"step": version + 1, "time": now, "eval/reward": good, "eval/episodes": 8.0})
            for row in range(4):
                rows = random.Random(1000 + row)
                lines, end = _group(draw, task, version + 1, now, [rows.randrange(10, 99) for _ in range(3)], good, 2)
                write(root / f"eval-rollout/{version + 1}/{task}.jsonl", *lines)
                task += 1
    (root / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    return root


def _group(
    draw: random.Random, task: int, version: int, start: float, numbers: list[int], good: float, size: int = GROUP
) -> tuple[list[dict[str, Any]], float]:
    lines: list[dict[str, Any]] = []
    ends = [start]
    for member in range(size):
        branches = _episode(draw, version, start, numbers, draw.random() < good)
        reward = float(branches[0][-1]["text"].removesuffix("<|im_end|>").endswith(str(sum(numbers))))
        ends.append(
            max(turn["started"] + turn["latency_s"] for turns in branches for turn in turns if "started" in turn)
        )
        for turns in branches:
            lines.append(_line(task, member, version, turns, reward=reward, run_s=0.0, end=0.0))
            lines[-1]["counts"] = {"answers": 2.0, "reward/correct": reward, "reward/format": 1.0}
        chance = draw.random()
        if chance < 0.06:
            _fail(lines[-1], *draw.choice(_FAILURES))
        elif chance < 0.1:
            lines[-1] |= {"status": "rejected", "error": "stale: its oldest token is 3 versions old, the bound is 2"}
    for place, line in enumerate(lines):
        line["sample_idx"] = place
    return lines, max(ends) + draw.random() / 2


_FAILURES = (
    ("agent", "TimeoutError", "the tool gave no answer in 5 s"),
    ("agent", "JSONDecodeError", "Expecting ',' delimiter: line 1 column 18 (char 17)"),
    ("context_overflow", "ContextOverflowError", "the prompt has 4,112 tokens, the context window 4,096"),
    ("reward", "ZeroDivisionError", "division by zero"),
)


def _fail(line: dict[str, Any], kind: str, type_: str, message: str) -> None:
    trace = (
        'Traceback (most recent call last):\n  File "agents/calculator.py", line 41, in run\n'
        "    value = await tool(call)\n"
        f'  File "agents/tools.py", line 17, in tool\n    return parse(answer)\n{type_}: {message}\n'
    )
    program = {
        "command": ["bc", "-l"],
        "returncode": -9,
        "timed_out": True,
        "seconds": 5.0,
        "stdout": "",
        "stderr": "Terminated\n",
    }
    line |= {"status": "failed", "error": trace, "error_kind": kind, "error_type": type_, "reward": None}
    line["processes"] = [program]


def _episode(
    draw: random.Random, version: int, start: float, numbers: list[int], right: bool
) -> list[list[dict[str, Any]]]:
    asked = " + ".join(map(str, numbers))
    total = sum(numbers) if right else sum(numbers) + draw.randrange(1, 20)
    call = json.dumps({"name": "calculator", "arguments": {"expression": asked}})
    clock = start + draw.random() / 2
    system = "You are a calculator. Call the tool, then answer with the number only."
    prompt = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is {asked}?<|im_end|>\n<|im_start|>assistant\n"
    )
    result = f"<|im_start|>user\n<tool_response>\n{total}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    turns = [
        _turn(0, None, "prompt", prompt),
        _turn(1, 0, "assistant", f"<tool_call>\n{call}\n</tool_call><|im_end|>", draw, version, clock),
        _turn(2, 1, "environment", result),
    ]
    clock += turns[1]["latency_s"] + draw.random()
    turns.append(_turn(3, 2, "assistant", f"The sum of {asked} is {total}<|im_end|>", draw, version, clock))
    if draw.random() < 0.8:
        return [turns]
    clock += turns[3]["latency_s"]
    again = "<|im_start|>user\nCheck it in your head.<|im_end|>\n<|im_start|>assistant\n"
    fork = [turns[0], turns[1], _turn(4, 1, "environment", again)]
    fork.append(_turn(5, 4, "assistant", f"<think>{asked}, in my head</think>{total}<|im_end|>", draw, version, clock))
    for each in fork[:2]:
        each["loss_mask"] = list(each["loss_mask"])
    fork[1] = {**fork[1], "loss_mask": [0] * len(fork[1]["ids"])}
    return [turns, fork]


def _turn(
    place: int,
    parent: int | None,
    role: str,
    text: str,
    draw: random.Random | None = None,
    version: int = 0,
    started: float | None = None,
    agent: str = "main",
) -> dict[str, Any]:
    draw = draw or random.Random(text)
    length = max(1, len(text) // 3)
    turn = {"role": role, "turn_idx": place, "parent_idx": parent, "start": 0, "text": text}
    turn |= {"ids": [draw.randrange(50_000) for _ in range(length)], "loss_mask": [int(role == "assistant")] * length}
    if role == "assistant":
        turn |= {"logprobs": [-draw.expovariate(2) for _ in range(length)], "versions": [version] * length}
        turn |= {"stop_reason": "stop", "agent": agent, "started": started, "latency_s": 0.3 + draw.expovariate(1)}
        turn["server"] = f"http://127.0.0.1:{30000 + version % 2}"
    return turn


def _line(
    task: int,
    member: int,
    version: int,
    turns: list[dict[str, Any]],
    *,
    reward: float | None,
    run_s: float,
    end: float,
    status: str = "accepted",
    group: str | None = None,
) -> dict[str, Any]:
    start = 0
    turns = [dict(turn) for turn in turns]
    for turn in turns:
        turn["start"] = start
        start += len(turn["ids"])
    return {
        **{"schema": 2, "task_id": task, "group_id": group or str(task), "sample_idx": member, "member_idx": member},
        **{"status": status, "error": None, "error_kind": None, "error_type": None, "seqlen": start},
        **{"prompt_len": len(turns[0]["ids"]), "start_version": version, "head_version": version},
        **{"tail_version": version, "reward": reward, "prompt": turns[0]["text"]},
        **{"completion": "".join(turn["text"] for turn in turns[1:]), "turns": turns, "counts": {}, "processes": []},
        "timings": {"queued_s": 0.0, "run_s": run_s, "finished_at": end},
    }
