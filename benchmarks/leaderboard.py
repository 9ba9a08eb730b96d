"""What small models learn on a CPU: held-out reward by task, algorithm and step, with intervals over seeds, and TRL's.

    python benchmarks/leaderboard.py [--tasks largest gcd] [--variants grpo rloo] [--seeds 3] [--trl-python PYTHON]

Every run trains on 8 rows x 8 answers a step, of games 4 x 4, at temperature 1, in bfloat16 autocast and without a KL
penalty, and answers the same held-out rows greedily. A seed has its own training rows and its own samples. The
variants are algorithms, bounds of staleness (``bound 2``; decoupled GRPO), and ``TRL``: GRPOTrainer with the same
model, rows in the same order, batch and learning rate, for tasks of one answer; ``--trl-steps`` ends its runs sooner.
Runs with a bound answer 500 held-out rows at their end alone, because an evaluation gives them time to generate ahead.
PYTHON is an interpreter with ``trl``, in an environment of its own. Runs of one seed follow one another, so that their
seconds compare; evaluations are not in them. Each run leaves one line in the records and is not made again. Without
``--variants``, the records are only shown; ``--draw`` makes a picture of them, and ``--plan`` compares the staleness
that ``areal-lite plan`` predicts for the bounds with that of their runs.
"""

from __future__ import annotations
import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_lite.tools.sweep.seed_statistics import Interval

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import ROOT, Figure, make_parser, write_figures

ROWS, ANSWERS, LEARNING_RATE = 8, 8, 3e-5
SYSTEM = "Reply with a number only."
HELD_OUT_SEED = 999_000_000
OWN_RATES = {"Gemma-3-270M-chat": 5e-6}  # at 3e-5 it forgets its answers within 5 steps
OWN_STEPS = {"Gemma-3-270M-chat": {"cliff": 4, "taxi": 10, "empty room": 10}}  # 20 minutes of one core


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, the arguments of its rows and of the loop around it, and the length of a run."""

    env: str = ""
    rows: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = SYSTEM
    max_turns: int = 1
    new_tokens: int = 16
    kwargs: dict[str, Any] = field(default_factory=dict)
    opponent: str | None = None  # of a game of several seats
    wrong_action_reward: float = 0.0
    batch: tuple[int, int] = (ROWS, ANSWERS)  # rows of a step, and answers to each
    steps: int = 25
    every_steps: int | None = 5  # steps between evaluations; without them there is one, at the end
    held_out: int = 200  # rows of an evaluation
    path: str = ""  # of rows and
    workflow: str = ""  # agent, in place of an environment

    @property
    def one_answer(self) -> bool:
        return self.env.startswith("reasoning-gym:") or self.path == LARGEST


LARGEST = "workflows.largest_number.rows"


def question(name: str, system_prompt: str = SYSTEM, new_tokens: int = 16, **rows: Any) -> Task:
    """Return a task of reasoning-gym."""
    return Task(env=f"reasoning-gym:{name}", rows=rows, system_prompt=system_prompt, new_tokens=new_tokens)


def game(
    env: str, system_prompt: str, max_turns: int, *, opponent: str | None = None, wrong: float = 0.0, **kwargs: Any
) -> Task:
    """Return a task of several turns, whose episodes have several hundred tokens each: fewer of them, and of steps."""
    few: dict[str, Any] = {"batch": (4, 4), "steps": 15, "every_steps": 15, "held_out": 40}
    few |= {"opponent": opponent, "wrong_action_reward": wrong}
    return Task(env=env, system_prompt=system_prompt, max_turns=max_turns, kwargs=kwargs, **few)


WORD, GUESS = "Reply with one word only.", "Reply with your move in square brackets only, such as [5]."
TASKS = {
    "largest": Task(path=LARGEST, workflow="workflows.largest_number.LargestNumberAgent", steps=20),
    "sum": question("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "sum of 3": question("chain_sum", min_terms=3, max_terms=3, min_digits=1, max_digits=1),
    "sum of 2 digits": question("chain_sum", min_terms=2, max_terms=2, min_digits=2, max_digits=2),
    "product": question("products", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "gcd": question("gcd", min_value=1, max_value=30),
    "lcm": question("lcm", min_value=1, max_value=10),
    "arithmetic": question("basic_arithmetic", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "fraction": question("fraction_simplification", "Reply with a fraction only, such as 2/3.", max_value=10),
    "primes": question("count_primes", min_n=1, max_n=10),
    "letters": question("letter_counting", min_words=2, max_words=4),
    "legs": question("leg_counting", min_animals=1, max_animals=1),
    "spelling": question("spell_backward", WORD, min_word_len=3, max_word_len=3),
    "sorting": question("number_sorting", "Reply with a list of numbers only.", 24, min_numbers=2, max_numbers=3),
    "bits": question("count_bits", max_n=15),
    "parity": question("binary_alternation", min_n=2, max_n=4),
    "guess the number": game("textarena:GuessTheNumber-v0", GUESS, 8),
    "tic-tac-toe": game("textarena:TicTacToe-v0", GUESS, 6, opponent="random"),
    "Kuhn poker": game(
        "textarena:KuhnPoker-v0", "Reply with one action in square brackets only.", 12, opponent="random"
    ),
    "nim": game("textarena:Nim-v0", "Reply with [pile quantity] only, such as [0 2].", 8, opponent="random"),
    "blackjack cards": game("textarena:Blackjack-v0", "Reply with [Hit] or [Stand] only.", 8),
    "frozen lake": game("gymnasium:FrozenLake-v1", WORD, 8, is_slippery=False),
    "cliff": game("gymnasium:CliffWalking-v1", WORD, 14, wrong=-1.0),
    "taxi": game("gymnasium:Taxi-v4", WORD, 12, wrong=-1.0),
    "blackjack": game("gymnasium:Blackjack-v1", WORD, 6),
    "empty room": game("gymnasium:MiniGrid-Empty-5x5-v0", WORD, 8),
    "calculator": Task(
        path="workflows.calculator.rows", workflow="workflows.calculator.CalculatorAgent", new_tokens=48, steps=20
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    **{name: {"trainer": {"advantage": name}} for name in ("rloo", "dr_grpo")},
    "gspo": {"trainer": {"loss": "gspo"}},
    **{f"bound {bound}": {"rollout": {"max_head_offpolicyness": bound}} for bound in (0, 1, 2, 4)},
}


def rate_of(model: str) -> float:
    """Return the learning rate of a model's folder."""
    return OWN_RATES.get(Path(model).name, LEARNING_RATE)


