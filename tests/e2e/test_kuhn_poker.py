"""Self-play on Kuhn poker comes near its known equilibrium: `make test-slow`."""

from __future__ import annotations
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from tests.environments.games import bets, kuhn_reward, kuhn_view

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
Policy = Mapping[tuple[int, str], float]
"""Probability of a bet or call, by card (0 to 2) and what was played before: p and b."""
VIEWS = {0: ("", "pb"), 1: ("p", "b")}
A = 1 / 6  # any up to 1/3
EQUILIBRIUM: Policy = {
    **{(0, ""): A, (1, ""): 0.0, (2, ""): 3 * A, (0, "pb"): 0.0, (1, "pb"): A + 1 / 3, (2, "pb"): 1.0},
    **{(0, "p"): 1 / 3, (1, "p"): 0.0, (2, "p"): 1.0, (0, "b"): 0.0, (1, "b"): 1 / 3, (2, "b"): 1.0},
}
"""One of Kuhn's equilibria (1950)."""


def value(first: Policy, second: Policy) -> float:
    """Return what the first seat wins on average."""

    def rest(cards: tuple[int, ...], history: str) -> float:
        if (won := kuhn_reward(cards, history)) is not None:
            return won
        seat = len(history) % 2
        bet = (first, second)[seat][cards[seat], history]
        return bet * rest(cards, history + "b") + (1 - bet) * rest(cards, history + "p")

    return sum(rest(cards, "") for cards in itertools.permutations(range(3), 2)) / 6


def exploitability(policy: Policy) -> float:
    """Return what a perfect opponent wins on average over both seats; 0 of an equilibrium."""

    def best(seat: int) -> float:
        places = list(itertools.product(range(3), VIEWS[seat]))
        pure = (dict(zip(places, choice, strict=True)) for choice in itertools.product((0.0, 1.0), repeat=6))
        return max(value(each, policy) if seat == 0 else -value(policy, each) for each in pure)

    return (best(0) + best(1)) / 2


def policy_of(model_path: Path) -> Policy:
    """Return a model's probabilities. Before its second move, the first seat has passed with the likeliest token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    texts = [tokenizer.decode([place], skip_special_tokens=True) for place in range(model.config.vocab_size)]
    betting = torch.tensor([bets(text) for text in texts])

    def after(messages: list[dict[str, Any]]) -> torch.Tensor:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].softmax(-1)  # type: ignore[no-any-return]

    policy = {}
    for card, history in itertools.product(range(3), ("", "p", "b", "pb")):
        messages = [{"role": "user", "content": kuhn_view(card, "" if history == "pb" else history)}]
        if history == "pb":
            passed = texts[int((after(messages) * ~betting).argmax())]
            messages += [{"role": "assistant", "content": passed}, {"role": "user", "content": kuhn_view(card, "pb")}]
        policy[card, history] = float(after(messages)[betting].sum())
    return policy


def test_the_equilibrium_is_one() -> None:
    assert value(EQUILIBRIUM, EQUILIBRIUM) == pytest.approx(-1 / 18)
    assert exploitability(EQUILIBRIUM) == pytest.approx(0)


def test_self_play_comes_near_the_equilibrium(run_yaml: Path, tiny_model: Path) -> None:
    values = yaml.safe_load(run_yaml.read_text())
    del values["workflow"], values["train_dataset"]
    values |= {"env": "tests.environments.games.Kuhn", "eval_dataset": None}
    values["rollout"] |= {"group_size": 8, "consumer_batch_size": 24, "dump_to_file": False}
    values["rollout"]["gconfig"] = {"max_new_tokens": 1}
    values["trainer"] |= {"total_steps": 400, "learning_rate": 2e-3, "advantage": "rloo", "entropy_coef": 0.02}
    run_yaml.write_text(yaml.safe_dump(values))
    config = load_config(run_yaml, [])
    before = policy_of(tiny_model)
    run_training(config)
    learned = policy_of(config.run_dir / "model")
    print({"before": before, "learned": learned})
    print({"exploitability": [exploitability(before), exploitability(learned)], "value": value(learned, learned)})
    assert exploitability(before) > 0.3
    assert exploitability(learned) < 0.2  # the policy of one moment goes round the equilibrium
    assert value(learned, learned) == pytest.approx(-1 / 18, abs=0.06)
    assert value(learned, EQUILIBRIUM) > -1 / 18 - 0.03
    assert -value(EQUILIBRIUM, learned) > 1 / 18 - 0.06
    assert min(learned[2, "b"], learned[2, "pb"]) > 0.9  # a king calls
    assert max(learned[0, "b"], learned[0, "pb"]) < 0.3  # a jack does not
