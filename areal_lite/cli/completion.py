"""areal-lite completion: a script for the shell that completes commands, options, files and config keys.

The script, which shtab makes of the parser, holds all words, so that completing starts no Python.
"""

import argparse
from pathlib import Path
from typing import Any
from areal_lite.cli.commands import COMMANDS, command_parser
from areal_lite.config.keys import describe_fields

_BASH = Path(__file__).with_name("completion.bash")
"""What bash needs beside shtab's script."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    import shtab

    parser = command_parser(COMMANDS)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        root = command.get_default("root")  # config class of a command that takes key=value
        action: Any  # shtab reads the attribute complete
        for action in command._actions:
            if root and action.nargs in ("*", "+"):
                action.choices = [f"{field.key}=" for field in describe_fields(root) if field.type != "section"]
                if options.shell == "zsh":  # which writes a space after a choice
                    action.complete = {"zsh": f"{{compadd -S '' -- {' '.join(action.choices)}; _files}}"}
            elif action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE
    print(shtab.complete(parser, options.shell) + (_BASH.read_text() if options.shell == "bash" else ""), end="")
    return 0
