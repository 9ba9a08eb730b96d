"""Hooks of mkdocs (`make docs`): pages that are not files of docs/, and their links.

``config_keys.md`` is made from the records of the config, as ``areal-lite train --help all`` shows them; ``python.md``
lists the names of ``__all__`` for mkdocstrings, which reads docstrings without importing them. Neither needs torch.
"""

from __future__ import annotations
import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index": "README", **{name: name for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}}
"""Page of the site -> file in the root of the repository."""
PYTHON = ("api", "data", "trainer/objectives", "trainer/estimators")
"""Packages whose ``__all__`` is for users."""
MORE = ("tools.notebook.train", "tools.notebook.Trainer", "rollout.remote_inf_engine.RemoteInfEngine")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    texts = {page: (ROOT / f"{name}.md").read_text() for page, name in PAGES.items()}
    texts |= {"config_keys": config_keys(), "python": python_names()}
    for page, text in texts.items():
        files.append(File.generated(config, f"{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return links_of_the_site(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of Sphinx in docstrings as code."""
    return re.sub(r":(?:attr|class|func|meth|mod):<code>~?", "<code>", html)


def links_of_the_site(markdown: str) -> str:
    """Return a page with its links to pages as on GitHub made links between pages of the site; to code, plain text."""
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[\w/]+\.py\)", r"\1", markdown)
    markdown = re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)
    return markdown.replace("](README.md", "](index.md")


def config_keys() -> str:
    """Return the page of all config keys: a table for each section of each kind of run."""
    from areal_lite import __version__
    from areal_lite.config.keys import describe_fields
    from areal_lite.config.loader import KINDS, class_of
    from areal_lite.config.run_config import RunConfig

    lines = ["# Config keys", "", f"Version {__version__}. `areal-lite train --help SECTION` prints the same."]
    for title, root in (("train", RunConfig), *((kind.replace("_", "-"), class_of(kind)) for kind in KINDS)):
        tables: dict[str, list[str]] = {"": []}
        for key, type_words, default, meaning in describe_fields(root):
            if type_words == "section":
                tables[key] = [_text(meaning), ""]
            else:
                section = key.rpartition(".")[0]
                tables[section] += [] if tables[section][-1:] > [""] else ["| key | | default | |", "|---|---|---|---|"]
                shown = "required" if default is None else f"`{default}`".replace("|", "\\|")
                tables[section].append(f"| `{key}` | {_text(type_words)} | {shown} | {_text(meaning)} |")
        lines += ["", f"## areal-lite {title}"]
        for section, table in tables.items():
            lines += ["", *([f"### {section}", ""] if section else []), *table]
    return "\n".join(lines) + "\n"


def _text(words: str) -> str:
    """Return text for a cell of a table: markup only in code."""
    return re.sub(r"`[^`]*`|[<&]", lambda m: {"<": "&lt;", "&": "&amp;"}.get(m[0], m[0]), words).replace("|", "\\|")


def python_names() -> str:
    """Return the page of Python names: an entry for mkdocstrings for each one."""
    lines = ["# Python", "", "What users' files import. Everything else may change with any version."]
    for package in PYTHON:
        tree = ast.parse((ROOT / "areal_lite" / package / "__init__.py").read_text())
        names = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        dotted = f"areal_lite.{package.replace('/', '.')}"
        lines += ["", f"## {dotted}", *(f"\n::: {dotted}.{name}" for name in sorted(names))]
    lines += ["", "## Runs and engine", *(f"\n::: areal_lite.{name}" for name in MORE)]
    return "\n".join(lines) + "\n"
