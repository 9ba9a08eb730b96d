"""The command ``areal-lite``: arguments, signals, exit codes. ``launch``, ``embedded`` and ``inspect`` do the work.

Exit codes: 0 done, 1 ``verify`` found something, 64 bad arguments or config, 70 internal error, 73 run folder busy,
74 disk error, 75 try again later, 78 no usable checkpoint, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import os
import pydoc
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_lite import __version__
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.runs.stopping import StopOnSignal

if TYPE_CHECKING:
    from areal_lite.config.run_config import ExperimentConfig, RunConfig
    from areal_lite.config.supervised_config import DPOConfig, RewardModelConfig, SFTConfig
    from areal_lite.runs.monitoring.run_metrics import OnStep
    from areal_lite.tools.export.export import Form

logger = logging.getLogger(__name__)

# Threads that busy-wait take CPU time from the other processes on the machine.
_THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
_SPINS = "10000"
"""Turns that a waiting thread of torch makes before it sleeps, about half a millisecond: longer than from one operation
to the next, which is then twice as fast."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name, value in _THREAD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(Path.cwd()))
    _start_logging()
    stop = StopOnSignal()
    try:
        if arguments[:1] == ["serve"]:
            from areal_lite.runs.serving.serve import serve

            serve(arguments[1:])
        options = _parse(arguments)
        code = 0
        if options.command in _COMMANDS:
            code = _COMMANDS[options.command](options) or 0
        else:
            from areal_lite.config.loader import load_config

            config = load_config(options.config, options.overrides, root=_root(options.root))
            if options.command != "config":
                logger.info("%s %s: loading torch and transformers", options.command, options.config)
            if getattr(options, "dry_run", False):
                _dry_run(config)
            else:
                if not _computes_side_by_side(config):
                    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # servers inherit it
                options.run(config)
                _show_next(options.command, options.config, config)
        sys.stdout.flush()
    except ArealLiteError as error:
        _report(error)
        code = error.exit_code
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        code = ArealLiteError.exit_code
        prints = {"completion", "config", "doctor", "inspect", "rescore", "verify", "view"}
        only_prints = not prints.isdisjoint(arguments[:1]) or not {"-h", "--help"}.isdisjoint(arguments)
        if isinstance(error, BrokenPipeError) and only_prints:  # the reader, for example `head`, has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        elif not stop.signal:
            traceback.print_exc()
    return 128 + stop.signal if stop.signal else code


def _computes_side_by_side(config: Any) -> bool:
    """Return whether several processes of the run compute at the same time on this machine's cores."""
    rollout = getattr(config, "rollout", None)
    if rollout is None or rollout.addresses:
        return False
    return bool(rollout.max_head_offpolicyness > 0 or config.server.replicas > 1)


def _start_logging() -> None:
    """Show what areal_lite logs on stderr, with the time, unless handlers are configured; INFO of the first rank."""
    logging.getLogger("areal_lite").setLevel(logging.INFO if _is_first_rank() else logging.WARNING)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)
        logging.lastResort.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))


def _view(options: argparse.Namespace) -> None:
    if options.export is not None:
        from areal_lite.tools.view.single_file import export_page

        print(export_page(options.paths, options.export, filter=options.filter))
        return
    from areal_lite.tools.view.page_server import serve_page

    serve_page(options.paths, port=options.port, browser=not options.no_browser, filter=options.filter)


def _inspect(options: argparse.Namespace) -> None:
    from areal_lite.tools.inspect import terminal

    chosen = {name: getattr(options, name) for name in terminal.Options.__dataclass_fields__ if name != "filter"}
    terminal.inspect(options.path, terminal.Options(filter=" ".join(options.filter), **chosen))


def _plot(options: argparse.Namespace) -> None:
    from areal_lite.tools.inspect.plot import plot_metrics

    print(plot_metrics(*options.run_dirs, out=options.out))


def _rescore(options: argparse.Namespace) -> None:
    from areal_lite.tools.inspect.rescore import rescore

    filter = " ".join(options.filter)
    rescore(options.path, options.reward, filter=filter, dataset=options.dataset, json=options.json)


def _export(options: argparse.Namespace) -> None:
    from areal_lite.tools.export.export import Options, export

    form, file = next((form, file) for form in _EXPORTS if (file := getattr(options, form)) is not None)
    chosen = {name: getattr(options, name) for name in ("choose", "keep_cut_off", "tokenizer")}
    export(options.path, file, Options(form=form, filter=" ".join(options.filter), **chosen))


