"""An epoch's order depends only on (seed, epoch), or is a curriculum that the config names."""

import textwrap
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.config.dataset_config import ClassConfig, DatasetConfig
from areal_lite.data.rows.loader import EpochSampler, create_rl_sampler
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.errors import ConfigError


class EasyFirst(AbstractSampler):
    def __init__(self, data_source, config):
        self.data_source, self.config, self.seen = data_source, config, []

    def __iter__(self):
        return iter(sorted(range(len(self)), key=lambda index: self.data_source[index]))

    def __len__(self):
        return len(self.data_source)

    def update(self, batch):
        self.seen.append(batch)


class WithoutUpdate(EasyFirst):
    update = AbstractSampler.update


def epoch_order(rows, *, seed, epoch):
    sampler = EpochSampler(range(rows), shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


class NoSampler:
    pass


def config(name=None, path=__name__, **settings):
    return DatasetConfig(path="rows.jsonl", sampler=name and ClassConfig(path=path, name=name), **settings)


@given(rows=st.integers(0, 50), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_an_epoch_has_each_row_once(rows, seed, epoch):  # R9
    assert sorted(epoch_order(rows, seed=seed, epoch=epoch)) == list(range(rows))


def test_the_order_depends_only_on_seed_and_epoch():  # R9, R-B16
    first = epoch_order(100, seed=1, epoch=0)
    np.random.seed(5)
    torch.manual_seed(5)
    assert epoch_order(100, seed=1, epoch=0) == first
    assert epoch_order(100, seed=1 - 2**64, epoch=0) == first  # a seed counts modulo 2**64, and no less
    assert epoch_order(100, seed=1 + 2**63, epoch=0) != first != epoch_order(100, seed=129, epoch=0)
    others = [epoch_order(100, seed=1, epoch=1), epoch_order(100, seed=2, epoch=0), range(100)]
    assert all(list(other) != first for other in others)


def test_drawing_leaves_the_global_random_states_alone():  # R-B16
    numpy_state, torch_state = np.random.get_state()[1].tolist(), torch.get_rng_state()
    list(EpochSampler(range(50), shuffle=True, seed=1))
    assert np.random.get_state()[1].tolist() == numpy_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_an_unshuffled_epoch_keeps_the_order_of_the_rows():  # V21
    assert list(create_rl_sampler(config(shuffle=False), range(5), seed=1)) == [0, 1, 2, 3, 4]


def test_a_shuffled_epoch_is_seeded():  # V21
    sampler = create_rl_sampler(config(), range(50), seed=3)
    assert list(sampler) == epoch_order(50, seed=3, epoch=0)
    sampler.set_epoch(4)
    assert list(sampler) == epoch_order(50, seed=3, epoch=4)


def test_an_epoch_can_cover_only_the_first_rows():
    sampler = EpochSampler(range(50), shuffle=True, seed=1)
    sampler.set_epoch(2, num_rows=7)
    assert list(sampler) == epoch_order(7, seed=1, epoch=2)
    assert len(sampler) == 7


def test_a_curriculum_gets_dataset_and_config():  # V21
    settings = config("EasyFirst")
    sampler = create_rl_sampler(settings, [3, 1, 2], seed=1)
    assert type(sampler).__name__ == "EasyFirst"
    assert sampler.config is settings
    assert list(sampler) == [1, 2, 0]


def test_a_curriculum_can_come_from_a_file(tmp_path):  # V21
    source = """
        from __future__ import annotations
        from dataclasses import dataclass
        from areal_lite.data.rows.samplers import AbstractSampler

        @dataclass
        class Place:
            offset: int = 0

        class Backwards(AbstractSampler):
            def __init__(self, data_source, config): self.size = len(data_source)
            def __iter__(self): return iter(range(self.size - 1, Place().offset - 1, -1))
            def __len__(self): return self.size
            def update(self, batch): pass
        """
    file = tmp_path / "curriculum.py"
    file.write_text(textwrap.dedent(source))
    assert list(create_rl_sampler(config("Backwards", str(file)), range(3), seed=1)) == [2, 1, 0]


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("NoSampler", __name__, "NoSampler.*subclass of areal_lite.data.rows.samplers.AbstractSampler"),
        ("config", __name__, "config.*subclass of"),
        ("WithoutUpdate", __name__, "WithoutUpdate.*has no update"),
        ("Missing", __name__, "sampler is .*Missing.*has no"),
        ("EasyFirst", "nowhere/curriculum.py", "no such file .*nowhere/curriculum.py"),
    ],
)
def test_a_class_that_is_not_a_curriculum_is_refused(name, path, message):  # V21
    with pytest.raises(ConfigError, match=message):
        create_rl_sampler(config(name, path), range(3), seed=1)
