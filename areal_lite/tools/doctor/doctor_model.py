"""Checks of ``areal-lite doctor`` on the model: its folder, its tokenizer, and the memory and disk that it needs."""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
import torch
from safetensors import safe_open
from areal_lite.agents.session.chat_renderer import chat_renderer
from areal_lite.config.run_config import RunConfig
from areal_lite.config.supervised_config import SupervisedConfig
from areal_lite.data.chat.hermes_tools import drops_tools
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError, StorageError
from areal_lite.files.model_path import check_model_path, stored_tensors
from areal_lite.models.policy_model import check_mesh, load_pretrained, resolve_device
from areal_lite.models.vision_model import auto_class_of
from areal_lite.runs.run_data import tokenizer_path
from areal_lite.runs.training_run import with_dtypes
from areal_lite.tools.doctor.doctor_machine import Finding, Findings, free_memory, gigabytes, ok, warning

Config = RunConfig | SupervisedConfig
_QUESTION = {"role": "user", "content": "What is 1 + 1?"}
_ANSWER = {"role": "assistant", "content": "It is 2."}
_TRAINED = 4 + 4 + 8
"""Bytes per trained parameter: weight, gradient, and two moments of AdamW."""
_LITTLE_REASONING = 256
"""New tokens that reasoning alone often takes."""
_SMALL_NORM = 0.2
"""A row of the output embedding with less than this share of the usual norm was hardly trained."""


def model_folder(path: str) -> Findings:
    """Check config.json, and that every weight of the architecture is in complete safetensors files."""
    check_model_path(path)
    if not Path(path).expanduser().is_dir():
        yield warning(f"model_path {path!r} is a hub name: the run reads its files from the cache or downloads them")
        return
    try:
        model, missing = load_pretrained(auto_class_of(path), path, what="causal LM", device_map="meta")
    except ImportError:  # accelerate, which is no dependency
        yield ok(f"model {path}: {_parameters(path) / 1e6:,.1f} M parameters; the training step checks their names")
        return
    if missing:
        raise ConfigError(
            f"model_path {path!r} has no weights for {missing[:4]}: give the folder of a complete causal LM, and save "
            "it with save_pretrained"
        )
    yield ok(f"model {path}: {model.config.model_type}, {_parameters(path) / 1e6:,.1f} M parameters, complete")


def tokenizer(config: Config) -> Findings:
    """Check the tokenizer, and what its chat template renders: tools, the end of a turn, reasoning."""
    path = tokenizer_path(config) if isinstance(config, RunConfig) else config.model_path
    loaded = load_tokenizer(path)
    yield ok(f"tokenizer {path}: {len(loaded):,} tokens")
    if not getattr(config.train_dataset, "apply_chat_template", True):
        return
    given = getattr(config.train_dataset, "apply_chat_template_kwargs", {}).get("chat_template")
    if given and loaded.chat_template is None:
        loaded = copy(loaded)
        loaded.chat_template = given
    rollout = config.rollout if isinstance(config, RunConfig) else None
    in_system_prompt = (rollout.agents if rollout else config.train_dataset).tools_in_system_prompt
    renderer = chat_renderer(loaded, tools_in_system_prompt=in_system_prompt)  # refuses a missing template
    if in_system_prompt:
        yield ok("tools are written into the system prompt")
    elif drops_tools(loaded, {}):
        key = "rollout.agents" if rollout else "train_dataset"
        yield warning(f"the chat template does not render tools: for tools set {key}.tools_in_system_prompt: true")
    else:
        yield ok("the chat template renders tools")
    yield from end_of_turn(config.model_path, loaded, renderer.stop_ids)
    prompt = loaded.apply_chat_template([_QUESTION], tokenize=False, add_generation_prompt=True)
    if rollout and str(prompt).rstrip().endswith("<think>"):
        budget = rollout.gconfig.max_new_tokens
        text = f"the chat template opens <think>: answers begin with reasoning, within max_new_tokens {budget}"
        fix = f", which may cut them: raise rollout.gconfig.max_new_tokens to {_LITTLE_REASONING} or more"
        yield ok(text) if budget >= _LITTLE_REASONING else warning(text + fix)


def end_of_turn(model_path: str, tokenizer: Any, stop_ids: list[int]) -> Findings:
    """Check that the token which ends an answer in the template is trained and stops generation."""
    rendered = str(tokenizer.apply_chat_template([_QUESTION, _ANSWER], tokenize=False))
    _, answer, rest = rendered.rpartition(_ANSWER["content"])
    after = tokenizer.encode(rest, add_special_tokens=False) if answer else []
    if not after or after[0] not in stop_ids:
        yield warning(
            "the chat template ends an answer without a special token, so the model does not learn to stop, and its "
            "answers end at max_new_tokens: use a template that writes an end token"
        )
        return
    end, text = after[0], repr(tokenizer.decode(after[:1]))
    model_ends = (_model_ends(model_path) | {tokenizer.eos_token_id}) - {None}
    if end not in model_ends:
        yield warning(
            f"answers end with {text} (id {end}), and the model with {sorted(model_ends)}: agents stop at "
            f"both, but for other workflows set rollout.gconfig.stop_token_ids: [{end}]"
        )
    if (share := _norm_of(model_path, end)) is not None and share < _SMALL_NORM:
        yield warning(
            f"the weights of {text} are {share:.2f} of the usual size, so the model has hardly been trained to end its "
            "answers: use an instruction-tuned model, or train it with SFT first"
        )
    elif end in model_ends:
        yield ok(f"answers end with {text}, which stops generation and is trained")


