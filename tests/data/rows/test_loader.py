"""The position counts batches handed out, and a restored loader gives exactly the remaining ones."""

import copy
import itertools
import json
import multiprocessing
import threading
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.data.rows.fingerprint import content_hash
from areal_lite.data.rows.loader import EpochSampler, ResumableLoader
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.errors import ConfigError


def make(rows=20, batch_size=3, **settings):
    return ResumableLoader(range(rows), **{"batch_size": batch_size, "shuffle": True, "collate_fn": list, **settings})


def epochs(loader, count):
    return [list(loader) for _ in range(count)]


def resumed(state, **settings):
    loader = make(**settings)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


class Curriculum(AbstractSampler):
    """Draws rows ``stride`` apart; a trained batch sets the stride."""

    def __init__(self, data_source, config=None):
        self.size, self.place, self.stride = len(data_source), 0, 1

    def __iter__(self):
        while self.place < self.size:
            self.place += 1
            yield (self.place - 1) * self.stride % self.size
        self.place = 0

    def __len__(self):
        return self.size

    def update(self, batch):
        self.stride += batch[0] + 1


class RememberedCurriculum(Curriculum):
    def state_dict(self):
        return {"place": self.place, "stride": self.stride}

    def load_state_dict(self, state):
        self.place, self.stride = state["place"], state["stride"]


