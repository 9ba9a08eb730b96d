"""A mixture's rows: quotas at any number of draws, epochs of each part, parts that end, resuming."""

from __future__ import annotations
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.config.dataset_config import MIXTURE, DatasetConfig
from areal_lite.data.batch.data_proto import object_array
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.row_streams import CurriculumRows
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.environments.mixture_sampler import WINDOW, MixtureSampler
from areal_lite.errors import ConfigError

WEIGHTS = st.lists(st.one_of(st.integers(1, 30), st.decimals("0.01", "9", places=2).map(float)), min_size=1, max_size=9)


def mixture(
    weights: list[Any], sizes: list[int], until: float | None = None, *, seed: int = 5, shuffle: bool = True
) -> RolloutDataSourceWithBuffer:
    parts = [{"name": f"p{i}", "weight": weight, "until": until} for i, weight in enumerate(weights)]
    rows = [{"data_source": part["name"], "number": i} for part, n in zip(parts, sizes, strict=True) for i in range(n)]
    config = DatasetConfig(path=MIXTURE, kwargs={"parts": parts, "seed": seed}, shuffle=shuffle)
    return RolloutDataSourceWithBuffer(CurriculumRows(rows, SourceSettings(), MixtureSampler(rows, config)))


def draw(source: RolloutDataSourceWithBuffer, count: int) -> list[tuple[str, int]]:
    """Return part and number of the next rows, which are trained."""
    groups = source.get_samples(count)
    source.mark_trained(groups)
    return [(group[0].row["data_source"], group[0].row["number"]) for group in groups]  # type: ignore[index]


def train(source: RolloutDataSourceWithBuffer, rewards: dict[str, float], groups: int = 1) -> None:
    """Tell the sampler of trained groups of two episodes each, whose mean is the reward."""
    made = [(name, f"{name} {i}", m, reward) for name, reward in rewards.items() for i in range(groups) for m in (0, 1)]
    names, ids, members, scores = zip(*made, strict=True)
    columns = {"group_ids": object_array(ids), "member_idx": object_array(members)}
    columns["rows"] = object_array({"data_source": name} for name in names)
    scored = torch.tensor([score + 0.5 * (1 if member else -1) for score, member in zip(scores, members, strict=True)])
    assert isinstance(source.rows, CurriculumRows)
    source.rows.update(SimpleNamespace(batch={"rewards": scored}, non_tensor_batch=columns))


def is_fair(counts: Counter[str], weights: dict[str, Any]) -> bool:
    shares = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(shares.values())
    return all(abs(counts[name] - counts.total() * share / total) < 1 for name, share in shares.items())


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, ends_after=st.integers(0, 100))
def test_after_any_number_of_draws_each_part_is_within_1_of_its_share(weights: list[Any], ends_after: int) -> None:
    """Also counted from the end of a part on."""
    source, counts = mixture(weights, [3] * len(weights), until=0.5), Counter[str]()
    shares = {f"p{i}": weight for i, weight in enumerate(weights)}
    for number in range(200):
        if number == ends_after and len(weights) > 1:
            train(source, {"p0": 1.0}, WINDOW)
            del shares["p0"]
            counts.clear()
        counts[draw(source, 1)[0][0]] += 1
        assert counts.keys() <= shares.keys() and is_fair(counts, shares)


def test_a_batch_that_the_weights_divide_has_exact_quotas() -> None:
    source = mixture([0.1, 0.2, 0.3], [5, 5, 5])
    for _ in range(50):
        assert Counter(name for name, _ in draw(source, 6)) == {"p0": 1, "p1": 2, "p2": 3}


def test_each_part_has_epochs_of_its_own_in_an_order_of_the_seed() -> None:
    rows = draw(source := mixture([2, 1], [8, 8]), 48)
    orders = {name: [number for part, number in rows if part == name] for name in ("p0", "p1")}
    epochs = [order[at : at + 8] for order in orders.values() for at in range(0, len(order), 8)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 6  # an order for each part and epoch
    assert draw(mixture([2, 1], [8, 8]), 48) == rows != draw(mixture([2, 1], [8, 8], seed=6), 48)
    assert (source.epoch_id, source.sample_offset, len(source)) == (2, 16, 16)
    assert [number for _, number in draw(mixture([1], [8], shuffle=False), 16)] == [*range(8)] * 2


def test_a_part_ends_when_its_last_groups_reach_until_and_the_others_share_its_quota() -> None:
    source = mixture([6, 2, 1], [8, 8, 8], until=0.75)
    draw(source, 5)
    train(source, {"p0": 0.75, "p1": 0.5}, WINDOW - 1)
    assert "p0" in dict(draw(source, 9))  # too few groups
    train(source, {"p0": 0.75, "p1": 0.5})
    assert Counter(name for name, _ in draw(source, 9)) == {"p1": 6, "p2": 3}
    train(source, {"p0": 0.0}, WINDOW)  # what ended stays so
    assert Counter(name for name, _ in draw(source, 9)) == {"p1": 6, "p2": 3}
    train(source, {"p1": 1.0, "p2": 1.0}, WINDOW)  # and the last ones stay
    assert Counter(name for name, _ in draw(source, 9)) == {"p1": 6, "p2": 3}
    train(source, {"p2": 0.0})
    assert Counter(name for name, _ in draw(source, 9)) == {"p1": 6, "p2": 3}  # 31 of 32 reach it
    train(source, {"p2": 0.0}, 8)
    assert Counter(name for name, _ in draw(source, 9)) == {"p2": 9}


def test_a_mean_is_over_episodes_by_their_own_reward_and_a_cached_batch_teaches_nothing() -> None:
    source = mixture([1, 1], [2, 2])
    columns = {
        "group_ids": object_array("aaab"),
        "member_idx": object_array([0, 0, 1, 0]),
        "rows": object_array({"data_source": f"p{i}"} for i in (0, 0, 0, 1)),
    }
    batch = {"rewards": torch.zeros(4), "episode_rewards": torch.tensor([1.0, 1.0, 0.0, 0.25])}
    assert isinstance(source.rows, CurriculumRows)
    source.rows.update(SimpleNamespace(batch=batch, non_tensor_batch=columns))
    del columns["rows"]
    source.rows.update(SimpleNamespace(batch=batch, non_tensor_batch=columns))
    parts = source.state_dict()["sampler"]["parts"]
    assert [part["rewards"] for part in parts.values()] == [[0.5], [0.25]]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), weights=WEIGHTS, batch=st.integers(1, 12), stop=st.integers(0, 11))
def test_a_resumed_mixture_gives_the_rows_of_an_uninterrupted_one(
    data: st.DataObject, weights: list[Any], batch: int, stop: int
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(weights), max_size=len(weights)))
    named = {f"p{i}": reward for i, reward in enumerate(rewards)}
    source, drawn, saved = mixture(weights, sizes, until=0.5), [], b""
    for step in range(12):
        if step == stop:
            saved = orjson.dumps(source.state_dict())
        drawn.append(draw(source, batch))
        train(source, named, groups=6)  # a part ends after six steps
    again = mixture(weights, sizes, until=0.5)
    again.load_state_dict(orjson.loads(saved))
    for rows in drawn[stop:]:
        assert draw(again, batch) == rows
        train(again, named, groups=6)
    assert again.state_dict() == source.state_dict()


def test_a_part_without_rows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no row of p1 is left"):
        mixture([1, 1], [2, 0])
