"""Losses of pairs: the two of a pair meet in one micro-batch, and every pair counts the same."""

from __future__ import annotations
from pathlib import Path
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.rl.step_tokens import StepCut
from tests.fixtures.tiny_model import build_tiny_model
from tests.trainer.supervised_data import (
    Item,
    dpo_trainer,
    gradients,
    pairs,
    reward_trainer,
    run_out_of_memory,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same shape."""
    return build_tiny_model(tmp_path_factory.mktemp("other"), seed=7)


def answer_logprob(model: object, item: Item, name: str) -> torch.Tensor:
    ids, mask = item[f"{name}_ids"], item[f"{name}_mask"]
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[mask[1:].bool()].sum()


def test_dpo_equals_the_formula_on_plain_logits(tiny: Path, other: Path) -> None:
    items, beta, smoothing = pairs(0, 5), 0.3, 0.1
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    policy = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    margins = torch.stack(
        [
            beta * (answer_logprob(policy, item, "chosen") - answer_logprob(reference, item, "chosen").detach())
            - beta * (answer_logprob(policy, item, "rejected") - answer_logprob(reference, item, "rejected").detach())
            for item in items
        ]
    )
    loss = (-(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)).mean()
    loss.backward()

    trainer = dpo_trainer(tiny, beta=beta, label_smoothing=smoothing, max_grad_norm=1e9)
    trainer.model.load_state_dict(policy.state_dict())  # the reference stays what the run began with
    metrics = trainer.train_step(items)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert metrics["accuracy"] == pytest.approx((margins > 0).float().mean().item())
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, policy.get_parameter(name).grad, rtol=1e-3, atol=1e-5)


@settings(max_examples=8)
@given(max_tokens=st.integers(1, 400), order=st.permutations(range(5)))
def test_a_pair_loss_does_not_depend_on_micro_batch_size_or_order(
    tiny: Path, other: Path, max_tokens: int, order: list[int]
) -> None:
    # R10, R15, R21
    items = pairs(1, 5)
    found = []
    for tokens, places in ((10_000, range(5)), (max_tokens, order)):
        trainer = dpo_trainer(tiny, max_tokens_per_microbatch=tokens)
        trainer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(other).state_dict())
        metrics = trainer.train_step([items[place] for place in places])
        found.append({name: metrics[name] for name in ("loss", "margin", "accuracy", "grad_norm")})
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9))
@settings(max_examples=30)
@pytest.mark.parametrize("size", [1, 3])
def test_pairs_stay_together_on_one_rank_and_in_one_micro_batch(
    untied_dpo: object, size: int, lengths: list[tuple[int, int, int]]
) -> None:
    # R15, R-B10: also where there are fewer pairs than ranks; every pair is computed exactly once.
    items = []
    for prompt, *answers in lengths:
        item = {}
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            item[f"{name}_ids"] = torch.arange(3, 3 + prompt + answer)
            item[f"{name}_mask"] = torch.from_numpy(np.repeat([0, 1], [prompt, answer]))
        items.append(item)
    step = untied_dpo._lay_out(items)
    seen = []
    for rank in range(size):
        cut = StepCut(
            step.sequences,
            untied_dpo.scorer,
            ranks=OneOf(rank, size),
            device=torch.device("cpu"),
            units=[one.group_id for one in step.sequences],
            whole=True,
        )
        for microbatch in cut(range(len(step.sequences)), 50):
            if microbatch.counts:
                sequences = torch.unique(step.of_token[microbatch.tokens]).tolist()
                assert all(sequence ^ 1 in sequences for sequence in sequences)
                seen += sequences
    assert sorted(seen) == list(range(2 * len(items)))


class OneOf(Ranks):
    """A rank that need not ask the others how many micro-batches they have."""

    def most(self, count: int, device: torch.device) -> int:
        return count


@pytest.fixture(scope="module")
def untied_dpo(untied: Path) -> object:
    return dpo_trainer(untied)


def test_dpo_starts_without_a_margin_and_learns_to_prefer(tiny: Path) -> None:
    items = pairs(2, 6)
    trainer = dpo_trainer(tiny, learning_rate=3e-3)
    first = trainer.evaluate(items)
    assert first["margin"] == 0.0
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    for _ in range(8):
        trainer.train_step(items)
    last = trainer.evaluate(items)
    assert last["accuracy"] == 1.0
    assert last["margin"] > 1.0
    assert last["margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"], rel=1e-5)


def test_with_adapters_the_reference_is_the_base_model(tiny: Path) -> None:
    pytest.importorskip("peft")
    items = pairs(3, 6)
    trainer = dpo_trainer(tiny, lora={"rank": 4}, learning_rate=1e-2)
    assert trainer.evaluate(items)["margin"] == 0.0
    for _ in range(5):
        trainer.train_step(items)
    assert trainer.evaluate(items)["margin"] > 0.5


@pytest.mark.parametrize("act", ["train_step", "evaluate"])
def test_running_out_of_memory_in_the_reference_halves_the_micro_batch(tiny: Path, act: str) -> None:
    # F68: the two of a pair still meet in one micro-batch.
    calm, pressed = (dpo_trainer(tiny, max_tokens_per_microbatch=128) for _ in range(2))
    assert pressed._reference is not None
    run_out_of_memory(pressed._reference, lambda: torch.empty(1 << 50), above=64)
    expected, found = (getattr(trainer, act)(pairs(5, 8)) for trainer in (calm, pressed))
    assert (calm.learner.max_tokens, pressed.learner.max_tokens) == (128, 64)
    for name in ("loss", "margin", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


def test_a_reward_model_learns_which_answer_is_better(tiny: Path) -> None:
    rng = np.random.default_rng(0)

    def labelled(count: int) -> list[Item]:
        """Return pairs of which the chosen answer has a 65 at a random place."""
        items = pairs(int(rng.integers(1 << 30)), count)
        for item in items:
            place = -int(rng.integers(1, int(item["chosen_mask"].sum()) + 1))
            for name in ("chosen_ids", "rejected_ids"):
                item[name][item[name] == 65] = 66
            item["chosen_ids"][place] = 65
        return items

    trainer = reward_trainer(tiny, learning_rate=1e-2)
    held_out = labelled(40)
    first = trainer.evaluate(held_out)
    assert (first["accuracy"], first["margin"]) == (0.0, 0.0)  # a new head is 0: no answer is above another
    for _ in range(40):
        metrics = trainer.train_step(labelled(16))
    assert metrics["loss"] < 0.5
    assert trainer.evaluate(held_out)["accuracy"] > 0.8
