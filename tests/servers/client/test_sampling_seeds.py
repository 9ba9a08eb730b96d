"""What the embedded server samples depends on the run's seed, the row and the call, and on nothing timing decides."""

from __future__ import annotations
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import TwoTurns
from tests.stub_server import StubThread

ROWS = [{"ids": [n, n, n]} for n in range(1, 5)]


def seeds(stub: StubThread, folder: Path, **settings: Any) -> dict[tuple[int, ...], list[int | None]]:
    """Return the seeds sent by prompt, for two groups of two episodes of two calls."""
    settings = {"backend": "embedded", "consumer_batch_size": 2, "seed": 7} | settings
    asked = len(stub.server.requests)
    config = InferenceEngineConfig(addresses=[stub.address], fileroot=str(folder), **settings)
    with RemoteInfEngine(config) as engine:
        source = RolloutDataSourceWithBuffer(ROWS, SourceSettings(n_samples_per_prompt=2))
        engine.prepare_batch(source, TwoTurns, group_size=2)
        engine.close_source(source)
    found: dict[tuple[int, ...], list[int | None]] = {}
    for request in stub.server.requests[asked:]:
        seed = request["sampling_params"].get("sampling_seed")
        found.setdefault(tuple(request["input_ids"]), []).append(seed)
    return {prompt: sorted(sent, key=str) for prompt, sent in found.items()}


def test_two_runs_ask_alike_and_no_two_calls_of_a_run_do(start_stub: Callable[..., StubThread], tmp_path: Path) -> None:
    stub = start_stub()
    first = seeds(stub, tmp_path)
    assert seeds(stub, tmp_path) == first
    sent = [seed for of_prompt in first.values() for seed in of_prompt]
    assert len(set(sent)) == len(sent) == 8
    assert not set(sent) & {seed for of_prompt in seeds(stub, tmp_path, seed=8).values() for seed in of_prompt}


@pytest.mark.parametrize("settings", [{"backend": "sglang"}, {"seed": None}])
def test_other_servers_and_runs_without_a_seed_draw_their_own(
    start_stub: Callable[..., StubThread], tmp_path: Path, settings: dict[str, Any]
) -> None:
    sent = seeds(start_stub(), tmp_path, **settings)
    assert {seed for of_prompt in sent.values() for seed in of_prompt} == {None}
