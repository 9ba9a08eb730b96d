"""Checks of folders with weights: manifests, labels, and that every update changed the weights."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from areal_lite.config.yaml_text import MAX_BYTES
from areal_lite.errors import CheckpointError
from areal_lite.tools.foreign_files import checked, read_inside
from areal_lite.tools.verify.verify_run import Run

_FOLDERS = {"weights": re.compile(r"v(\d{8,})"), "checkpoints": re.compile(r"step_(\d{8,})")}
_WEIGHTS = re.compile(r"(policy/model/|^)(model|adapter_model)[^/]*\.safetensors$")


def folders_are_whole(run: Run) -> Iterator[str]:
    """Each published version, checkpoint and saved model equals its manifest, which has the folder's number."""
    from areal_lite.files.atomic_folder import DAMAGED, check_folder

    numbered = [each for name in _FOLDERS for each in _numbered(run, name)]
    saved = [(None, run.root / "model")] if (run.root / "model").exists() else []
    for number, folder in (*numbered, *saved):
        try:
            manifest = json.loads(read_inside(folder / "manifest.json", run.root))
            for name in manifest["files"]:
                checked(folder / name, run.root)
            check_folder(folder, manifest)
        except (CheckpointError, *DAMAGED) as error:
            yield str(error) if isinstance(error, CheckpointError) else f"{folder} is incomplete: {error}"
            continue
        if (label := manifest.get("version")) != number:
            yield f"{folder.relative_to(run.root)} has the version {label} in its manifest"


def checkpoints_have_their_step(run: Run) -> Iterator[str]:
    """A checkpoint's counters are its step, and its optimizer made the updates that metrics.jsonl has."""
    trainer = getattr(run.config, "trainer", None)
    one_update = getattr(trainer, "minibatches_per_step", 1) == 1 and getattr(trainer, "critic", None) is None
    for number, folder in _numbered(run, "checkpoints"):
        name = str(folder.relative_to(run.root))
        try:
            state = json.loads(read_inside(folder / "trainer.json", run.root))
            counts = {state["step"], *(learner["steps_done"] for learner in state["learners"].values())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{name}: trainer.json cannot be read: {error!r}"
            continue
        if counts != {number}:
            yield f"{name}: trainer.json has the steps {sorted(counts)}"
        if not one_update or run.config is None:
            continue
        steps = [record for record in run.steps if record["step"] <= number]
        skipped = sum(record.get("train/skipped_updates") or 0 for record in steps)
        made = _updates_of(next(iter(sorted((folder / "policy").glob("optimizer*"))), folder), run.root)
        if len(steps) == number and made is not None and made != number - skipped:
            yield f"{name}: its optimizer made {made:g} updates in {number} steps, of which {skipped:g} skipped theirs"


def updates_change_the_weights(run: Run) -> Iterator[str]:
    """Two versions have different weights, unless no step between them could change any."""
    for name in _FOLDERS:
        for (before, one), (after, other) in itertools.pairwise(_numbered(run, name)):
            if (hashes := weight_hashes(one, run.root)) != weight_hashes(other, run.root) or not hashes:
                continue
            between = [record for record in run.steps if before < record["step"] <= after]
            could_change = (
                r.get("train/learning_rate") and r.get("train/grad_norm") != 0 and not r.get("train/skipped_updates")
                for r in between
            )
            if len(between) < after - before or any(could_change):
                yield f"{name}/{one.name} and {other.name} have the same weights"
    if run.steps and not any(len(_numbered(run, name)) > 1 for name in _FOLDERS):
        run.unproved.append("that updates changed the weights: fewer than two versions are on disk")


def copies_are_of_their_step(run: Run) -> Iterator[str]:
    """Published weights and the saved model are the weights of the checkpoint of their step."""
    checkpoints = dict(_numbered(run, "checkpoints"))
    copies = [(number, folder) for number, folder in _numbered(run, "weights") if number in checkpoints]
    last = max((record["step"] for record in run.steps), default=None)
    if last in checkpoints and run.complete and (run.root / "model").is_dir():
        copies.append((last, run.root / "model"))
    if not copies:
        run.unproved.append("that published and saved weights are those of their step: no checkpoint of such a step")
    for number, folder in copies:
        name = _first_difference(checkpoints[number] / "policy" / "model", folder, run.root)
        if name == "":
            run.unproved.append(f"that {folder.relative_to(run.root)} is of its step: its weights have other names")
        elif name is not None:
            where, checkpoint = folder.relative_to(run.root), checkpoints[number].name
            yield f"{where} is not of step {number}: {name} differs from {checkpoint}"


def checkpoints_have_the_runs_config(run: Run) -> Iterator[str]:
    """A checkpoint was made with the run's config."""
    from areal_lite.config.dump import dump_config
    from areal_lite.trainer.checkpoint.checkpoint import CONFIG_FILE, check_config

    if run.config is None:
        return
    for _, folder in _numbered(run, "checkpoints"):
        try:
            if (folder / CONFIG_FILE).exists():
                checked(folder / CONFIG_FILE, run.root, most=MAX_BYTES)
            check_config(folder, dump_config(run.config))
        except ValueError as error:  # a ConfigError is one
            yield str(error)


def _numbered(run: Run, name: str) -> list[tuple[int, Path]]:
    """Return the folders of versions or checkpoints by their number."""
    root = run.root / name
    found = [(_FOLDERS[name].fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ())]
    return sorted((int(match[1]), path) for match, path in found if match)


def weight_hashes(folder: Path, root: Path) -> dict[str, Any]:
    """Return size and SHA-256 of each file of weights, by the manifest of a folder of the run in ``root``."""
    with suppress(OSError, ValueError, AttributeError):
        files = json.loads(read_inside(folder / "manifest.json", root)).get("files") or {}
        return {name: digest for name, digest in files.items() if _WEIGHTS.search(name)}
    return {}


def _updates_of(file: Path, root: Path) -> float | None:
    """Return the number of updates that an optimizer's state counts; None if unknown."""
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(checked(file, root), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if name.endswith(".step"):
                return float(tensors.get_tensor(name))
    return None


def _first_difference(trained: Path, copy: Path, root: Path) -> str | None:
    """Return the first weight of ``copy`` that is not the trained one in its dtype; "" if no names are shared."""
    import torch
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        opened: list[dict[str, Any]] = []
        try:
            for folder in (trained, copy):
                paths = [checked(path, root) for path in sorted(folder.glob("model*.safetensors"))]
                files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
                opened.append({name: file for file in files for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            return f"a file ({error})"
        shared = sorted(opened[0].keys() & opened[1].keys())
        for name in shared:
            one, other = (files[name].get_tensor(name) for files in opened)
            if one.shape != other.shape or not torch.equal(one.to(other.dtype), other):
                return name
        return None if shared else ""


WEIGHT_CHECKS: dict[str, Callable[[Run], Iterator[str]]] = {
    "manifests": folders_are_whole,
    "checkpoints": checkpoints_have_their_step,
    "weights": updates_change_the_weights,
    "copies": copies_are_of_their_step,
    "config": checkpoints_have_the_runs_config,
}
