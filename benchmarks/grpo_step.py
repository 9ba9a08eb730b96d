"""Seconds of a whole GRPO step - generation, rewards, training, new weights - against TRL's GRPOTrainer.

    python benchmarks/grpo_step.py --trl-python PYTHON [--model FOLDER] [--steps 5]

PYTHON is an interpreter with ``trl`` installed, in an environment of its own. The work of a step is the same
for both: 8 prompts of workflows/largest_number.py, 8 answers each of at most 16 tokens at temperature 1, one
update in bfloat16 autocast, no KL penalty, all cores. One run of each after the other, a step is timed from its
start to its end, the first of each is left out (it warms up).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPTS, ANSWERS, NEW_TOKENS = 8, 8, 16


def our_steps(model: str, steps: int) -> list[float]:
    """Return the seconds of the steps of ``areal-lite train``."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"model_path={model}",
            f"fileroot={folder}",
            f"trainer.total_steps={steps}",
            f"rollout.consumer_batch_size={PROMPTS}",
            f"rollout.group_size={ANSWERS}",
            "rollout.dump_to_file=false",
            "checkpoint.every_minutes=null",
            "eval_dataset=null",
            "save_model=false",
        ]
        command = [sys.executable, "-m", "areal_lite", "train", "configs/on_policy.yaml", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        return [json.loads(line)["timing/step_s"] for line in metrics.read_text().splitlines()]


def trl_steps(python: str, model: str, steps: int) -> list[float]:
    """Return the seconds of TRL's steps, made in a process of its own."""
    from workflows.largest_number import rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows(size=PROMPTS * (steps + 1), seed=1)))
        command = [python, __file__, "--trl-child", str(path), "--model", model, "--steps", str(steps)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step_seconds ")]


def run_trl(path: Path, model: str, steps: int) -> None:
    """Train with TRL and print the seconds of each step."""
    import re

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

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
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            beta=0.0,
            learning_rate=3e-5,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
        )
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
        trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python")
    parser.add_argument("--trl-child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.trl_child is not None:
        run_trl(arguments.trl_child, arguments.model, arguments.steps)
        return
    if arguments.trl_python is None:
        parser.error("--trl-python is missing: name an interpreter with trl installed")
    times = {
        "areal_lite": our_steps(arguments.model, arguments.steps)[1:],
        "TRL": trl_steps(arguments.trl_python, arguments.model, arguments.steps)[1:],
    }
    for name, seconds in times.items():
        print(f"{name:<12} median {statistics.median(seconds):6.2f} s   of {[round(s, 1) for s in seconds]}")
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    print(f"ratio        {ours / theirs:6.2f}")


if __name__ == "__main__":
    main()
