"""``areal-lite export``: its files train with the commands they are for, and hold nothing that was not said."""

from __future__ import annotations
import json
import sys
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
import yaml
from pyarrow import parquet
import areal_lite
from areal_lite.cli.main import main
from areal_lite.config.loader import class_of, load_config
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.tools.export.conversation_text import ConversationReader
from tests.tools.inspect.dump_lines import failed, line, turn, write


def spans(tokenizer: Any, *texts: tuple[str, str], **values: Any) -> list[dict[str, Any]]:
    """Return the turns of roles and texts."""
    turns, start = [], 0
    for place, (role, text) in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        each = turn(role, text, len(ids), ids=ids, turn_idx=place, parent_idx=place - 1 if place else None, start=start)
        turns.append(each | values if role == "assistant" else each)
        start += len(ids)
    return turns


def question(text: str) -> tuple[str, str]:
    return "prompt", f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def answered(tokenizer: Any, task: int, sample: int, text: str, reward: float, **values: Any) -> dict[str, Any]:
    turns = spans(tokenizer, question(f"What is {task}?"), ("assistant", f"{text}<|im_end|>"), **values)
    return line(task, sample, reward=reward, turns=turns, prompt_len=len(turns[0]["ids"]))


@pytest.fixture
def dump(tmp_path: Path, tiny_model: Path) -> Path:
    """Return a run of two groups of three, one that failed in part, and an evaluation."""
    tokenizer, root = load_tokenizer(str(tiny_model)), tmp_path / "e" / "t"
    texts = (("right", 1.0), ("wrong", 0.0), ("nearly", 0.5))
    for task in (7, 8):
        write(
            root / f"rollout/1/{task}.jsonl",
            *(answered(tokenizer, task, i, f"{text} {task}", reward) for i, (text, reward) in enumerate(texts)),
        )
    cut = answered(tokenizer, 9, 0, "cut", 1.0, stop_reason="length")
    write(root / "rollout/1/9.jsonl", cut, answered(tokenizer, 9, 1, "no", 0.0) | {"status": "failed"})
    write(root / "eval-rollout/1/10.jsonl", answered(tokenizer, 10, 0, "held out", 1.0))
    (root / "config.yaml").write_text(
        yaml.safe_dump(
            {
                **{"experiment_name": "e", "model_path": str(tiny_model), "workflow": "tests.e2e.agents.LetterAgent"},
                **{"train_dataset": {"path": "x"}, "trainer": {"total_steps": 1, "learning_rate": 1e-3}},
            }
        )
    )
    return root


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def train(kind: str, rows: Path, tiny_model: Path, folder: Path, **dataset: Any) -> list[dict[str, float]]:
    """Train two steps with the repository's config on the exported rows, and return the metrics."""
    config = yaml.safe_load(Path(f"configs/{kind}.yaml").read_text())
    config |= {"model_path": str(tiny_model), "fileroot": str(folder / "runs"), "eval_dataset": None}
    config["train_dataset"] = {"path": str(rows), "max_length": 200, **dataset}
    config["trainer"] |= {"device": "cpu", "num_threads": 1, "dtype": "float32", "batch_size": 2, "total_steps": 2}
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(config))
    run_dir = run_supervised(load_config(path, root=class_of(kind))).run_dir  # type: ignore[arg-type]
    return rows_of(run_dir / "metrics.jsonl")


