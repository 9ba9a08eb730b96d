"""A copy of a trainer's state in CPU memory, so that training can continue while it is written.

Guarantees that :func:`restore` gives a trainer the state that :func:`snapshot` took, bit for bit. Parameters are stored
by name, independent of their order and of the number of ranks.

Only the copy is taken between two steps; the disk is written while the next step trains. A writer thread that read the
live tensors would need no copy, but AdamW updates them in place, so a file could mix two steps, each tensor intact and
every hash right. The price is the size of weights and optimizer once more in CPU memory, which
:meth:`CheckpointWriter.wait` frees before the next copy is made.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import torch
from safetensors.torch import save_file
from torch import Tensor
from areal_lite.errors import CheckpointError
from areal_lite.files.crash_points import crash_point
from areal_lite.files.model_path import stored_tensors
from areal_lite.models.lora import has_adapters, load_adapters
from areal_lite.models.parallel import sharding
from areal_lite.models.parallel.ranks import Ranks, gather_json
from areal_lite.models.policy_model import load_pretrained, quiet_transformers
from areal_lite.trainer.learner import Learner
from areal_lite.trainer.seeding import restore_rng_state, rng_state

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    model: Any  # the model itself; only its config is written
    weights: dict[str, Tensor]
    """Whole trained weights that this rank owns, float32 on the CPU, by name (tied ones once), or the adapters'."""
    optimizer: dict[str, Tensor]  # optimizer state by ``parameter.kind``, likewise
    owners: dict[str, int]  # rank of each weight
    steps_done: int
    skipped_in_a_row: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a trainer; each tensor is on one rank."""

    learners: dict[str, LearnerSnapshot]
    counters: dict[str, Any]
    rng: list[dict[str, Any]]  # random state of each rank
    num_bytes: int  # of the tensors of all ranks


def snapshot(trainer: Any) -> Snapshot:
    """Copy all state of a PolicyTrainer or SupervisedTrainer that decides how it continues; every rank must call it."""
    learners = {name: _learner_snapshot(learner) for name, learner in trainer.learners.items()}
    own = (t.nbytes for one in learners.values() for t in (*one.weights.values(), *one.optimizer.values()))
    num_bytes = sum(gather_json(sum(own)))
    return Snapshot(learners=learners, counters=trainer.counters(), rng=gather_json(rng_state()), num_bytes=num_bytes)


def write_snapshot(taken: Snapshot, folder: Path, step: int) -> None:
    """Write ``NAME/model/`` (a Hugging Face folder, or peft's under adapters), ``NAME/optimizer.safetensors`` for each
    learner, ``trainer.json`` and ``rng.json``. Each of several ranks writes the tensors that it owns, in files with its
    number, into a folder of its own, and the first the rest as well; all files together are the snapshot."""
    first, counts = Ranks.current().rank == 0, {}
    for name, learner in taken.learners.items():
        crash_point("checkpoint:before_model")
        _write_model(learner, folder / name / "model")
        crash_point("checkpoint:after_model")
        save_file(learner.optimizer, folder / name / _own_file("optimizer"))
        crash_point("checkpoint:after_optimizer")
        counts[name] = {"steps_done": learner.steps_done, "skipped_in_a_row": learner.skipped_in_a_row}
    if first:
        state = {"step": step, "learners": counts, "counters": taken.counters}
        (folder / "trainer.json").write_text(json.dumps(state) + "\n")
        (folder / "rng.json").write_text(json.dumps(taken.rng) + "\n")
        crash_point("checkpoint:after_state")


def _write_model(learner: LearnerSnapshot, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = Ranks.current()
    if ranks.rank == 0:
        with quiet_transformers():
            learner.model.save_pretrained(folder, state_dict=dict(learner.weights), max_shard_size=sys.maxsize)
    if not any(learner.owners.values()):
        return  # the first has written all
    if ranks.rank:
        save_file(learner.weights, folder / _own_file("model"), metadata={"format": "pt"})
        return
    (folder / _WEIGHTS).rename(folder / _own_file("model"))
    index = {"metadata": {}, "weight_map": {name: _own_file("model", rank) for name, rank in learner.owners.items()}}
    (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _own_file(kind: str, rank: int | None = None) -> str:
    ranks = Ranks.current()
    number = ranks.rank if rank is None else rank
    return f"{kind}-{number + 1:05d}-of-{ranks.size:05d}.safetensors" if ranks.size > 1 else f"{kind}.safetensors"


def restore(trainer: Any, folder: Path) -> None:
    """Restore ``trainer`` from ``folder``, bit for bit; all ranks call it. Further ones keep their own random state."""
    state = json.loads((folder / "trainer.json").read_bytes())
    saved, own = set(state["learners"]), set(trainer.learners)
    if saved != own:
        raise CheckpointError(
            f"{folder} holds {sorted(saved)} and this run trains {sorted(own)}: use the config it was made with"
        )
    for name, learner in trainer.learners.items():
        _load_weights(learner.module.model, folder / name / "model")
        _load_optimizer(learner, folder / name)
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
    weights = sharding.weights_of(model)
    if adapters:
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = {
        f"{name}.{kind}": value
        for name, parameter in _trained(learner).items()
        for kind, value in learner.optimizer.state.get(parameter, {}).items()
    }
    # One file must hold what is saved under other names, or by peft.
    owners = dict.fromkeys(weights, 0) if adapters or sharding.conversions_of(model) else sharding.shared_out(weights)
    return LearnerSnapshot(
        model=model,
        weights=_copies(weights, owners),
        optimizer=_copies(optimizer, sharding.shared_out(optimizer)),
        owners=owners,
        steps_done=learner.steps_done,
        skipped_in_a_row=learner.skipped_in_a_row,
    )


def _copies(tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
    """Return full copies on the CPU of the tensors that this rank owns."""
    full = sharding.full_tensors(((name, tensor.detach()) for name, tensor in tensors.items()), owners)
    return {name: one.to("cpu", copy=True).contiguous() for name, one in full if one is not None}


def _trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters under the model's names, in the optimizer's order."""
    model: Any = learner.module.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: p for group in learner.optimizer.param_groups for p in group["params"]}