def task_of(name: str, variant: str, model: str) -> Task:
    """Return a task as a model is trained on it and a variant evaluates it."""
    task = TASKS[name]
    if steps := OWN_STEPS.get(Path(model).name, {}).get(name):
        task = dataclasses.replace(task, steps=steps, every_steps=steps)
    return dataclasses.replace(task, held_out=500, every_steps=None) if variant.startswith("bound") else task


def config_of(task: Task, seed: int, model: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of one of our runs."""
    sizes = {
        "train_dataset": (seed * 1_000_000, task.batch[0] * (task.steps + 8)),
        "eval_dataset": (HELD_OUT_SEED, task.held_out),
    }
    sections: dict[str, Any] = {
        name: {"kwargs": {"seed": own, "size": size, **task.rows}, "shuffle": False}
        for name, (own, size) in sizes.items()
    }
    config: dict[str, Any] = {
        "experiment_name": "leaderboard",
        "model_path": model,
        "seed": seed,
        **sections,
        "rollout": {
            "group_size": task.batch[1],
            "consumer_batch_size": task.batch[0],
            "max_head_offpolicyness": 0,
            "agents": {"tools_in_system_prompt": "calculator" in task.path},
            "gconfig": {"max_new_tokens": task.new_tokens},
            "eval_gconfig": {"max_new_tokens": task.new_tokens, "greedy": True},
        }
        | changes.get("rollout", {}),
        "trainer": {"total_steps": task.steps, "learning_rate": rate_of(model)} | changes.get("trainer", {}),
        "evaluation": {"every_steps": task.every_steps, "at_start": task.every_steps is not None},
        "checkpoint": {"every_minutes": None},
        "save_model": False,
    }
    if task.env:
        config["env"] = task.env
        config["workflow_kwargs"] = {"system_prompt": task.system_prompt, "max_turns": task.max_turns}
        config["workflow_kwargs"] |= {"kwargs": task.kwargs} if task.kwargs else {}
        config["workflow_kwargs"] |= {"opponent": task.opponent} if task.opponent else {}
        config["workflow_kwargs"] |= {"wrong_action_reward": task.wrong_action_reward}
    else:
        config["workflow"] = task.workflow
        for section in sections.values():
            section["path"] = task.path
    return config


def our_run(task: Task, changes: dict[str, Any], *, seed: int, model: str, smoke: bool) -> dict[str, Any]:
    """Train with ``areal-lite train``, in this process if ``smoke``; return the curve, the rewards in training, the
    seconds of the steps and the mean staleness."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(task, seed, model, changes) | {"fileroot": folder}
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))
        if smoke:
            from areal_lite.config.loader import load_config
            from areal_lite.runs.entry_points import run_training

            run_training(load_config(path))
        else:
            command = [sys.executable, "-m", "areal_lite", "train", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "timing/step_s" in record]
    staleness = [record.get("train/staleness_mean", 0.0) for record in steps]
    return {
        "curve": {
            str(record["step"]): round(record["eval/reward"], 4) for record in records if "eval/reward" in record
        },
        "training": [round(record["train/reward_mean"], 4) for record in steps],
        "seconds": round(sum(record["timing/step_s"] for record in steps), 1),
        "each_s": [round(record["timing/step_s"], 2) for record in steps],
        "steps": len(steps),
        "staleness": round(sum(staleness) / len(staleness), 3),
    }


