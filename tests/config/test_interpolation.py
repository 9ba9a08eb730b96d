"""References in a config are replaced before it is checked, with OmegaConf's syntax; each mistake is an error."""

from __future__ import annotations
import dataclasses
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.dump import dump_config
from areal_lite.config.loader import describe_value, load_config
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.errors import ConfigError

SFT = """
kind: sft
experiment_name: seed
model_path: {model_path}
fileroot: {fileroot}
seed: 7
train_dataset:
  path: {path}
  max_length: 64
trainer:
  batch_size: {batch_size}
  learning_rate: 1e-5
"""
PLAIN = {"model_path": "m", "fileroot": "runs", "path": "rows.jsonl", "batch_size": "8"}


def loaded(folder: Path, *overrides: str, **texts: str) -> SFTConfig:
    path = folder / "c.yaml"
    path.write_text(SFT.format(**PLAIN | texts))
    return load_config(path, overrides, root=SFTConfig)


def refused(folder: Path, *overrides: str, **texts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, *overrides, **texts)
    return str(caught.value)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_HOME", "/home/me")
    monkeypatch.setenv("SFT_BATCH", "16")
    monkeypatch.setenv("SFT_ODD", "${model_path}")
    monkeypatch.delenv("SFT_UNSET", raising=False)


def test_variables_and_other_values_are_inserted(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        model_path="${oc.env:SFT_HOME}/models/tiny",
        fileroot="${oc.env:SFT_UNSET,runs}/${experiment_name}-${seed}",
        path="[a.jsonl, '${model_path}/${train_dataset.max_length}.jsonl']",
    )
    assert config.model_path == "/home/me/models/tiny"
    assert config.fileroot == "runs/seed-7"
    assert config.train_dataset.path == ["a.jsonl", "/home/me/models/tiny/64.jsonl"]


@pytest.mark.parametrize("written", ["${oc.env:SFT_BATCH}", "${oc.env:SFT_UNSET,16}", "${trainer.epochs}6"])
def test_a_whole_value_has_the_type_of_its_key(tmp_path: Path, written: str) -> None:
    if "epochs" in written:
        written = "${oc.env:SFT_UNSET,${trainer.epochs}6}"
    assert loaded(tmp_path, batch_size=written).trainer.batch_size == 16
    assert loaded(tmp_path, batch_size=written, path="'${oc.env:SFT_BATCH}'").train_dataset.path == "16"


def test_a_reference_keeps_the_type_of_what_it_names(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        "eval_dataset=${train_dataset}",
        "trainer.total_steps=${trainer.batch_size}",
        "evaluation.every_steps=${seed}",
    )
    assert config.eval_dataset == config.train_dataset
    assert (config.trainer.total_steps, config.evaluation.every_steps) == (8, 7)


def test_a_key_that_the_file_lacks_has_its_default(tmp_path: Path) -> None:
    assert loaded(tmp_path, batch_size="${trainer.epochs}").trainer.batch_size == 1
    assert loaded(tmp_path, path="${trainer.lr_schedule}.jsonl").train_dataset.path == "cosine.jsonl"


def test_an_inserted_value_is_not_read_again_and_an_escape_is_a_dollar(tmp_path: Path) -> None:
    assert loaded(tmp_path, path="'${oc.env:SFT_ODD}/x'").train_dataset.path == "${model_path}/x"
    assert loaded(tmp_path, path=r"'\${HOME}/${model_path}'").train_dataset.path == "${HOME}/m"
    assert loaded(tmp_path, path="'$HOME/a'").train_dataset.path == "$HOME/a"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (
            {"path": "${model_pth}"},
            "train_dataset.path: '${model_pth}': unknown key 'model_pth'; did you mean",
        ),
        ({"path": "${trainer.batch}"}, "unknown key 'batch'; did you mean"),
        ({"path": "${model_path.x}"}, "there is no key 'model_path.x'"),
        ({"path": "${oc.env:SFT_UNSET}"}, "the environment variable 'SFT_UNSET' is not set: export it, or write"),
        ({"path": "${env:SFT_HOME}"}, "no resolver 'env': use ${oc.env:NAME}"),
        ({"path": "'${model_path'"}, "${ without its }"),
        ({"path": "x${trainer}"}, "${trainer} is a dict: text can hold only single values"),
        ({"path": "${train_dataset.tools}"}, "unknown key 'tools'"),
        ({"path": "${eval_dataset.max_length}"}, "'eval_dataset.max_length' has no value: set it"),
        (
            {"model_path": "${fileroot}/m", "fileroot": "${model_path}/runs"},
            "model_path: '${fileroot}/m': it refers to itself through other keys: give one of them a value",
        ),
        ({"path": "a/${train_dataset.path}"}, "train_dataset.path: 'a/${train_dataset.path}': it refers to itself"),
        ({"batch_size": "${oc.env:SFT_HOME}"}, "from '${oc.env:SFT_HOME}': trainer.batch_size: '/home/me': it must be"),
    ],
)
def test_a_mistake_names_file_key_and_fix(tmp_path: Path, texts: dict[str, str], says: str) -> None:
    error = refused(tmp_path, **texts)
    assert error.startswith(f"{tmp_path}/c.yaml")
    assert says in error


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    error = refused(tmp_path, model_path="${oc.env:SFT_UNSET}", path="${nothing}")
    assert [line.split(": ")[1] for line in error.splitlines()] == ["model_path", "train_dataset.path"]


def test_a_value_is_explained_with_its_source(tmp_path: Path) -> None:
    texts = {"model_path": "${oc.env:SFT_HOME}/m", "path": "${model_path}/rows.jsonl"}
    config = loaded(tmp_path, **texts)

    def says(key: str, *overrides: str) -> Any:
        return describe_value(tmp_path / "c.yaml", overrides, key, root=ExperimentConfig)

    file = tmp_path / "c.yaml"
    assert says("model_path") == f"value /home/me/m  ({file}, from '${{oc.env:SFT_HOME}}/m')"
    assert says("train_dataset.path") == f"value /home/me/m/rows.jsonl  ({file}, from '${{model_path}}/rows.jsonl')"
    assert says("seed") == f"value 7  ({file})"
    assert says("trainer.epochs") == "value 1  (default)"
    assert says("seed", "seed=9") == f"value 9  ({file}, override 'seed=9')"
    assert "override 'seed=${trainer.epochs}', from '${trainer.epochs}'" in says("seed", "seed=${trainer.epochs}")
    assert says("trainer") == says("nothing") == ""
    assert "${" not in dump_config(config)


@pytest.mark.parametrize("text", ["${HOME}", r"\${HOME}", r"a\\${HOME}", "${", "$${x}"])
def test_a_dumped_text_is_no_reference(tmp_path: Path, text: str) -> None:
    config = dataclasses.replace(loaded(tmp_path), model_path=text)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml", root=SFTConfig) == config
