"""Gradients and weights after a step are those of a naive step, for every setting of ``trainer:`` that a YAML can name.

Configs are drawn over the product of :data:`AXES`; ``make test-slow`` covers every pair of choices.
"""

from __future__ import annotations
import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import CorrectionConfig, CriticConfig, KLConfig, LoRAConfig, TrainerConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.models.truncation import Truncation
from areal_lite.trainer.estimators import ESTIMATORS
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES
from areal_lite.trainer.rl.policy_trainer import EngineSampling, PolicyTrainer
from tests.trainer.naive_step import Model, NaiveStep, Sampling
from tests.trainer.training_data import VOCABULARY, training_batch

Choice = dict[str, Any]
CLIP = {"clip_eps": 0.05, "clip_eps_high": 0.08}
REJECTIONS = {
    "token_k1": "0.7_1.3", "token_k2": "0.03", "token_k3": "0.03",
    "seq_sum_k1": "0.5_1.4", "seq_sum_k2": "0.3", "seq_sum_k3": "0.3",
    "seq_mean_k1": "0.9_1.15", "seq_mean_k2": "0.05", "seq_mean_k3": "0.05",
    "seq_max_k2": "0.15", "seq_max_k3": "0.15",
    "seq_mean_k3,token_k1": "0.1,0.7_1.5",
}  # fmt: skip
AXES: dict[str, list[Any]] = {
    "loss": [
        *((name, {}) for name in ("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "gpg")),
        ("ppo", CLIP), ("ppo", {"clip_eps": 0.05, "dual_clip": 1.1}), ("gspo", CLIP), ("gmpo", CLIP), ("cispo", CLIP),
        ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
        ("clip_cov", {"token_share": 1.0, "min_covariance": 0.1, "clip_eps": 0.1}),
        ("kl_cov", {"token_share": 0.2, "kl_coef": 0.5}),
        ("m2po", {}), ("m2po", {"max_second_moment": 0.01}),
    ],
    "aggregation": [
        None, "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ],
    "level": ["token", "sequence", "none", "mask"],
    "max_weight": [1.2, 5.0],
    "normalize": [False, True],
    "reject": [None, *REJECTIONS],
    "max_episode_kl": [None, 0.02],
    "recorded": ["all", "some", "none"],
    "token_rewards": [False, True],
    "proximal": ["trainer", "behaviour"],
    "kl": [
        None,
        *({"estimator": name} for name in ("k1", "abs", "k2", "k3", "k1+", "k3+")),
        *({"estimator": name, "unbiased": True} for name in ("k1", "k3")),
        *({"estimator": name, "place": "reward"} for name in ("k1", "abs", "k2", "k3")),
        {"estimator": "k1", "place": "reward", "target": 0.01, "horizon": 100.0},
    ],
    "entropy_coef": [0.0, 0.1, -0.1],
    "critic": [{}, {"clip_eps": 0.01}, {"updates_before_policy": 1}],
    "lora": [None, {"rank": 2, "alpha": 3.0}, {"rank": 3, "target_modules": ["q_proj", "down_proj"]}],
    "advantage": [
        *((name, {}) for name in sorted(ESTIMATORS)),
        ("grpo", {"divide_by_std": False}), ("grpo_passk", {"divide_by_std": False}), ("gpg", {"f_norm": 2.0}),
        ("gae", {"gamma": 0.9, "lam": 0.8}), ("reinforce", {"gamma": 0.9}), ("reinforce_plus_plus", {"gamma": 0.9}),
        ("optimal_token_baseline", {"credit_lone_tail": True}), ("turn_grpo", {"divide_by_std": False}),
        ("turn_returns", {"gamma": 0.5}),
    ],
    "advantage_mean": ["none", "group", "batch"],
    "advantage_std": ["none", "group", "batch"],
    "overlong_buffer": [0, 3],
    "minibatches": [1, 3],
    "max_grad_norm": [1e9, 0.3],
    "weight_decay": [0.0, 0.1],
    "temperature": [1.0, 0.7],
    "top_k": [None, 20],
    "max_tokens": [4096, 16],
}  # fmt: skip
"""What a draw chooses from; :func:`possible` replaces choices that exclude each other."""


def possible(choice: Choice) -> Choice:
    """Return the choice without contradictions, which the config would refuse."""
    choice, advantage = dict(choice), choice["advantage"][0]
    if choice["loss"][0] in ("gspo", "gmpo") and choice["aggregation"] != "seq-mean-token-mean":
        choice["aggregation"] = None
    if advantage != "gae":
        choice["critic"] = None
    if advantage == "optimal_token_baseline":
        choice["proximal"] = "trainer"
    if advantage.startswith("turn"):
        choice["overlong_buffer"] = 0
    if choice["proximal"] == "behaviour":
        choice |= {"level": "none", "reject": None, "recorded": "all"}
    if choice["level"] in ("none", "mask"):
        choice["normalize"] = False
    if choice["level"] == "none":
        choice["max_weight"] = 5.0
    return choice


def config_of(choice: Choice) -> TrainerConfig:
    """Return the trainer's config."""
    masks = choice["level"] == "mask"
    correction = CorrectionConfig(
        level="token" if masks else choice["level"],
        outside="mask" if masks else "truncate",
        min_weight=0.8 if masks else 0.0,
        max_weight=choice["max_weight"],
        normalize=choice["normalize"],
        reject=choice["reject"],
        reject_bounds=choice["reject"] and REJECTIONS[choice["reject"]],
        max_episode_kl=choice["max_episode_kl"],
    )
    shared = {"learning_rate": 0.01, "adam_eps": 1e-2, "adam_betas": (0.8, 0.9)}
    shared |= {name: choice[name] for name in ("max_grad_norm", "weight_decay")}
    return TrainerConfig(
        total_steps=10,
        dtype="float32",
        device="cpu",
        num_threads=1,
        correction=correction,
        loss=choice["loss"][0],
        loss_kwargs=choice["loss"][1],
        loss_aggregation=choice["aggregation"],
        loss_scale=20 if choice["aggregation"] == "seq-mean-token-sum-norm" else None,
        advantage=choice["advantage"][0],
        advantage_kwargs=choice["advantage"][1],
        kl=None if choice["kl"] is None else KLConfig(coef=0.2, **choice["kl"]),
        critic=None if choice["critic"] is None else CriticConfig(**shared, **choice["critic"]),
        lora=None if choice["lora"] is None else LoRAConfig(**choice["lora"]),
        minibatches_per_step=choice["minibatches"],
        max_tokens_per_microbatch=choice["max_tokens"],
        **shared,
        **{
            name: choice[name]
            for name in ("proximal", "entropy_coef", "advantage_mean", "advantage_std", "overlong_buffer")
        },
    )


# -- what is trained on ----------------------------------------------------------------------------------


def drawn_episode(rng: np.random.Generator, prompt: list[int], group: str, member: int) -> list[TokenSequence]:
    """Return the sequences of an episode: answers that continue one another, or fork."""
    calls: list[tuple[tuple[int, ...], int, list[int]]] = []
    reward = float(rng.integers(-4, 5)) / 4
    by_turn = rng.random() < 0.3
    sequences = []
    for number in range(int(rng.integers(1, 4))):
        path, turn_idx, ids = calls[rng.integers(len(calls))] if number else ((0,), -1, prompt)
        asked = rng.integers(3, VOCABULARY, rng.integers(1, 3) if number else 0).tolist()
        answer, tool = (rng.integers(3, VOCABULARY, rng.integers(low, 4)).tolist() for low in (1, 0))
        mask = [False] * len(ids + asked) + [True] * len(answer)
        ids, own = [*ids, *asked, *answer], [2 * number + 1] + [2 * number + 2] * bool(number)
        if tool:  # two calls in one sequence
            ids, mask, own = [*ids, *tool, 7], [*mask, *[False] * len(tool), True], [*own, 50 + number, 90 + number]
        path, turn_idx = (*path, *own), turn_idx + 1 + bool(tool)
        calls.append((path, turn_idx, ids))
        sequences.append(
            TokenSequence(
                input_ids=np.array(ids),
                loss_mask=np.array(mask) & (rng.random() > 0.1),
                versions=np.zeros(len(ids), np.int64),
                reward=float(rng.integers(-4, 5)) / 4 if by_turn else reward,
                place=(path, turn_idx),
                group_id=group,
                task_id=group,
                member_idx=member,
            )
        )
    return sequences


def drawn_step(model_path: Path, seed: int, choice: Choice) -> list[TokenSequence]:
    """Return groups whose recorded log-probs are near those of the model."""
    recorded, temperature = choice["recorded"], choice["temperature"]
    rng = np.random.default_rng(seed)
    batch: list[TokenSequence] = []
    for group in range(3):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 5)).tolist()
        for member in range(int(rng.integers(1 if group else 2, 4))):
            batch += (episode := drawn_episode(rng, prompt, str(group), member))
            if choice["token_rewards"] and len(episode) == 1:
                episode[0].token_rewards = (rng.integers(-4, 5, len(episode[0])) / 4).astype(np.float32)
                episode[0].reward = float(episode[0].token_rewards.sum())
    ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
    for row, one in zip(ids, batch, strict=True):
        row[: len(one)] = torch.from_numpy(one.input_ids)
    with torch.no_grad():
        logits = plain(AutoModelForCausalLM, model_path)(input_ids=ids).logits / temperature
    logprobs = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
    for one, row in zip(batch, logprobs, strict=True):
        column = np.append(0.0, row[: len(one) - 1] + rng.normal(0, 0.2, len(one) - 1)).astype(np.float32)
        if recorded == "some":
            column[rng.random(len(one)) < 0.3] = np.nan
        if recorded == "all" or (recorded == "some" and rng.random() < 0.8):
            one.logprobs = np.where(one.loss_mask, column, np.float32(0))
    return batch


@cache
def plain(auto_class: Any, model_path: Path) -> Any:
    """Return transformers' own model in float64."""
    options = {"num_labels": 1} if auto_class is AutoModelForTokenClassification else {}
    return auto_class.from_pretrained(
        model_path, dtype=torch.float64, attn_implementation="eager", **options
    ).requires_grad_(False)


def naive_model(auto_class: Any, model_path: Path, trained: Any, lora_scale: float = 0.0) -> Model:
    """Return the naive model with the weights of one that the trainer trains."""
    weights = {
        name: weight.detach().double().clone().requires_grad_(weight.requires_grad)
        for name, weight in trained.named_parameters()
    }
    names = [name for name, weight in weights.items() if weight.requires_grad]
    return Model(module=plain(auto_class, model_path), weights=weights, trained=names, lora_scale=lora_scale)


def move_away(model: Any, strength: float) -> None:
    """Move the trained weights away from those that the reference has, and from 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += strength * torch.randn(weight.shape, generator=generator)


# -- the comparison ----------------------------------------------------------------------------------------


SMALLEST_MARGIN = 3e-5
"""Nearer to a threshold, float32 may decide otherwise than float64."""


def agrees(model_path: Path, choice: Choice, seed: int) -> bool:
    """Do one step with the trainer and one naively, and compare all that they leave behind.

    Returns:
        Whether they could be compared: no number was too near to a threshold.
    """
    choice = possible(choice)
    config = config_of(choice)
    sampling = Sampling(
        temperature=choice["temperature"],
        top_k=choice["top_k"],
        reported=config.proximal == "behaviour",
        max_new_tokens=6,
    )
    trainer = PolicyTrainer(
        config,
        model_path=str(model_path),
        seed=seed,
        sampling=EngineSampling(
            temperature=sampling.temperature,
            truncation=sampling.top_k and Truncation(top_k=sampling.top_k, reported=sampling.reported),
            max_new_tokens=sampling.max_new_tokens,
        ),
    )
    move_away(trainer.model, 0.1 if config.lora else 0.02)
    critic = None
    if trainer.critic is not None:
        move_away(trainer.critic.module.model, 0.05)
        critic = naive_model(AutoModelForTokenClassification, model_path, trainer.critic.module.model)
    gradients: dict[str, list[Tensor]] = {"policy": [], "critic": []}
    for role, learner in trainer.learners.items():
        learner.optimizer.register_step_pre_hook(
            lambda *_, role=role, module=learner.module.model: gradients[role].append(
                flat({name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad})
            )
        )
    sequences = drawn_step(model_path, seed, choice)
    baselines = {str(group): 0.25 * group for group in range(3)}
    batch: DataProto = training_batch(sequences)
    batch.batch["baselines"] = torch.tensor([baselines[one.group_id] for one in sequences])
    begun = trainer.begin(batch, version=0)
    lora_scale = config.lora.alpha / config.lora.rank if config.lora else 0.0
    naive = NaiveStep(
        config,
        sampling,
        sequences,
        [{begun.sequences[index].group_id for index in share} for share in begun.minibatches],
        policy=naive_model(AutoModelForCausalLM, model_path, trainer.model, lora_scale),
        reference=naive_model(AutoModelForCausalLM, model_path, plain(AutoModelForCausalLM, model_path)),
        critic=critic,
        baselines=baselines,
    )
    expected = naive.run()
    if expected.margin < SMALLEST_MARGIN:
        return False
    metrics = trainer.train_step(batch, version=0)
    assert metrics["skipped_updates"] == 0
    close("critic's gradients", gradients["critic"], [flat(one) for one in expected.critic_gradients])
    close("gradients", gradients["policy"], [flat(one) for one in expected.gradients])
    if expected.losses:
        assert metrics["loss"] == pytest.approx(np.mean(expected.losses), rel=1e-3, abs=1e-4)
    for role, model in {"policy": naive.policy, "critic": naive.critic}.items():
        if model is not None:
            trained = dict(trainer.learners[role].module.model.named_parameters())
            found = flat({name: trained[name].detach() for name in model.trained})
            close(f"{role}'s weights", [found], [flat({name: model.weights[name] for name in model.trained})])
    assert trainer.algorithm.kl_coef == pytest.approx(expected.kl_coef, rel=1e-5)
    return True


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors.values()])


def close(what: str, found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare vectors by the largest difference, relative to the largest number where that is above 1."""
    assert len(found) == len(expected), what
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = float((one - other).abs().max()) / max(1.0, float(other.abs().max()))
        bound = 2e-5 if what.endswith("gradients") and number == 0 else 1e-4  # Adam divides rounding by small gradients
        assert error < bound, f"{what} of update {number} differ by {error}"


def test_the_axes_name_every_loss_and_estimator() -> None:
    assert {name for name, _ in AXES["loss"]} == set(POLICY_LOSSES)
    assert {name for name, _ in AXES["advantage"]} == set(ESTIMATORS)


choices = st.fixed_dictionaries({name: st.sampled_from(options) for name, options in AXES.items()})


@settings(max_examples=40, derandomize=True, database=None, phases=[Phase.generate])  # to shrink would take minutes
@given(choice=choices, seed=st.integers(0, 999))
def test_a_step_is_that_of_the_naive_reference(tiny: Path, choice: Choice, seed: int) -> None:
    assume(agrees(tiny, choice, seed))


def covering_choices(seed: int) -> list[Choice]:
    """Return choices that together hold every pair of options of any two axes."""
    rng = random.Random(seed)
    places = {name: range(len(options)) for name, options in AXES.items()}
    missing = {
        (a, i, b, j) for a, b in itertools.combinations(AXES, 2) for i in places[a] for j in places[b]
    }  # fmt: skip
    made = []
    while missing:
        a, i, b, j = min(missing)
        best: tuple[int, dict[str, int]] = (-1, {})
        for _ in range(20):
            drawn = {name: rng.choice(places[name]) for name in AXES} | {a: i, b: j}
            hits = sum((x, drawn[x], y, drawn[y]) in missing for x, y in itertools.combinations(AXES, 2))
            best = max(best, (hits, drawn), key=lambda pair: pair[0])
        missing -= {(x, best[1][x], y, best[1][y]) for x, y in itertools.combinations(AXES, 2)}
        made.append({name: AXES[name][place] for name, place in best[1].items()})
    return made


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_step_is_that_of_the_naive_reference_for_every_pair_of_settings(tiny: Path) -> None:
    for number, choice in enumerate(covering_choices(0)):
        assert any(agrees(tiny, choice, seed) for seed in range(number, number + 20)), choice
