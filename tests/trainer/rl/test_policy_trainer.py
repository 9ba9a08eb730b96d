from __future__ import annotations
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import (
    AggregationMode,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    LoRAConfig,
    TrainerConfig,
)
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.models.truncation import Truncation
from areal_lite.trainer.estimators import Estimate, EstimatorInputs
from areal_lite.trainer.machine_metrics import peak_flops
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES
from areal_lite.trainer.rl.policy_trainer import EngineSampling, PolicyTrainer
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut
from tests.trainer.training_data import drawn_batch, packed_together, sequence, training_batch


def make_trainer(
    model_path: Path,
    *,
    seed: int = 1,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    **changes: Any,
) -> PolicyTrainer:
    given: dict[str, Any] = {
        "total_steps": 100,
        "learning_rate": 1e-3,
        "dtype": "float32",
        "num_threads": 1,
        "device": "cpu",
    }
    config = TrainerConfig(**given | changes)
    sampling = EngineSampling(temperature=temperature, truncation=truncation)
    return PolicyTrainer(config, model_path=str(model_path), seed=seed, sampling=sampling)


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tiny: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of one batch in one micro-batch."""
    trainer = make_trainer(tiny, kl=KLConfig(coef=0.1), entropy_coef=0.01, max_grad_norm=1e9)
    return trainer.train_step(training_batch(drawn_batch(0)), version=5), gradients(trainer)


@settings(max_examples=12, deadline=None)
@given(cap=st.integers(8, 300), order=st.permutations(range(12)), share=st.booleans())
def test_loss_and_gradients_do_not_depend_on_how_the_step_is_cut(
    tiny: Path,
    whole: tuple[dict[str, float], dict[str, torch.Tensor]],
    cap: int,
    order: list[int],
    share: bool,
) -> None:
    trainer = make_trainer(
        tiny, kl=KLConfig(coef=0.1), entropy_coef=0.01, max_grad_norm=1e9, max_tokens_per_microbatch=cap
    )
    trainer._policy.shares_prefixes = share
    batch = training_batch(drawn_batch(0))
    batch.reorder(order)
    metrics = trainer.train_step(batch, version=5)
    drift = "staleness_drift/log_prob_diff_mean"
    for name in ("loss", "entropy", "kl", "grad_norm", drift, "trained_tokens", "reward_mean"):
        assert metrics[name] == pytest.approx(whole[0][name], rel=1e-3, abs=1e-6), name
    torch.testing.assert_close(gradients(trainer), whole[1], atol=1e-5, rtol=1e-3)


CHOICES: dict[str, dict[str, Any]] = {
    "clip_cov": {"token_share": 0.2, "min_covariance": 0.0},
    "kl_cov": {"token_share": 0.2},
    "m2po": {"max_second_moment": 9.0},
}
"""Options under which losses that choose among the tokens of a minibatch have a choice here."""


CUTS: list[dict[str, Any]] = [
    *({"loss": loss, "loss_kwargs": CHOICES.get(loss, {})} for loss in POLICY_LOSSES),
    *({"loss": loss, "loss_kwargs": options, "proximal": "behaviour"} for loss, options in CHOICES.items()),
    *({"loss_aggregation": mode} for mode in get_args(AggregationMode) if not mode.endswith("norm")),
    {"loss_aggregation": "seq-mean-token-sum-norm", "loss_scale": 32},
    {"correction": CorrectionConfig(level="sequence", normalize=True, max_episode_kl=1.0)},
]


@pytest.mark.parametrize("changes", CUTS, ids=lambda changes: ",".join(map(str, changes.values())))
def test_no_loss_depends_on_the_cut_of_its_minibatches(tiny: Path, changes: dict[str, Any]) -> None:
    """L10, also of losses that choose among all tokens of a minibatch; the second one is scored with new weights."""
    # A large epsilon, so that the first update does not turn rounding into whole steps.
    given = changes | {"minibatches_per_step": 2, "max_grad_norm": 1e9, "adam_eps": 1e-3}
    whole, cut = make_trainer(tiny, **given), make_trainer(tiny, max_tokens_per_microbatch=16, **given)
    batch, shuffled = training_batch(drawn_batch(0)), training_batch(drawn_batch(0))
    shuffled.reorder(list(range(len(shuffled)))[::-1])
    expected, found = whole.train_step(batch, version=5), cut.train_step(shuffled, version=5)
    torch.testing.assert_close(gradients(cut), gradients(whole), atol=1e-5, rtol=1e-3)
    for name in {"loss", "grad_norm", "approx_kl", "clip_fraction", "drifted_fraction"} & set(expected):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    if changes.get("loss") in ("clip_cov", "m2po"):
        assert 0 < expected["clip_fraction"] < 1
    assert ("seconds_choice" in expected) == (changes.get("loss") in CHOICES)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_a_penalty_at_the_reference_does_not_depend_on_the_cut(tiny: Path, estimator: str) -> None:
    """At first policy and reference are the same, and differences have the sign of their rounding."""
    after = []
    for cap in (4096, 16):
        kl = KLConfig(coef=1.0, estimator=estimator)
        caps = {"max_tokens_per_microbatch": cap, "minibatches_per_step": 2}
        trainer = make_trainer(tiny, kl=kl, adam_eps=1e-3, **caps)
        for version in range(2):
            trainer.train_step(training_batch(drawn_batch(0)), version=version)
        after.append(weights(trainer))
    torch.testing.assert_close(*after, atol=1e-6, rtol=1e-5)


def test_groups_share_updates_anew_in_each_step_and_alike_in_a_resumed_run(tiny: Path) -> None:
    trainer, resumed = (make_trainer(tiny, minibatches_per_step=2) for _ in range(2))
    batch = training_batch(drawn_batch(0, groups=6))
    splits = []
    for step in range(4):
        trainer.learner.steps_done = resumed.learner.steps_done = step
        splits.append(trainer.begin(batch, version=step).minibatches)
        assert resumed.begin(batch, version=step).minibatches == splits[-1]
    assert all(one != other for one, other in itertools.combinations(splits, 2))


@pytest.mark.parametrize("proximal", ["trainer", "behaviour"])
def test_a_loss_chooses_among_a_later_minibatch_with_the_weights_of_then(tiny: Path, proximal: str) -> None:
    """The first one is chosen by the pass ahead, or by one of its own if that pass is of other weights."""
    changes: dict[str, Any] = {"loss": "clip_cov", "loss_kwargs": CHOICES["clip_cov"], "proximal": proximal}
    trainer = make_trainer(tiny, minibatches_per_step=2, **changes)
    updates: list[int] = []
    trainer.learner.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    fill, scored = trainer._policy_update.fill, []

    def spy(step: Any, phase: Any, chosen: Any, score: Any) -> None:
        scored.append((list(chosen), len(updates)))
        fill(step, phase, chosen, score)

    trainer._policy_update.fill = spy  # type: ignore[method-assign]
    step = trainer.begin(training_batch(drawn_batch(0)), version=5)
    trainer.score_proximal(step)
    trainer.estimate_advantages(step)
    trainer.update_policy(step)
    first, second = step.minibatches
    assert scored == [(list(step.all_indices) if proximal == "trainer" else first, 0), (second, 1)]
    assert step.choice is not None
    assert bool(step.choice[step.tokens.chosen(second)].any())
    assert not bool(step.choice[step.tokens.chosen(first)].any())


def surprise(inputs: EstimatorInputs) -> Estimate:
    return Estimate(-inputs.needed("proximal_logprobs"))


def test_the_trainer_computes_the_inputs_a_users_estimator_needs(tiny: Path) -> None:
    trainer = make_trainer(tiny, advantage=f"{__name__}.surprise")
    step = trainer.begin(training_batch(drawn_batch(0)), version=5)
    trainer.score_proximal(step)
    trainer.correct(step)
    trainer.estimate_advantages(step)
    assert torch.equal(step.tokens.advantages, -step.tokens.proximal)
    assert bool((step.tokens.advantages > 0).all())


def test_an_unbiased_kl_penalty_weighs_each_token_by_policy_over_behaviour(tiny: Path) -> None:
    """Nothing else has a gradient: all rewards are equal. At a ratio of 2 everywhere it is twice as large."""
    batch = training_batch([sequence([5, 6, 7, 8], [2, 3]), sequence([5, 9, 7], [1, 2])])
    found = {}
    for unbiased in (False, True):
        kl = KLConfig(coef=1.0, estimator="k1", unbiased=unbiased)
        trainer = make_trainer(tiny, kl=kl, max_grad_norm=1e9)
        step = trainer.begin(batch, version=1)
        trainer._policy_update.score_proximal(step, step.all_indices)
        step.tokens.behaviour = step.tokens.proximal - math.log(2)
        trainer.score_reference(step)
        trainer.estimate_advantages(step)
        trainer.update_policy(step)
        found[unbiased] = gradients(trainer)
    torch.testing.assert_close(found[True], {name: 2 * value for name, value in found[False].items()})
    assert any(bool(value.any()) for value in found[True].values())


def with_teacher(batch: list[TokenSequence], trained: np.ndarray) -> DataProto:
    """Return the batch with the reward 0 and a teacher's log-probs of its ``trained`` tokens."""
    first = 0
    for one in batch:
        one.reward, scores = 0.0, np.zeros(len(one), np.float32)
        scores[one.loss_mask] = trained[first : first + one.num_trained_tokens]
        one.reference_logprobs, first = scores, first + one.num_trained_tokens
    return training_batch(batch)


