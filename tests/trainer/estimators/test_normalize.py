from __future__ import annotations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.trainer.estimators.inputs import Level, normalize_advantages, whiten

LEVELS: list[Level] = ["none", "group", "batch"]
steps = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), min_size=1, max_size=8)


def parts(level: Level, groups: list[str], episodes: Tensor) -> list[Tensor]:
    """Return which tokens are normalised together."""
    if level == "batch":
        return [torch.ones(len(episodes), dtype=torch.bool)]
    return [
        torch.tensor([groups[episode] == group for episode in episodes.tolist()], dtype=torch.bool)
        for group in set(groups)
    ]


@given(steps, st.sampled_from(LEVELS), st.sampled_from(LEVELS), st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_mean_and_deviation_are_over_tokens_of_the_group_or_batch(
    drawn: list[tuple[str, int]], mean: Level, std: Level, seed: int
) -> None:
    groups = [group for group, _ in drawn]
    episodes = torch.arange(len(drawn)).repeat_interleave(torch.tensor([length for _, length in drawn]))
    values = torch.randn(len(episodes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = values.clone()
    if mean != "none":
        for part in parts(mean, groups, episodes):
            expected[part] -= values[part].mean() if part.any() else 0.0
    if std != "none":
        for part in parts(std, groups, episodes):
            if part.sum() > 1:
                expected[part] /= (values[part].var() + 1e-8).sqrt()
    ours = normalize_advantages(values, episodes, groups, mean=mean, std=std)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", ["group", "batch"])
def test_equal_values_become_exactly_0_or_stay_unchanged(level: Level) -> None:
    values, episodes = (
        torch.full((3,), 0.1, dtype=torch.float64),
        torch.tensor([0, 0, 1]),
    )  # their mean is not 0.1
    assert normalize_advantages(values, episodes, ["a", "a"], mean=level, std=level).tolist() == [0, 0, 0]
    assert torch.equal(normalize_advantages(values, episodes, ["a", "a"], std=level), values)
    assert whiten(values).tolist() == [0, 0, 0]


def test_groups_are_identified_by_id_not_by_position() -> None:
    values = torch.tensor([1.0, 10.0, 3.0, 30.0])
    ours = normalize_advantages(values, torch.tensor([0, 1, 2, 3]), ["a", "b", "a", "b"], mean="group")
    assert ours.tolist() == [-1.0, -10.0, 1.0, 10.0]
