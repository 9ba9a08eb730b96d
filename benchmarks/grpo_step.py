"""Seconds of a whole GRPO step - generation, rewards, training, new weights - against TRL's GRPOTrainer.

    python benchmarks/grpo_step.py [--trl-python PYTHON] [--model FOLDER] [--steps 5]

PYTHON is an interpreter with ``trl`` installed, in an environment of its own; without it only our side is measured.
The work of a step is the same for both: 8 prompts of workflows/largest_number.py, 8 answers each of at most 16 tokens
at temperature 1, one update in bfloat16 autocast, no KL penalty, all cores. One run of each after the other, a step is
timed from its start to its end, the first of each is left out (it warms up). The limit is that of decoding and then
training, by benchmarks/roofline.py.
"""

from __future__ import annotations
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.leaderboard import ANSWERS, ROWS, trl_config
from benchmarks.report import ROOT, Figure, make_parser, of_limit, write_figures

NEW_TOKENS = 16


def our_steps(model: str, steps: int, *, smoke: bool) -> list[dict[str, float]]:
    """Return the metrics of the steps of ``areal-lite train``; in this process if ``smoke``."""
    config = str(ROOT / "configs/on_policy.yaml")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"model_path={model}",
            f"fileroot={folder}",
            f"trainer.total_steps={steps}",
            f"rollout.consumer_batch_size={ROWS}",
            f"rollout.group_size={ANSWERS}",
            "rollout.dump_to_file=false",
            "checkpoint.every_minutes=null",
            "eval_dataset=null",
            "save_model=false",
        ]
        if smoke:
            from areal_lite.config.loader import load_config
            from areal_lite.runs.entry_points import run_training

            run_training(load_config(config, overrides))
        else:
            command = [sys.executable, "-m", "areal_lite", "train", config, *overrides]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def limit_of(model: str, metrics: dict[str, Any], *, smoke: bool) -> float:
    """Return the least seconds of a step with these lengths on all cores, prompts computed once per group."""
    import torch
    from transformers import AutoConfig
    from benchmarks.roofline import decode_limit, limits, training_limit

    config = AutoConfig.from_pretrained(model)
    rates = limits(len(os.sched_getaffinity(0)), torch.bfloat16, smoke=smoke)
    prompt, trained = metrics["train/prompt_length_mean"], metrics["train/trained_tokens"]
    tokens_per_s = decode_limit(config, rates, in_flight=ROWS * ANSWERS, context=prompt)
    return trained / tokens_per_s + training_limit(config, rates, tokens=ROWS * prompt + trained, trained=trained)


def trl_steps(python: str, model: str, steps: int) -> list[float]:
    """Return the seconds of TRL's steps, made in a process of its own."""
    from workflows.largest_number import rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows(size=ROWS * (steps + 1), seed=1)))
        command = [python, __file__, "--trl-child", str(path), "--model", model, "--steps", str(steps)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step_seconds ")]


def run_trl(path: Path, model: str, steps: int) -> None:
    """Train with TRL and print the seconds of each step."""
    import re
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: object, **named: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *arguments: object, **named: object) -> None:
            print(f"step_seconds {time.perf_counter() - self.began:.2f}", flush=True)

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **named: object) -> list[float]:
        found = (re.findall(r"\d+", completion[0]["content"]) for completion in completions)
        return [float(numbers[-1:] == [right]) for numbers, right in zip(found, answer, strict=True)]

    system = {"role": "system", "content": "Reply with a number only."}
    dataset = Dataset.from_list(
        [
            {"prompt": [system, {"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in json.loads(path.read_text())
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        config = trl_config(folder, steps, max_completion_length=NEW_TOKENS)
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
        trainer.train()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trl-python")
    parser.add_argument("--trl-child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.trl_child is not None:
        run_trl(arguments.trl_child, arguments.model, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            from tests.fixtures.tiny_model import build_tiny_model

            arguments.model, arguments.steps = str(build_tiny_model(Path(folder) / "model")), 2
        metrics = our_steps(arguments.model, arguments.steps, smoke=arguments.smoke)[1:]
        limit = limit_of(arguments.model, metrics[-1], smoke=arguments.smoke)
        times = {"areal_lite": [record["timing/step_s"] for record in metrics]}
        if arguments.trl_python is not None:
            times["TRL"] = trl_steps(arguments.trl_python, arguments.model, arguments.steps)[1:]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    reference = medians.get("TRL")
    figures = [
        Figure(name, median, "s", ratio=None if reference is None else median / reference, limit=limit)
        for name, median in medians.items()
    ]
    for figure in figures:
        of_trl = "" if figure.ratio is None else f"{figure.ratio:.2f} of TRL, "
        seconds = [round(second, 1) for second in times[figure.figure]]
        print(f"{figure.figure:<12} median {figure.value:6.2f} s of {seconds}: {of_trl}{of_limit(figure)} s")
    write_figures(arguments.json, figures)


if __name__ == "__main__":
    main()