def test_a_teachers_penalty_in_the_advantage_is_the_reverse_kl_of_each_token(tiny: Path) -> None:
    """With a reward of 0 it is the whole advantage, so nothing pulls at a policy that equals its teacher."""
    batch, teacher = drawn_batch(4), {"addresses": ["127.0.0.1:1"]}
    trainer = make_trainer(tiny, kl=KLConfig(coef=2.0, estimator="k1", place="advantage", teacher=teacher))
    assert trainer._reference is None
    with pytest.raises(TrainingError, match=f"{len(batch)} of {len(batch)} sequences have no reference_logprobs"):
        trainer.train_step(training_batch(batch), version=0)
    own = trainer.logprobs_of(batch).numpy()
    other = own + np.random.default_rng(0).normal(size=len(own)).astype(np.float32)
    for scores in (other, own):
        step = trainer.begin(with_teacher(batch, scores), version=0)
        for stage in (trainer.score_proximal, trainer.score_reference, trainer.penalize_kl, trainer.correct):
            stage(step)
        trainer.estimate_advantages(step)
        np.testing.assert_allclose(step.tokens.advantages.numpy(), -2.0 * (own - scores), atol=1e-4)
    metrics = trainer.train_step(with_teacher(batch, other), version=0)
    assert metrics["kl"] == pytest.approx(float((own - other).mean()), abs=1e-4)


