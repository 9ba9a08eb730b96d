"""Credit belongs to episodes: how an episode is cut into sequences changes no advantage and no gradient."""

from __future__ import annotations
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.api.trajectory import Group
from areal_lite.config.trainer_config import AggregationMode, CorrectionConfig, CriticConfig, KLConfig, TrainerConfig
from areal_lite.data.batch.data_proto_file import load_data_proto, save_data_proto
from areal_lite.data.batch.training_batch import data_proto_of
from areal_lite.trainer.estimators import ESTIMATORS
from areal_lite.trainer.rl.policy_step import Batch, Step
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.trainer.episode_data import Call, Episode, group_of, line
from tests.trainer.training_data import VOCABULARY

VERSION = 3
STILL = 1e-30
"""A learning rate that changes no weight, so that one trainer gives the gradients of several batches."""


def make_trainer(model_path: Path, **changes: Any) -> PolicyTrainer:
    given: dict[str, Any] = {
        "total_steps": 100,
        "learning_rate": 1e-3,
        "max_grad_norm": 1e9,
        "dtype": "float32",
        "num_threads": 1,
        "device": "cpu",
    }
    trainer = PolicyTrainer(TrainerConfig(**given | changes), model_path=str(model_path), seed=1)
    if trainer.critic is not None:  # whose head begins at 0, and so do all values
        torch.nn.init.normal_(trainer.critic.module.model.score.weight, std=0.1)
    return trainer


def still_trainer(model_path: Path, changes: dict[str, Any], last: list[Any] = []) -> PolicyTrainer:  # noqa: B006
    """Return a trainer that does not learn, again for the examples of one test."""
    if last[:2] != [model_path, changes]:
        last[:] = model_path, changes, make_trainer(model_path, learning_rate=STILL, **changes)
    trainer: PolicyTrainer = last[2]
    return trainer


def with_advantages(trainer: PolicyTrainer, batch: Batch) -> Step:
    step = trainer.begin(batch, version=VERSION)
    trainer.score_proximal(step)
    trainer.score_reference(step)
    trainer.score_values(step)
    trainer.penalize_kl(step)
    trainer.correct(step)
    trainer.estimate_advantages(step)
    return step


def gradient(trainer: PolicyTrainer) -> Tensor:
    """Return the gradients of all models in one row."""
    modules = [learner.module for learner in trainer.learners.values()]
    return torch.cat([parameter.grad.flatten() for module in modules for parameter in module.parameters()])


def advantages_of(trainer: PolicyTrainer, batch: Batch) -> list[float]:
    """Return the advantage of each episode, which all of its tokens have."""
    tokens = with_advantages(trainer, batch).tokens
    found = [tokens.advantages[tokens.episodes == episode] for episode in range(int(tokens.episodes[-1]) + 1)]
    assert all(bool((values == values[0]).all()) for values in found)
    return [float(values[0]) for values in found]


def test_advantages_do_not_change_if_an_episode_is_cut_into_five_sequences(tiny: Path) -> None:
    """Counted by sequences they would be .375 and -.625."""
    others = [Episode(line(1), 0.0) for _ in range(3)]
    for calls in (line(5), line(5, joins=True)):
        group = group_of("g", [5, 6], [Episode(calls, 1.0), *others])
        trainer = make_trainer(tiny, advantage="dr_grpo")
        assert advantages_of(trainer, [group]) == [0.75, -0.25, -0.25, -0.25]
        metrics = trainer.train_step([group], version=VERSION)
        assert (metrics["episodes"], metrics["reward_mean"]) == (4, 0.25)
        assert metrics["sequences"] == len(group.sequences)


# -- any cut leaves the gradients as they are -----------------------------------------------------------