def test_sft_rows_are_the_best_of_each_group_and_train(
    dump: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.jsonl"
    assert main(["export", str(dump), "--sft", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"2 rows written to {file}; train on them: areal-lite sft CONFIG.yaml train_dataset.path={file}\n"
    assert "1 cut off" in err and "failed" not in err
    assert [row["messages"] for row in rows_of(file)] == [
        [{"role": "user", "content": f"What is {task}?"}, {"role": "assistant", "content": f"right {task}"}]
        for task in (7, 8)
    ]
    steps = train("sft", file, tiny_model, tmp_path)
    # An answer trains with its end of turn: "right 7" and <|im_end|>, twice in a batch.
    assert [step["train/trained_tokens"] for step in steps] == [2 * (len("right 7") + 1)] * 2
    assert main(["export", str(dump), "--sft", str(file), "--choose", "accepted", "--keep-cut-off"]) == 0
    assert len(rows_of(file)) == 7
    assert main(["export", str(dump), "--sft", str(file), "--choose", "accepted", "reward<1", "scope~."]) == 0
    assert {row["reward"] for row in rows_of(file)} == {0.0, 0.5}


def test_with_rewards_of_turns_the_best_episode_is_exported_whole(tmp_path: Path, tiny_model: Path, dump: Path) -> None:
    tokenizer, file = load_tokenizer(str(tiny_model)), tmp_path / "sft.jsonl"
    lines = []
    for member, (text, each, whole) in enumerate((("wrong", 1.0, 1.0), ("right", 0.9, 1.8))):
        texts = [question("What is 5?"), ("assistant", f"{text}<|im_end|>")]
        more = [("environment", "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"), texts[1]]
        for turns in (spans(tokenizer, *texts), spans(tokenizer, *texts, *more)):
            facts = {"member_idx": member, "episode_reward": whole, "seqlen": sum(len(turn["ids"]) for turn in turns)}
            one = line(5, len(lines), reward=each, turns=turns, prompt_len=len(turns[0]["ids"]), **facts)
            lines.append({name: value for name, value in one.items() if (name, value) != ("episode_reward", each)})
    write(dump / "rollout/1/5.jsonl", *lines)
    assert main(["export", str(dump), "--sft", str(file), "task=5"]) == 0
    (row,) = rows_of(file)
    assert [message["content"] for message in row["messages"]] == ["What is 5?", "right", "And?", "right"]
    assert row["reward"] == 1.8
    frame = areal_lite.load_run(dump, "task=5").episodes
    assert (list(frame.reward), list(frame.episode_reward)) == ([1.0, 1.0, 0.9, 0.9], [1.0, 1.0, 1.8, 1.8])
    assert main(["export", str(dump), "--dpo", str(file), "task=5"]) == 0
    (row,) = rows_of(file)
    assert (row["chosen"][0]["content"], row["chosen_reward"], row["rejected_reward"]) == ("right", 1.8, 1.0)


def test_dpo_rows_are_best_against_worst_and_train(dump: Path, tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "dpo.jsonl"
    assert main(["export", str(dump), "--dpo", str(file)]) == 0
    rows = rows_of(file)
    assert [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows] == [
        ("right 7", "wrong 7"),
        ("right 8", "wrong 8"),
    ]
    assert (rows[0]["chosen_reward"], rows[0]["rejected_reward"]) == (1.0, 0.0)
    steps = train("dpo", file, tiny_model, tmp_path)
    assert len(steps) == 2 and steps[0]["train/margin"] == pytest.approx(0, abs=1e-5)


def test_openai_rows_are_messages_alone(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "openai.jsonl"
    assert main(["export", str(dump), "--openai", str(file), "task=8"]) == 0
    (row,) = rows_of(file)
    assert row == {"messages": [{"role": "user", "content": "What is 8?"}, {"role": "assistant", "content": "right 8"}]}
    (dump / "config.yaml").unlink()
    assert main(["export", str(dump), "--openai", str(file)]) == 64
    assert "--tokenizer" in capsys.readouterr().err
    assert not list(tmp_path.glob(".unfinished*"))
    assert rows_of(file) == [row]


def test_without_a_tokenizer_sft_rows_are_texts(
    dump: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dump / "config.yaml").unlink()
    file = tmp_path / "sft.jsonl"
    assert main(["export", str(dump), "--sft", str(file)]) == 0
    assert "train_dataset.apply_chat_template=false" in capsys.readouterr().err
    assert rows_of(file)[0]["prompt"] == question("What is 7?")[1]
    assert len(train("sft", file, tiny_model, tmp_path, apply_chat_template=False)) == 2


def test_parquet_has_every_line_with_its_tokens(sound_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.parquet"
    assert main(["export", str(sound_run), "--parquet", str(file)]) == 0
    table = parquet.read_table(file).to_pylist()
    dumped = [row for path in sound_run.glob("*rollout/*/*.jsonl") for row in rows_of(path)]
    assert len(table) == len(dumped) == 3 * 16 + 3 * 4
    by_id = {(row["task_id"], row["sample_idx"]): row for row in table}
    for each in dumped:
        row = by_id[str(each["task_id"]), each["sample_idx"]]
        assert row["reward"] == each["reward"] and row["completion"] == each["completion"]
        assert row["input_ids"] == [id for turn in each["turns"] for id in turn["ids"]]
        assert len(row["logprobs"]) == len(row["versions"]) == len(row["loss_mask"]) == each["seqlen"]
        assert sum(row["loss_mask"]) == sum(sum(turn["loss_mask"]) for turn in each["turns"]) > 0


@pytest.fixture
def two_lines(tmp_path: Path) -> Path:
    """A run with an accepted line, a failed one of another task, and metrics."""
    write(tmp_path / "e/t/rollout/3/7.jsonl", line())
    write(tmp_path / "e/t/rollout/3/a.jsonl", failed("a", turns=[turn("prompt", tokens=3)]), tail="{")
    write(tmp_path / "e/t/metrics.jsonl", {"step": 1, "train/loss": 0.5}, {"step": 1, "eval/reward": 1, "note": "x"})
    return tmp_path / "e/t"


def test_load_run_gives_episodes_turns_tokens_and_metrics_as_frames(
    two_lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = areal_lite.load_run(two_lines)
    assert "1 lines or files could not be read" in capsys.readouterr().err
    episodes = run.episodes.set_index("id")
    assert list(episodes.index) == ["rollout/3/7.jsonl:1", "rollout/3/a.jsonl:1"]
    assert list(episodes.task_id) == ["7", "a"] and list(episodes.status) == ["accepted", "failed"]
    assert episodes.reward.iloc[0] == 0.5 and isnan(episodes.reward.iloc[1]) and episodes.finished_at.iloc[0] == 100
    assert episodes.episode_reward.iloc[0] == 0.5 and isnan(episodes.episode_reward.iloc[1])
    turns = run.turns.merge(run.episodes, left_on=["run", "episode"], right_on=["run", "id"])
    assert list(turns.role) == ["prompt", "assistant", "prompt"] and list(turns.tokens) == [2, 2, 3]
    assert list(turns.trained) == [0, 2, 0] and list(turns.turn) == [0, 1, 0] and list(turns.task_id) == ["7", "7", "a"]
    tokens = run.tokens
    assert list(tokens["index"]) == [0, 1, 2, 3, 0, 1, 2] and list(tokens.token) == [0, 1, 0, 1, 0, 1, 2]
    assert list(tokens["mask"]) == [0, 0, 1, 1, 0, 0, 0] and list(tokens.logprob.dropna()) == [-0.5, -0.5]
    assert list(tokens.advantages.isna()) == [True] * 7  # there are no training facts
    assert run.metrics.drop(columns="run").to_dict("list")["step"] == [1, 1] and "note" not in run.metrics
    assert list(run.metrics["train/loss"].dropna()) == [0.5] and list(run.metrics["eval/reward"].dropna()) == [1.0]
    assert run.tokens is tokens


def test_load_run_filters_and_makes_frames_of_polars(two_lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(from_arrow=lambda table: ("polars", table.num_rows)))
    run: Any = areal_lite.load_run(str(two_lines.parent), "status=failed", frames="polars")
    assert (run.episodes, run.turns, run.tokens) == (("polars", 1), ("polars", 1), ("polars", 3))
    none: Any = areal_lite.load_run(two_lines, "reward>7", frames="polars")
    assert (none.episodes, none.metrics) == (("polars", 0), ("polars", 2))


def test_load_run_refuses_what_it_cannot_do_in_one_sentence(two_lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": "nowhere"}, "nowhere: No such file or directory: give a file or folder that a run wrote"),
        ({"filter": "rewrd<1"}, "did you mean 'reward'?"),
        ({"frames": "polars"}, "frames='polars' needs polars: pip install polars"),
        ({"frames": "os"}, "frames is 'os': it must be pandas or polars"),
    ]
    for arguments, says in cases:
        with pytest.raises(ConfigError) as caught:
            areal_lite.load_run(**{"path": two_lines} | arguments)
        assert says in str(caught.value)


def test_nothing_to_export_is_an_error(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for terms, says in ((["task=9"], "1 cut off"), (["reward>7"], "no accepted episode of the run matches")):
        assert main(["export", str(dump), "--sft", str(tmp_path / "x.jsonl"), *terms]) == 64
        assert says in capsys.readouterr().err
    assert main(["export", str(dump), "--sft", str(tmp_path / "no" / "x.jsonl")]) == 74
    assert not list(tmp_path.glob("*x.jsonl"))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
FORGETS = CHATML.replace("{{ m.content }}", "{{ m.content.split('/think')[-1] if not loop.last else m.content }}")


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_messages_come_back_from_text(template: str, tiny_model: Path) -> None:
    reader, tokenizer = reader_of(template, tiny_model)
    talk = [
        *({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""}),
        *({"role": "tool", "content": "user\n<|im"}, {"role": "assistant", "content": "d e "}),
    ]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    found = reader.messages(text.removesuffix("\n"))
    assert found is not None and found[-4:] == talk
    assert reader.messages(text.removesuffix("<|im_end|>\n")) == found
    assert reader.messages(text + "<|im_start|>more") is None
    assert reader.messages("something else") is None


def test_a_template_that_rewrites_history_gives_no_messages(tiny_model: Path) -> None:
    reader, _ = reader_of(FORGETS, tiny_model)
    talk = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nx/thinky<|im_end|>\n<|im_start|>user\nz<|im_end|>\n"
    assert reader.messages(talk) is None
    assert reader.messages(talk.replace("x/think", "")) is not None


def reader_of(template: str, model: Path) -> tuple[ConversationReader, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return ConversationReader(tokenizer), tokenizer
