"""Several ranks train like one process, share batches, and end together."""

from __future__ import annotations
import faulthandler
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import load_data_proto
from areal_lite.models.parallel.ranks import Ranks, broadcast_batch, broadcast_json, gather_json, join_ranks
from areal_lite.servers.weights.weight_folder import write_model
from areal_lite.trainer.checkpoint.snapshot import restore
from tests.models.parallel.rank_programs.training_cases import (
    PUBLISHED,
    RESUMED,
    SHARD_BYTES,
    SIZES,
    generated_rows,
    make_trainer,
    run_case,
    weights,
)

Alone = Callable[[str], dict[str, Tensor]]
PROGRAMS = Path(__file__).parent / "rank_programs"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def by_ranks(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of 2 and 4 ranks for all cases, in folders ``2`` and ``4``."""
    out = tmp_path_factory.mktemp("by_ranks")
    ended = run([str(PROGRAMS / "training_cases.py"), str(out), str(tiny)])
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Results of one process for a case, with its published weights."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def compute(case: str) -> dict[str, Tensor]:
        trainer, found = run_case(case, tiny)
        if case in PUBLISHED:
            (folder / case).mkdir()
            write_model(trainer.model, folder / case, torch.float32)
            found |= {
                f"published/{name}": tensor for name, tensor in load_file(folder / case / "model.safetensors").items()
            }
        return found

    return compute


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in SIZES.items() for case in cases])
def test_any_number_of_ranks_gives_the_results_of_one_process(
    size: int, case: str, by_ranks: Path, alone: Alone
) -> None:
    """L10, R21: scores, metrics, gradients and weights after two steps, also if a rank has no sequences."""
    expected = {name: tensor for name, tensor in alone(case).items() if not name.startswith("published/")}
    found = load_file(by_ranks / str(size) / f"{case}.safetensors")

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # bfloat16 has three digits, and rounds differently in a micro-batch of another shape.
        tolerance = 0.1 if case == "bfloat16" else 1e-4
        least = 0.1 if name.endswith("_pearson") else 1e-3  # a correlation near 0 is noise on the scale of 1
        near = tolerance * max(least, tensor.abs().nan_to_num().max().item())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=near, equal_nan=True, msg=name)
    assert any(tensor.any() for name, tensor in expected.items() if name.startswith("gradient/"))


@pytest.mark.parametrize("size", SIZES)
def test_weights_and_optimizer_state_are_sharded_over_ranks(size: int, by_ranks: Path) -> None:
    held = [json.loads((by_ranks / str(size) / f"held_{rank}.json").read_bytes()) for rank in range(size)]
    weights, states, (num_weights, *_), gathered = zip(*held, strict=True)

    assert sum(weights) == num_weights
    assert sum(states) == 2 * num_weights
    assert max(weights) < 1.05 * num_weights / size
    assert set(gathered) == {3}  # each of two layers, and what is outside of layers


@pytest.mark.parametrize(("size", "case"), [(2, "one_microbatch"), (2, "adapters"), (4, "one_microbatch")])
def test_ranks_write_one_folder_in_files_of_bounded_size(size: int, case: str, by_ranks: Path, alone: Alone) -> None:
    folder = by_ranks / str(size) / f"{case}_weights"
    files = sorted(folder.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = {name[len("published/") :]: t for name, t in alone(case).items() if name.startswith("published/")}

    assert len(files) > 1
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= SHARD_BYTES for file in files)
    assert written.keys() == expected.keys()  # a tied head is not there, adapters are merged
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=1e-4 * tensor.abs().max().item(), msg=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    sent = load_file(by_ranks / str(size) / f"{case}_broadcast.safetensors")
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("size", SIZES)
def test_written_weights_equal_those_in_training_bit_for_bit(size: int, by_ranks: Path) -> None:
    trained = load_file(by_ranks / str(size) / "one_microbatch.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(by_ranks / str(size) / "one_microbatch_weights", dtype="auto")

    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, trained[f"weight/policy/model.{name}"]), name


@pytest.mark.parametrize("case", RESUMED)
def test_a_sharded_checkpoint_resumes_bit_for_bit_on_as_many_or_fewer_ranks(
    case: str, tiny: Path, by_ranks: Path
) -> None:
    out = by_ranks / "2"
    trained = load_file(out / f"{case}.safetensors")
    fewer = make_trainer(case, tiny)
    restore(fewer, out / f"{case}_checkpoints/step_00000002")

    for resumed in (
        weights(fewer),
        *(load_file(out / f"{case}_resumed_{rank}.safetensors") for rank in range(2)),
    ):
        for name, tensor in resumed.items():
            assert torch.equal(tensor, trained[name]), name


def assert_same(found: DataProto, expected: DataProto) -> None:
    assert found.batch.keys() == expected.batch.keys()
    for key, column in expected.batch.items():
        torch.testing.assert_close(found.batch[key], column, rtol=0, atol=0, equal_nan=True)
    for key, array in expected.non_tensor_batch.items():
        assert found.non_tensor_batch[key].tolist() == array.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_receives_rank_0s_batch_unchanged(size: int, by_ranks: Path) -> None:
    for rank in range(size):
        assert_same(load_data_proto(by_ranks / str(size) / f"broadcast_{rank}"), generated_rows())


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_receives_the_same_decision(size: int, by_ranks: Path) -> None:
    for rank in range(size):
        decision, everyone = json.loads((by_ranks / str(size) / f"decision_{rank}.json").read_bytes())
        assert decision == {"stop": True}  # rank 0's, while the others said False
        assert everyone == [[other, "é"] for other in range(size)]


def test_a_rank_that_raises_ends_the_run_and_is_named() -> None:
    """F69; the error names the first rank that failed."""
    ended = run([*LAUNCHER, str(PROGRAMS / "failing.py"), "raises"])

    assert ended.returncode != 0
    report = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "rank      : 1" in report
    assert "RuntimeError: the engine is gone" in report
    assert ", in generate" in report  # the place


def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    """F69; a killed rank leaves no time of its end, so the launcher may see the other's failure first."""
    ended = run([*LAUNCHER, str(PROGRAMS / "failing.py"), "killed"])

    assert ended.returncode != 0
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 .*(\n.*)*SIGKILL", ended.stderr)


@pytest.mark.slow
def test_a_hanging_rank_ends_the_run_with_its_stack() -> None:
    """F70: the other gives up waiting, and the launcher ends both, after its own 30 s."""
    ended = run([*LAUNCHER, str(PROGRAMS / "failing.py"), "hangs"])

    assert ended.returncode != 0
    stack = ended.stderr[ended.stderr.index("still running after 0.5 s") :]
    assert 'failing.py", line' in stack
    assert "in generate" in stack
    assert "rank      : 0" in ended.stderr[ended.stderr.index("Root Cause") :]


def test_a_single_process_broadcasts_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    batch = generated_rows()
    with join_ranks(torch.device("cpu")) as ranks:
        assert ranks == Ranks(rank=0, size=1)
        assert (broadcast_json({"stop": False}), gather_json(1)) == ({"stop": False}, [1])
        assert_same(broadcast_batch(batch), batch)


@pytest.mark.parametrize(("device", "backend", "gpus"), [("cpu", "gloo", []), ("cuda", "cpu:gloo,cuda:nccl", [3])])
def test_a_rank_takes_the_gpu_of_its_number_and_its_stack_is_shown_at_a_crash(
    device: str, backend: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    taken: list[int] = []
    begun: list[str] = []
    handlers: list[bool] = []

    def begin(backend: str, **_: Any) -> None:
        begun.append(backend)
        raise ConnectionError

    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(faulthandler, "enable", lambda **_: handlers.append(True))
    monkeypatch.setattr(dist, "init_process_group", begin)
    with pytest.raises(ConnectionError), join_ranks(torch.device(device)):
        pass
    assert (taken, begun, handlers) == (gpus, [backend], [True])


def test_broadcasting_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 passed None"):
        broadcast_batch(None)
