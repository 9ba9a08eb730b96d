from __future__ import annotations
import hashlib
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.errors import StorageError
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.weight_folder import in_parts, publish_weights, save_model, write_model

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny: Path) -> Any:
    return load_policy(str(tiny), device=CPU)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_a_published_folder_loads_in_transformers(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = load_policy(str(request.getfixturevalue(kind)), device=CPU)
    folder = publish_weights(model, tmp_path, 7, dtype=torch.float32)
    assert folder == tmp_path / "v00000007"
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert ("lm_head.weight" in tensors.keys()) == (kind == "untied")  # noqa: SIM118
        assert "model.embed_tokens.weight" in tensors.keys()  # noqa: SIM118


def test_weights_are_published_in_the_configured_dtype(model: Any, tmp_path: Path) -> None:
    folder = publish_weights(model, tmp_path, 1, dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    torch.testing.assert_close(again.state_dict(), {k: v.bfloat16() for k, v in model.state_dict().items()})


def test_the_manifest_names_every_file_with_size_and_hash(model: Any, tmp_path: Path) -> None:
    folder = publish_weights(model, tmp_path, 3)
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text)
    assert text == json.dumps(manifest, indent=2) + "\n"
    assert (manifest["schema"], manifest["version"]) == (1, 3)
    assert sorted(manifest["files"]) == ["config.json", "generation_config.json", "model.safetensors"]
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_the_newest_two_versions_are_kept(model: Any, tmp_path: Path) -> None:
    for version in range(4):
        publish_weights(model, tmp_path, version)
    assert names(tmp_path) == ["v00000002", "v00000003"]


def test_a_run_that_went_back_keeps_what_it_publishes_and_what_is_newer(model: Any, tmp_path: Path) -> None:
    for version in (5, 6, 3):
        publish_weights(model, tmp_path, version)
    assert names(tmp_path) == ["v00000003", "v00000005", "v00000006"]


def test_files_of_weights_are_as_large_as_allowed_and_no_larger() -> None:
    tensors = [(name, torch.zeros(2)) for name in "abcde"]
    assert [sorted(one) for one in in_parts(tensors, 16)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [sorted(one) for one in in_parts(tensors, 15)] == [[name] for name in "abcde"]
    assert [sorted(one) for one in in_parts([("a", None), *tensors], 1e9)] == [[*"abcde"]]
    assert list(in_parts([("a", None)], 1e9)) == []


def test_several_files_of_weights_load_in_transformers(model: Any, tmp_path: Path) -> None:
    write_model(model, tmp_path, torch.float32, max_shard_bytes=40_000)
    files = [name for name in names(tmp_path) if name.endswith(".safetensors")]
    assert len(files) > 1
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())
    for name in ("config.json", "model.safetensors.index.json"):  # as transformers writes them
        text = (tmp_path / name).read_text()
        assert text == json.dumps(json.loads(text), indent=2) + "\n"


def test_publishing_a_version_again_replaces_it(model: Any, tmp_path: Path) -> None:
    publish_weights(model, tmp_path, 1)
    with torch.no_grad():
        model.model.norm.weight += 1
    folder = publish_weights(model, tmp_path, 1, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    assert names(tmp_path) == ["v00000001"]


def test_a_failed_write_leaves_the_older_version_and_no_half_folder(model: Any, tmp_path: Path) -> None:
    publish_weights(model, tmp_path, 1)

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    model.save_pretrained = full_disk
    with pytest.raises(StorageError, match="No space left on device.*free disk space"):
        publish_weights(model, tmp_path, 2)
    assert names(tmp_path) == ["v00000001"]


def test_leftovers_of_a_killed_writer_are_removed(model: Any, tmp_path: Path) -> None:
    (tmp_path / ".areal-lite-tmp-dead").mkdir()
    publish_weights(model, tmp_path, 1)
    assert names(tmp_path) == ["v00000001"]


def test_the_final_model_comes_with_its_tokenizer(model: Any, tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    folder = save_model(model, tokenizer, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(folder).encode("hi") == tokenizer.encode("hi")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 259


def test_a_folder_with_other_files_is_not_overwritten(model: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="holds files that areal_lite did not write"):
        save_model(model, AutoTokenizer.from_pretrained(tiny), tmp_path)
    assert names(tmp_path) == ["thesis.txt"]
