"""``areal-lite continue``: runs a dumped episode again from one of its turns; shows the branches beside the original.

Guarantees that the run's folder is only read: branches are dumped in a folder of their own, and every line names the
run, the episode and the turn that it continues, as ``extra``.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from rich.console import Console
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text
from areal_lite.agents.session.chat_history import shared_length
from areal_lite.api.trajectory import EpisodeStatus
from areal_lite.config.run_config import RunConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import printable
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper, next_task_id
from areal_lite.rollout.episodes.workflow_resolution import resolve_workflow
from areal_lite.runs.engine_stack import generating_engine
from areal_lite.runs.entry_points import check_startable
from areal_lite.runs.evaluation import no_success
from areal_lite.runs.folder.resuming import CHECKPOINTS
from areal_lite.runs.folder.run_directory import run_directory
from areal_lite.runs.run_data import WorkflowChoice, tokenizer_path
from areal_lite.tools.inspect.dumps import Dumps, dataset_row
from areal_lite.tools.inspect.episode_row import SCOPES
from areal_lite.tools.inspect.episode_text import episode_text
from areal_lite.tools.inspect.last_answer import CONFIG
from areal_lite.tools.replay.branching_workflow import Continuation, Fork
from areal_lite.tools.replay.replay import load_copy
from areal_lite.trainer.checkpoint.checkpoint import checkpoints

Record = Mapping[str, Any]
_BESIDE = 3


def continue_episode(options: argparse.Namespace, *, console: Console | None = None) -> Path:
    """Continue an episode, print it, and return the folder of the run that holds the branches."""
    console = console or Console(highlight=False)
    root, lines, row = _episode(options)
    fork = Fork.at(lines, options.turn)
    config = _config(root, options)
    is_eval = lines[0]["scope"] == SCOPES[1]
    choice = WorkflowChoice.of(config)
    kwargs = choice.kwargs(config, config.rollout.eval_gconfig if is_eval else config.rollout.gconfig)
    workflow = resolve_workflow(choice.workflow, kwargs, config.rollout)
    continuation = Continuation(workflow, fork, load_tokenizer(tokenizer_path(config)), say=options.say)
    check_startable(config)
    said = f"{len(fork.kept)} answers come from the dump, the next from {options.address or config.model_path}"
    console.print(Text(printable(said)), soft_wrap=True)
    with run_directory(config, fresh=False, trains=False) as run_dir:
        task_id = next_task_id(run_dir)
        with generating_engine(config, run_dir) as engine:
            engine.submit(row, continuation, group_size=options.n, task_id=task_id, is_eval=is_eval)
            (group,) = engine.wait()
        if continuation.difference is not None:
            raise ConfigError(continuation.difference)
        parent = {"run": str(root), **{name: lines[0][name] for name in ("task_id", "member_idx")}}
        dumper = TrajectoryDumper(config.rollout, extra={"continues": {**parent, "turn_idx": options.turn}})
        dumper.put(group)
        dumper.close()
    _show(lines, fork, (root, run_dir), task_id, console)
    if all(trajectory.status is EpisodeStatus.FAILED for trajectory in group.trajectories):
        raise no_success([group])
    return run_dir


def _episode(options: argparse.Namespace) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """Return the run's folder, the lines of the episode, and its dataset row."""
    with Dumps.open(options.path) as dumps:
        found = list(dumps.rows(f'task="{options.task}" member={options.member}'))
        if not found:
            raise ConfigError(
                f"{options.path} has no episode with task {options.task} and member {options.member}: areal-lite "
                f"inspect {options.path} --by episodes lists them"
            )
        if len(files := {(row["run"], row["file"]) for row in found}) > 1:
            raise ConfigError(
                f"{options.path} has {len(files)} dumps of task {options.task}: name one run, or one dump"
            )
        lines = dumps.episode(found[0]["run"], found[0]["id"])
        return dumps.runs[found[0]["run"]], lines, dataset_row(dumps, lines[0])


def _config(root: Path, options: argparse.Namespace) -> RunConfig:
    if not (root / CONFIG).is_file():
        raise ConfigError(f"{root} has no {CONFIG}, which names the agent: name the folder of a whole run")
    addresses = f"rollout.addresses={[options.address] if options.address else []}"
    config = load_copy(root, [addresses, *options.overrides], trial_name=f"{root.name}-continued")
    faults = replace(config.rollout.faults, on_error="drop_episode")
    rollout = replace(config.rollout, weight_update="auto", faults=faults)
    server = config.server
    if rollout.addresses:
        rollout = replace(rollout, backend=server.backend or rollout.backend)
        server = replace(server, backend=None, router=False)
    elif server.backend is None:
        rollout = replace(rollout, backend="embedded", router=None)
    model = options.model or (config.model_path if rollout.addresses else _last_model(root))
    if (checkpointed := Path(model) / "policy" / "model").is_dir():
        model = str(checkpointed)
    return replace(config, model_path=model, rollout=rollout, server=server)


def _last_model(root: Path) -> str:
    if (root / "model").is_dir():
        return str(root / "model")
    if found := checkpoints(root / CHECKPOINTS):
        return str(found[-1])
    raise ConfigError(f"{root} has saved no model and no checkpoint: name one with --model, or a server with --address")


def _show(original: Sequence[Record], fork: Fork, runs: tuple[Path, Path], task_id: int, console: Console) -> None:
    """Print the original and the branches, of their ``runs``, from the first turn that differs, at most the fork."""
    with Dumps.open(runs[1]) as dumps:
        lines = list(dumps.records(dumps.rows(f"task={task_id}")))

    def shared(line: Record) -> int:
        return shared_length([token for turn in line["turns"] for token in turn["ids"]], list(fork.first.prompt))

    branches = [max(each, key=shared) for _, each in itertools.groupby(lines, lambda line: line["member_idx"])]
    answer = fork.first.path[-1]
    continued = next(line for line in original if any(turn["turn_idx"] == answer for turn in line["turns"]))
    shown = [continued, *branches[:_BESIDE]]
    turns = zip(*(line["turns"] for line in shown), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda each: all(t["ids"] == each[0]["ids"] for t in each), turns))
    same = min(same, fork.first.path.index(fork.turn))
    table = Table("original", *(f"branch {line['member_idx']}" for line in shown[1:]), box=None, pad_edge=False)
    later = [{**line, "turns": line["turns"][same:]} for line in shown]
    table.add_row(*(Lines(*episode_text(line, runs[place > 0])) for place, line in enumerate(later)))
    console.print(Text(f"turns before these: {same}, the same in all", "dim"))
    console.print(table)
    if len(branches) > _BESIDE:
        rewards = ", ".join(str(line["reward"]) for line in branches[_BESIDE:])
        console.print(f"{len(branches) - _BESIDE} more branches with the rewards {rewards}")