class Growing:
    """A dataset that gains rows while it is trained on."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        return index


def test_a_training_epoch_gives_full_batches_of_rows_drawn_once():  # R9, V18
    (epoch,) = epochs(make(rows=20, batch_size=3), 1)
    assert [len(batch) for batch in epoch] == [3] * 6
    assert len(set(itertools.chain(*epoch))) == 18


def test_validation_gives_every_row():  # V18
    settings = {"shuffle": False, "drop_last": False}
    assert epochs(make(5, 2, **settings), 1) == [[[0, 1], [2, 3], [4]]]
    assert epochs(make(5, None, **settings), 2) == [[[0, 1, 2, 3, 4]]] * 2


def test_each_epoch_has_its_own_seeded_order():  # R9, R-B16
    first, second = epochs(make(seed=1), 2)
    assert first != second
    torch.manual_seed(9)
    assert epochs(make(seed=1), 2) == [first, second]
    assert epochs(make(seed=2), 1) != [first]


def test_loading_leaves_the_global_random_state_alone():  # R-B16
    before = torch.get_rng_state()
    epochs(make(), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_length_is_the_number_of_batches_per_epoch():  # V19
    for drop_last in (True, False):
        loader = make(rows=20, batch_size=3, drop_last=drop_last)
        assert len(loader) == len(list(loader))


def test_rows_are_stacked_by_default():
    (batch,) = make(4, 4, collate_fn=None, shuffle=False)
    assert torch.equal(batch, torch.arange(4))


@given(
    rows=st.integers(3, 20),
    size=st.integers(1, 3),
    before=st.integers(0, 30),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_restored_loader_gives_exactly_the_remaining_batches(rows, size, before, shuffle, drop_last):  # V20
    settings = {"rows": rows, "batch_size": size, "shuffle": shuffle, "drop_last": drop_last}
    loader = make(**settings)
    stream = itertools.chain.from_iterable(loader for _ in itertools.count())
    for _ in itertools.islice(stream, before):
        pass
    copy = resumed(loader.state_dict(), **settings)
    assert copy.epoch == loader.epoch
    assert list(copy) == list(itertools.islice(stream, len(loader) - loader.state_dict()["batches"]))
    loader.load_state_dict(copy.state_dict())
    assert list(copy) == list(loader)


def test_workers_load_ahead_but_only_batches_handed_out_count():  # V20
    reference = epochs(make(batch_size=1), 2)
    loader = make(batch_size=1, num_workers=2)
    iteration = iter(loader)
    assert [next(iteration) for _ in range(3)] == reference[0][:3]
    assert len(multiprocessing.active_children()) >= 2
    state = loader.state_dict()
    iteration.close()
    assert state["batches"] == 3
    for num_workers in (2, 0):
        copy = resumed(state, batch_size=1, num_workers=num_workers)
        assert epochs(copy, 2) == [reference[0][3:], reference[1]]


def test_a_thread_loads_one_batch_ahead_but_only_batches_handed_out_count():  # V20
    drawn, third = [], threading.Event()

    class Watched(list):
        def __getitem__(self, index):
            drawn.append(index)
            if index == 2:
                third.set()
            if index == 6:
                raise ConfigError("row 6 is damaged")
            return super().__getitem__(index)

    loader = ResumableLoader(Watched(range(8)), batch_size=2, read_ahead=True, collate_fn=list)
    batches = iter(loader)
    assert next(batches) == [0, 1]
    assert third.wait(10)
    assert loader._batches == 1
    assert [next(batches), next(batches)] == [[2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="row 6 is damaged"):
        next(batches)
    assert loader._batches == 3
    plain, ahead = (
        ResumableLoader(list(range(9)), batch_size=2, shuffle=True, read_ahead=ahead) for ahead in (False, True)
    )
    for _ in range(3):
        assert [batch.tolist() for batch in ahead] == [batch.tolist() for batch in plain]
        assert ahead.state_dict() == plain.state_dict()


def test_by_default_rows_are_loaded_in_this_thread():
    class Watched(list):
        def __getitem__(self, index):
            return threading.get_ident()

    loader = ResumableLoader(Watched(range(4)), batch_size=2, collate_fn=set)
    assert list(loader) == [{threading.get_ident()}] * 2


def test_a_loader_restored_after_the_last_batch_ends_at_once():  # V20
    loader = make(rows=6, batch_size=3)
    iteration = iter(loader)
    for _ in range(2):
        next(iteration)
    copy = resumed(loader.state_dict(), rows=6, batch_size=3)
    assert epochs(copy, 2) == [[], epochs(make(rows=6, batch_size=3), 2)[1]]
    assert copy.epoch == 2


def test_breaking_out_of_an_iteration_keeps_the_position():
    reference, loader = list(make()), make()
    first = next(iter(loader))
    assert [first, *loader] == reference


def test_an_iteration_ends_when_another_begins():
    loader = make()
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another one began.*iter"):
        next(old)
    old = iter(loader)
    next(old)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="a position was restored"):
        next(old)
    assert loader.state_dict()["batches"] == 3


@pytest.mark.parametrize(
    ("settings", "had"),
    [
        ({"rows": 21}, "rows was 20 and is 21; content was "),
        ({"batch_size": 4}, "batch_size was 3 and is 4"),
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": False}, "drop_last was True and is False"),
        (
            {"shuffle": False, "sampler": Curriculum(range(20))},
            "sampler was 'EpochSampler' and is 'Curriculum'",
        ),
    ],
)
def test_the_position_of_another_dataset_or_setting_is_refused(settings, had):  # V20
    with pytest.raises(ConfigError, match=f"(?s)loader does not fit: .*{had}.*Use the same.*or another trial"):
        resumed(make().state_dict(), **settings)


def items(changed=None):
    """Return 200 fine-tuning items; item ``changed`` ends with another token."""
    return [
        {"input_ids": torch.arange(n, n + 4 + n % 3) + (n == changed), "loss_mask": torch.ones(4 + n % 3)}
        for n in range(200)
    ]


@pytest.mark.parametrize("changed", [0, 199])
def test_the_position_of_equally_many_other_rows_is_refused(changed):  # V20, V51
    def loader(rows):
        return ResumableLoader(rows, batch_size=8, shuffle=True, collate_fn=list)

    state = json.loads(json.dumps(loader(items()).state_dict()))
    loader(items()).load_state_dict(state)
    with pytest.raises(ConfigError, match="content was .*Use the same dataset"):
        loader(items(changed)).load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.array([1.0, 2.5])},
        {"x": np.array([1, 2], np.int32)},
        {"x": np.array([[1, 2]])},
        {"x": np.array([1, {"a": 3}], object)},
        {"x": torch.tensor([1.0, 3.0], dtype=torch.bfloat16)},
        {"y": np.array([1, 2])},
    ],
)
def test_the_hash_of_arrays_covers_values_dtype_and_shape(other):
    row = {"x": np.array([1, 2])}
    assert content_hash([row]) == content_hash([{"x": torch.tensor([1, 2])}])  # bytes, wherever they are
    assert content_hash([other]) == content_hash([copy.deepcopy(other)]) != content_hash([row])


def test_a_dataset_smaller_than_a_batch_is_refused_at_the_start():  # R-B15, V18
    with pytest.raises(ConfigError, match="5 rows has no full batch of 8.*at most 5"):
        make(rows=5, batch_size=8)
    assert len(make(rows=5, batch_size=8, drop_last=False)) == 1


@pytest.mark.parametrize("batch_size", [4, None])
def test_no_rows_are_refused(batch_size):  # R-B15, V18
    with pytest.raises(ConfigError, match="no rows"):
        make(rows=0, batch_size=batch_size, drop_last=False)


def test_arguments_that_contradict_are_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        make(batch_size=0)
    with pytest.raises(ValueError, match="both sampler and shuffle"):
        make(sampler=EpochSampler(range(20), shuffle=True, seed=1))


def test_a_curriculum_needs_rows_drawn_one_batch_at_a_time():  # V21
    with pytest.raises(ConfigError, match="num_workers is 2 with the curriculum Curriculum.*Set num_workers to 0"):
        make(shuffle=False, sampler=Curriculum(range(20)), num_workers=2)


def test_a_curriculum_learns_from_a_batch_before_the_next_is_drawn():  # V21
    curriculum, batches = Curriculum(range(10)), []
    for batch in make(rows=10, batch_size=2, shuffle=False, sampler=curriculum):
        batches.append(batch)
        curriculum.update(batch)
    # Strides 1, 2, 7, ...: rows 2 and 3 with stride 2 are 4 and 6, rows 4 and 5 with stride 7 are 8 and 5.
    assert batches[:3] == [[0, 1], [4, 6], [8, 5]]


@given(before=st.integers(0, 14))
def test_a_curriculum_with_a_state_resumes_what_it_learned(before):  # V20, V21
    def run(loader, curriculum, count):
        for batch in itertools.islice(itertools.chain.from_iterable(loader for _ in itertools.count()), count):
            curriculum.update(batch)
            yield batch

    def new():
        curriculum = RememberedCurriculum(range(10))
        return make(rows=10, batch_size=2, shuffle=False, sampler=curriculum), curriculum

    reference = list(run(*new(), 15))
    loader, curriculum = new()
    assert list(run(loader, curriculum, before)) == reference[:before]
    copy, learned = new()
    copy.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(run(copy, learned, 15 - before)) == reference[before:]


def test_a_curriculum_without_a_state_restarts_and_warns(caplog):  # V20, V21
    settings = {"rows": 10, "batch_size": 2, "shuffle": False}
    loader = make(**settings, sampler=Curriculum(range(10)))
    next(iter(loader))
    copy = resumed(loader.state_dict(), **settings, sampler=Curriculum(range(10)))
    assert "Curriculum has no state_dict" in caplog.text
    assert list(copy) == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_rows_added_to_a_dataset_are_drawn_in_the_next_epoch():
    dataset = Growing(8)
    loader = ResumableLoader(dataset, batch_size=2, shuffle=True, collate_fn=list)
    iteration = iter(loader)
    given_out = [next(iteration)]
    dataset.size = 12
    copy = ResumableLoader(Growing(12), batch_size=2, shuffle=True, collate_fn=list)
    copy.load_state_dict(loader.state_dict())
    given_out += iteration
    assert sorted(itertools.chain(*given_out)) == list(range(8))
    assert list(copy) == given_out[1:]
    second = list(loader)
    assert sorted(itertools.chain(*second)) == list(range(12))
    assert list(copy) == second
