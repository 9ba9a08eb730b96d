"""Weights are read by shard: what a rank does not keep takes no memory."""

from __future__ import annotations
import json
import os
import subprocess
import sys
from pathlib import Path
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig
from areal_lite.models.parallel.sharding import empty_model, fill
from tests.fixtures.tiny_model import build_tiny_model

PROGRAM = Path(__file__).parent / "rank_programs" / "memory.py"


@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_model_is_filled_with_the_bits_of_a_whole_one(tied: bool, tmp_path: Path) -> None:
    build_tiny_model(tmp_path, tied=tied)
    GenerationConfig(temperature=0.3, do_sample=True).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    model, missing = empty_model(AutoModelForCausalLM, str(tmp_path)) or pytest.fail("it was not possible")
    fill(model)

    assert missing == []
    assert not model.training
    assert model.generation_config.temperature == 0.3
    assert model.name_or_path == whole.name_or_path
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.state_dict().keys() == whole.state_dict().keys()
    for found, expected in (
        (model.state_dict(), whole.state_dict()),
        *[map(lambda m: dict(m.named_buffers()), (model, whole))],
    ):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_only_a_head_may_be_missing_and_only_plain_weights_are_read_so(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, tied=False)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    critic = empty_model(AutoModelForTokenClassification, str(tmp_path), num_labels=1)
    assert critic is not None
    assert critic[1] == ["score.weight", "score.bias"]
    changes = {
        "renamed": {"model.layers.0.mlp.up.weight": weights["model.layers.0.mlp.up_proj.weight"]},
        "of another shape": {"lm_head.weight": weights["lm_head.weight"][:9]},
    }
    for changed in changes.values():
        save_file({name: t for name, t in weights.items() if "layers.0.mlp.up" not in name} | changed, file)
        assert empty_model(AutoModelForCausalLM, str(tmp_path)) is None
    save_file(weights, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert empty_model(AutoModelForCausalLM, str(tmp_path)) is None
    assert empty_model(AutoModelForCausalLM, "owner/name") is None


@pytest.mark.slow
@pytest.mark.parametrize(("size", "share"), [(2, 0.55), (4, 0.30)])
def test_a_rank_needs_memory_for_its_own_shard_and_two_files(size: int, share: float, tmp_path: Path) -> None:
    """R21: while it loads and while it saves, beside what a rank needs without a model."""
    build_tiny_model(tmp_path / "model", hidden_size=1024, num_layers=6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model", max_shard_size="20MB")
    (tmp_path / "model/model.safetensors").unlink()
    files = [file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(size), str(tmp_path / "model"), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    whole = sum(weight.nbytes for weight in model.parameters())
    for rank in range(size):
        grown = json.loads((tmp_path / f"memory_{rank}.json").read_text())
        assert grown["loaded"] < share * whole + 2 * max(files)
        assert grown["copied"] < 3 * share * whole
        assert grown["saved"] < 3 * share * whole + 2 * max(files)  # weights and two moments