def first_gradients(model_path: Path, kl_coef: float) -> dict[str, torch.Tensor]:
    """Return those of the first of two updates, where the pass that scores tokens ahead errs a little."""
    options = {"token_share": 1.0, "kl_coef": kl_coef}
    trainer = make_trainer(model_path, loss="kl_cov", loss_kwargs=options, minibatches_per_step=2)
    fill, seen = trainer._policy_update.fill, []

    def erring(step: Any, phase: Any, chosen: Any, score: Any) -> None:
        fill(step, phase, chosen, lambda part: {name: values * 1.001 for name, values in score(part).items()})

    trainer._policy_update.fill = erring  # type: ignore[method-assign]
    trainer.learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(trainer)))
    trainer.train_step(training_batch(drawn_batch(0)), version=5)
    return seen[0]


def test_the_first_update_of_a_step_has_a_ratio_of_exactly_1(tiny: Path) -> None:
    """To the last bit: at any distance kl_cov would pull at the tokens."""
    torch.testing.assert_close(first_gradients(tiny, 0.0), first_gradients(tiny, 1e3), atol=1e-6, rtol=1e-5)


def test_max_episode_kl_masks_bad_answers_far_from_the_policy(tiny: Path) -> None:
    """Only the worse of the two is far from what sampled it, so nothing but the better one has a gradient."""
    batch = [
        sequence([5, 6, 7], [2], reward=reward, behaviour=[0, 0, logprob])
        for reward, logprob in ((1.0, -1.0), (0.0, 0.0))
    ]
    bounded, alone = (
        make_trainer(tiny, advantage="reinforce", advantage_mean="batch", max_grad_norm=1e9, correction=correction)
        for correction in (CorrectionConfig(level="none", max_episode_kl=5.1), CorrectionConfig(level="none"))
    )
    metrics = bounded.train_step(training_batch(batch), version=0)
    assert metrics["drifted_fraction"] == 0.5
    alone._policy_update._with_gradient = lambda step: {step.episodes[0]}  # type: ignore[method-assign]
    alone.train_step(training_batch(batch), version=0)
    torch.testing.assert_close(gradients(bounded), gradients(alone), atol=1e-6, rtol=1e-5)


def test_which_groups_share_an_update_does_not_depend_on_the_order_of_the_batch(tiny: Path) -> None:
    trainers = [make_trainer(tiny, minibatches_per_step=2) for _ in range(2)]
    batch = drawn_batch(0, groups=4)
    for trainer, ordered in zip(trainers, (batch, batch[::-1]), strict=True):
        trainer.train_step(training_batch(ordered), version=0)
    torch.testing.assert_close(weights(trainers[0]), weights(trainers[1]), atol=1e-5, rtol=1e-4)


def test_a_users_loss_gets_episodes_without_an_advantage(tiny: Path) -> None:
    silent = [
        dataclasses.replace(one, reward=2.0, group_id=f"s{n}") for n in range(2) for one in drawn_batch(2, groups=1)
    ]
    batch = training_batch(drawn_batch(1, groups=1) + silent)
    trainer = make_trainer(tiny, loss="tests.trainer.training_data.squared_ratio", minibatches_per_step=3)
    metrics = trainer.train_step(batch, version=0)
    assert metrics["computed_tokens"] == metrics["trained_tokens"]


def test_critic_metrics_are_means_over_the_critics_tokens(tiny: Path) -> None:
    """Also while the policy waits."""
    critic = CriticConfig(learning_rate=1.0, updates_before_policy=1)
    trainer = make_trainer(tiny, advantage="gae", critic=critic, minibatches_per_step=3)
    metrics = trainer.train_step(training_batch(drawn_batch(0)), version=0)
    assert (metrics["computed_tokens"], metrics["loss"], metrics["grad_norm"]) == (0, 0, 0)
    assert 0 < metrics["value_clip_fraction"] <= 1
    assert "value_mean" in metrics
    metrics = trainer.train_step(training_batch(drawn_batch(0)), version=0)
    assert metrics["computed_tokens"] == metrics["trained_tokens"]
    assert {name: learner.steps_done for name, learner in trainer.learners.items()} == {"policy": 2, "critic": 2}