tokens = st.integers(3, VOCABULARY - 1)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """A tree of calls in depth-first order."""
    calls, path = [], [-1]
    for place in range(draw(st.integers(1, 5))):
        path = path[: draw(st.integers(1, len(path)))] if draw(st.booleans()) else path
        asked = draw(st.lists(tokens, min_size=1, max_size=3)) if path[-1] >= 0 else []
        calls.append(Call(path[-1], asked, draw(st.lists(tokens, min_size=1, max_size=3))))
        path = [*path, place]
    return Episode(calls, draw(st.integers(-4, 4)) / 4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Group], list[Group], int]:
    """Two groups, the same groups with one episode cut differently, and its number."""
    drawn = [
        (draw(st.lists(tokens, min_size=1, max_size=6)), draw(st.lists(episodes(), min_size=2, max_size=3)))
        for _ in range(2)
    ]
    before, after = draw(cuts()), draw(cuts())
    target = draw(st.integers(0, sum(len(own) for _, own in drawn) - 1))
    batches = []
    for joins in (before, after):
        place, groups = 0, []
        for name, (prompt, own) in enumerate(drawn):
            chosen = [one.cut(joins if place + number == target else before) for number, one in enumerate(own)]
            groups.append(group_of(f"g{name}", prompt, chosen, baseline=0.25))
            place += len(own)
        batches.append(groups)
    return batches[0], batches[1], target


def cuts() -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=5, max_size=5)


