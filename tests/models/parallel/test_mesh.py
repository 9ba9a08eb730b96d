"""Ranks that read sequences together compute what one process computes."""

from __future__ import annotations
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.files.atomic_folder import check_folder
from areal_lite.models.parallel.ranks import Ranks, join_ranks
from areal_lite.models.policy_model import check_mesh
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.forward.microbatches import plan_blocks
from areal_lite.trainer.forward.packed_model import PackedModel, pack
from tests.fixtures.tiny_model import build_tiny_model
from tests.models.parallel.rank_programs.mesh_cases import FAMILIES, LLAMA, MESHES, ONE_KEY, RESUMED, build, results
from tests.models.parallel.rank_programs.training_cases import make_trainer, run_case
from tests.trainer.training_data import drawn_batch

PROGRAM = Path(__file__).parent / "rank_programs" / "mesh_cases.py"
CPU = torch.device("cpu")
QUICK = ("sp2", "tp2")
IN_BFLOAT16, OF_ROUNDING = 0.2, 1e-5
"""Limits of the relative error."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        build(family, folder / family)
    build_tiny_model(folder / "tiny")
    with CheckpointWriter(folder / "alone", keep=1) as writer:
        writer.save(2, snapshot(run_case(RESUMED, folder / "tiny")[0]), {})
    return folder


@pytest.fixture(scope="module")
def by_mesh(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the results of all cases of a mesh, which its ranks write once."""

    @functools.cache
    def compute(mesh: str) -> Path:
        out = tmp_path_factory.mktemp("by_mesh")
        environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROGRAM), mesh, str(out), str(models)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr
        return out

    return compute


@pytest.fixture(scope="module")
def alone(models: Path) -> Callable[[str, int], dict[str, Tensor]]:
    """Results of one process for a case."""
    return functools.cache(functools.partial(results, models=models))


@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        pytest.param(name, case, marks=[] if name in QUICK else pytest.mark.slow)
        for name, mesh in MESHES.items()
        for case in mesh.cases
    ],
)
def test_a_mesh_gives_each_gradient_and_weight_of_one_process(
    mesh: str, case: str, by_mesh: Callable[[str], Path], alone: Callable[[str, int], dict[str, Tensor]]
) -> None:
    """R21: also clipped ones, after several updates, of trees, forks, critics, adapters and pairs."""
    expected, found = alone(case, MESHES[mesh].steps), load_file(by_mesh(mesh) / f"{case}.safetensors")
    limit = IN_BFLOAT16 if case == "bfloat16" else OF_ROUNDING

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("metric/") or tensor.isnan().any():  # some metrics are differences or near 0
            torch.testing.assert_close(found[name], tensor, rtol=max(limit, 1e-3), atol=limit, equal_nan=True, msg=name)
        else:
            assert (found[name] - tensor).double().norm() <= limit * tensor.double().norm(), name
    assert any(tensor.any() for name, tensor in expected.items() if name.startswith("gradient/"))


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        kind = f"{file.relative_to(folder).parent}/{file.name.split('.')[0].split('-')[0]}"
        found |= {f"{kind}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


MESH = pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MESHES]
)


@MESH
def test_a_checkpoint_is_resumed_bit_for_bit_on_another_mesh_and_back(
    mesh: str, models: Path, by_mesh: Callable[[str], Path]
) -> None:
    """R21: each rank writes its share of the tensors, whole ones, in files that transformers reads."""
    alone, together = models / "alone/step_00000002", by_mesh(mesh) / "checkpoints/step_00000002"
    size = MESHES[mesh].size
    check_folder(together)
    expected, found = tensors(alone), tensors(together)

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (together / "trainer.json").read_bytes() == (alone / "trainer.json").read_bytes()
    assert (together / "note").read_bytes() == b"of the first rank"
    for kind in ("policy/model/model", "policy/optimizer", "critic/model/model", "critic/optimizer"):
        sizes = [(together / f"{kind}-{n + 1:05d}-of-{size:05d}.safetensors").stat().st_size for n in range(size)]
        assert max(sizes) < 1.8 * sum(sizes) / size
    loaded = AutoModelForCausalLM.from_pretrained(together / "policy/model").state_dict()
    assert all(torch.equal(loaded[name[19:]], t) for name, t in found.items() if name.startswith("policy/model/model/"))
    resumed = make_trainer(RESUMED, models / "tiny")
    restore(resumed, together)
    assert snapshot(resumed).learners["critic"].optimizer.keys() == {
        name.removeprefix("critic/optimizer/") for name in found if name.startswith("critic/optimizer/")
    }


