"""Rows come in the order of a curriculum, which learns from each trained batch."""

from __future__ import annotations
from collections.abc import Iterator
from typing import Any
import orjson
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.row_streams import CurriculumRows
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError

ROWS = [{"prompt": str(number)} for number in range(6)]


class Up(AbstractSampler):
    """Counts up to the end, from a start that trained batches move."""

    def __init__(self, data_source: Any, config: DatasetConfig) -> None:
        self.size, self.place = len(data_source), 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.size:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def __len__(self) -> int:
        return self.size

    def update(self, batch: Any) -> None:
        self.place += batch


class UpWithState(Up):
    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def source(kind: type[Up] = Up) -> RolloutDataSourceWithBuffer:
    sampler = kind(ROWS, DatasetConfig(path=""))
    return RolloutDataSourceWithBuffer(CurriculumRows(ROWS, SourceSettings(n_samples_per_prompt=2), sampler))


def learn(source: RolloutDataSourceWithBuffer, batch: int) -> None:
    assert isinstance(source.rows, CurriculumRows)
    source.rows.update(batch)


def prompts(drawn: list[Any]) -> list[Any]:
    return [group[0].prompt for group in drawn]


def test_v61_a_trained_batch_changes_the_next_draw() -> None:
    rows = source()
    assert prompts(rows.get_samples(2)) == ["0", "1"]
    learn(rows, 2)
    assert prompts(rows.get_samples(2)) == ["4", "5"]
    assert prompts(rows.get_samples(1)) == ["0"]
    assert (rows.epoch_id, rows.sample_offset, len(rows)) == (1, 1, 6)


def test_groups_given_back_come_first() -> None:
    rows = source()
    first, second = rows.get_samples(2)
    rows.give_back([first])
    assert prompts(rows.get_samples(2)) == ["0", "2"]


@pytest.mark.parametrize(("kind", "next_prompt"), [(UpWithState, "4"), (Up, "2")])
def test_a_restart_resumes_the_curriculum(kind: type[Up], next_prompt: str) -> None:
    """A curriculum without a state skips as many rows as were drawn, and forgets what it learned."""
    before = source(kind)
    before.mark_trained(before.get_samples(2))
    learn(before, 2)
    after = source(kind)
    after.load_state_dict(orjson.loads(orjson.dumps(before.state_dict())))
    assert prompts(after.get_samples(1)) == [next_prompt]


def test_a_curriculum_without_rows_is_an_error() -> None:
    class Nothing(Up):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError, match="Nothing gives no row in epoch 1"):
        source(Nothing).get_samples(1)
