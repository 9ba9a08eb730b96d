"""Ranks start and end together, and runs side by side: on places of this machine, which needs no Ray."""

from __future__ import annotations
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.cluster.ray_places import Bundle, RayPlaces
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import TrainingError
from areal_lite.processes.place import HERE, OnEnd, Program
from areal_lite.processes.ports import free_ports
from areal_lite.runs.stopping import Stopped
from areal_lite.tools.run import on_nodes, train
from areal_lite.tools.run.on_nodes import run_side_by_side, train_on_ranks

RAY_YAML = Path(__file__).parents[3] / "configs/ray.yaml"


class LocalPlace:
    """Runs ``script`` in place of each command, with its words as arguments, in ``folder``."""

    def __init__(self, script: str, folder: Path) -> None:
        self.host = self.address = "127.0.0.1"
        self.log_path: Path | None = folder / "log"
        self._log = folder / "log"
        self.starts = 0
        self._script = f"import os, signal, sys\nfolder = {str(folder)!r}\n{textwrap.dedent(script)}"

    where = " on node n"

    def ready_actor(self) -> None:
        pass

    def listen_at(self, host: str, port: int) -> tuple[str, int]:
        return self.host, free_ports(self.host, 1)[0]

    def start_logged(self, command: Sequence[str], environment: Mapping[str, str], on_end: OnEnd) -> Program:
        self.starts += 1
        assert command[:3] == [sys.executable, "-m", "areal_lite"]
        words = [sys.executable, "-S", "-E", "-c", self._script, *command[3:]]
        variables = {**environment, "START": str(self.starts)}
        with self._log.open("ab") as log:
            return HERE.start(words, variables, log, on_end)


Started = Callable[[str], RayPlaces]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """Return a function that has all places run a script; the places are filled when they are made."""

    def start(script: str) -> RayPlaces:
        made = RayPlaces()
        made.address = "head:1"

        @contextmanager
        def ray_places(
            config: Any, log_dir: Path, bundles: Sequence[Bundle], later: Sequence[Bundle] = ()
        ) -> Iterator[RayPlaces]:
            made.update({bundle.role: LocalPlace(script, tmp_path) for bundle in bundles})  # type: ignore[misc]
            yield made

        monkeypatch.setattr(on_nodes, "ray_places", ray_places)
        monkeypatch.setattr(on_nodes, "check_ray", lambda config: None)
        return made

    return start


def config_of(tmp_path: Path, *changes: str) -> Any:
    return load_config(RAY_YAML, [f"fileroot={tmp_path}", "cluster.n_ranks=2", *changes])


def starts(places: Any) -> list[int]:
    return [place.starts for place in places.values()]


def test_a_rank_that_is_killed_has_all_start_again(
    started: Started, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places: Any = started("""
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
        values = [os.environ[name] for name in names] + sys.argv[1:]
        open(folder + "/" + os.environ["START"] + "-" + os.environ["RANK"], "w").write(" ".join(values))
        if os.environ["START"] == "1":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # as a rank that waits for the one that died
    """)
    train_on_ranks(config_of(tmp_path), ["train", "my.yaml", "a=1"])
    assert starts(places) == [2, 2]
    assert (tmp_path / "2-0").read_text() == "0 2 0 2 127.0.0.1 train my.yaml a=1 ray.address=head:1"
    assert (tmp_path / "2-1").read_text() == "1 2 1 2 127.0.0.1 train my.yaml a=1 ray.address=head:1"
    assert "rank-1 on node n was ended by SIGKILL: all ranks start again, time 1 of 3" in caplog.text


@pytest.mark.parametrize(("code", "times"), [(5, 2), (64, 1), (78, 1)])
def test_ranks_start_again_as_often_as_the_config_says_and_not_for_what_comes_again(
    started: Started, tmp_path: Path, code: int, times: int
) -> None:
    places: Any = started(f"sys.exit({code} if os.environ['RANK'] == '0' else 0)")
    with pytest.raises(
        TrainingError, match=rf"^rank-0 on node n ended with exit code {code}; .* {times} times"
    ) as error:
        train_on_ranks(config_of(tmp_path, "ray.max_failures=1"), ["train", "my.yaml"])
    assert error.value.exit_code == code
    assert starts(places) == [times, times]


def test_a_stop_reaches_all_ranks_and_waits_for_them(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped

    former = signal.signal(signal.SIGUSR1, stop)
    places: Any = started("""
        def end(*_):
            open(folder + "/stopped-" + os.environ["RANK"], "w").close()
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGUSR1)
        else:
            open(folder + "/ready", "w").close()
        while True:
            signal.pause()
    """)
    original = LocalPlace.start_logged

    def start_in_order(place: LocalPlace, *arguments: Any) -> Program:
        program = original(place, *arguments)
        while place is places["rank-0"] and not (tmp_path / "ready").exists():
            os.sched_yield()
        return program

    monkeypatch.setattr(LocalPlace, "start_logged", start_in_order)
    try:
        with pytest.raises(Stopped):
            train_on_ranks(config_of(tmp_path), ["train", "my.yaml"])
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert {"stopped-0", "stopped-1"} <= {path.name for path in tmp_path.iterdir()}


def test_a_command_with_ranks_on_nodes_starts_them_and_a_rank_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(on_nodes, "train_on_ranks", lambda config, words: calls.append(words))
    monkeypatch.setattr(train, "train", lambda config: calls.append(config.cluster.n_ranks))
    overrides = [f"fileroot={tmp_path}", "cluster.n_ranks=2"]
    options: Any = SimpleNamespace(command="train", config=str(RAY_YAML), overrides=overrides, root=RunConfig)
    options.verbose = False
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")  # which loading a run sets
    train.run(options)
    monkeypatch.setenv("RANK", "1")
    train.run(options)
    assert calls == [["train", str(RAY_YAML), *overrides], 2]


def test_runs_side_by_side_are_made_once_each_on_as_many_nodes_as_there_are(started: Started, tmp_path: Path) -> None:
    places: Any = started("open(folder + '/' + sys.argv[2] + '.made', 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    configs = [config_of(tmp_path, "cluster.n_nodes=2", f"trial_name={name}") for name in "abc"]
    done: list[str] = []
    run_side_by_side(configs, [["sft", name] for name in "abc"], lambda config: done.append(config.trial_name))
    assert sorted(done) == ["a", "b", "c"]
    assert len(places) == 2
    assert sum(starts(places)) == 3
    (line,) = (tmp_path / "b.made").read_text().splitlines()
    assert line.startswith("sft b launch=local cluster.n_nodes=1 cluster.n_gpus_per_node=0 cluster.n_ranks=0 ray.")
    alone = load_config(RAY_YAML, line.split()[2:])
    assert (alone.launch, alone.ray) == ("local", type(alone.ray)())


def test_a_run_that_fails_ends_the_others_with_its_code(started: Started, tmp_path: Path) -> None:
    started("sys.exit(7) if sys.argv[2] == 'b' else signal.pause()")
    configs = [config_of(tmp_path, "cluster.n_nodes=2", f"trial_name={name}") for name in "ab"]
    with pytest.raises(TrainingError, match=r"the run of \S+/b on node n ended with exit code 7") as error:
        run_side_by_side(configs, [["train", "a"], ["train", "b"]], lambda config: None)
    assert error.value.exit_code == 7