def trl_run(task_name: str, task: Task, *, seed: int, model: str, python: str) -> dict[str, Any]:
    """Train with TRL in a process of its own; return the curve and the seconds of each step."""
    words = ["--trl-child", str(seed), "--tasks", task_name, "--model", model]
    words += ["--held-out", str(task.held_out), "--trl-steps", str(task.steps)]
    done = subprocess.run([python, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run_trl(task: Task, seed: int, model: str) -> None:
    """Train with TRL and print the result."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    def conversation(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": row["question"]}]

    def reward(completions: list[list[dict[str, str]]], row: list[str], **named: object) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [score(text, json.loads(asked)) for text, asked in zip(texts, row, strict=True)]

    def evaluate(step: int) -> None:
        policy, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        texts = [
            tokenizer.apply_chat_template(conversation(row), tokenize=False, add_generation_prompt=True)
            for row in held_out_rows
        ]
        rewards = []
        for begin in range(0, len(texts), 100):
            batch = tokenizer(texts[begin : begin + 100], return_tensors="pt", padding=True, padding_side="left")
            batch = batch.to(policy.device)
            with torch.no_grad(), torch.autocast(policy.device.type, torch.bfloat16):
                ids = policy.generate(**batch, max_new_tokens=task.new_tokens, do_sample=False)
            answers = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            asked = held_out_rows[begin : begin + 100]
            rewards += [score(answer, row) for answer, row in zip(answers, asked, strict=True)]
        curve[str(step)] = sum(rewards) / len(rewards)

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: object, **named: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, arguments: object, state: Any, *others: object, **named: object) -> None:
            seconds.append(time.perf_counter() - self.began)
            if state.global_step % task.every_steps == 0:
                evaluate(state.global_step)

    curve: dict[str, float] = {}
    seconds: list[float] = []
    score = scorer(task)
    held_out_rows = rows(task, HELD_OUT_SEED, task.held_out)
    training = [
        {"prompt": conversation(row), "row": json.dumps(row)} for row in rows(task, seed * 1_000_000, ROWS * task.steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = trl_config(folder, task.steps, rate_of(model), seed=seed, max_completion_length=task.new_tokens)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(training),
            callbacks=[Clock()],
        )
        evaluate(0)
        trainer.train()
    print(json.dumps({"curve": curve, "seconds": sum(seconds), "steps": task.steps}))


def trl_config(folder: str, steps: int, learning_rate: float = LEARNING_RATE, **options: Any) -> Any:
    """Return the GRPOConfig of the work that our runs do."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        shuffle_dataset=False,
        per_device_train_batch_size=ROWS * ANSWERS,
        num_generations=ANSWERS,
        temperature=1.0,
        beta=0.0,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=device_here() == "cpu",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        **options,
    )


def rows(task: Task, seed: int, size: int) -> list[dict[str, Any]]:
    """Return the rows that the task's config makes."""
    import workflows.largest_number
    from areal_lite.environments.adapters.reasoning_gym import ReasoningGymTask

    if task.path == LARGEST:
        return workflows.largest_number.rows(seed=seed, size=size)  # type: ignore[return-value]
    return ReasoningGymTask.rows(task.env.partition(":")[2], seed=seed, size=size, **task.rows)


def conversations(seed: int, size: int) -> list[dict[str, Any]]:
    """Return ``size`` answered questions of each task of one answer, to teach a base model how to answer."""
    return [
        {
            "messages": [
                {"role": "system", "content": task.system_prompt},
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for task in TASKS.values()
        if task.one_answer
        for row in rows(task, seed, size)
    ]


def scorer(task: Task) -> Callable[[str, dict[str, Any]], float]:
    """Return the reward of an answer to a row: that of our runs."""
    from areal_lite.environments.adapters.reasoning_gym import final_answer
    from areal_lite.environments.adapters.reasoning_gym import score as score_of

    if task.path == LARGEST:
        return lambda text, row: float(re.findall(r"\d+", text)[-1:] == [row["answer"]])
    return lambda text, row: score_of(row["task"], final_answer(text), row)


def device_here() -> str:
    """Return where runs train."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_runs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the runs that the records lack, and return all records of the chosen tasks."""
    path: Path = arguments.records
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    here = device_here()
    made = {(run["task"], run["variant"], run["seed"], run["model"], run.get("device", "cpu")) for run in records}
    wanted = itertools.product(range(1, arguments.seeds + 1), arguments.tasks, arguments.variants)
    for seed, task_name, variant in wanted:
        task, model = task_of(task_name, variant, arguments.model), Path(arguments.model).name
        if (task_name, variant, seed, model, here) in made or (variant == "TRL" and not task.one_answer):
            continue
        task = dataclasses.replace(task, held_out=arguments.held_out or task.held_out)
        common = {"seed": seed, "model": arguments.model}
        record = {"task": task_name, "variant": variant, "seed": seed, "model": model, "device": here}
        record |= {"load": os.getloadavg()[0]}
        if variant == "TRL":
            task = dataclasses.replace(task, steps=min(task.steps, arguments.trl_steps or task.steps))
            record |= trl_run(task_name, task, python=arguments.trl_python, **common)
        else:
            record |= our_run(task, VARIANTS[variant], smoke=arguments.smoke, **common)
        records.append(record)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{task_name}, {variant}, seed {seed}: {record['curve']} in {record['seconds']:.0f} s", flush=True)
    return [record for record in records if record["task"] in arguments.tasks]


def step_seconds(runs: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of a step, by device and seed."""
    return {(run.get("device", "cpu"), run["seed"]): run["seconds"] / run["steps"] for run in runs}


def ratio_to(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> float | None:
    """Return our seconds per step over theirs, of the steps that both made, with the same device and seed."""
    ratios = []
    for run, other in itertools.product(ours, theirs):
        if (run.get("device", "cpu"), run["seed"]) == (other.get("device", "cpu"), other["seed"]):
            own = run.get("each_s", [run["seconds"] / run["steps"]])[: other["steps"]]
            ratios.append(statistics.mean(own) * other["steps"] / other["seconds"])
    return statistics.mean(ratios) if ratios else None


def longest(runs: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the run of each seed, the longest if there are several."""
    return {run["seed"]: run for run in sorted(runs, key=lambda run: len(run["curve"]))}


def by_step(runs: list[dict[str, Any]]) -> dict[int, Interval]:
    """Return the held-out reward of each evaluated step over the seeds."""
    from areal_lite.tools.sweep.seed_statistics import mean_interval

    curves = [{int(step): reward for step, reward in run["curve"].items()} for run in longest(runs).values()]
    steps = sorted({step for curve in curves for step in curve})
    return {step: mean_interval([curve[step] for curve in curves if step in curve]) for step in steps}


def show_board(records: list[dict[str, Any]]) -> None:
    """Print what GRPO learned of each task: the mean gain, and its 95 % interval over seeds."""
    from areal_lite.tools.sweep.seed_statistics import mean_interval

    print("| task | model | seeds | steps | before | after | gain | learned |\n|---|---|---|---|---|---|---|---|")
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in records:
        if run["variant"] == "grpo":
            by_name.setdefault((run["task"], run["model"]), []).append(run)
    for task, model in sorted(by_name, key=lambda name: (name[1], list(TASKS).index(name[0]))):
        curves = [list(run["curve"].values()) for run in longest(by_name[task, model]).values()]
        before, after = (statistics.mean(curve[at] for curve in curves) for at in (0, -1))
        gain, low, high = mean_interval([curve[-1] - curve[0] for curve in curves])
        told = f"{gain:+.2f}" + f" [{low:+.2f}, {high:+.2f}]" * (len(curves) > 1)
        learned = "yes" if low > 0 else "no" if high < 0.05 else "not sure"
        cells = [task, model, str(len(curves)), str(by_name[task, model][0]["steps"]), f"{before:.2f}", f"{after:.2f}"]
        print(f"| {' | '.join([*cells, told, learned])} |")


def show(records: list[dict[str, Any]]) -> list[Figure]:
    """Print a table of each task and model; return the last reward of each variant, and its seconds."""
    figures = []
    by_task: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        by_task.setdefault((record["model"], record["task"]), {}).setdefault(record["variant"], []).append(record)
    for (model, task), by_variant in by_task.items():
        steps = sorted({int(step) for runs in by_variant.values() for run in runs for step in run["curve"]})
        print(f"\n{task}, {model}: held-out reward by step, mean and 95 % interval over seeds")
        print(f"| | seeds | {' | '.join(map(str, steps))} | s per step | of TRL's | staleness |")
        print(f"|---|{'---|' * (len(steps) + 4)}")
        for variant, runs in by_variant.items():
            found, seeds = by_step(runs), len(longest(runs))
            cells = [variant, str(seeds)]
            for step in steps:
                told = ""
                if step in found:
                    last, low, high = found[step]
                    told = f"{last:.3f}" + f" [{low:.3f}, {high:.3f}]" * (seeds > 1)
                cells.append(told)
            each_s = step_seconds(runs)
            device = min(each_s)[0]  # cpu, if any
            seconds = statistics.mean(value for (where, _), value in each_s.items() if where == device)
            ratio = ratio_to(by_variant.get("TRL", []), runs)
            staleness = "" if variant == "TRL" else f"{statistics.mean(run['staleness'] for run in runs):.2f}"
            cells += [
                f"{seconds:.1f}" + " (GPU)" * (device == "cuda"),
                "" if ratio is None else f"{ratio:.2f}",
                staleness,
            ]
            print(f"| {' | '.join(cells)} |")
            figures.append(Figure(f"{task}, {variant}, {model}: last held-out reward", max(last, 1e-9), ""))
            figures.append(Figure(f"{task}, {variant}, {model}: a step", seconds, "s", ratio=ratio))
    return figures


def draw(records: list[dict[str, Any]], out: Path) -> None:
    """Save a picture: the curve of each task by us and by TRL, and beside it the rewards at the end by bound."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    tasks = sorted({run["task"] for run in records}, key=list(TASKS).index)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "leaderboard"}):
        picture = Picture(figsize=(4.2 * len(tasks), 4), layout="constrained")
        for place, task in enumerate(tasks, 1):
            axes = picture.add_subplot(1, len(tasks), place, title=task, xlabel="step", ylim=(0, 1))
            runs: dict[str, list[dict[str, Any]]] = {}
            for run in records:
                if run["task"] == task:
                    runs.setdefault(run["variant"], []).append(run)
            for variant, label in (("grpo", "ours"), ("TRL", "TRL")):
                if variant not in runs:
                    continue
                curve = by_step(runs[variant])
                means, lows, highs = zip(*curve.values(), strict=True)
                axes.plot(list(curve), means, label=label)
                axes.fill_between(list(curve), lows, highs, alpha=0.2)
            for number, bound in enumerate(name for name in runs if name.startswith("bound")):
                ((step, (mean, low, high)),) = by_step(runs[bound]).items()
                seconds = statistics.mean(step_seconds(runs[bound]).values())
                errors = [[mean - low], [high - mean]]
                label = f"{bound}: {seconds:.1f} s a step"
                axes.errorbar([step + 1.5 * (number + 1)], [mean], errors, marker="o", label=label)
            axes.legend(fontsize="x-small")
        picture.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def show_plans(records: list[dict[str, Any]], model: str) -> None:
    """Print the mean staleness that a plan predicts for each task and bound, beside that of the runs."""
    runs: dict[tuple[str, str], list[float]] = {}
    for run in records:
        if run["variant"].startswith("bound") and run["model"] == Path(model).name and run["staleness"]:
            runs.setdefault((run["task"], run["variant"]), []).append(run["staleness"])
    print("\n| task | bound | planned staleness | of the runs, mean and range | error |\n|---|---|---|---|---|")
    for (task, variant), seen in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.yaml"
            config = config_of(task_of(task, variant, model), 1, model, VARIANTS[variant])
            path.write_text(json.dumps(config | {"fileroot": folder}))
            command = [sys.executable, "-m", "areal_lite", "plan", str(path), "--json"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        planned, mean = json.loads(done.stdout)["staleness"]["mean"], statistics.mean(seen)
        cells = [task, variant.split()[1], f"{planned:.2f}", f"{mean:.2f}, {min(seen):.2f} to {max(seen):.2f}"]
        print(f"| {' | '.join([*cells, f'{planned / mean - 1:+.0%}'])} |", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trl-python")
    parser.add_argument("--trl-steps", type=int, help="steps of TRL's runs, at most a task's own")
    parser.add_argument("--trl-child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, "TRL"], default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, help="rows of each evaluation, in place of a task's own")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="save a picture of the chosen tasks")
    parser.add_argument("--plan", action="store_true", help="compare planned staleness with that of runs with bounds")
    parser.add_argument("--records", type=Path, default=ROOT / "docs/leaderboard.jsonl")
    arguments = parser.parse_args()
    if arguments.trl_child is not None:
        (name,) = arguments.tasks
        task = dataclasses.replace(TASKS[name], steps=arguments.trl_steps, held_out=arguments.held_out)
        run_trl(task, arguments.trl_child, arguments.model)
        return
    if "TRL" in arguments.variants and arguments.trl_python is None:
        parser.error("TRL needs --trl-python PYTHON")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            from tests.fixtures.tiny_model import build_tiny_model

            TASKS["largest"] = dataclasses.replace(TASKS["largest"], steps=1, every_steps=1, new_tokens=4)
            arguments.model, arguments.records = str(build_tiny_model(Path(folder) / "model")), Path(folder) / "records"
            arguments.tasks, arguments.variants, arguments.seeds = ["largest"], ["grpo"], 1
            arguments.held_out, arguments.draw = 1, Path(folder) / "board.svg"
        records = make_runs(arguments)
        show_board(records)
        write_figures(arguments.json, show(records))
        if arguments.draw:
            draw(records, arguments.draw)
        if arguments.plan:
            show_plans(records, arguments.model)


if __name__ == "__main__":
    main()