def test_padding_in_a_micro_batch_changes_nothing(tiny: Path) -> None:
    """A long sequence of another group causes padding; its advantage is 0, so it adds no gradient."""
    group = [sequence([5, 6, 7, 8 + i], [3], reward=float(i), group="a") for i in range(2)]
    stranger = [sequence(list(range(3, 60)), [50], group="b")]
    results = []
    for batch in (group, group + stranger):
        # Without a KL term the extra sequence would be skipped in the forward pass; this term has weight 0.
        trainer = make_trainer(tiny, max_grad_norm=1e9, kl=KLConfig(coef=1e-12))
        loss = trainer.train_step(training_batch(batch), version=0)["loss"]
        results.append((loss * len(batch), {name: grad * len(batch) for name, grad in gradients(trainer).items()}))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_skipping_groups_without_advantage_changes_nothing(tiny: Path) -> None:
    batch = drawn_batch(1, groups=2)
    silent = [dataclasses.replace(one, reward=2.0, group_id="silent") for one in drawn_batch(2, groups=1)]
    skipping, forced = make_trainer(tiny), make_trainer(tiny)
    step = training_batch(batch + silent)
    forced._policy_update._with_gradient = lambda step: set(step.episodes)  # type: ignore[method-assign]
    metrics = skipping.train_step(step, version=0)
    expected = forced.train_step(step, version=0)
    assert metrics["trained_tokens"] == expected["trained_tokens"] == expected["computed_tokens"]
    assert metrics["computed_tokens"] == sum(one.num_trained_tokens for one in batch)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(gradients(skipping), gradients(forced), atol=1e-6, rtol=1e-4)


