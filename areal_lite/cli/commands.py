"""The commands of ``areal-lite``, each in the module beside its feature, and the parser of their arguments.

A command's module has ``add_arguments(parser)`` and ``run(options)``, which returns the exit code. It is imported only
for its own command, so that ``areal-lite --help`` loads none of them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Collection, Iterable
from typing import NamedTuple, NoReturn

from areal_lite import __version__


class Command(NamedTuple):
    """One command: where its arguments and its function are, and its line in ``areal-lite --help``."""

    module: str
    help: str
    dry_run: bool = False
    """It has ``--dry-run``."""


_TOOLS = "areal_lite.tools"
COMMANDS = {
    "train": Command(f"{_TOOLS}.run.train", "train by reinforcement learning and evaluate", dry_run=True),
    "rollout": Command(f"{_TOOLS}.run.rollout", "run episodes on the training rows without training"),
    "eval": Command(f"{_TOOLS}.run.rollout", "run episodes on the held-out rows"),
    "config": Command(
        f"{_TOOLS}.run.config",
        "print any config file with its defaults filled in (for its keys: train, sft, dpo, reward-model --help)",
    ),
    "sft": Command(f"{_TOOLS}.run.train", "fine-tune on the answers in conversations", dry_run=True),
    "dpo": Command(f"{_TOOLS}.run.train", "train a policy on preference pairs (DPO)", dry_run=True),
    "reward-model": Command(f"{_TOOLS}.run.train", "train a reward model on preference pairs", dry_run=True),
    "serve": Command(f"{_TOOLS}.serve.serve", "start SGLang, vLLM or embedded servers of a model"),
    "inspect": Command(f"{_TOOLS}.inspect.terminal", "filter, sort and compare dumped episodes; also as JSON"),
    "rescore": Command(f"{_TOOLS}.inspect.rescore", "compare the rewards of dumped episodes with a new function's"),
    "export": Command(f"{_TOOLS}.export.export", "write dumped episodes as rows to train on, or as Parquet"),
    "verify": Command(f"{_TOOLS}.verify.verify", "prove from a run's folder that it trained what it says"),
    "replay": Command(f"{_TOOLS}.replay.replay_command", "train again from the dumps of a run, without servers"),
    "continue": Command(f"{_TOOLS}.replay.continue_command", "run a dumped episode again from one of its turns"),
    "init": Command(f"{_TOOLS}.init.new_project", "start a project: agent, config, test"),
    "doctor": Command(f"{_TOOLS}.doctor.doctor", "check the machine, and what a run needs, step by step"),
    "plan": Command(f"{_TOOLS}.plan.command", "predict time, tokens, memory and disk of a run"),
    "sweep": Command(f"{_TOOLS}.sweep.sweep", "train over seeds; compare configs or values"),
    "completion": Command(
        "areal_lite.cli.completion", "print a script that completes commands, options and config keys"
    ),
    "view": Command(f"{_TOOLS}.view.command", "show dumped episodes and metrics in the browser"),
    "plot": Command(f"{_TOOLS}.inspect.plot", "draw the metrics of one or several runs"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(64, f"error: {message}. See {self.prog} --help\n")


def command_parser(names: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of the commands ``names``."""
    parser = _Parser(prog="areal-lite", description="Agentic RL rollouts and training from one YAML file.")
    parser.add_argument("--version", action="version", version=f"areal-lite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in COMMANDS.items():
        # A command that reads a config replaces -h by its own.
        arguments = commands.add_parser(name, help=command.help, description=command.help, conflict_handler="resolve")
        if name in names:
            module = importlib.import_module(command.module)
            module.add_arguments(arguments)
            arguments.set_defaults(run=module.run)
            if command.dry_run:
                arguments.add_argument("--dry-run", action="store_true", help="check everything and start nothing")
            arguments.add_argument("-v", "--verbose", action="store_true", help="show where errors and hangs come from")
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse a command; ``key=value``, filters and configs may follow options, and ``--sort`` takes ``-KEY``."""
    parser = command_parser(arguments[:1])
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(f"unknown command {arguments[0]!r}{_hint(arguments[0], COMMANDS)}")
    for index in range(len(arguments) - 1, 0, -1):
        if arguments[:1] == ["inspect"] and arguments[index - 1] == "--sort":
            arguments[index - 1 : index + 1] = [f"--sort={arguments[index]}"]
    options, words = parser.parse_known_args(arguments)
    several = next(
        (name for name in ("filter", "overrides", "words") if isinstance(getattr(options, name, 0), list)), ""
    )
    unknown = [word for word in words if word.startswith("-") or not several]
    if unknown:
        (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        known = commands.choices[options.command]._option_string_actions
        hint = _hint(unknown[0], known, takes_keys=several == "overrides")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if several:
        getattr(options, several).extend(words)
    return options


def _hint(word: str, known: Iterable[str], *, takes_keys: bool = False) -> str:
    """Return what was probably meant by an unknown ``word``; empty if nothing comes close."""
    name, _, value = word.partition("=")
    close = difflib.get_close_matches(name, known, 1)
    if not close and takes_keys and {".", "="} & set(word):
        close = [f"{name.lstrip('-')}={value or 'VALUE'}"]
    return f" (did you mean {close[0]}?)" if close else ""
