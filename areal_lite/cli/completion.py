"""areal-lite completion: a script for the shell that completes commands, options, files and config keys.

The script holds all words, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from areal_lite.cli.commands import COMMANDS, command_parser
from areal_lite.config.keys import describe_fields


class _Command(NamedTuple):
    name: str
    help: str
    options: dict[str, str]
    """Meaning of each long option."""
    choices: dict[str, list[str]]
    """Values of options and of the first argument (``""``)."""
    keys: list[str]
    """Config keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = 'bash: eval "$(areal-lite completion bash)". docs/plan.md has the other shells.'
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    commands = list(_commands(command_parser(COMMANDS)))
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](commands), end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        options, choices = {}, {}
        for action in command._actions:
            long = next((option for option in action.option_strings if option.startswith("--")), "")
            if long:
                options[long] = action.help or ""
            if action.choices:
                choices[long] = [str(choice) for choice in action.choices]
        root = command.get_default("root")  # config class of a command that takes key=value
        keys = [f.key for f in describe_fields(root) if f.type != "section"] if root else []
        yield _Command(name, helps[name], options, choices, keys)


def _bash(commands: list[_Command]) -> str:
    def case(command: _Command) -> str:
        keys = " ".join(f"{key}=" for key in command.keys)
        return f"""    {command.name})
      options="{" ".join(command.options)}" keys="{keys}"
      {_choices(command, 'choices="{}"', '"$previous"')} ;;
"""

    return f"""# areal-lite completion for bash: eval "$(areal-lite completion bash)"
_areal_lite() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" options="" keys="" choices="" file
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    choices="{" ".join(command.name for command in commands)}"
  fi
  case "${{COMP_WORDS[1]}}" in
{"".join(map(case, commands))}  esac
  if [[ -n "$choices" ]]; then
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
  elif [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$word")
    if [[ -n "$word" ]]; then COMPREPLY+=($(compgen -W "$keys" -- "$word")); fi
    if [[ "${{COMPREPLY[*]}}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
  fi
}}
complete -o filenames -F _areal_lite areal-lite
"""


def _zsh(commands: list[_Command]) -> str:
    def case(command: _Command) -> str:
        options = " ".join(_quoted(f"{option}:{meaning}") for option, meaning in command.options.items())
        return f"""    {command.name})
      options=({options}) keys=({" ".join(command.keys)})
      {_choices(command, "choices=({})", '"$words[CURRENT-1]"')} ;;
"""

    names = "\n".join(f"    {_quoted(f'{command.name}:{command.help}')}" for command in commands)
    return f"""#compdef areal-lite
# areal-lite completion for zsh: eval "$(areal-lite completion zsh)" after compinit
_areal_lite() {{
  local -a commands options keys choices
  commands=(
{names}
  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  case "$words[2]" in
{"".join(map(case, commands))}  esac
  if (($#choices)); then
    compadd -a choices
  elif [[ "$PREFIX" == -* ]]; then
    _describe option options
  else
    [[ -n "$PREFIX" ]] && compadd -S = -a keys
    _files
  fi
}}
compdef _areal_lite areal-lite
"""


def _choices(command: _Command, assign: str, previous: str) -> str:
    """Return the statement that assigns the values which may follow the word before."""
    cases = [
        f"{name or command.name}) {assign.format(' '.join(values))} ;;" for name, values in command.choices.items()
    ]
    return f"case {previous} in {' '.join(cases)} esac" if cases else ":"


def _fish(commands: list[_Command]) -> str:
    lines = ["# areal-lite completion for fish: areal-lite completion fish | source"]
    for command in commands:
        lines.append(f"complete -c areal-lite -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.help)}")
        start = f"complete -c areal-lite -n '__fish_seen_subcommand_from {command.name}'"
        for option, meaning in command.options.items():
            values = f" -x -a {_quoted(' '.join(command.choices[option]))}" if option in command.choices else ""
            lines.append(f"{start} -l {option[2:]}{values} -d {_quoted(meaning)}")
        words = [*command.choices.get("", []), *(f"{key}=" for key in command.keys)]
        if words:
            lines.append(f"{start} -a {_quoted(' '.join(words))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return ``text`` in single quotes, for every shell."""
    return "'" + text.replace("'", "’") + "'"