def room(config: Config) -> Findings:
    """Compare memory and disk with what weights, optimizer and checkpoints need."""
    if not Path(config.model_path).expanduser().is_dir():
        return
    parameters = _parameters(config.model_path)
    yield from _memory(_needs(config, parameters))
    yield _on_ranks(config, parameters)
    yield from _disk(config, parameters)


def _needs(config: Config, parameters: int) -> Mapping[str, float]:
    """Return the bytes that weights and optimizer need by device; activations and KV caches come on top."""
    needs = Counter({resolve_device(config.trainer.device).type: _trainer_bytes(config, parameters)})
    if isinstance(config, RunConfig) and not config.rollout.addresses:
        served = resolve_device(config.server.device, key="server.device").type
        needs[served] += parameters * getattr(torch, with_dtypes(config).server.dtype).itemsize * config.server.replicas
    return needs


def _trainer_bytes(config: Config, parameters: int) -> int:
    lora = config.trainer.lora is not None
    each = 4 if lora else _TRAINED
    if isinstance(config, RunConfig):
        each += _TRAINED * (config.trainer.critic is not None) + 4 * (config.trainer.kl is not None and not lora)
    return parameters * each


def _on_ranks(config: Config, parameters: int) -> Finding:
    """Tell what each of several ranks needs, and how many of them can read a sequence or compute a layer together."""
    need, trainer = _trainer_bytes(config, parameters), config.trainer
    check_mesh(config.model_path, trainer)
    possible: dict[str, list[str]] = {"sp_size": [], "tp_size": []}
    for size in (1, 2, 4, 8):
        meshes = replace(trainer, sp_size=size, tp_size=1), replace(trainer, sp_size=1, tp_size=size)
        for sizes, mesh in zip(possible.values(), meshes, strict=True):
            with suppress(ConfigError):
                check_mesh(config.model_path, mesh)
                sizes.append(str(size))
    each = ", ".join(f"{gigabytes(need / ranks)} on {ranks}" for ranks in (2, 4, 8))
    choices = "; ".join(f"{key} can be {', '.join(sizes)}" for key, sizes in possible.items())
    return ok(f"under torchrun each rank's weights and optimizer need {each} ranks; {choices}")


def _memory(needs: Mapping[str, float]) -> Findings:
    for device, need in needs.items():
        gpus = range(torch.cuda.device_count()) if device == "cuda" else ()
        free = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus) if gpus else free_memory()
        what = f"weights and optimizer need {gigabytes(need)} of memory ({device}), {gigabytes(free)} are free"
        if need > free:
            raise ConfigError(f"{what}: use a smaller model, trainer.lora, or a machine with more memory")
        fix = ", and activations come on top: lower trainer.max_tokens_per_microbatch if memory runs out"
        yield ok(what) if 1.5 * need < free else warning(what + fix)


def _disk(config: Config, parameters: int) -> Findings:
    folder = config.run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise StorageError(f"{folder} is not writable: set fileroot to a writable folder")
    each = 0 if config.trainer.lora is not None else parameters * (4 + 8)  # weight and moments
    count = config.checkpoint.keep + 1 if config.checkpoint.enabled else 0
    need, free = each * count + parameters * 4 * config.save_model, shutil.disk_usage(folder).free
    what = f"{count} checkpoints and the model need {gigabytes(need)} of disk, {gigabytes(free)} are free in {folder}"
    if need > free:
        raise StorageError(f"{what}: free some, lower checkpoint.keep, or set fileroot to another disk")
    yield ok(what)


def _parameters(path: str) -> int:
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(Path(path).expanduser()).values())


def _model_ends(path: str) -> set[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        with suppress(OSError, ValueError):
            given = json.loads((Path(path).expanduser() / name).read_text()).get("eos_token_id")
            ids.update(given if isinstance(given, list) else [given])
    return ids


def _norm_of(path: str, token: int) -> float | None:
    """Return the norm of a token's row in the output embedding, as a share of the median; None if it is unknown."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    tensors = stored_tensors(folder)
    names = [n for end in ("lm_head.weight", "embed_tokens.weight") for n in tensors if n.endswith(end)]
    if not names:
        return None
    with safe_open(tensors[names[0]].file, framework="pt") as file:
        rows = file.get_slice(names[0])
        size = tensors[names[0]].shape[0]
        sample = range(0, size, max(1, size // 200))  # about 200 rows
        usual = torch.stack([rows[index].float().norm() for index in sample]).median()
        return float(rows[token].float().norm() / usual)
