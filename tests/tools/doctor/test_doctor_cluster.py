"""What doctor shows of the nodes of a run."""

from __future__ import annotations
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import pytest
from areal_lite.cluster.ray_places import Bundle, RayPlaces
from areal_lite.config.loader import load_config
from areal_lite.tools.doctor import doctor_run

RAY_YAML = Path(__file__).parents[3] / "configs/ray.yaml"


class Place:
    def __init__(self, host: str, ahead_s: float) -> None:
        self.host = host
        self._ahead_s = ahead_s

    def listen_at(self, host: str, port: int) -> tuple[str, int]:
        return self.host, 20001

    def clock_s(self) -> float:
        return self._ahead_s

    def sees(self, path: str) -> bool:
        return self.host != "10.0.0.3"


def test_each_program_has_a_line_with_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    @contextmanager
    def ray_places(config: Any, log_dir: Path, bundles: Sequence[Bundle]) -> Iterator[RayPlaces]:
        asked.extend(bundle.role for bundle in bundles)
        made: Any = RayPlaces()
        made |= {"rank-0": Place("10.0.0.2", 0.1), "worker-0": Place("10.0.0.3", -2.0)}
        made.address = "10.0.0.1:6379"
        yield made

    monkeypatch.setattr("areal_lite.cluster.ray_places.ray_places", ray_places)
    monkeypatch.setattr("areal_lite.cluster.ray_session.check_ray", lambda config: None)
    config = load_config(RAY_YAML, [f"fileroot={tmp_path}", "cluster.n_ranks=1"])
    cluster, rank, worker = [finding.text for finding in doctor_run.cluster(config)]
    assert asked == ["rank-0", "server-0", "worker-0", "worker-1"]
    assert "Ray at 10.0.0.1:6379 has all that the run wants" in cluster
    assert f"rank-0: node 10.0.0.2 sees {tmp_path}, port 20001 is free, clock +0.1 s" in rank
    assert (
        f"worker-0: node 10.0.0.3 does not see {tmp_path}, port 20001 is free, clock -2.0 s: set the clocks" in worker
    )
    assert not list(doctor_run.cluster(load_config(RAY_YAML, ["launch=local"])))