def _verify(options: argparse.Namespace) -> int:
    from areal_lite.tools.verify.verify import verify

    return verify(options.path, reward=options.reward)


def _init(options: argparse.Namespace) -> None:
    from areal_lite.tools.init.new_project import init

    print(init(options.name, template=options.template, model=options.model).next_steps)


def _dry_run(config: RunConfig | SFTConfig | DPOConfig | RewardModelConfig) -> None:
    from areal_lite.tools.doctor.doctor_run import dry_run

    for finding in dry_run(config):
        print(finding.text, flush=True)
    print("nothing was started; areal-lite doctor also tries servers, an episode and a training step")


def _doctor(options: argparse.Namespace) -> int:
    from areal_lite.tools.doctor.doctor import doctor

    code = doctor(options.config, options.overrides, show=lambda finding: print(finding, flush=True))
    if code:
        print("fix the lines that begin with fix, and run doctor again")
    else:
        print("nothing to fix" + (f"; next: areal-lite plan {options.config}" if options.config else ""))
    return code


def _replay(options: argparse.Namespace) -> None:
    from areal_lite.runs.monitoring.progress import TrainingProgress, summary_table
    from areal_lite.tools.replay.replay import plan_replay, run_replay, same_weights

    replay = plan_replay(options.path, options.overrides)
    with TrainingProgress(replay.total_steps) as progress:
        summary = run_replay(replay, on_step=progress.on_step)
    if not _is_first_rank():
        return
    progress.console.print(summary_table(summary))
    recorded, wanted = len(replay.batches), replay.config.trainer.steps
    if recorded < wanted:
        print(f"{options.path} has the batches of {recorded} steps, and trainer.total_steps is {wanted}")
    if replay.is_same and (same := same_weights(options.path, summary.run_dir)) is not None:
        print(f"the weights {'equal' if same else 'differ from'} those of {options.path}/model")
    print(f"written to {summary.run_dir}")
    print(f"next: areal-lite plot {options.path} {summary.run_dir}")


def _continue(options: argparse.Namespace) -> None:
    from areal_lite.tools.replay import continue_episode as command

    chosen = {name: getattr(options, name) for name in command.Options.__dataclass_fields__}
    run_dir = command.continue_episode(command.Options(**chosen))
    print(f"written to {run_dir}\nnext: areal-lite view {options.path} {run_dir}")


def _plan(options: argparse.Namespace) -> None:
    import json

    from rich.console import Console

    from areal_lite.config.loader import load_config
    from areal_lite.config.run_config import ExperimentConfig
    from areal_lite.tools.plan.plan import plan, plan_table

    config: Any = load_config(options.config, options.overrides, root=ExperimentConfig)
    print("trying the first steps in a temporary folder ...", file=sys.stderr)
    made = plan(config, on_step=lambda step, metrics: print(f"step {step}", file=sys.stderr))
    if options.json:
        print(json.dumps(made.as_json()))
        return
    Console().print(plan_table(made))
    print(f"not in it: {'; '.join(made.unknown)}")
    print(f"next: areal-lite {getattr(config, 'kind', 'train').replace('_', '-')} {options.config}")


def _sweep(options: argparse.Namespace) -> None:
    from rich.console import Console

    from areal_lite.tools.inspect.plot import plot_means
    from areal_lite.tools.sweep.sweep import results_of, run_sweep, sweep_table, variants_of, verdict_lines

    overrides = [word for word in options.words if "=" in word]
    paths = [word for word in options.words if "=" not in word]
    variants = variants_of(paths, overrides, seeds=options.seeds)
    run_sweep(variants, _make_run)
    metric, results = results_of(variants, metric=options.metric, level=options.level)
    Console().print(sweep_table(metric, results, level=options.level))
    for line in verdict_lines(results):
        print(line)
    folder = variants[0].run_dirs[0].parent
    try:
        runs = {variant.name: variant.run_dirs for variant in variants}
        print(f"curves: {plot_means(runs, out=options.out or folder / 'sweep.png', level=options.level)}")
    except ConfigError as error:
        print(f"no curves: {error}")
    print(f"next: areal-lite view {folder}")