def test_a_batch_without_advantages_still_counts_as_a_step(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    before = weights(trainer)
    batch = training_batch([sequence([5, 6, 7], [2], group=name) for name in "ab"])
    metrics = trainer.train_step(batch, version=0)
    assert (metrics["computed_tokens"], metrics["grad_norm"], metrics["loss"]) == (0, 0, 0)
    assert metrics["skipped_updates"] == 0
    torch.testing.assert_close(weights(trainer), before, atol=0, rtol=0)


def test_the_same_seed_gives_bit_equal_weights(tiny: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = make_trainer(tiny, minibatches_per_step=2, dtype="bfloat16", kl=KLConfig(coef=0.01))
        for step in range(3):
            trainer.train_step(training_batch(drawn_batch(step, groups=4)), version=step)
        runs.append(weights(trainer))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_policy_learns_what_is_rewarded(tiny: Path) -> None:
    """A bandit: after [5, 6], token 9 pays 1 and every other 0; tokens are drawn from the policy itself."""
    trainer = make_trainer(tiny, learning_rate=3e-3)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(25):
        with torch.no_grad():
            logprobs = torch.log_softmax(trainer.model(torch.tensor([[5, 6]])).logits[0, -1, :16], -1)
        drawn = torch.multinomial(logprobs.exp(), 32, replacement=True, generator=generator).tolist()
        batch = [
            sequence([5, 6, token], [2], reward=float(token == 9), behaviour=[0, 0, logprobs[token]]) for token in drawn
        ]
        rewards.append(trainer.train_step(training_batch(batch), version=step)["reward_mean"])
    assert rewards[0] < 0.5
    assert sum(rewards[-3:]) / 3 > 0.9


def test_fresh_data_has_no_mismatch_ratio_one_and_no_staleness(tiny: Path) -> None:
    trainer = make_trainer(tiny, temperature=0.7)
    with torch.no_grad():
        logits = trainer.model(torch.tensor([[5, 6]])).logits[0, -1] / 0.7
    logprobs = torch.log_softmax(logits, -1)
    batch = [
        sequence([5, 6, t], [2], reward=float(t), behaviour=[0, 0, logprobs[t]], versions=[-1, -1, 3]) for t in (7, 8)
    ]
    metrics = trainer.train_step(training_batch(batch), version=3)
    assert metrics["engine_mismatch/log_prob_diff_max"] < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0)
    assert (metrics["staleness_max"], metrics["clip_fraction"], metrics["approx_kl"]) == (0, 0, 0)


@pytest.mark.parametrize("minibatches", [2, 3])
def test_later_minibatches_are_clipped_around_the_weights_at_the_start_of_the_step(
    tiny: Path, minibatches: int
) -> None:
    trainer = make_trainer(tiny, minibatches_per_step=minibatches, learning_rate=1e-2)
    metrics = trainer.train_step(training_batch(drawn_batch(4)), version=0)
    assert metrics["seconds_proximal"] > 0
    assert metrics["approx_kl"] > 0
    assert trainer.learner.optimizer.state[next(trainer.model.parameters())]["step"] == minibatches


def test_each_update_has_the_learning_rate_of_its_step(tiny: Path) -> None:
    trainer, rates = make_trainer(tiny, warmup_steps=2, lr_schedule="linear", total_steps=4), []
    for step in range(4):
        trainer.train_step(training_batch(drawn_batch(step)), version=step)
        rates += {group["lr"] for group in trainer.learner.optimizer.param_groups}
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


def test_the_critic_has_a_learning_rate_of_its_own_step(tiny: Path) -> None:
    critic = CriticConfig(learning_rate=1e-3, warmup_steps=4)
    trainer = make_trainer(tiny, advantage="gae", critic=critic, minibatches_per_step=2)
    metrics = [trainer.train_step(training_batch(drawn_batch(step)), version=step) for step in range(3)]
    assert [one["critic_learning_rate"] for one in metrics] == pytest.approx([0.0, 2.5e-4, 5e-4])


def test_a_frozen_weight_costs_no_gradient(tiny: Path) -> None:
    assert make_trainer(tiny).learner.passes == 3
    assert 2 < make_trainer(tiny, lora=LoRAConfig(rank=1)).learner.passes < 2.5


def test_the_reference_keeps_the_initial_weights(tiny: Path) -> None:
    trainer = make_trainer(tiny, kl=KLConfig(coef=0.1), learning_rate=1e-2)
    assert trainer._reference is not None
    assert not any(parameter.requires_grad for parameter in trainer._reference.parameters())
    first, second = (trainer.train_step(training_batch(drawn_batch(step)), version=step)["kl"] for step in range(2))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-4


def poison(trainer: PolicyTrainer, value: float) -> None:
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = value


def test_three_consecutive_non_finite_updates_stop_the_run(tiny: Path) -> None:
    trainer, batch = make_trainer(tiny), training_batch(drawn_batch(0))
    poison(trainer, math.nan)
    before = weights(trainer)
    for _ in range(2):
        assert trainer.train_step(batch, version=0)["skipped_updates"] == 1
    torch.testing.assert_close(weights(trainer), before, atol=0, rtol=0, equal_nan=True)
    with pytest.raises(TrainingError, match=r"step 2: .* the 3rd non-finite update in a row"):
        trainer.train_step(batch, version=0)


def test_a_finite_update_resets_the_count_of_skipped_ones(tiny: Path) -> None:
    trainer, batch = make_trainer(tiny), training_batch(drawn_batch(0))
    skipped = []
    for value in (math.nan, math.nan, 1.0, math.nan, math.nan, 1.0):
        poison(trainer, value)
        skipped.append(trainer.train_step(batch, version=0)["skipped_updates"])
    assert skipped == [1, 1, 0, 1, 1, 0]


def run_out_of_memory(trainer: PolicyTrainer, module: torch.nn.Module, times: int) -> list[int]:
    """Have forward passes of ``module`` fail so often, and return the list that fills with the tokens of each pass."""
    passes: list[int] = []

    def refuse(_: Any, arguments: tuple[Any, ...]) -> None:
        passes.append(arguments[0].input_ids.numel())
        if len([size for size in passes if size > 64]) <= times and passes[-1] > 64:
            raise MemoryError

    module.register_forward_pre_hook(refuse)
    return passes


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_f68_running_out_of_memory_once_halves_the_micro_batch(tiny: Path, role: str) -> None:
    settings: dict[str, Any] = {
        "advantage": "gae",
        "critic": CriticConfig(learning_rate=1e-3),
        "kl": KLConfig(coef=0.1, place="reward"),
        "max_tokens_per_microbatch": 128,
        "minibatches_per_step": 2,
    }
    calm, pressed = make_trainer(tiny, **settings), make_trainer(tiny, **settings)
    passes = run_out_of_memory(pressed, pressed.learners[role].module, times=1)
    metrics = [trainer.train_step(training_batch(drawn_batch(0)), version=5) for trainer in (calm, pressed)]
    assert pressed.learners[role].max_tokens == 64
    assert len([size for size in passes if size > 64]) == 1  # the one that failed
    for name, value in metrics[0].items():
        if not name.startswith(("seconds", "ms_per", "tokens_per", "mfu")):
            assert metrics[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    torch.testing.assert_close(weights(pressed), weights(calm), atol=1e-4, rtol=1e-3)


def test_f68_running_out_of_memory_again_ends_the_run(tiny: Path) -> None:
    trainer = make_trainer(tiny, max_tokens_per_microbatch=256)
    run_out_of_memory(trainer, trainer.learner.module, times=2)
    with pytest.raises(TrainingError, match="out of memory with micro-batches of 128 tokens: lower trainer.max_tokens"):
        trainer.train_step(training_batch(drawn_batch(0)), version=5)


def test_f67_a_skipped_update_is_recorded_with_its_tasks(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    skipped_updates: list[dict[str, Any]] = []
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, dtype="float32", device="cpu")
    trainer = PolicyTrainer(config, model_path=str(tiny), seed=1, on_skip=skipped_updates.append)
    poison(trainer, math.nan)
    batch = [dataclasses.replace(one, task_id=f"t{place}") for place, one in enumerate(drawn_batch(0))]
    trainer.train_step(training_batch(batch), version=0)
    (skipped,) = skipped_updates
    assert sorted(skipped["task_ids"]) == sorted(one.task_id for one in batch)
    assert (skipped["step"], skipped["role"], skipped["applied"]) == (0, "policy", False)
    assert "skipped a non-finite update" in caplog.text


def test_f67_a_skipped_update_of_the_critic_is_recorded_as_such(tiny: Path) -> None:
    skipped_updates: list[dict[str, Any]] = []
    critic = CriticConfig(learning_rate=1e-3, updates_before_policy=1)
    config = TrainerConfig(total_steps=2, learning_rate=1e-3, device="cpu", advantage="gae", critic=critic)
    trainer = PolicyTrainer(config, model_path=str(tiny), seed=1, on_skip=skipped_updates.append)
    step = trainer.begin(training_batch(drawn_batch(0)), version=0)
    step.tokens.returns.fill_(math.inf)
    trainer.update_critic(step)
    assert [one["role"] for one in skipped_updates] == ["critic"]


@pytest.mark.parametrize(("key", "value"), [("rewards", math.nan), ("baselines", math.inf), ("logprobs", -math.inf)])
def test_a_non_finite_number_in_a_batch_ends_the_run_and_names_its_task(tiny: Path, key: str, value: float) -> None:
    batch = training_batch([dataclasses.replace(one, task_id=f"t{n}") for n, one in enumerate(drawn_batch(0))])
    batch.batch["baselines"] = batch.batch["rewards"].clone()
    batch.batch[key][3] = value
    trainer = make_trainer(tiny)
    with pytest.raises(TrainingError, match=f"step 7: {key} of task t3 must be finite and are not: fail the"):
        trainer.train_step(batch, version=7)
    assert trainer.steps_done == 0


def test_no_advantages_are_computed_from_a_diverged_model(tiny: Path) -> None:
    trainer = make_trainer(tiny, advantage="gae", critic=CriticConfig(learning_rate=1e-3))
    assert trainer.critic is not None
    with torch.no_grad():
        next(trainer.critic.module.parameters())[:] = math.nan
    batch = [dataclasses.replace(one, task_id=f"t{n}") for n, one in enumerate(drawn_batch(0))]
    with pytest.raises(TrainingError, match="values of task t0, t1, .*, t7 and 4 more must be finite"):
        trainer.train_step(training_batch(batch), version=0)


def test_no_penalty_is_taken_from_a_diverged_reference(tiny: Path) -> None:
    trainer = make_trainer(tiny, kl=KLConfig(coef=0.1, place="reward"))
    assert trainer._reference is not None
    with torch.no_grad():
        next(trainer._reference.parameters())[:] = math.nan
    with pytest.raises(TrainingError, match="reference of task .* must be finite"):
        trainer.train_step(training_batch(drawn_batch(0)), version=0)


def test_a_batch_without_trained_tokens_is_an_error(tiny: Path) -> None:
    with pytest.raises(TrainingError, match="none of the 1 sequences has a trained token"):
        make_trainer(tiny).train_step(training_batch([sequence([5, 6], [])]), version=0)


def test_a_batch_is_checked_before_anything_is_computed(tiny: Path) -> None:
    """V64"""
    trainer, batch = make_trainer(tiny), training_batch(drawn_batch(0))
    del batch.batch["rewards"]
    with pytest.raises(ValueError, match="has no 'rewards'"):
        trainer.train_step(batch, version=0)
    assert trainer.steps_done == 0


def test_sequences_with_images_are_refused(tiny: Path) -> None:
    image = {"pixel_values": torch.zeros(1)}
    batch = training_batch([dataclasses.replace(one, multi_modal_inputs=image) for one in drawn_batch(0)])
    with pytest.raises(TrainingError, match="12 of 12 sequences have multi_modal_inputs"):
        make_trainer(tiny).train_step(batch, version=0)


def test_a_batch_joined_from_parts_trains_like_the_whole(tiny: Path) -> None:
    """V64"""
    whole, staged = training_batch(drawn_batch(0)), training_batch(drawn_batch(0))
    rewards = staged.pop(["rewards"])
    staged = DataProto.concat(staged.chunk(3)).union(rewards)
    trainers = [make_trainer(tiny), make_trainer(tiny)]
    for trainer, batch in zip(trainers, (whole, staged), strict=True):
        trainer.train_step(batch, version=0)
    torch.testing.assert_close(weights(trainers[0]), weights(trainers[1]), atol=0, rtol=0)


def test_gradient_checkpointing_gives_the_same_gradients(tiny: Path) -> None:
    plain, recomputing = make_trainer(tiny), make_trainer(tiny, gradient_checkpointing=True)
    for trainer in (plain, recomputing):
        trainer.train_step(training_batch(drawn_batch(0)), version=0)
    torch.testing.assert_close(gradients(recomputing), gradients(plain), atol=1e-6, rtol=1e-5)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a folder with config.json and model.safetensors"):
        make_trainer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot be loaded as a causal LM"):
        make_trainer(tmp_path)


def test_a_missing_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal LM"):
        make_trainer(Path("no/such/model"))


def test_a_missing_gpu_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        make_trainer(tiny, device="cuda")


def test_metrics_are_flat_floats(tiny: Path) -> None:
    batch = drawn_batch(0)
    metrics = make_trainer(tiny).train_step(training_batch(batch), version=7)
    assert not {"seconds_proximal", "value_mean", "kept_mass"} & metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["trained_tokens"] == sum(one.num_trained_tokens for one in batch)
    assert metrics["staleness_max"] == max(one.staleness(7) or 0 for one in batch)


@pytest.mark.parametrize(
    ("ids", "behaviour", "versions", "message"),
    [
        ([3, 4, 259], [0.0, -1.0, -1.0], [0, 0, 0], r"token id 259 is not in the vocabulary \[0, 259\).*this model"),
        ([3, -1, 5], [0.0, -1.0, -1.0], [0, 0, 0], "token id -1 is not in the vocabulary"),
        ([3, 4, 5], [0.0, -1.0, 0.7], [0, 0, 0], "step 2: logprobs of task 7 must be at most 0 and reach 0.7: record"),
        ([3, 4, 5], [0.0, -1.0, -math.inf], [0, 0, 0], "step 2: logprobs of task 7 must be finite and are not: fail"),
        ([3, 4, 5], [0.0, -1.0, -1.0], [0, 2, 3], "step 2: versions of task 7 must be at most 2 and reach 3: record"),
    ],
)
def test_tokens_that_nothing_can_have_sampled_are_refused(
    tiny: Path, ids: list[int], behaviour: list[float], versions: list[int], message: str
) -> None:
    trainer = make_trainer(tiny)
    before = weights(trainer)
    good = sequence([0, 4, 258], [1, 2], reward=0.0, behaviour=[0.0, 1e-6, -1.0], versions=[0, 2, 2])
    bad = dataclasses.replace(sequence(ids, [1, 2], behaviour=behaviour, versions=versions), task_id="7")
    with pytest.raises(TrainingError, match=message):
        trainer.train_step(training_batch([good, bad]), version=2)
    torch.testing.assert_close(weights(trainer), before, atol=0, rtol=0)
    trainer.train_step(training_batch([good, dataclasses.replace(good, reward=1.0)]), version=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"proximal": "behaviour"},
        {"loss": "m2po"},
        {"minibatches_per_step": 2},
        {"truncation": Truncation(top_p=0.5)},
    ],
    ids=str,
)
def test_entropy_and_ratios_are_measured_where_all_groups_are_equal(tiny: Path, changes: dict[str, Any]) -> None:
    """They are those of a step that trains on the same tokens."""
    batch = drawn_batch(3, version=3)
    equal = [dataclasses.replace(one, reward=0.5) for one in batch]
    measured, computed = (
        make_trainer(tiny, learning_rate=1e-9, **changes).train_step(training_batch(one), version=3)
        for one in (equal, batch)
    )
    assert (measured["computed_tokens"], measured["grad_norm"]) == (0, 0)
    names = {"entropy", "ratio", "approx_kl", "correction_weight", "clip_fraction"}
    names |= {name for name in computed if name.startswith(("engine_mismatch/", "staleness_drift/"))}
    assert ("kept_mass" in measured) == ("kept_mass" in computed) == ("truncation" in changes)
    names |= {"kept_mass"} & computed.keys()
    names -= {"clip_fraction"} if "proximal" in changes else set()  # whose side depends on the advantage
    assert {name: measured[name] for name in names} == pytest.approx(
        {name: computed[name] for name in names}, rel=1e-4, abs=1e-6
    )


