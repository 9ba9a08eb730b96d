"""Weights published in shared memory."""

from __future__ import annotations
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
import pytest
import torch
from safetensors.torch import load_file
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.shared_memory import SharedWeights
from areal_lite.servers.weights.weight_folder import publish_weights
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.fork_server import IN_A_FORK

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("tiny", torch.bfloat16), ("untied", torch.float32), ("vlm", torch.float32)]
)
def test_every_version_equals_the_published_files(
    kind: str, dtype: torch.dtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = save_tiny_vlm(tmp_path / "vlm") if kind == "vlm" else request.getfixturevalue(kind)
    model = load_policy(str(folder), device=CPU)  # whose tower, if any, is frozen
    shared = SharedWeights(tmp_path / "shared", dtype=dtype)
    for version in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.25 * torch.randn_like(parameter))
        ours, files = shared.publish(model, version), publish_weights(model, tmp_path / "files", version, dtype=dtype)
        mapped, written = load_file(ours / "model.safetensors"), load_file(files / "model.safetensors")
        assert mapped.keys() == written.keys()
        assert all(torch.equal(mapped[name], written[name]) for name in written)
        assert (ours / "config.json").read_text() == (files / "config.json").read_text()
    shared.close()
    assert not list((tmp_path / "shared").iterdir())


def test_the_version_before_stays_as_it_was(tiny: Path, tmp_path: Path) -> None:
    model = load_policy(str(tiny), device=CPU)
    shared = SharedWeights(tmp_path, dtype=torch.float32)
    newest = shared.publish(model, 0)
    for version in range(1, 6):
        before = {name: one.clone() for name, one in load_file(newest / "model.safetensors").items()}
        with torch.no_grad():
            next(model.parameters()).add_(1)
        read_late, newest = newest, shared.publish(model, version)
        after = load_file(read_late / "model.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)
    shared.close()


def test_closing_frees_the_memory_and_may_come_twice_or_after_the_folders_are_gone(tiny: Path, tmp_path: Path) -> None:
    model = load_policy(str(tiny), device=CPU)
    root = tmp_path / "shared"
    (root / "shared-1").mkdir(parents=True)
    (root / "shared-1" / "adapter_config.json").touch()  # of a run that was killed
    descriptor = os.dup(0)
    os.close(descriptor)
    shared = SharedWeights(root, dtype=torch.float32)
    folders = [shared.publish(model, version) for version in (1, 2)]
    assert not (folders[0] / "adapter_config.json").exists()
    assert "memfd:model.safetensors" in Path("/proc/self/maps").read_text()
    shutil.rmtree(folders[1])
    shared.close()
    shared.close()
    assert not list(root.iterdir())
    assert "memfd:model.safetensors" not in Path("/proc/self/maps").read_text()
    assert os.dup(0) == descriptor
    os.close(descriptor)


def test_another_process_reads_it_and_a_killed_run_leaves_no_memory(tiny: Path, tmp_path: Path) -> None:
    program = (
        f"{IN_A_FORK}import sys, torch; from pathlib import Path\n"
        "from areal_lite.models.policy_model import load_policy\n"
        "from areal_lite.servers.weights.shared_memory import SharedWeights\n"
        "model = load_policy(sys.argv[2], device=torch.device('cpu'))\n"
        "folder = SharedWeights(Path(sys.argv[1]), dtype=torch.float32).publish(model, 0)\n"
        "print(folder, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(tiny)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        file = Path(process.stdout.readline().strip()) / "model.safetensors"
        assert load_file(file)
        assert file.is_symlink()
        process.kill()
    assert not file.exists()
    shared = SharedWeights(tmp_path, dtype=torch.float32)  # the next run replaces what is left
    assert load_file(shared.publish(load_policy(str(tiny), device=CPU), 2) / "model.safetensors")
    assert json.loads((tmp_path / "shared-0" / "config.json").read_text())["dtype"] == "float32"
    shared.close()