def _make_run(config: Any, title: str) -> None:
    """Make a run of a sweep."""
    print(title, flush=True)
    (_supervised if hasattr(config, "kind") else _train)(config)


def _completion(options: argparse.Namespace) -> None:
    from areal_lite.cli.completion import completion_script

    roots = {name: _root(root) for name, (_, root, _) in _RUNS.items()}
    keys = roots | dict.fromkeys(("plan", "sweep", "doctor"), _root("RunConfig"))
    print(completion_script(_parser(), keys, options.shell), end="")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "view": _view,
    "inspect": _inspect,
    "plot": _plot,
    "rescore": _rescore,
    "export": _export,
    "verify": _verify,
    "replay": _replay,
    "continue": _continue,
    "init": _init,
    "doctor": _doctor,
    "plan": _plan,
    "sweep": _sweep,
    "completion": _completion,
}
"""Commands that are no run of a config; they return an exit code, or None for 0."""


def _config(config: ExperimentConfig) -> None:
    from areal_lite.config.loader import dump_config

    print(dump_config(config), end="")


def _show_next(command: str, path: str, config: RunConfig) -> None:
    """Print a command to go on with, where a run ended."""
    run = config.run_dir
    dumped = command in ("rollout", "eval") and config.rollout.dump_to_file
    steps = {
        "train": f"view {run}",
        "rollout": f"inspect {run}" if dumped else f"train {path}",
        "eval": f"inspect {run}" if dumped else f"train {path}",
        "sft": f"train CONFIG.yaml model_path={run / 'model'}",
        "dpo": f"eval CONFIG.yaml model_path={run / 'model'}",
        "reward-model": f"train CONFIG.yaml reward_model={run / 'model'}",
    }
    if command in steps and _is_first_rank():
        print(f"next: areal-lite {steps[command]}")


def _train(config: RunConfig) -> None:
    from areal_lite.processes.quick_import import quick_import

    with quick_import():
        from areal_lite.runs.entry_points import run_training
        from areal_lite.runs.monitoring.progress import TrainingProgress, server_table, summary_table

    with TrainingProgress(config.trainer.total_steps) as progress:
        summary = run_training(config, on_step=progress.on_step)
    if _is_first_rank():
        progress.console.print(summary_table(summary))
        if table := server_table(progress.last, config.rollout.addresses):
            progress.console.print(table)
        print(f"written to {summary.run_dir}")


@contextmanager
def _servers_shown(config: RunConfig) -> Iterator[OnStep]:
    """Yield a callback for the metrics of a run; print their table of servers at the end, also after an error."""
    from rich.console import Console

    from areal_lite.runs.monitoring.progress import server_table

    last: dict[str, float] = {}
    try:
        yield lambda step, metrics: last.update(metrics)
    finally:
        if table := server_table(last, config.rollout.addresses):
            Console().print(table)


def _rollout(config: RunConfig) -> None:
    from areal_lite.runs.entry_points import run_rollout

    with _servers_shown(config) as on_step:
        results = run_rollout(config, on_step=on_step)
    rewards = [reward for result in results for reward in result.rewards]
    counts = ", ".join(f"{count} {status}" for status, count in Counter(r.status for r in results).items())
    mean = sum(rewards) / max(1, len(rewards))
    print(f"groups: {counts}; mean reward {mean:.3f} over {len(rewards)} episodes")


def _eval(config: RunConfig) -> None:
    from areal_lite.runs.entry_points import run_evaluation

    with _servers_shown(config) as on_step:
        result = run_evaluation(config, on_step=on_step)
    print(f"held-out reward {result.reward:.3f} over {result.episodes} episodes, {result.failed} failed")


def _supervised(config: SFTConfig | DPOConfig | RewardModelConfig) -> None:
    from areal_lite.processes.quick_import import quick_import

    with quick_import():
        from areal_lite.runs.monitoring.progress import progress_line
        from areal_lite.runs.supervised_run import run_supervised
    if _is_first_rank():
        _config(config)
    summary = run_supervised(config, on_step=lambda step, metrics: print(progress_line(step, metrics), flush=True))
    if _is_first_rank():
        print(f"{summary.steps} steps in {summary.seconds:.0f} s, written to {summary.run_dir}")


def _is_first_rank() -> bool:
    """Return whether this is the only process, or the first rank under torchrun."""
    return os.environ.get("RANK", "0") == "0"


