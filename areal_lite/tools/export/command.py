"""``areal-lite export``: dumped episodes as rows to train on, or as Parquet."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lite.tools.inspect.commands.inspect import add_selection

if TYPE_CHECKING:
    from areal_lite.tools.export.export import Form

_FORMS: dict[Form, str] = {
    "sft": "rows of areal-lite sft: messages",
    "dpo": "rows of areal-lite dpo: the best against the worst answer of each group",
    "openai": "rows of OpenAI's fine-tuning of chat models",
    "parquet": "a table with a row per dumped line, tokens included",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes accepted training episodes as training rows, or all as a table. See docs/verify.md."
    add_selection(parser)
    forms = parser.add_mutually_exclusive_group(required=True)
    for form, meaning in _FORMS.items():
        forms.add_argument(f"--{form}", type=Path, metavar="FILE", help=meaning)
    add = parser.add_argument
    add("--choose", choices=("best", "accepted"), default="best", help="of each group the best (default), or all")
    add("--keep-cut-off", action="store_true", help="also answers that ended at a limit of tokens")
    add("--tokenizer", metavar="PATH", help="tokenizer with the chat template (default: the run's)")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.export.export import Options, export

    form, file = next((form, file) for form in _FORMS if (file := getattr(options, form)) is not None)
    chosen = Options(
        form=form,
        filter=" ".join(options.filter),
        choose=options.choose,
        keep_cut_off=options.keep_cut_off,
        tokenizer=options.tokenizer,
    )
    export(options.path, file, chosen)
    return 0