def contributions(trainer: PolicyTrainer, batch: Batch, target: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of all episodes, of all but one, and of this one."""
    found = []
    for kept in (None, False, True):
        step = with_advantages(trainer, batch)
        if kept is not None:
            left_out = (step.tokens.episodes == target) != kept
            step.tokens.advantages[left_out] = 0
            step.tokens.returns[left_out] = step.tokens.values[left_out]
        trainer.update_critic(step)
        trainer.update_policy(step)
        found.append(gradient(trainer))
    return found[0], found[1], found[2]


def assert_credit_ignores_the_cut(
    model_path: Path, changes: dict[str, Any], drawn: tuple[list[Group], list[Group], int]
) -> None:
    before, after, target = drawn
    trainer = still_trainer(model_path, changes)
    expected, found = (contributions(trainer, batch, target) for batch in (before, after))
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[2], expected[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)


SMALL = {"max_tokens_per_microbatch": 8}
"""Several micro-batches, and episodes too long for one block."""
SEQUENCE_LEVEL: list[dict[str, Any]] = [
    {"correction": CorrectionConfig(level="sequence")},
    {"correction": CorrectionConfig(level="sequence", normalize=True)},
    {"correction": CorrectionConfig(level="none", reject="seq_mean_k3", reject_bounds="0.5")},
    {"correction": CorrectionConfig(level="none", reject="seq_max_k2,token_k1", reject_bounds="2.0,0.3_3.0")},
    {"correction": CorrectionConfig(level="none", max_episode_kl=0.3)},
]
OBJECTIVES: list[dict[str, Any]] = [
    *({"loss": loss, "proximal": "behaviour"} for loss in ("ppo", "gspo", "gmpo", "cispo")),
    *({"loss_aggregation": mode} for mode in get_args(AggregationMode) if not mode.endswith("norm")),
    {"loss_aggregation": "seq-mean-token-sum-norm", "loss_scale": 16},
    *SEQUENCE_LEVEL,
]
NEEDS_MORE = {"gae", "turn_grpo", "turn_returns"}
"""A critic and turn estimators: another cut into turns changes credit."""
WHOLE_EPISODES = sorted(set(ESTIMATORS) - NEEDS_MORE)


@pytest.mark.parametrize("changes", OBJECTIVES, ids=lambda changes: ",".join(map(str, changes.values()))[:60])
@settings(max_examples=4, deadline=None)
@given(drawn=batches(), small=st.booleans())
def test_no_objective_depends_on_how_an_episode_is_cut(
    tiny: Path, changes: dict[str, Any], drawn: tuple[list[Group], list[Group], int], small: bool
) -> None:
    assert_credit_ignores_the_cut(tiny, changes | (SMALL if small else {}), drawn)


@pytest.mark.parametrize("name", WHOLE_EPISODES)
@settings(max_examples=4, deadline=None)
@given(drawn=batches())
def test_no_episode_estimator_depends_on_how_an_episode_is_cut(
    tiny: Path, name: str, drawn: tuple[list[Group], list[Group], int]
) -> None:
    assert_credit_ignores_the_cut(tiny, {"advantage": name}, drawn)


@settings(max_examples=4, deadline=None)
@given(drawn=batches(), small=st.booleans(), gamma=st.floats(0.5, 1), lam=st.floats(0, 1), penalty=st.booleans())
def test_neither_policy_nor_critic_of_gae_sees_how_an_episode_was_cut(
    tiny: Path,
    drawn: tuple[list[Group], list[Group], int],
    small: bool,
    gamma: float,
    lam: float,
    penalty: bool,
) -> None:
    changes: dict[str, Any] = {
        "advantage": "gae",
        "advantage_kwargs": {"gamma": gamma, "lam": lam},
        "critic": CriticConfig(learning_rate=STILL, max_grad_norm=1e9),
        "kl": KLConfig(coef=0.1, place="reward") if penalty else None,
    }
    assert_credit_ignores_the_cut(tiny, changes | (SMALL if small else {}), drawn)


def test_gae_runs_through_the_branches_of_a_fork_in_their_order(tiny: Path) -> None:
    root, left, right = Call(-1, [], [40]), Call(0, [20], [41]), Call(0, [21], [42])
    for options, same in (({"gamma": 1.0, "lam": 1.0}, True), ({"gamma": 1.0, "lam": 0.5}, False)):
        first = []
        for branches in ((left, right), (right, left)):
            trainer = make_trainer(
                tiny,
                advantage="gae",
                advantage_kwargs=options,
                critic=CriticConfig(learning_rate=1e-3),
            )
            fork = Episode([root, *branches], 1.0)
            step = with_advantages(trainer, [group_of("g", [5, 6], [fork, Episode(line(1), 0.0)])])
            first.append(float(step.tokens.returns[0]))
        assert (first[0] == pytest.approx(first[1], abs=1e-5)) is same
        assert not same or first[0] == pytest.approx(1.0, abs=1e-5)  # the reward


@settings(max_examples=4, deadline=None)
@given(drawn=batches(), place=st.sampled_from(["loss", "reward"]))
def test_entropy_and_kl_terms_do_not_depend_on_how_an_episode_is_cut(
    tiny: Path, drawn: tuple[list[Group], list[Group], int], place: str
) -> None:
    given_: dict[str, Any] = {
        "entropy_coef": 0.1,
        "kl": KLConfig(coef=0.1, place=place),
        "minibatches_per_step": 2,
    }
    found = []
    for batch in drawn[:2]:
        trainer = make_trainer(tiny, adam_eps=1e-3, **given_)
        trainer.train_step(batch, version=VERSION)
        found.append(gradient(trainer))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-3)


# -- groups and DataProto ---------------------------------------------------------------------------------


@settings(max_examples=4, deadline=None)
@given(drawn=batches(), name=st.sampled_from(["grpo", "remax", "turn_grpo", "turn_returns"]))
def test_a_data_proto_of_groups_trains_bit_for_bit_like_the_groups(
    tiny: Path,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[list[Group], list[Group], int],
    name: str,
) -> None:
    groups = drawn[0]
    whole = data_proto_of(groups)
    folder = tmp_path_factory.mktemp("batch")
    save_data_proto(whole, folder / "saved")
    found = []
    for batch in (groups, whole, load_data_proto(folder / "saved")):
        trainer = make_trainer(tiny, advantage=name)
        metrics = trainer.train_step(batch, version=VERSION)
        timed = ("second", "ms_per", "mfu")
        timeless = {key: value for key, value in metrics.items() if not any(word in key for word in timed)}
        found.append((timeless, gradient(trainer)))
    for metrics, gradients in found[1:]:
        assert metrics == found[0][0]
        assert torch.equal(gradients, found[0][1])


def test_a_data_proto_of_groups_is_padded_with_0_and_has_the_baselines() -> None:
    group = group_of("g", [5, 6], [Episode(line(2, joins=True), 1.0), Episode(line(1), 0.0)], baseline=0.25)
    batch = data_proto_of([group]).batch
    assert batch["baselines"].tolist() == [0.25, 0.25]
    assert batch["input_ids"].shape[1] == len(group.sequences[0])
    padding = batch["input_ids"][~batch["attention_mask"]]
    assert len(padding) == len(group.sequences[0]) - len(group.sequences[1])
    assert not padding.any()


def test_paths_and_turns_of_a_fork_survive_a_data_proto_and_its_file(tiny: Path, tmp_path: Path) -> None:
    fork = [*line(2), Call(0, [30], [31], reward=0.5)]
    group = group_of("g", [5, 6], [Episode(fork, 1.0), Episode(line(1), 0.0)])
    save_data_proto(data_proto_of([group]), tmp_path / "saved")
    trainer = make_trainer(tiny, advantage="turn_grpo")
    steps = [
        trainer.begin(batch, version=VERSION)
        for batch in ([group], data_proto_of([group]), load_data_proto(tmp_path / "saved"))
    ]
    for step in steps:
        assert [(one.member_idx, one.turn_idx) for one in step.sequences] == [(0, 0), (0, 1), (0, 1), (1, 0)]
        assert [one.path for one in step.sequences] == [one.path for one in group.sequences]
        assert step.turns().parents.tolist() == [-1, 0, 0, -1]
        assert step.turns().rewards.tolist() == [1.0, 1.0, 0.5, 0.0]


# -- rewards per turn -------------------------------------------------------------------------------------


def episode_with_turn_rewards(*rewards: float) -> Episode:
    """Return an episode whose calls follow each other and are rewarded one by one."""
    return Episode([replace(call, reward=reward) for call, reward in zip(line(5), rewards, strict=False)], 0.0)


TURN_BY_TURN = [
    episode_with_turn_rewards(1, 0),
    episode_with_turn_rewards(0, 1),
    episode_with_turn_rewards(0),
]


def test_turn_grpo_compares_turns_of_the_same_index(tiny: Path) -> None:
    trainer = make_trainer(tiny, advantage="turn_grpo")
    tokens = with_advantages(trainer, [group_of("g", [5, 6], TURN_BY_TURN)]).tokens
    expected = [1.155, -0.707, -0.577, 0.707, -0.577]  # two tokens per turn
    assert tokens.advantages.tolist() == pytest.approx([one for one in expected for _ in range(2)], abs=1e-3)


def test_episode_estimators_use_the_sum_of_turn_rewards_and_its_metrics_are_those_of_the_sum(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tiny, advantage="dr_grpo")
    group = group_of("g", [5, 6], [episode_with_turn_rewards(1, 0, 0.5), episode_with_turn_rewards(0.5)])
    for batch in ([group], data_proto_of([group])):
        assert advantages_of(trainer, batch) == [0.5, -0.5]
        metrics = trainer.train_step(batch, version=VERSION)
        assert (metrics["reward_mean"], metrics["reward_max"]) == (1.0, 1.5)
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


def test_a_data_proto_without_rewards_of_episodes_has_their_means(tiny: Path) -> None:
    group = group_of("g", [5, 6], [episode_with_turn_rewards(1, 0), episode_with_turn_rewards(0)])
    proto = data_proto_of([group])
    assert proto.batch["episode_rewards"].tolist() == [1.0, 1.0, 0.0]
    del proto.batch["episode_rewards"]  # as an earlier version saved it
    assert advantages_of(make_trainer(tiny, advantage="dr_grpo"), proto) == [0.25, -0.25]
