"""A copy of a trainer's state in CPU memory, so that training can continue while it is written.

Guarantees that :func:`restore` gives a trainer the state that :func:`snapshot` took, bit for bit. Parameters are
stored by name, independent of their order and of the number of ranks. Atomic writing is in
:mod:`areal_lite.trainer.checkpoint.checkpoint`.

Only the copy is taken between two steps; the disk is written while the next step trains. A writer thread that read the
live tensors would need no copy, but AdamW updates them in place, so a file could mix two steps, each tensor intact and
every hash right. The price is the size of weights and optimizer once more in CPU memory, which
:meth:`CheckpointWriter.wait` frees before the next copy is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal_lite.errors import CheckpointError
from areal_lite.files.crash_points import crash_point
from areal_lite.models.lora import has_adapters, load_adapters
from areal_lite.models.parallel.ranks import Ranks, gather_json
from areal_lite.models.parallel.sharding import full_tensors, shard_like
from areal_lite.models.policy_model import load_pretrained, quiet_transformers
from areal_lite.trainer.learner import Learner
from areal_lite.trainer.seeding import restore_rng_state, rng_state


class Trainer(Protocol):
    """A trainer that can be saved in a checkpoint."""

    @property
    def learners(self) -> Mapping[str, Learner]:
        """The trained models by name; ``learner.module.model`` is a Hugging Face model."""

    def counters(self) -> dict[str, Any]:
        """Return further state that decides the next step, as JSON values, without the learners' own counts."""

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Restore the result of :meth:`counters`."""


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    model: Any  # the model itself; only its config is written
    weights: dict[str, Tensor]
    """Trained weights, float32 on the CPU: all weights under the model's names (tied ones are one tensor), or only
    the adapters."""
    optimizer: dict[str, Tensor]  # optimizer state by ``parameter.kind``
    steps_done: int
    skipped_in_a_row: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a trainer; only rank 0 has the tensors."""

    learners: dict[str, LearnerSnapshot]
    counters: dict[str, Any]
    rng: list[dict[str, Any]]  # random state of each rank

    @property
    def num_bytes(self) -> int:
        tensors = (t for one in self.learners.values() for t in (*one.weights.values(), *one.optimizer.values()))
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def snapshot(trainer: Trainer) -> Snapshot:
    """Copy all state that decides how training continues; every rank must call this."""
    return Snapshot(
        learners={name: _learner_snapshot(learner) for name, learner in trainer.learners.items()},
        counters=trainer.counters(),
        rng=gather_json(rng_state()),
    )


def write_snapshot(taken: Snapshot, folder: Path, step: int) -> None:
    """Write ``NAME/model/`` (a Hugging Face folder, or peft's under adapters), ``NAME/optimizer.safetensors`` for each
    learner, ``trainer.json`` and ``rng.json``."""
    counts = {}
    for name, learner in taken.learners.items():
        crash_point("checkpoint:before_model")
        with quiet_transformers():
            learner.model.save_pretrained(folder / name / "model", state_dict=dict(learner.weights))
        crash_point("checkpoint:after_model")
        save_file(learner.optimizer, folder / name / "optimizer.safetensors")
        crash_point("checkpoint:after_optimizer")
        counts[name] = {"steps_done": learner.steps_done, "skipped_in_a_row": learner.skipped_in_a_row}
    state = {"step": step, "learners": counts, "counters": taken.counters}
    (folder / "trainer.json").write_text(json.dumps(state) + "\n")
    (folder / "rng.json").write_text(json.dumps(taken.rng) + "\n")
    crash_point("checkpoint:after_state")


def restore(trainer: Trainer, folder: Path) -> None:
    """Restore ``trainer`` from ``folder``, bit for bit; every rank must call this. Ranks beyond the saved number keep
    their own random state."""
    state = json.loads((folder / "trainer.json").read_bytes())
    saved, own = set(state["learners"]), set(trainer.learners)
    if saved != own:
        raise CheckpointError(
            f"{folder} holds {sorted(saved)} and this run trains {sorted(own)}: use the config it was made with"
        )
    for name, learner in trainer.learners.items():
        _load_weights(learner.module.model, folder / name / "model")
        _load_optimizer(learner, folder / name / "optimizer.safetensors")
        learner.steps_done = state["learners"][name]["steps_done"]
        learner.skipped_in_a_row = state["learners"][name]["skipped_in_a_row"]
    trainer.load_counters(state["counters"])
    rng = json.loads((folder / "rng.json").read_bytes())
    rank = Ranks.current().rank
    if rank < len(rng):
        restore_rng_state(rng[rank])


def _learner_snapshot(learner: Learner) -> LearnerSnapshot:
    model: Any = learner.module.model
    adapters = has_adapters(model)
    weights = model.state_dict(keep_vars=True).items()
    optimizer = {
        f"{name}.{kind}": value
        for name, parameter in _trained(learner).items()
        for kind, value in learner.optimizer.state.get(parameter, {}).items()
    }
    return LearnerSnapshot(
        model=model,
        weights=_copies({name: tensor for name, tensor in weights if tensor.requires_grad or not adapters}),
        optimizer=_copies(optimizer),
        steps_done=learner.steps_done,
        skipped_in_a_row=learner.skipped_in_a_row,
    )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full copies on the CPU, tied tensors as one; nothing on all ranks but rank 0."""
    distinct = {str(id(tensor)): tensor.detach() for tensor in tensors.values()}
    full = {
        key: one.to("cpu", copy=True).contiguous() for key, one in full_tensors(distinct.items()) if one is not None
    }
    return {name: full[key] for name, tensor in tensors.items() if (key := str(id(tensor))) in full}


def _trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters under the model's names, in the optimizer's order."""
    model: Any = learner.module.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: p for group in learner.optimizer.param_groups for p in group["params"]}


def _load_weights(model: Any, folder: Path) -> None:
    if has_adapters(model):
        load_adapters(model, folder)
        return
    own = model.state_dict()
    loaded = load_pretrained(type(model), str(folder), what="checkpoint")[0].state_dict()
    shapes = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (loaded, own))
    _check_same(folder, *shapes)
    for name, tensor in own.items():
        tensor.copy_(shard_like(tensor, loaded[name]))


def _load_optimizer(learner: Learner, file: Path) -> None:
    parameters, saved = _trained(learner), load_file(file)
    if names := [key.rpartition(".")[0] for key in saved]:  # none before the first update
        _check_same(file, dict.fromkeys(names, "trained"), dict.fromkeys(parameters, "trained"))
    learner.optimizer.state.clear()
    for key, value in saved.items():
        name, _, kind = key.rpartition(".")
        parameter = parameters[name]
        sharded = value.shape == parameter.shape  # the number of steps is not
        learner.optimizer.state[parameter][kind] = (
            shard_like(parameter, value) if sharded else value.to(parameter.device)
        )


def _check_same(path: Path, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    pairs = {name: (saved.get(name, "absent"), own.get(name, "absent")) for name in {**saved, **own}}
    other = [f"{name!r} was {then} and is {now}" for name, (then, now) in pairs.items() if then != now]
    if other:
        raise CheckpointError(
            f"{path} does not fit the model: {len(other)} parameters differ, {other[0]}: use the "
            "model_path and config it was made with"
        )
