"""``areal-lite init``: its arguments, and the next steps in the new project."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes the folder NAME with an agent, its task, a config, a test and a README."
    add = parser.add_argument
    add("name", metavar="NAME", help="a new folder, which is imported by this name")
    templates = ("single", "tools", "multi-turn", "env", "sft")
    add("--template", choices=templates, default="single", help="kind of agent (default: single)")
    add("--model", metavar="PATH", help="model folder or hub name (default: the first in runs/models)")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.init.new_project import init

    print(init(options.name, template=options.template, model=options.model).next_steps)
    return 0
