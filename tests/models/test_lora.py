from __future__ import annotations
import importlib.metadata
import sys
from pathlib import Path
from typing import Any
import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.config.trainer_config import AdapterShape, LearnerConfig, LoRAConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.models.lora import (
    adapter_shape,
    adapters_off,
    add_adapters,
    load_adapters,
    plain_weights,
    planned_shape,
    write_adapters,
)
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.weight_folder import publish_weights, save_model
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.learner import Learner
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together

CPU = torch.device("cpu")
CONFIG = LoRAConfig(rank=4, alpha=6.0)


def load(path: Path, config: LoRAConfig | None = CONFIG, *, recompute: bool = False) -> Any:
    torch.manual_seed(0)
    return load_policy(str(path), device=CPU, lora=config, gradient_checkpointing=recompute)


def packed_sequences() -> PackedSequences:
    return packed_together(drawn_batch(0))[0]


def logprobs(model: Any) -> Tensor:
    return TokenScorer(model, temperature=1.0)(packed_sequences()).logprobs


def trained(model: Any, *, updates: int = 2) -> Any:
    """Update the adapters, so that they are not 0."""
    scorer = TokenScorer(model, temperature=1.0)
    config = LearnerConfig(learning_rate=0.05, device="cpu", dtype="float32")
    learner = Learner(scorer, config, config, total_steps=updates)
    for _ in range(updates):
        assert learner.update(lambda _: [packed_sequences()], lambda packed: -scorer(packed).logprobs.mean()).applied
    return model


@pytest.fixture(scope="module")
def adapted(untied: Path) -> Any:
    return trained(load(untied))


def test_only_adapters_train_and_they_start_as_the_base_model(tiny: Path) -> None:
    plain, model = load(tiny, None), load(tiny)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(trains) == 2 * 7 * 2  # A and B of seven matrices in two layers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert type(model) is type(plain)
    with torch.no_grad():
        assert torch.equal(logprobs(model), logprobs(plain))


