"""Rows of tasks and functions, and the errors if they cannot be made."""

import sys
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.errors import ConfigError
from areal_lite.runs.entry_points import check_held_out

SUM = "reasoning-gym:chain_sum"


def load(path, **settings):
    return load_rows(DatasetConfig(path=path, **settings))


def test_a_reasoning_gym_task_gives_question_answer_metadata_and_task():
    rows = load(SUM, kwargs={"size": 5, "seed": 3}, max_samples=2, shuffle=False)
    assert [sorted(row) for row in rows] == [["answer", "metadata", "question", "task"]] * 2
    assert rows[0]["task"] == "chain_sum"
    assert rows == load(SUM, kwargs={"size": 5, "seed": 3})[:2]


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("reasoning-gym:chain_sums", {"seed": 1}, r"no task 'chain_sums'; did you mean 'chain_sum'"),
        ("reasoning-gym:zzzzzz", {"seed": 1}, r"the tasks are .*chain_sum"),
        (SUM, {}, "kwargs has no seed"),
        (SUM, {"seed": 1, "sise": 2}, "unexpected keyword argument 'sise'"),
        (SUM, {"seed": 1, "min_terms": -1}, "min_terms must be positive"),
    ],
)
def test_a_task_that_cannot_be_created_says_why(path, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load(path, kwargs=kwargs)


def test_a_missing_reasoning_gym_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "areal_lite.environments.adapters.reasoning_gym", raising=False)
    with pytest.raises(ConfigError, match="pip install reasoning_gym"):
        load(SUM, kwargs={"seed": 1})


def test_a_file_with_a_colon_in_its_name_is_no_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part:1.jsonl").write_text('{"n": 1}\n')
    assert [dict(row) for row in load("part:1.jsonl")] == [{"n": 1}]


def numbers(count, start=0):
    return [{"n": n} for n in range(start, start + count)]


def words():
    return ["a", [{"role": "user", "content": "b"}]]


def odd():
    return [{"n": 1}, 3]


def unordered():
    return {"a", "b"}


def lazily():
    yield {"n": 1}


NOT_CALLABLE = 3


def test_a_function_gets_its_kwargs_and_gives_rows():
    assert load(f"{__name__}.numbers", kwargs={"count": 2, "start": 5}) == [{"n": 5}, {"n": 6}]


def test_rows_of_a_function_may_be_text_or_conversations():
    assert load(f"{__name__}.words") == words()


def test_max_samples_takes_the_first_rows_or_a_seeded_choice_in_order():
    # V2
    def some(**settings):
        return [row["n"] for row in load(f"{__name__}.numbers", kwargs={"count": 100}, max_samples=4, **settings)]

    assert some(shuffle=False) == [0, 1, 2, 3]
    assert some() == sorted(some()) != some(shuffle=False)
    config = DatasetConfig(path=f"{__name__}.numbers", kwargs={"count": 100}, max_samples=4)
    assert load_rows(config, seed=1) == load_rows(config) != load_rows(config, seed=2)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("numbers", {}, "do not fit: missing a required argument: 'count'"),
        ("numbers", {"count": 1, "end": 2}, "unexpected keyword argument 'end'"),
        ("numbers", {"count": 0}, "there are no rows"),
        ("odd", {}, "row 2: a number"),
        ("lazily", {}, "it returned a generator: it must return a list"),
        ("unordered", {}, "it returned a set: it must return a list"),
        ("NOT_CALLABLE", {}, "it must be a function"),
        ("nombers", {"count": 1}, "did you mean .*numbers"),
    ],
)
def test_a_function_that_does_not_return_rows_says_why(name, kwargs, message):
    # S-B2: no dataset without rows
    with pytest.raises(ConfigError, match=message):
        load(f"{__name__}.{name}", kwargs=kwargs)


@pytest.mark.parametrize(
    ("train", "held_out", "overlap"),
    [
        ({"kwargs": {"seed": 1, "size": 10}}, {"kwargs": {"seed": 10, "size": 5}}, True),
        ({"kwargs": {"seed": 1, "size": 10}}, {"kwargs": {"seed": 11, "size": 5}}, False),
        ({"kwargs": {"seed": 1}}, {"kwargs": {"seed": 500}}, True),
        ({}, {"kwargs": {"seed": 500}}, False),
        (
            {"kwargs": {"seed": 1, "size": 10}, "max_samples": 2, "shuffle": False},
            {"kwargs": {"seed": 3}},
            False,
        ),
        ({"kwargs": {"seed": 1, "size": 10}, "max_samples": 2}, {"kwargs": {"seed": 3}}, True),
    ],
)
def test_held_out_rows_of_a_task_must_not_be_training_rows(train, held_out, overlap):
    configs = DatasetConfig(path=SUM, **train), DatasetConfig(path=SUM, **held_out)
    if not overlap:
        check_held_out(*configs)
        return
    with pytest.raises(ConfigError, match="overlap with the training rows'.*set its seed to"):
        check_held_out(*configs)


def test_files_and_other_tasks_share_no_seeds():
    files = DatasetConfig(path=["a.jsonl", "b.jsonl"])
    check_held_out(files, files)
    check_held_out(DatasetConfig(path=SUM), DatasetConfig(path="reasoning-gym:leg_counting"))