@MESH
def test_a_rank_that_cannot_write_leaves_no_checkpoint_and_is_named_on_all(
    mesh: str, by_mesh: Callable[[str], Path]
) -> None:
    out = by_mesh(mesh)
    first, second, *others = ((out / f"failed_{rank}.txt").read_text() for rank in range(MESHES[mesh].size))

    assert [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert "part-00001 could not be written" in second
    assert {first, *others} == {"the checkpoint of step 3 was not written: another rank names the reason"}


def test_ranks_are_numbered_by_share_then_by_part() -> None:
    places = [Ranks(rank, 12, sp=2, tp=2) for rank in range(12)]

    assert [(one.dp, one.shards, one.dp_rank, one.sp_rank, one.tp_rank) for one in places] == [
        (3, 6, share, part, layer) for share in range(3) for part in range(2) for layer in range(2)
    ]


def test_a_width_is_rounded_up_by_tokens_that_nobody_reads() -> None:
    batch = drawn_batch(0)
    blocks = [block for [block] in plan_blocks(batch, range(len(batch)), max_tokens=1000, balance_length=1000)]
    plain, rounded = (pack(batch, blocks, device=CPU, multiple=multiple) for multiple in (1, 64))
    width = len(plain.input_ids)

    assert width % 64
    assert len(rounded.input_ids) == width - width % 64 + 64
    assert rounded.segments.query_ends.tolist() == [*plain.segments.query_ends.tolist(), len(rounded.input_ids)]
    assert (rounded.segments.keys[-(64 - width % 64) :] >= width).all()
    assert torch.equal(rounded.predicted_at, plain.predicted_at)


@pytest.mark.parametrize("sp_size", [3, 8])
def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(sp_size: int, models: Path) -> None:
    check_mesh(str(models / ONE_KEY), mesh_config(sp_size=4))
    with pytest.raises(ConfigError, match=rf"sp_size is {sp_size}, .* 4 attention heads.* one of 1, 2, 4 as sp_size$"):
        check_mesh(str(models / ONE_KEY), mesh_config(sp_size=sp_size))
    with pytest.raises(ConfigError, match=r"sp_size is 4, tp_size 2, .* one of 1, 2 as sp_size$"):
        check_mesh(str(models / LLAMA), mesh_config(sp_size=4, tp_size=2))
    model = PackedModel(transformers.AutoModelForCausalLM.from_pretrained(models / "llama"))
    with pytest.raises(ConfigError, match=f"sp_size is {sp_size}"):
        model.read_in_parts(Ranks(0, sp_size, sp=sp_size))


def mesh_config(**sizes: int) -> TrainerConfig:
    return TrainerConfig(total_steps=1, learning_rate=1e-3, **sizes)  # type: ignore[arg-type]


def test_layers_that_ranks_cannot_divide_are_refused_by_the_config_alone(models: Path, tmp_path: Path) -> None:
    check_mesh(str(models / LLAMA), mesh_config(tp_size=2))
    with pytest.raises(ConfigError, match=r"tp_size is 2, .* num_key_value_heads 1, .*: use one of 1$"):
        check_mesh(str(models / ONE_KEY), mesh_config(tp_size=2))
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"tp_size is 2, .* a gpt2 model, without a plan to divide its layers"):
        check_mesh(str(tmp_path), mesh_config(tp_size=2))
    transformers.MixtralConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"a mixtral model, whose layers .* \(.*moe_tp_experts.*\)"):
        check_mesh(str(tmp_path), mesh_config(tp_size=2))


def test_layers_of_a_model_that_reads_images_are_not_divided(tmp_path: Path) -> None:
    transformers.Qwen2VLConfig().save_pretrained(tmp_path)
    check_mesh(str(tmp_path), mesh_config(sp_size=2))
    with pytest.raises(ConfigError, match=r"tp_size is 2, .* reads images, without a plan"):
        check_mesh(str(tmp_path), mesh_config(tp_size=2))


def test_each_rank_keeps_its_part_of_each_layer(by_mesh: Callable[[str], Path]) -> None:
    """Weights and optimizer, of which norms alone are whole on both."""
    held = [json.loads((by_mesh("tp2") / f"held_{rank}.json").read_bytes()) for rank in range(2)]

    assert all(kept <= 0.55 * whole for kept, whole in held)


def test_a_model_that_does_not_read_sequences_side_by_side_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1, state_size=4)
    model = PackedModel(transformers.MambaForCausalLM(config))
    with pytest.raises(ConfigError, match="MambaForCausalLM does not read sequences side by side"):
        model.read_in_parts(Ranks(0, 2, sp=2))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_cannot_be_divided_are_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with (
        pytest.raises(ConfigError, match=f"sp_size is 2, tp_size 1, and there are {size} ranks"),
        join_ranks(CPU, sp_size=2),
    ):
        pass


def test_a_config_needs_at_least_one_rank_of_each() -> None:
    with pytest.raises(ValueError, match="sp_size"):
        TrainerConfig(total_steps=1, learning_rate=1e-3, sp_size=0)
