"""Loading a model leaves nothing behind but the model, which computes the same in every pass."""

from __future__ import annotations
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.embedded.model_runner import load_model
from areal_lite.errors import ConfigError
from areal_lite.models import policy_model
from areal_lite.models.policy_model import has_bfloat16, load_policy, prepare, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("cpu", False, "cpu"),
    ],
)
def test_the_device_is_the_named_one_or_the_best(
    device: str, has_gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(device).type == expected


@pytest.mark.parametrize(
    ("dtype", "device", "flags", "expected"),
    [
        ("auto", "cpu", "avx2 avx512_bf16 fma", torch.bfloat16),
        ("auto", "cpu", "amx_bf16", torch.bfloat16),
        ("auto", "cpu", "fp asimd bf16", torch.bfloat16),
        ("auto", "cpu", "avx2 avx512f fma", torch.float32),
        ("auto", "cpu", None, torch.float32),
        ("auto", "cuda", "avx2", torch.bfloat16),
        ("bfloat16", "cpu", "avx2", torch.bfloat16),
        ("float32", "cuda", "bf16", torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_device_has_instructions_for_it(
    dtype: str, device: str, flags: str | None, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_model, "CPU_INFO", tmp_path / "cpuinfo")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: {flags}\nmodel: 1\n")
    has_bfloat16.cache_clear()
    assert resolve_dtype(dtype, torch.device(device)) == expected
    has_bfloat16.cache_clear()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": False}, {"gradient_checkpointing": True}])
def test_no_pass_drops_out_anything(tiny: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(tiny, attention_dropout=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), device=CPU, **options)
    layers = model.model.layers
    assert {layer.self_attn.attention_dropout for layer in layers} == {0.0}
    recomputes = any(options.values())
    assert {model.training, *(layer.gradient_checkpointing for layer in layers)} == {recomputes}


@pytest.mark.parametrize("bars", [False, True])
def test_loading_leaves_the_settings_of_transformers_as_they_were(tiny: Path, bars: bool) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def choose(verbosity: int, enabled: bool) -> None:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()

    choose(logging.CRITICAL, bars)
    try:
        load_policy(str(tiny), device=CPU)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.CRITICAL, bars)
    finally:
        choose(*before)


@pytest.mark.parametrize("weights", ["absent", "cut"])
def test_the_error_gives_the_reason_why_a_model_does_not_load(tiny: Path, tmp_path: Path, weights: str) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    if weights == "cut":  # as by a download that broke off
        (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"cannot be loaded as a causal LM \(.*\w.*\): give a folder"):
        load_policy(str(tmp_path), device=CPU)


class _Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("what", ["code of a known model", "code of its own", "pickle"])
def test_the_folder_of_a_model_runs_no_code(tiny: Path, tmp_path: Path, what: str) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny, folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    named: dict[str, Any] = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    named["auto_map"]["AutoTokenizer"] = ["evil.T", None]
    if what == "code of its own":
        named["model_type"] = "evil"
    if what == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save({"lm_head.weight": _Evil(ran)}, folder / "pytorch_model.bin")
        named = {}
    for file in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(settings | named))
    with suppress(ConfigError):
        load_policy(str(folder), device=CPU)
    with suppress(ConfigError):
        load_tokenizer(str(folder))
    with suppress(ValueError, OSError):  # the server's own checks of a folder come first
        load_model(folder, dtype=torch.float32, device="cpu")
    assert not ran.exists()


def test_layers_that_pass_their_dropout_to_a_function_have_none() -> None:
    config = AutoConfig.for_model(
        "opt", hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.5, attention_dropout=0.5,
    )  # fmt: skip
    model = prepare(AutoModelForCausalLM.from_config(config), device=torch.device("cpu"), gradient_checkpointing=True)
    assert model.training
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