def test_tokens_are_counted_over_a_resume_and_operations_per_second_measured(tiny: Path) -> None:
    batch = training_batch(drawn_batch(0))
    trainer = make_trainer(tiny)
    first, second = (trainer.train_step(batch, version=5) for _ in range(2))
    assert (first["total_tokens"], second["total_tokens"]) == (first["tokens"], 2 * first["tokens"])
    assert 0 < second["mfu"] < 1.5
    resumed = make_trainer(tiny)
    resumed.load_counters(trainer.counters())
    assert resumed.train_step(batch, version=5)["total_tokens"] == 3 * first["tokens"]
    resumed.load_counters({"kl_controller": {}})  # of a checkpoint that does not have them
    assert resumed.total_tokens == 0
    penalized = make_trainer(tiny, kl=KLConfig(coef=0.1, target=1.0, place="reward"))
    penalized.load_counters({"kl_controller": {"coef": 0.5}})
    assert penalized.algorithm.kl_coef == 0.5


def test_operations_of_all_passes_are_counted(tiny: Path) -> None:
    trainer = make_trainer(
        tiny,
        advantage="gae",
        critic=CriticConfig(learning_rate=1e-3),
        kl=KLConfig(coef=0.1, place="reward"),
        max_tokens_per_microbatch=64,
    )
    assert trainer.critic is not None
    done: list[float] = []

    def passed(model: Any, arguments: tuple[Any, ...], _: Any) -> None:
        done.append((3 if torch.is_grad_enabled() else 1) * model.flops(*arguments))

    for model in (trainer._policy, trainer._reference, trainer.critic.module):
        assert model is not None
        model.register_forward_hook(passed)
    metrics = trainer.train_step(training_batch(drawn_batch(0)), version=5)
    assert len(done) > 10
    peak = peak_flops(trainer.device, torch.float32)
    assert metrics["mfu"] * metrics["seconds_step"] * peak == pytest.approx(sum(done))