_RUNS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "train": (_train, "RunConfig", "train by reinforcement learning and evaluate"),
    "rollout": (_rollout, "RolloutConfig", "run episodes on the training rows without training"),
    "eval": (_eval, "RolloutConfig", "run episodes on the held-out rows"),
    "config": (
        _config,
        "ExperimentConfig",
        "print any config file with its defaults filled in (for its keys: train, sft, dpo, reward-model --help)",
    ),
    "sft": (_supervised, "SFTConfig", "fine-tune on the answers in conversations"),
    "dpo": (_supervised, "DPOConfig", "train a policy on preference pairs (DPO)"),
    "reward-model": (_supervised, "RewardModelConfig", "train a reward model on preference pairs"),
}
"""Function, config class and help text of each command."""


def _root(name: str) -> type[Any]:
    from areal_lite.config import run_config as config
    from areal_lite.config import supervised_config

    root: type[Any] = getattr(config, name, None) or getattr(supervised_config, name)
    return root


def _report(error: ArealLiteError) -> None:
    if os.environ.get("AREAL_LITE_DEBUG") == "1":
        traceback.print_exception(error)
    for line in "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines():
        print(f"error: {line}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(64, f"error: {message}. See {self.prog} --help\n")


class _ConfigHelp(argparse.Action):
    """``--help`` that also lists the sections of the config, or the keys of one."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        text = "show this help, or the keys of a SECTION of the config"
        super().__init__(option_strings, dest, nargs="?", metavar="SECTION", help=text)

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object) -> NoReturn:
        from areal_lite.config.help import help_text, section_list

        root = _root(parser.get_default("root"))
        if values is None:
            hint = f"{parser.prog} --help SECTION shows the keys of a section:"
            _page(f"{parser.format_help()}\n{hint}\n\n{section_list(root)}")
        else:
            _page(help_text(root, values))
        parser.exit()


def _page(text: str) -> None:
    """Print text, on a terminal by its pager."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        os.environ.setdefault("LESS", "-FRX")
        pydoc.pager(text)
    else:
        print(text, flush=True)


class _Explain(argparse.Action):
    """Prints what a config key means and, after the name of a config, its value there and where that comes from."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: object) -> NoReturn:
        from areal_lite.config.help import explain
        from areal_lite.config.loader import describe_value
        from areal_lite.config.supervised_config import KINDS

        print(explain(values, [_root("RunConfig"), *KINDS.values()]), flush=True)
        if namespace.config is not None:
            given = namespace.overrides or []
            print(describe_value(namespace.config, given, values, root=_root("ExperimentConfig")), flush=True)
        parser.exit()


def positive_integer(text: str) -> int:
    """Return ``text`` as an integer of at least 1; argparse shows this function's name."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _fraction(text: str) -> float:
    """Return ``text`` as a number between 0 and 1."""
    if not 0 < (number := float(text)) < 1:
        raise ValueError
    return number


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse a command; ``key=value``, filters and configs may follow options, and ``--sort`` takes ``-KEY``."""
    parser = _parser()
    for place in range(len(arguments) - 1, 0, -1):
        if arguments[:1] == ["inspect"] and arguments[place - 1] == "--sort":
            arguments[place - 1 : place + 1] = [f"--sort={arguments[place]}"]
    options, words = parser.parse_known_args(arguments)
    several = next(
        (name for name in ("filter", "overrides", "words") if isinstance(getattr(options, name, 0), list)), ""
    )
    unknown = [word for word in words if word.startswith("-") or not several]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if several:
        getattr(options, several).extend(words)
    return options


def _add_inspect(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    command.description = (
        "Shows runs, versions, groups, episodes or turns of dumps. docs/trajectories.md has the filter keys."
    )
    _add_selection(command)
    add("--by", choices=("runs", "versions", "groups", "episodes", "turns", "problems"), help="what to list")
    add("--sort", default="version", metavar="KEY", help="a filter key, with - before it for descending")
    add("--limit", type=positive_integer, metavar="N", help="at most N (default: 50, of turns 10; with --json all)")
    add("--offset", type=int, default=0, metavar="N", help="leave out the first N")
    add("--sample", type=positive_integer, metavar="N", help="N random episodes")
    add("--seed", type=int, default=0, metavar="S", help="seed of --sample")
    add("--json", action="store_true", help="one JSON object per line: of an episode its dumped line with run and id")
    add("--diff", nargs=2, metavar="ID", help="where two episodes begin to differ; an ID is FILE:LINE, as listed")
    add("--tokens", metavar="ID", help="each token of an episode: id, text, whether it trains, log-prob, version")


def _add_selection(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("path", type=Path, metavar="RUN", help="a run's folder, a folder of runs, a folder of dumps, or a dump")
    add(
        "filter",
        nargs="*",
        metavar="FILTER",
        help="such as 'reward<0.5 status=failed text~\"not sure\"' (quote < and >)",
    )


def _add_rescore(command: argparse.ArgumentParser) -> None:
    command.description = "Scores dumped episodes with another reward function; changes nothing. See docs/verify.md."
    _add_selection(command)
    add = command.add_argument
    add("--reward", required=True, metavar="PKG.FN", help="fn(prompt, completion, prompt_ids, completion_ids, **row)")
    add("--dataset", type=Path, metavar="CONFIG", help="config with the dataset rows (default: RUN/config.yaml)")
    add("--json", action="store_true", help="one JSON object per episode")


_EXPORTS: dict[Form, str] = {
    "sft": "rows of areal-lite sft: messages",
    "dpo": "rows of areal-lite dpo: the best against the worst answer of each group",
    "openai": "rows of OpenAI's fine-tuning of chat models",
    "parquet": "a table with a row per dumped line, tokens included",
}


def _add_export(command: argparse.ArgumentParser) -> None:
    command.description = "Writes accepted training episodes as training rows, or all as a table. See docs/verify.md."
    _add_selection(command)
    forms = command.add_mutually_exclusive_group(required=True)
    for form, meaning in _EXPORTS.items():
        forms.add_argument(f"--{form}", type=Path, metavar="FILE", help=meaning)
    add = command.add_argument
    add("--choose", choices=("best", "accepted"), default="best", help="of each group the best (default), or all")
    add("--keep-cut-off", action="store_true", help="also answers that ended at a limit of tokens")
    add("--tokenizer", metavar="PATH", help="tokenizer with the chat template (default: the run's)")


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Trains the batches of RUN again, in their order, with its config and the overrides, into the folder of a new "
        "run (RUN's trial_name with -replay). Without overrides it ends with RUN's weights. See docs/replay.md."
    )
    command.add_argument("path", type=Path, metavar="RUN", help="a run's folder with dumps (rollout.dump_to_file)")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="override a key that concerns training")


def _add_continue(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Runs the agent of a dumped episode again: its model calls before turn K get the dumped answers, the others "
        "are sampled. The agent must make the same calls again, so it may not use a clock or randomness, and its "
        "tools must answer the same; otherwise the command ends with the first difference. See docs/replay.md."
    )
    add = command.add_argument
    add("path", type=Path, metavar="RUN", help="a run's folder with dumps")
    add("overrides", metavar="key=value", nargs="*", help="override a key of the run's config")
    add("--task", required=True, metavar="ID", help="task_id of the episode")
    add("--turn", required=True, type=int, metavar="K", help="turn_idx in the dump; all turns before it are kept")
    add("--member", type=int, default=0, metavar="M", help="member_idx of the episode (default: 0)")
    add("--model", metavar="PATH", help="model or checkpoint that answers (default: RUN's model, or last checkpoint)")
    add("--address", metavar="HOST:PORT", help="running server that answers")
    add("--say", metavar="TEXT", help="replace the last user message before the turn; of agents only")
    add("--n", type=positive_integer, default=1, metavar="N", help="branches (default: 1)")


def _add_init(command: argparse.ArgumentParser) -> None:
    command.description = "Writes the folder NAME with an agent, its task, a config, a test and a README."
    command.add_argument("name", metavar="NAME", help="a new folder, which is imported by this name")
    command.add_argument(
        "--template",
        choices=("single", "tools", "multi-turn", "env", "sft"),
        default="single",
        help="kind of agent (default: single)",
    )
    command.add_argument("--model", metavar="PATH", help="model folder or hub name (default: the first in runs/models)")


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Checks packages, devices, memory and disk; with CONFIG also model, tokenizer, servers, one episode and one "
        "training step. Changes nothing. Exit code 0: nothing to fix."
    )
    command.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a config of any kind of run")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="override one value")


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Runs the first steps in a temporary folder and predicts time, tokens, memory and disk of the whole run. "
        "Servers in rollout.addresses must not serve another run. See docs/plan.md."
    )
    add = command.add_argument
    add("config", metavar="CONFIG.yaml", help="a config of any kind of run")
    add("overrides", metavar="key=value", nargs="*", help="override one value")
    add("--json", action="store_true", help="print one JSON object")


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Trains each variant with each seed, one run after the other, and shows means with intervals. Variants are "
        "configs, or values of key=v1,v2; each is compared with the first, seed by seed. The same command continues a "
        "sweep. See docs/plan.md."
    )
    add = command.add_argument
    add("words", metavar="CONFIG.yaml | key=v1,v2", nargs="+", help="one or more configs, and values for all of them")
    add("--seeds", type=positive_integer, required=True, metavar="N", help="runs of each variant")
    add("--metric", metavar="NAME", help="what is compared (default: eval/reward, else train/reward_mean, else a loss)")
    add("--level", type=_fraction, default=0.95, metavar="P", help="level of the intervals (default: 0.95)")
    add("--out", type=Path, metavar="FILE.png", help="image file (default: sweep.png in the experiment's folder)")


def _add_view(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    command.description = "Serves a page of runs on 127.0.0.1, also while they write. docs/view.md describes it."
    add("paths", type=Path, nargs="+", metavar="RUN", help="a run's folder, a folder of runs or dumps, or a dump")
    add("--filter", default="", metavar="FILTER", help="what to show first, or to export; such as 'status=failed'")
    add("--port", type=positive_integer, metavar="N", help="port of the page (default: 8642, or any free one)")
    add("--no-browser", action="store_true", help="only print the address")
    add("--export", type=Path, metavar="FILE.html", help="write the page to one file that needs no server, and end")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="areal-lite", description="Agentic RL rollouts and training from one YAML file.")
    parser.add_argument("--version", action="version", version=f"areal-lite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (run, root, summary) in _RUNS.items():
        command = commands.add_parser(name, help=summary, description=summary, add_help=False)
        command.add_argument("config", metavar="CONFIG.yaml")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="override one value: dotted key, YAML value"
        )
        command.add_argument("-h", "--help", action=_ConfigHelp)
        if name == "config":
            command.add_argument("--explain", action=_Explain, metavar="KEY", help="what a key means; no file needed")
        elif name not in ("rollout", "eval"):
            command.add_argument("--dry-run", action="store_true", help="check everything and start nothing")
        command.set_defaults(run=run, root=root)
    commands.add_parser("serve", help="start SGLang, vLLM or embedded servers of a model", add_help=False)
    _add_inspect(commands.add_parser("inspect", help="filter, sort and compare dumped episodes; also as JSON"))
    _add_rescore(commands.add_parser("rescore", help="compare the rewards of dumped episodes with a new function's"))
    _add_export(commands.add_parser("export", help="write dumped episodes as rows to train on, or as Parquet"))
    command = commands.add_parser("verify", help="prove from a run's folder that it trained what it says")
    command.add_argument("path", type=Path, metavar="RUN", help="a run's folder")
    command.add_argument("--reward", metavar="PKG.FN", help="the run's reward function: score its episodes again")
    _add_replay(commands.add_parser("replay", help="train again from the dumps of a run, without servers"))
    _add_continue(commands.add_parser("continue", help="run a dumped episode again from one of its turns"))
    _add_init(commands.add_parser("init", help="start a project: agent, config, test"))
    _add_doctor(commands.add_parser("doctor", help="check the machine, and what a run needs, step by step"))
    _add_plan(commands.add_parser("plan", help="predict time, tokens, memory and disk of a run"))
    _add_sweep(commands.add_parser("sweep", help="train over seeds; compare configs or values"))
    command = commands.add_parser("completion", help="print a script that completes commands, options and config keys")
    command.description = 'bash: eval "$(areal-lite completion bash)". docs/plan.md has the other shells.'
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    _add_view(commands.add_parser("view", help="show dumped episodes and metrics in the browser"))
    command = commands.add_parser("plot", help="draw the metrics of one or several runs")
    command.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a folder with a metrics.jsonl")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="image file (default for a single run: RUN_DIR/metrics.png)",
    )
    return parser
