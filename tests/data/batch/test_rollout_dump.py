"""V56, V-B10: one line per answer with its score, including numpy values; no file is ever replaced."""

import json
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.data.batch.rollout_dump import dump_rollouts
from areal_lite.errors import StorageError
from tests.trainer.crash_states import files_end_at


def dump(directory, step=3, extra=None, **changes):
    columns = {"input": ["2+2?", "1+1?"], "output": ["4", "3"], "gts": ["4", "2"], "score": [1.0, 0.0]}
    return dump_rollouts(directory, step, columns | changes, extra or {})


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_v56_a_line_has_input_output_truth_score_step_and_the_extra_columns(tmp_path):
    path = dump(tmp_path / "rollouts", extra={"request_id": ["x", "y"], "acc": [True, False]})
    assert path == tmp_path / "rollouts/3.jsonl"
    assert lines(path) == [
        {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 3, "request_id": "x", "acc": True},
        {
            "input": "1+1?",
            "output": "3",
            "gts": "2",
            "score": 0.0,
            "step": 3,
            "request_id": "y",
            "acc": False,
        },
    ]


def test_vb10_numbers_arrays_and_tensors_are_written_as_json(tmp_path):
    values = [np.float32(0.5), np.int64(2), np.bool_(True), np.arange(2), torch.tensor([1.5]), float("nan")]
    odd = [np.array(["a", None], dtype=object), {1: (np.float64(2.0),)}]
    count = len(values + odd)
    path = dump(
        tmp_path,
        input=[[{"role": "user", "content": "hé"}]] * count,
        output=[""] * count,
        gts=values + odd,
        score=np.zeros(count, np.float32),
    )
    found = lines(path)
    assert [one["gts"] for one in found] == [0.5, 2, True, [0, 1], [1.5], None, ["a", None], {"1": [2.0]}]
    assert found[0]["input"] == [{"role": "user", "content": "hé"}] and found[0]["score"] == 0.0


def test_vb10_a_step_trained_again_gets_a_new_file(tmp_path):
    paths = [dump(tmp_path, score=[score, score]) for score in (0.0, 1.0, 2.0)]
    assert [path.name for path in paths] == ["3.jsonl", "3.1.jsonl", "3.2.jsonl"]
    assert [lines(path)[0]["score"] for path in paths] == [0.0, 1.0, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.1.jsonl", "3.2.jsonl", "3.jsonl"]


@settings(max_examples=30)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=4))
def test_every_answer_is_one_line_for_any_text(tmp_path_factory, texts):
    count = len(texts)
    path = dump(tmp_path_factory.mktemp("dump"), 0, input=texts, output=texts, gts=texts, score=[0.0] * count)
    assert [one["output"] for one in lines(path)] == texts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": [1.0]}, "shorter"),
        ({"extra": {"score": [1.0, 1.0]}}, r"extra has \['score'\], which every line already has"),
        (
            {"gts": [object(), 1]},
            r"gts is an object that cannot be written as JSON \(an object has no JSON form\)",
        ),
    ],
)
def test_a_column_that_cannot_be_written_leaves_no_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        dump(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="rollouts of step 3 cannot be written"):
        dump(tmp_path / "file" / "below")


def test_t6_a_full_disk_leaves_no_partial_dump(tmp_path):
    with files_end_at(10), pytest.raises(StorageError, match="step 3 cannot be written.*File too large"):
        dump(tmp_path)
    assert not list(tmp_path.iterdir())