def test_log_probs_of_any_sequences_are_of_the_whole_vocabulary_at_temperature_1(tiny: Path) -> None:
    trainer = make_trainer(tiny, temperature=0.7, truncation=Truncation(top_k=5))
    found = trainer.logprobs_of([sequence([5, 6, 7, 8], [2, 3])])
    with torch.no_grad():
        every = trainer.model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, torch.stack([every[1, 7], every[2, 8]]))
    assert trainer._policy.temperature == 0.7


def test_the_process_is_seeded_and_the_temperature_is_1_by_default(tiny: Path) -> None:
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, dtype="float32", device="cpu", num_threads=1)
    trainer = PolicyTrainer(config, model_path=str(tiny), seed=77)
    assert torch.initial_seed() == 77
    assert trainer._policy.temperature == 1.0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_exact_where_runs_are_deterministic_in_float32(
    tiny: Path, deterministic: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        trainer = make_trainer(tiny, deterministic=deterministic, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert trainer._policy.reads_exactly == (deterministic and dtype == "float32")


def test_the_entropy_term_is_as_strong_as_its_coefficient(tiny: Path) -> None:
    """Nothing else has a gradient: all rewards are equal."""
    batch = training_batch([sequence([5, 6, 7, 8], [2, 3]), sequence([5, 9, 7], [1, 2])])
    found = []
    for coef in (1.0, 0.1):
        trainer = make_trainer(tiny, entropy_coef=coef, max_grad_norm=1e9, adam_eps=1e-3, learning_rate=1e-2)
        entropy = trainer.train_step(batch, version=0)["entropy"]
        found.append({name: value / coef for name, value in gradients(trainer).items()})
    torch.testing.assert_close(*found)
    assert any(bool(value.any()) for value in found[0].values())
    assert trainer.train_step(batch, version=0)["entropy"] > entropy


def test_a_pass_that_only_keeps_step_with_other_ranks_adds_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_fillers(self: StepCut, *given: Any) -> Iterator[Microbatch]:
        for microbatch in cut(self, *given):
            yield microbatch
            yield dataclasses.replace(microbatch, counts=False)

    found, cut = [], StepCut.__call__
    for fillers in (False, True):
        monkeypatch.setattr(StepCut, "__call__", with_fillers if fillers else cut)
        trainer = make_trainer(tiny, advantage="gae", critic=CriticConfig(learning_rate=1e-3))
        metrics = trainer.train_step(training_batch(drawn_batch(1)), version=5)
        found.append((gradients(trainer), metrics["loss"], metrics["critic_loss"], metrics["entropy"]))
    torch.testing.assert_close(*found)


def test_operations_of_a_pass_are_those_of_its_products(tiny: Path) -> None:
    """Two layers of hidden size 32; the tree of two sequences computes their common prefix once."""
    model = make_trainer(tiny)._policy
    packed, _ = packed_together([sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 9], [2])])
    weights = sum(p.numel() for name, p in model.model.named_parameters() if "embed" not in name)
    assert (sum(packed.lengths), packed.num_pairs) == (3 + 0, 1 + 2 + 3)
    head = model.model.get_input_embeddings().weight.numel()
    config = model.model.config
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 6
    assert model.flops(packed) == 2 * (weights * 3 + head * 3) + attention


def test_the_sides_of_clipped_tokens_and_the_overlong_penalty_are_metrics(tiny: Path) -> None:
    trainer = make_trainer(tiny, proximal="behaviour", loss_kwargs={"clip_eps": 0.2})
    metrics = trainer.train_step(training_batch(drawn_batch(1)), version=5)
    sides = metrics["clip_fraction_low"], metrics["clip_fraction_high"]
    assert min(sides) > 0
    assert sum(sides) == pytest.approx(metrics["clip_fraction"])
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, dtype="float32", device="cpu", overlong_buffer=4)
    trainer = PolicyTrainer(config, model_path=str(tiny), seed=1, sampling=EngineSampling(max_new_tokens=6))
    # 4 of 6 tokens are free, of 4 that count down: 5 trained tokens lose 3/4.
    answers = [sequence(range(3, 3 + length), range(1, length), reward=length / 9) for length in (3, 6)]
    metrics = trainer.train_step(training_batch(answers), version=0)
    assert (metrics["overlong_penalty"], metrics["overlong_fraction"]) == (-0.375, 0.5)