def _load_weights(model: Any, folder: Path) -> None:
    if has_adapters(model):
        load_adapters(model, folder)
        return
    own, stored = sharding.weights_of(model), stored_tensors(folder)
    if {name: tuple(tensor.shape) for name, tensor in own.items()} == {name: one.shape for name, one in stored.items()}:
        sharding.read_into(own, stored)
        return
    own = model.state_dict()
    loaded = load_pretrained(type(model), str(folder), what="checkpoint")[0].state_dict()
    _check_same(folder, *({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (loaded, own)))
    for name, tensor in own.items():
        local, part = sharding.own_part(tensor)
        local.copy_(loaded[name][part])


def _load_optimizer(learner: Learner, folder: Path) -> None:
    parameters, saved = _trained(learner), stored_tensors(folder)
    if names := [key.rpartition(".")[0] for key in saved]:  # none before the first update
        _check_same(folder / "optimizer", dict.fromkeys(names, "trained"), dict.fromkeys(parameters, "trained"))
    learner.optimizer.state.clear()
    states: dict[str, Tensor] = {}
    for key, stored in saved.items():
        name, _, kind = key.rpartition(".")
        parameter = parameters[name]
        sharded = stored.shape == tuple(parameter.shape)  # the number of steps is not
        states[key] = torch.empty_like(parameter.detach()) if sharded else torch.empty((), device=parameter.device)
        learner.optimizer.state[parameter][kind] = states[key]
    sharding.read_into(states, saved)


def _check_same(path: Path, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    pairs = {name: (saved.get(name, "absent"), own.get(name, "absent")) for name in {**saved, **own}}
    if other := [f"{name!r} was {then} and is {now}" for name, (then, now) in pairs.items() if then != now]:
        raise CheckpointError(
            f"{path} does not fit the model: {len(other)} parameters differ, {other[0]}: use the "
            "model_path and config it was made with"
        )
