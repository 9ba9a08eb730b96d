from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from areal_lite.errors import ConfigError
from areal_lite.trainer.metrics import MetricsWriter


def test_each_record_is_one_json_line_after_those_already_there(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(step, {"loss": 0.5, "entropy": math.nan})
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["loss"], first["entropy"], second["step"]) == (1, 0.5, None, 2)
    assert first["time"] > 1e9


def test_tensorboard_events_are_written_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"loss": 0.5})
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_missing_tensorboard_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"areal-lite\[tensorboard\]"):
        MetricsWriter(tmp_path, tensorboard=True)
