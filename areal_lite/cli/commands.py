"""The commands of ``areal-lite``, which commands.toml lists, and the parser of their arguments.

A command's module has ``add_arguments(parser)`` and ``run(options)``, which returns the exit code. It is imported only
for its own command, so that ``areal-lite --help`` loads none of them.
"""

import argparse
import importlib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, NoReturn
from areal_lite import __version__
from areal_lite.errors import did_you_mean


class Command(NamedTuple):
    module: str
    """Below ``areal_lite``."""
    help: str
    description: str = ""
    """Text of its own ``--help``, if it is not ``help``."""
    dry_run: bool = False
    """It has ``--dry-run``."""


_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
COMMANDS = {name: Command(**row) for name, row in _TABLE.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(64, f"error: {message}{'' if message.endswith('?') else '.'} See {self.prog} --help\n")


def command_parser(names: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of the commands ``names``."""
    parser = _Parser(prog="areal-lite", description="Agentic RL rollouts and training from one YAML file.")
    parser.add_argument("--version", action="version", version=f"areal-lite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in COMMANDS.items():
        text = command.description or command.help
        # A command that reads a config replaces -h by its own.
        arguments = commands.add_parser(name, help=command.help, description=text, conflict_handler="resolve")
        if name in names:
            module = importlib.import_module(f"areal_lite.{command.module}")
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
        parser.error(f"unknown command {arguments[0]!r}{did_you_mean(arguments[0], COMMANDS)}")
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
        name, _, value = unknown[0].partition("=")
        is_key = several == "overrides" and {".", "="} & set(unknown[0])
        key = f"; did you mean '{name.lstrip('-')}={value or 'VALUE'}'?" if is_key else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(name, known, key)}")
    if several:
        getattr(options, several).extend(words)
    return options
