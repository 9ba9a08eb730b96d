"""Rows come whole and checked, or an error says which line is wrong."""

import json
import sys

import pytest

from areal_lite.api.config import DatasetConfig
from areal_lite.data.dataset import load_rows
from areal_lite.errors import ConfigError


def load(path, **settings):
    return load_rows(DatasetConfig(path=str(path), **settings))


@pytest.fixture
def write(tmp_path):
    def write(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content.encode())
        return path

    return write


def test_a_jsonl_file_gives_one_row_a_line_and_skips_blank_ones(write):
    assert load(write('{"a": 1}\n\n{"a": 2}')) == [{"a": 1}, {"a": 2}]


def test_a_json_file_gives_its_list(write):
    assert load(write('[{"a": "é"}, {"b": null}]', "rows.json")) == [{"a": "é"}, {"b": None}]


def test_max_samples_takes_the_first_rows(write):
    assert load(write('{"a": 1}\n{"a": 2}\n{"a": 3}\n'), max_samples=2) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n{"a": 3}\n', "rows.jsonl, line 2: not JSON"),
        ("rows.jsonl", '{"a": 1}\n{"a": 2', "rows.jsonl, line 2: not JSON.*the last line, perhaps cut off"),
        ("rows.jsonl", '{"a": 1}\n[1]\n', "rows.jsonl, line 2: it is a list: each row must be an object"),
        ("rows.jsonl", '{"a": NaN}\n', "line 1: not JSON"),
        ("rows.jsonl", "", "there are no rows"),
        ("rows.jsonl", "\n\n", "there are no rows"),
        ("rows.json", "[]", "there are no rows"),
        ("rows.json", "{}", "it holds a dict: it must be a list of objects"),
        ("rows.json", '[{"a": 1}, null]', "rows.json, row 2: it is a null"),
        ("rows.json", "[1,\n", "rows.json: not JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_file_and_line(write, name, content, message):
    with pytest.raises(ConfigError, match=message):
        load(write(content, name))


def test_a_file_that_is_not_there_names_a_close_one(write):
    path = write("{}", "train.jsonl")
    with pytest.raises(ConfigError, match=r"No such file or directory; did you mean .*train.jsonl\?"):
        load(path.with_name("trian.jsonl"))


def test_kwargs_mean_nothing_to_a_file(write):
    with pytest.raises(ConfigError, match="mean nothing to a file"):
        load(write("{}"), kwargs={"size": 3})


def test_a_path_of_no_known_kind_says_the_three_kinds():
    for path in ("rows.csv/x", "rows"):
        with pytest.raises(ConfigError, match=r"\.jsonl or \.json, reasoning-gym:TASK, or the dotted path"):
            load(path)


def test_a_reasoning_gym_task_gives_question_answer_metadata_and_task():
    rows = load("reasoning-gym:chain_sum", kwargs={"size": 5, "seed": 3}, max_samples=2)
    assert [sorted(row) for row in rows] == [["answer", "metadata", "question", "task"]] * 2
    assert rows[0]["task"] == "chain_sum"
    assert rows == load("reasoning-gym:chain_sum", kwargs={"size": 5, "seed": 3})[:2]


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("reasoning-gym:chain_sums", {"seed": 1}, r"no task 'chain_sums'; did you mean chain_sum"),
        ("reasoning-gym:zzzzzz", {"seed": 1}, r"the tasks are .*chain_sum"),
        ("reasoning-gym:chain_sum", {}, "kwargs has no seed"),
        ("reasoning-gym:chain_sum", {"seed": 1, "sise": 2}, "unexpected keyword argument 'sise'"),
        ("reasoning-gym:chain_sum", {"seed": 1, "min_terms": -1}, "min_terms must be positive"),
    ],
)
def test_a_task_that_cannot_be_made_says_why(path, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load(path, kwargs=kwargs)


def test_without_reasoning_gym_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"areal-lite\[examples\]"):
        load("reasoning-gym:chain_sum", kwargs={"seed": 1})


def numbers(count, start=0):
    return [{"n": n} for n in range(start, start + count)]


def words():
    return ["a"]


def lazily():
    yield {"n": 1}


NOT_CALLABLE = 3


def test_a_function_gets_its_kwargs_and_gives_rows():
    assert load(f"{__name__}.numbers", kwargs={"count": 2, "start": 5}) == [{"n": 5}, {"n": 6}]
    assert load(f"{__name__}.numbers", kwargs={"count": 9}, max_samples=1) == [{"n": 0}]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("numbers", {}, "do not fit: missing a required argument: 'count'"),
        ("numbers", {"count": 1, "end": 2}, "unexpected keyword argument 'end'"),
        ("numbers", {"count": 0}, "there are no rows"),
        ("words", {}, "row 1: it is a str"),
        ("lazily", {}, "it returned a generator: it must return a list"),
        ("NOT_CALLABLE", {}, "it must be a function"),
        ("nombers", {"count": 1}, "did you mean .*numbers"),
    ],
)
def test_a_function_that_gives_no_rows_says_why(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load(f"{__name__}.{name}", kwargs=kwargs)


def test_rows_are_plain_json_objects(write):
    rows = load(write('{"a": {"b": [1]}}\n'))
    assert json.loads(json.dumps(rows)) == rows
