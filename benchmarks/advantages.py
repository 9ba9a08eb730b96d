"""Time of the advantage estimators on one core, and of GAE against a loop over its tokens.

    python benchmarks/advantages.py [--repeats 15]

Group estimators: 1,024 groups of 8 episodes, 64 tokens each. Estimators of returns: 32 episodes of 8,192 tokens. The
loop is the textbook recursion backwards over the columns of ``[32, 8192]``, without whitening. Float32; every figure is
the median over repeats, in milliseconds of the core; `inputs` is the check of the fields a step begins with.
"""

from __future__ import annotations
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.trainer.estimators import ESTIMATORS, EstimatorInputs, Turns
from areal_lite.trainer.estimators.inputs import normalize_advantages
from benchmarks.report import Figure, make_parser, write_figures

GROUPS = [
    *("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"),
    *("turn_grpo", "turn_returns"),
]
GAMMA, LAM = 1.0, 0.95
TURNS = 8
"""Rewarded turns of each episode, one after the other."""


def make_step(num_episodes: int, length: int, group_size: int) -> EstimatorInputs:
    """Return a step of equally long episodes with random rewards."""
    torch.manual_seed(0)
    tokens, num_turns = num_episodes * length, num_episodes * TURNS
    rewards = torch.zeros(num_episodes, length)
    rewards[:, -1] = scores = torch.randn(num_episodes)
    logprobs = -torch.rand(tokens)
    return EstimatorInputs(
        scores=scores,
        group_ids=[f"group-{episode // group_size}" for episode in range(num_episodes)],
        episodes=torch.arange(num_episodes).repeat_interleave(length),
        token_rewards=rewards.flatten(),
        values=torch.randn(tokens),
        baselines=torch.randn(num_episodes),
        proximal_logprobs=logprobs,
        sum_squared_probs=logprobs.exp().square(),
        turns=Turns(
            of_token=torch.arange(num_turns).repeat_interleave(length // TURNS),
            rewards=torch.randn(num_turns),
            episodes=torch.arange(num_turns) // TURNS,
            index=torch.arange(num_turns) % TURNS,
            parents=torch.where(torch.arange(num_turns) % TURNS > 0, torch.arange(num_turns) - 1, -1),
        ),
    )


def loop_gae(rewards: Tensor, values: Tensor) -> Tensor:
    """Return ``[B, L]`` advantages, token after token."""
    advantages = torch.empty_like(rewards)
    running, following = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        running = rewards[:, place] + GAMMA * following - values[:, place] + GAMMA * LAM * running
        following = values[:, place]
        advantages[:, place] = running
    return advantages


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on one thread, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append((time.thread_time() - start) * 1000)
    return median(times)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    repeats, scale = (1, 16) if args.smoke else (args.repeats, 1)
    torch.set_num_threads(1)

    grouped, long = make_step(8192 // scale, 64, group_size=8), make_step(32, 8192 // scale, group_size=8)
    figures = []

    def show(shape: str, name: str, call: Callable[[], object]) -> None:
        figures.append(Figure(f"{shape}: {name}", milliseconds(call, repeats), "ms"))
        print(f"  {name:<30}{figures[-1].value:>8.2f}")

    for title, step, names in (
        (f"{1024 // scale:,} groups of 8 episodes of 64 tokens", grouped, GROUPS),
        (f"32 episodes of {8192 // scale:,} tokens", long, [name for name in ESTIMATORS if name not in GROUPS]),
    ):
        print(title)
        fields = {name: getattr(step, name) for name in EstimatorInputs.__dataclass_fields__}
        show(title, "inputs", partial(EstimatorInputs, **fields))
        for name in names:
            options = {"gamma": GAMMA, "lam": LAM} if name == "gae" else {}
            show(title, name, partial(ESTIMATORS[name], step, **options))
        for level in ("group", "batch"):
            call = partial(
                normalize_advantages, step.token_rewards, step.episodes, step.group_ids, mean=level, std=level
            )
            show(title, f"normalised over the {level}", call)

    assert long.values is not None
    flat = milliseconds(partial(ESTIMATORS["gae"], long, lam=LAM), repeats)
    columns = (long.token_rewards.view(32, -1), long.values.view(32, -1))
    loop = milliseconds(partial(loop_gae, *columns), max(3, repeats // 3))
    figures.append(Figure("GAE with whitening, against a loop over tokens", flat, "ms", ratio=flat / loop))
    print(f"GAE with whitening {flat:.1f}, a loop over tokens {loop:.1f} without: {loop / flat:.0f} times as long")
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
