"""The loss of an update is that of its tokens, however it is cut; evaluation changes nothing."""

from __future__ import annotations
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from areal_lite.config.supervised_config import SFTTrainerConfig
from areal_lite.errors import TrainingError
from areal_lite.trainer.forward.microbatches import plan_microbatches
from areal_lite.trainer.machine_metrics import peak_flops
from areal_lite.trainer.supervised import supervised_trainer
from areal_lite.trainer.supervised.supervised_trainer import shared_prefix, with_warmup
from tests.trainer.supervised_data import COMMON, gradients, run_out_of_memory, sequences, sft_trainer
from tests.trainer.training_data import sequence


def plain_loss(model: Path, items: list[dict[str, torch.Tensor]], averaging: str) -> tuple[torch.Tensor, object]:
    """Return the loss from full logits of one sequence at a time, and the model with its gradients."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for item in items:
        logprobs = plain(input_ids=item["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, item["input_ids"][1:, None])[:, 0]
        losses.append(-chosen[item["loss_mask"][1:].bool()])
    loss = torch.cat(losses).mean()
    if averaging == "sequence":
        loss = torch.stack([one.mean() for one in losses]).mean()
    loss.backward()
    return loss, plain


@pytest.mark.parametrize("averaging", ["token", "sequence"])
@pytest.mark.parametrize("common", [0, 20])
def test_loss_and_gradients_equal_those_of_each_sequence_alone(tiny: Path, averaging: str, common: int) -> None:
    # R21
    items = sequences(0, 7, common=common)
    expected, plain = plain_loss(tiny, items, averaging)
    trainer = sft_trainer(tiny, averaging=averaging, max_grad_norm=1e9)
    metrics = trainer.train_step(items)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["trained_tokens"] == sum(int(item["loss_mask"].sum()) for item in items)
    assert metrics["tokens"] == metrics["total_tokens"] == sum(len(item["input_ids"]) for item in items)
    assert metrics["truncated_sequences"] == 0
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@settings(max_examples=10)
@given(
    common=st.sampled_from([0, 20]),
    max_tokens=st.integers(1, 300),
    order=st.permutations(range(6)),
    averaging=st.sampled_from(["token", "sequence"]),
)
def test_loss_and_gradients_do_not_depend_on_micro_batch_size_or_order(
    tiny: Path, common: int, max_tokens: int, order: list[int], averaging: str
) -> None:
    # R21
    items = sequences(1, 6, common=common)
    whole = sft_trainer(tiny, averaging=averaging, max_tokens_per_microbatch=10_000)
    cut = sft_trainer(tiny, averaging=averaging, max_tokens_per_microbatch=max_tokens)
    expected = whole.train_step(items)
    metrics = cut.train_step([items[place] for place in order])
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
    ours = gradients(cut)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)


def test_a_long_common_prefix_is_computed_once(tiny: Path) -> None:
    trainer = sft_trainer(tiny)
    for common, rows in ((1, 6), (60, 1)):
        step = trainer._lay_out(sequences(1, 6, common=common))
        [microbatch] = trainer._cut(step, 10_000)
        assert len(microbatch.packed.lengths) == rows
        assert len([*trainer._cut(step, 70)]) > 1  # also of one group


@pytest.mark.parametrize(("common", "shared"), [(3, False), (4, True)])
def test_a_prefix_of_a_quarter_of_the_mean_length_is_computed_once(tiny: Path, common: int, shared: bool) -> None:
    items = [
        {"input_ids": torch.tensor([*range(5, 5 + common), *range(start, start + 17 - common)]), "loss_mask": mask}
        for start, mask in ((50, torch.arange(17) == 16), (90, torch.arange(17) == 16))
    ]
    sequences = sft_trainer(tiny)._lay_out(items).sequences
    assert (len({one.group_id for one in sequences}) == 1) == shared


def test_the_process_is_seeded_and_operations_of_training_are_counted(tiny: Path) -> None:
    trainer, done = sft_trainer(tiny), []
    assert torch.initial_seed() == 0
    trainer.scorer.register_forward_hook(lambda model, given, _: done.append(3 * model.flops(*given)))
    metrics = trainer.train_step(sequences(2, 5))
    assert done
    seconds = metrics["tokens"] / metrics["tokens_per_second"]
    assert metrics["mfu"] * seconds * peak_flops(trainer.device, torch.float32) == pytest.approx(sum(done))
    trainer.evaluate(sequences(2, 5))
    assert trainer.learner.take_flops() == 0
    trainer.load_counters({})  # of a checkpoint that does not have them
    assert trainer.total_tokens == 0


def test_evaluation_gives_the_loss_of_the_next_update_without_changing_weights(tiny: Path) -> None:
    items = sequences(2, 5)
    trainer = sft_trainer(tiny)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    evaluated = trainer.evaluate(items)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert trainer.learner.steps_done == 0
    assert trainer.train_step(items)["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert trainer.evaluate(items)["loss"] < evaluated["loss"]


@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_an_evaluation_does_not_depend_on_how_many_items_it_reads_at_once(
    tiny: Path, averaging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = sequences(2, 7)
    trainer = sft_trainer(tiny, averaging=averaging)
    whole = trainer.evaluate(items)
    monkeypatch.setattr("areal_lite.trainer.supervised.supervised_trainer.EVALUATED_AT_ONCE", 2)
    assert trainer.evaluate(iter(items)) == pytest.approx(whole, rel=1e-6)


def test_an_evaluation_has_a_token_cap_of_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = sft_trainer(tiny, max_tokens_per_microbatch=40, max_inference_length_per_device=10_000)
    caps, cut = [], trainer._cut
    monkeypatch.setattr(trainer, "_cut", lambda step, most: (caps.append(most), cut(step, most))[1])
    items = sequences(2, 6)
    loss = trainer.evaluate(items)["loss"]
    assert trainer.train_step(items)["loss"] == pytest.approx(loss, rel=1e-5)
    assert caps == [10_000, 40]
    run_out_of_memory(trainer.scorer, fails(MemoryError), above=1)
    with pytest.raises(TrainingError, match="5000 tokens: lower trainer.max_inference_length_per_device"):
        trainer.evaluate(items)


def test_a_pass_that_only_keeps_step_with_other_ranks_adds_nothing(tiny: Path) -> None:
    trainer = sft_trainer(tiny)
    step = trainer._lay_out(sequences(2, 3))
    (microbatch,) = trainer._cut(step, 10_000)
    loss = trainer._loss(step, dataclasses.replace(microbatch, counts=False))
    loss.backward()
    assert loss.item() == 0.0
    assert [bool(one.any()) for one in gradients(trainer).values()] == [False] * len(list(trainer.model.parameters()))


def test_tokens_are_counted_per_second(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=iter((10.0, 14.0)).__next__)
    trainer = sft_trainer(tiny)
    monkeypatch.setattr(supervised_trainer, "time", clock)
    metrics = trainer.train_step(sequences(2, 3))
    assert metrics["tokens_per_second"] == metrics["tokens"] / 4


def test_truncated_sequences_are_counted(tiny: Path) -> None:
    items = [item | {"truncated": torch.tensor(number % 2)} for number, item in enumerate(sequences(2, 5))]
    assert sft_trainer(tiny).train_step(items)["truncated_sequences"] == 2


def test_the_learning_rate_warms_up_and_then_follows_a_cosine(tiny: Path) -> None:
    # R20: int(0.25 * 9) = 2 steps of warm-up.
    trainer = sft_trainer(tiny, total_steps=9, warmup_ratio=0.25, lr_schedule="cosine", learning_rate=1.0)
    items = sequences(3, 2)
    rates = []
    for _ in range(9):
        rates.append(trainer.learner.learning_rate)
        trainer.learner.steps_done += 1
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.1
    assert trainer.train_step(items)["learning_rate"] == pytest.approx(0.0)


def test_warm_up_steps_are_rounded_down() -> None:
    # R20
    config = SFTTrainerConfig(**COMMON | {"warmup_ratio": 0.1})
    assert [with_warmup(config, total).warmup_steps for total in (9, 10, 19, 20)] == [0, 1, 1, 2]


def test_a_non_finite_update_is_skipped_and_recorded_and_the_third_in_a_row_ends_the_run(
    tiny: Path,
) -> None:
    # F67
    skipped_updates: list[dict[str, Any]] = []
    trainer = sft_trainer(tiny, on_skip=skipped_updates.append)
    assert trainer.train_step(sequences(4, 3))["skipped_updates"] == 0.0
    weights = trainer.model.get_input_embeddings().weight
    with torch.no_grad():
        weights[5, 0] = float("nan")
    before = weights.clone()
    items = sequences(4, 3)
    items[0]["input_ids"][0] = 5
    for _ in range(2):
        assert trainer.train_step([items[2], items[0]])["skipped_updates"] == 1.0
    with pytest.raises(TrainingError, match=r"step 3: loss nan .* the 3rd non-finite update in a row"):
        trainer.train_step(items[:1])
    torch.testing.assert_close(weights, before, rtol=0, atol=0, equal_nan=True)
    assert [(one["step"], one["rows"]) for one in skipped_updates] == [(1, [0, 2]), (2, [0, 2]), (3, [0])]
    assert math.isnan(skipped_updates[0]["loss"])


def fails(kind: type[Exception]) -> Callable[[], object]:
    def fail() -> None:
        raise kind("CUDA out of memory")

    return fail


@pytest.mark.parametrize("act", ["train_step", "evaluate"])
@pytest.mark.parametrize(
    "error",
    [fails(MemoryError), fails(torch.OutOfMemoryError), lambda: torch.empty(1 << 50)],
    ids=["python", "GPU", "CPU"],
)
def test_running_out_of_memory_once_halves_the_micro_batch(tiny: Path, act: str, error: Callable[[], object]) -> None:
    # F68
    calm, pressed = (sft_trainer(tiny, max_tokens_per_microbatch=128) for _ in range(2))
    run_out_of_memory(pressed.scorer, error, above=64)
    items = sequences(5, 6)
    expected, found = (getattr(trainer, act)(items) for trainer in (calm, pressed))
    assert (calm.learner.max_tokens, pressed.learner.max_tokens) == (128, 64)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    torch.testing.assert_close(list(pressed.model.parameters()), list(calm.model.parameters()), rtol=1e-3, atol=1e-5)
    run_out_of_memory(pressed.scorer, error, above=1)
    with pytest.raises(TrainingError, match="out of memory with micro-batches of 64 tokens: lower"):
        getattr(pressed, act)(items)


def test_other_torch_errors_are_not_treated_as_out_of_memory(tiny: Path) -> None:
    trainer = sft_trainer(tiny)
    run_out_of_memory(trainer.scorer, lambda: torch.zeros(2) @ torch.zeros(3), above=1)
    with pytest.raises(RuntimeError, match="size"):
        trainer.train_step(sequences(5, 2))
    assert trainer.learner.max_tokens == 4096


def test_sequences_of_a_block_stay_in_one_micro_batch() -> None:
    # Two sequences of 6 tokens take 12 of the 20; two of 5 do not fit beside them.
    assert plan_microbatches([5, 6, 4], max_tokens=20, num_blocks=[2, 2, 1]) == [[1], [0, 2]]


def test_the_shared_prefix_ends_where_members_differ_or_one_has_its_last_trained_token() -> None:
    assert shared_prefix([sequence([1, 2, 3, 4], [3]), sequence([1, 2, 9, 4], [3])]) == 2
    assert shared_prefix([sequence([1, 2, 3, 4], [3]), sequence([1, 2, 3, 4], [2, 3])]) == 3
    assert shared_prefix([sequence([1, 2, 3, 4], [3]), sequence([1, 2, 3, 4], [2])]) == 2
    assert shared_prefix([sequence([1, 2, 3], [2]), sequence([9, 2, 3], [2])]) == 0
