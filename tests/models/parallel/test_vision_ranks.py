"""Two ranks train a model that reads images like one process, also if the tokens of a rank have no image."""

from __future__ import annotations
import os
import subprocess
import sys
from pathlib import Path
import pytest
import torch
from safetensors import safe_open
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.models.parallel.rank_programs.vision_cases import CASES, compute

PROGRAM = Path(__file__).parent / "rank_programs" / "vision_cases.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module", params=[1, 2], ids=["dp2", "sp2"])
def by_ranks(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("by_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    ended = subprocess.run(
        [*command, str(request.param), str(out), str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_without_images_computes_with_the_others(case: str, folder: Path, by_ranks: Path) -> None:
    expected, _ = compute(folder, case)
    with safe_open(by_ranks / f"{case}.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"with_images": "[0, 1]"}

    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-4)
    assert any(name.startswith("model.visual") for name in found) == (case == "train")
    for name, tensor in expected.items():
        near = max(1e-6, 1e-3 * tensor.abs().max().item())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=near, msg=name)
