"""The columns of a step's facts: who computed a value, and what is null; tests/verify proves whole files."""

from __future__ import annotations
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from pyarrow import parquet
from areal_lite.config.trainer_config import CorrectionConfig, CriticConfig, KLConfig, TrainerConfig
from areal_lite.errors import StorageError
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.data_metrics import PhaseClock
from areal_lite.trainer.rl.policy_step import Step
from areal_lite.trainer.rl.step_tokens import StepTokens
from areal_lite.trainer.rl.token_facts import TokenFacts, facts_writer, token_facts, write_facts
from tests.trainer.training_data import sequence

NAN = math.nan


def facts(statistics: dict[str, list[float]], log_kept: float = 0.0, **settings: Any) -> TokenFacts:
    """Return facts of three answers of 2 tokens; the last is computed by no rank, and its last token not scored."""
    algorithm = Algorithm(TrainerConfig(total_steps=1, learning_rate=1e-3, **settings), max_new_tokens=None)
    tokens = StepTokens.zeros(torch.tensor([0, 0, 1, 1, 2, 2]))
    tokens.computed[:4] = True
    tokens.known[:5] = True
    tokens.policy = torch.tensor([-1.5, -3.0, -1.0, -3.0, -1.0, -1.0])
    tokens.proximal = torch.tensor([-2.0, -2.0, -2.0, -2.0, -2.0, -2.0])
    tokens.correction = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    tokens.advantages = torch.tensor([0.5, 0.5, -1.0, -1.0, 0.0, 0.0])
    tokens.log_kept.fill_(log_kept)
    step = Step(
        sequences=[sequence([1, 2, 3], [1, 2]) for _ in range(3)],
        episodes=[0, 1, 2],
        version=6,
        tokens=tokens,
        scores=torch.ones(3),
        clock=PhaseClock(torch.device("cpu")),
        baselines=torch.tensor([0.5, 0.25, 0.0]) if algorithm.needs else None,
        statistics={name: torch.tensor(values) for name, values in statistics.items()},
    )
    return token_facts(step, algorithm)


def equal(found: Any, expected: Sequence[float]) -> bool:
    return np.array_equal(found, np.array(expected, np.float32), equal_nan=True)


@pytest.mark.parametrize("early", [True, False])
def test_a_value_that_no_rank_computed_is_null_unless_all_ranks_have_it(early: bool) -> None:
    made = facts({"entropy": [1.0, 2.0, 3.0, 4.0, NAN, NAN]}, correction=CorrectionConfig(normalize=early))
    assert (made.step, made.baselines) == (7, None)
    assert equal(made.columns["policy_logprobs"], [-1.5, -3, -1, -3, NAN, NAN])
    assert equal(made.columns["proximal_logprobs"], [-2, -2, -2, -2, -2, -2 if early else NAN])
    assert equal(made.columns["importance_weights"], [1, 2, 3, 4, *([5, 6] if early else [NAN, NAN])])
    assert equal(made.columns["entropy"], [1, 2, 3, 4, NAN, NAN])
    always = {"behaviour_logprobs", "policy_logprobs", "proximal_logprobs", "importance_weights"}
    assert made.columns.keys() == always | {"advantages", "clipped", "entropy"}


def test_each_setting_has_its_columns() -> None:
    made = facts({}, log_kept=-0.5, kl=KLConfig(coef=0.1), advantage="optimal_token_baseline")
    more = {"log_kept", "reference_logprobs", "sum_squared_probs"}
    assert made.columns.keys() - facts({}).columns.keys() == more
    assert made.baselines == [0.5, 0.25, 0.0]
    assert equal(made.columns["entropy"], [NAN] * 6)
    critic = facts({}, critic=CriticConfig(learning_rate=1e-3), advantage="gae")
    assert critic.columns.keys() - facts({}).columns.keys() == {"values", "returns"}


@pytest.mark.parametrize(("loss", "clipped"), [("ppo", [1, -1, 0, -1, NAN, NAN]), ("gspo", [1, 1, 0, -1, NAN, NAN])])
def test_a_clipped_token_has_the_sign_of_its_bound(loss: str, clipped: list[float]) -> None:
    """The ratio of an episode has the sign of the advantage, that of a token its own."""
    upper, lower = [1.0, 1.0, 0.0, 0.0, NAN, NAN], [0.0, 0.0, 0.0, 1.0, NAN, NAN]
    made = facts({"clip_fraction": upper, "clip_fraction_lower": lower, "ratio": [1.0] * 6}, loss=loss)
    assert equal(made.columns["clipped"], clipped)


def one_token(step: int, *, baselines: Sequence[float] | None = None) -> TokenFacts:
    return TokenFacts(step, [sequence([1, 2], [1])], baselines, {"advantages": np.ones(1, np.float32)})


def threads() -> int:
    return sum(thread.name.startswith("areal-lite-facts") for thread in threading.enumerate())


def test_a_failed_write_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "training").write_text("no folder")
    before = threads()
    with facts_writer(tmp_path / "training") as writer:
        writer(one_token(1))
        with pytest.raises(StorageError, match=r"training/1\.parquet cannot be written"):
            writer(one_token(2))
    assert threads() == before


def test_baselines_and_lines_of_the_dump_are_columns(tmp_path: Path) -> None:
    """Episode 0 has two sequences, episode 1 none, which has one line too, and episode 2 two."""
    sequences = [replace(sequence([1, 2], [1]), task_id="t", member_idx=member) for member in (0, 0, 2, 2)]
    columns = {"clipped": np.ones(4, np.float32), "advantages": np.full(4, 0.5, np.float32)}
    path = tmp_path / "1.parquet"
    write_facts(path, TokenFacts(1, sequences, [0.5, 0.5, 1.0, 1.0], columns))
    rows = parquet.read_table(path).to_pydict()
    assert (rows["baseline"], rows["sample_idx"]) == ([0.5, 0.5, 1.0, 1.0], [0, 1, 3, 4])
    assert (rows["clipped"], rows["advantages"]) == ([[1]] * 4, [[0.5]] * 4)
    assert [str(parquet.read_schema(path).field(name).type.value_type) for name in columns] == ["int8", "float"]
    described = parquet.ParquetFile(path).metadata.row_group(0)
    assert [described.column(place).is_stats_set for place in (0, described.num_columns - 1)] == [True, False]


def test_the_documentation_reads_it_with_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs/trajectories.md").read_text()
    (code,) = re.findall(r"^```python\n(import pandas.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("RUN/training").mkdir(parents=True)
    columns = {name: np.ones(4, np.float32) for name in ("clipped", "advantages", "importance_weights")}
    write_facts(
        Path("RUN/training/7.parquet"), TokenFacts(7, [replace(sequence([1, 2], [1]), task_id="t")] * 4, None, columns)
    )
    names: dict[str, Any] = {}
    exec(compile(code, "docs/trajectories.md", "exec"), names)
    assert names["rows"]["advantages"].tolist() == [1.0] * 4
