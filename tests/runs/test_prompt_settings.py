"""Settings of a dataset section that nothing would read are refused by name; the others reach the row."""

from __future__ import annotations
from dataclasses import replace
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import RunConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data import load_tokenizer
from areal_lite.data.packer.data_packer import UnpreparedRow
from areal_lite.errors import ConfigError
from areal_lite.runs.run_data import WorkflowChoice, prompt_preparer, training_data

SINGLE, AGENT = "workflows.single_turn.SingleTurnWorkflow", "tests.e2e.agents.LetterAgent"
ROW = {"prompt": "Hi", "answer": 1}


def prepared(tiny_model: Path, rows: dict[str, Any], *, row: Any = ROW, **settings: Any) -> Any:
    section = DatasetConfig(path="rows.jsonl", **rows)
    names: dict[str, Any] = {"experiment_name": "e", "model_path": str(tiny_model), **settings}
    config = RunConfig(trainer=TrainerConfig(total_steps=1, learning_rate=1.0), train_dataset=section, **names)
    tokenizer = load_tokenizer(str(tiny_model))
    choice = WorkflowChoice.of(config)
    prepare = prompt_preparer(config, section, choice, tokenizer=tokenizer, first_row=row)
    if prepare is None:
        return None
    forms = prepare(row)
    return forms | {"raw_prompt_ids": tokenizer.decode(forms.get("raw_prompt_ids", []))}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"max_prompt_length": 5},
            r"train_dataset.max_prompt_length is 5, but would do nothing: LetterAgent writes its",
        ),
        ({"truncation": "left", "max_prompt_length": 5}, "truncation is 'left', but would do nothing: LetterAgent"),
        ({"truncation": "left", "max_prompt_length": 50, "filter_overlong_prompts": True}, "truncation is 'left'"),
        ({"apply_chat_template_kwargs": {"mood": 1}}, "apply_chat_template_kwargs is {'mood': 1}"),
        ({"tools_key": "functions"}, "tools_key is 'functions'"),
        ({"tools_in_system_prompt": True}, "tools_in_system_prompt is True"),
        ({"image_key": "pictures"}, "image_key is 'pictures'"),
        ({"video_key": "films"}, "video_key is 'films'"),
    ],
)
def test_what_an_agent_does_not_read_is_refused(tiny_model: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tiny_model, rows, workflow=AGENT)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"prompt_key": "question", "max_prompt_length": 5}, "no column 'question', only prompt, answer"),
        ({"prompt_key": "question", "return_raw_chat": True}, "return_raw_chat is True, but would do nothing"),
        ({"max_prompt_length": 5}, r"train_dataset rows.jsonl, row 0: the prompt has \d+ tokens, and the maximum is 5"),
    ],
)
def test_what_cannot_act_on_a_prepared_prompt_is_refused(tiny_model: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tiny_model, rows, workflow=SINGLE)


def test_with_a_filter_an_agent_may_say_how_prompts_are_measured(tiny_model: Path) -> None:
    rows = {"filter_overlong_prompts": True, "max_prompt_length": 50, "apply_chat_template_kwargs": {"mood": 1}}
    assert prepared(tiny_model, rows | {"filter_overlong_prompts_workers": 2}, workflow=AGENT) is None


@pytest.mark.parametrize("settings", [{"data_packer": "mine.Packer"}, {}])
def test_beside_a_users_packer_or_dataset_nothing_is_refused(tiny_model: Path, settings: dict[str, str]) -> None:
    rows: dict[str, Any] = {"image_key": "pictures", "max_prompt_length": 5}
    if not settings:
        rows["custom_cls"] = {"path": "mine", "name": "Mine"}
    assert prepared(tiny_model, rows, workflow=AGENT, **settings) is None


def test_agents_get_the_chat_and_the_text_that_they_ask_for(tiny_model: Path) -> None:
    forms = prepared(tiny_model, {"return_raw_chat": True, "return_full_prompt": True}, workflow=AGENT)
    assert forms["raw_prompt"] == [{"role": "user", "content": "Hi"}]
    assert forms["full_prompts"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert forms["raw_prompt_ids"] == ""


def test_arguments_of_the_workflow_are_part_of_the_prompt(tiny_model: Path) -> None:
    template = "{{ enable_thinking }}|{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    rows: dict[str, Any] = {"apply_chat_template_kwargs": {"chat_template": template}}
    kwargs = {"system_prompt": "Be brief."}
    text = prepared(tiny_model, rows, workflow=SINGLE, workflow_kwargs=kwargs)["raw_prompt_ids"]
    assert text == "False|system: Be brief.|user: Hi|"
    rows["apply_chat_template_kwargs"]["enable_thinking"] = True
    row = {"prompt": [{"role": "user", "content": "Hi"}]}
    assert prepared(tiny_model, rows, row=row, workflow=SINGLE, workflow_kwargs=kwargs)["raw_prompt_ids"] == (
        "True|user: Hi|"
    )


def test_rows_without_the_column_are_left_to_the_workflow(tiny_model: Path) -> None:
    assert prepared(tiny_model, {}, row={"messages": []}, workflow=SINGLE) is None


def test_what_a_users_dataset_prepared_is_kept(tiny_model: Path) -> None:
    row = {**ROW, "raw_prompt_ids": [5]}
    assert prepared(tiny_model, {}, row=row, workflow=SINGLE) == {"raw_prompt_ids": ""}


def test_conversations_as_rows_are_rendered_for_agents(tiny_model: Path) -> None:
    rows = {"apply_chat_template_kwargs": {"mood": 1}}
    assert prepared(tiny_model, rows, row=[{"role": "user", "content": "Hi"}], workflow=AGENT) is None


def test_a_prompt_is_filtered_by_the_length_that_the_workflow_asks_with(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"prompt": "Hi there"}\n')
    rows = DatasetConfig(path=str(path), max_prompt_length=39, filter_overlong_prompts=True, shuffle=False)
    trainer = TrainerConfig(total_steps=1, learning_rate=1.0)
    names: dict[str, Any] = {"experiment_name": "e", "model_path": str(tiny_model), "workflow": SINGLE}
    config = RunConfig(**names, trainer=trainer, train_dataset=rows, workflow_kwargs={"reward_fn": "len"})
    assert len(training_data(config).dataset) == 2
    config = replace(config, workflow_kwargs={"reward_fn": "len", "system_prompt": "Be."})
    data = training_data(config)
    assert [row["prompt"] for row in data.dataset.rows] == ["Hi"]
    (group,) = data.source.get_samples(1)
    asked = data.source.rollout_input(group)
    assert isinstance(asked, UnpreparedRow)
    assert len(asked.prepared()["raw_prompt_ids"]) <= 39


@pytest.mark.parametrize(("batch", "repeats"), [(2, False), (3, True)])
def test_a_batch_that_has_a_row_twice_is_said(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int, repeats: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"prompt": "Hi there"}\n')
    names: dict[str, Any] = {"experiment_name": "e", "model_path": str(tiny_model), "workflow": SINGLE}
    trainer = TrainerConfig(total_steps=1, learning_rate=1.0)
    rows, given = DatasetConfig(path=str(path)), {"reward_fn": "len"}
    config = RunConfig(**names, trainer=trainer, train_dataset=rows, workflow_kwargs=given)
    training_data(replace(config, rollout=replace(config.rollout, consumer_batch_size=batch)))
    assert ("a batch has 3 rows and train_dataset has 2: rows repeat within a batch" in caplog.text) == repeats