def test_updates_change_only_adapters(untied: Path, adapted: Any) -> None:
    begun, plain = load(untied), load(untied, None)
    moved = [
        name
        for (name, one), other in zip(adapted.named_parameters(), begun.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert moved == [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    with torch.no_grad():
        assert not torch.allclose(logprobs(adapted), logprobs(plain), atol=1e-2)


def test_without_its_adapters_the_model_is_the_reference_bit_for_bit(untied: Path, adapted: Any) -> None:
    # V48: the reference is the actor without its adapters.
    plain = load(untied, None)
    with torch.no_grad():
        before = logprobs(adapted)
        with adapters_off(adapted):
            assert torch.equal(logprobs(adapted), logprobs(plain))
        assert torch.equal(logprobs(adapted), before)


def test_adapters_are_enabled_again_after_an_error(adapted: Any) -> None:
    trains = [parameter.requires_grad for parameter in adapted.parameters()]
    before = logprobs(adapted)
    with pytest.raises(RuntimeError, match="in the middle"), adapters_off(adapted):
        raise RuntimeError("in the middle")
    assert torch.equal(logprobs(adapted), before)
    assert [parameter.requires_grad for parameter in adapted.parameters()] == trains


def test_adapters_keep_the_chunked_output_embedding(adapted: Any) -> None:
    assert TokenScorer(adapted, temperature=1.0)._head == (adapted.lm_head,)


def test_recomputing_activations_gives_the_same_gradients(untied: Path) -> None:
    gradients = []
    for recompute in (False, True):
        model = load(untied, recompute=recompute)
        logprobs(model).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert any(gradient.any() for gradient in gradients[0])
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_published_weights_are_a_plain_model_that_computes_the_same(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = trained(load(request.getfixturevalue(kind)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = publish_weights(model, tmp_path, 1, dtype=torch.float32)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(logprobs(again), logprobs(model), atol=1e-4, rtol=1e-4)
    publish_weights(model, tmp_path, 2)
    torch.testing.assert_close(dict(model.state_dict()), before, atol=0, rtol=0)  # no drift


def test_merged_weights_are_summed_in_float32(adapted: Any) -> None:
    layer = adapted.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    expected = layer.base_layer.weight.detach() + 1.5 * (b @ a)  # alpha / rank
    for dtype in (torch.float32, torch.bfloat16):
        weights = dict(plain_weights(adapted, dtype))
        torch.testing.assert_close(weights["model.layers.1.mlp.up_proj.weight"], expected.to(dtype))
        assert {weight.dtype for weight in weights.values()} == {dtype}


def test_transposed_layers_are_merged_too() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    add_adapters(model, CONFIG)
    trained(model)
    report = plain.load_state_dict(dict(plain_weights(model, torch.float32)), strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied to the input embedding, which is there
    assert not report.unexpected_keys
    with torch.no_grad():
        torch.testing.assert_close(logprobs(plain), logprobs(model), atol=1e-4, rtol=1e-4)


def test_written_adapters_are_loaded_by_peft_and_transformers(untied: Path, adapted: Any, tmp_path: Path) -> None:
    write_adapters(adapted, tmp_path)
    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), tmp_path)
    by_transformers = AutoModelForCausalLM.from_pretrained(untied)
    by_transformers.load_adapter(str(tmp_path))
    assert peft.PeftConfig.from_pretrained(tmp_path).base_model_name_or_path == str(untied)
    with torch.no_grad():
        expected = adapted(torch.tensor([[5, 6, 7]])).logits
        for model in (by_peft, by_transformers):
            assert torch.equal(model.eval()(torch.tensor([[5, 6, 7]])).logits, expected)


def test_adapters_name_their_base_by_its_whole_path(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(untied.parent)
    model = load(Path(untied.name))
    write_adapters(model, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path).base_model.model.name_or_path == str(untied)


def test_a_saved_model_is_merged_and_has_its_adapters_beside_it(untied: Path, adapted: Any, tmp_path: Path) -> None:
    """In float32 whatever the dtype, because bfloat16 rounds much of the adapters away."""
    folder = save_model(adapted, AutoTokenizer.from_pretrained(untied), tmp_path / "model", dtype=torch.bfloat16)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert merged.dtype == torch.float32
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), folder / "adapters")
    with torch.no_grad():
        found = [model.eval()(torch.tensor([[5, 6, 7]])).logits for model in (merged, beside, adapted)]
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1], found[2])


def test_adapters_read_back_equal_those_written_bit_for_bit(untied: Path, adapted: Any, tmp_path: Path) -> None:
    write_adapters(adapted, tmp_path)
    again = load(untied)
    load_adapters(again, tmp_path)
    torch.testing.assert_close(again.state_dict(), adapted.state_dict(), atol=0, rtol=0)
    assert all(parameter.requires_grad for name, parameter in again.named_parameters() if ".lora_" in name)


@pytest.mark.parametrize(
    "other",
    [
        LoRAConfig(rank=8, alpha=6.0),
        LoRAConfig(rank=4, alpha=7.0),
        LoRAConfig(rank=4, alpha=6.0, target_modules=["q_proj"]),
    ],
)
def test_adapters_of_another_shape_are_refused(untied: Path, adapted: Any, tmp_path: Path, other: LoRAConfig) -> None:
    write_adapters(adapted, tmp_path)
    with pytest.raises(CheckpointError, match="other layers, rank or alpha.*use the trainer.lora"):
        load_adapters(load(untied, other), tmp_path)


def test_only_the_named_layers_get_adapters(untied: Path) -> None:
    config = LoRAConfig(rank=4, target_modules=["q_proj", "layers.1.mlp.up_proj"])
    model = load(untied, config)
    assert planned_shape(str(untied), config) == adapter_shape(model) == AdapterShape(4, ("q_proj", "up_proj"))
    names = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
    assert names == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)} | {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize("names", ["lm_head", ["q_proj", "nowhere"], ["embed_tokens"], []])
def test_names_that_are_not_linear_layers_are_refused(untied: Path, names: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="not linear layers.*all-linear or some of.*'q_proj'"):
        load(untied, LoRAConfig(target_modules=names))


@pytest.mark.parametrize("found", [None, "0.1"])
def test_a_missing_or_old_peft_is_named_in_the_error(
    tiny: Path, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    if found is None:
        monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found if name == "peft" else real(name))
    with pytest.raises(ConfigError, match=r"needs peft 0\.\d+\.\d+ or newer.*pip install -U peft"):
        load(tiny)
