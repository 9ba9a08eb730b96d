"""The page of a selection of episodes as one file that needs no server and no network.

The data is JSON that cannot end its script element. The page's own script and style run because the file's content
security policy has their hashes, and nothing else does.
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import write_whole
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.view.page_data import Answers, to_json

MAX_LINES = 2000
MAX_RUNS = 4
"""Runs that are compared with each other."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class|let) )", re.MULTILINE)
_UNSAFE = str.maketrans({each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"})


def export_page(paths: Sequence[Path], out: Path, *, filter: str = "") -> str:
    """Write the matching episodes of the runs in ``paths`` to ``out``, and return what was written."""
    with Dumps.open(*paths) as dumps:
        data = _data(Answers(dumps, filter), filter)
    if not data["rows"]:
        raise ConfigError(f"no episode matches the filter {filter!r}: nothing to export")
    page = page_with(data)
    try:
        write_whole(out, page.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}: use a file in an existing folder") from error
    total = data["total"]
    more = f", the first of {total}: a --filter selects others" if total > len(data["rows"]) else ""
    return f"{out}: {len(data['rows'])} sequences{more}, {len(page) / 1e6:.1f} MB"


def _data(answers: Answers, filter: str) -> dict[str, Any]:
    rows = list(answers.dumps.rows(filter, sort="newest", limit=MAX_LINES))
    episodes: list[Any] = []
    places: dict[str, int] = {}
    texts: dict[str, Any] = {run: {"texts": None, "reason": ""} for run in answers.dumps.runs}
    for row in rows:
        if f"{row['run']} {row['id']}" not in places:
            episode = answers.episode(row["run"], row["id"])
            places |= {f"{row['run']} {each['id']}": len(episodes) for each in episode["sequences"]}
            episodes.append(episode)
            found = answers.texts(row["run"], row["id"])
            known = texts[row["run"]]["texts"] or {}
            texts[row["run"]] = {**found, "texts": found["texts"] and known | found["texts"]}
    keys = {(row["run"], str(row["group"])) for row in rows if row["group"] is not None}
    groups = {f"{run} {group}": answers.group(run, group) for run, group in sorted(keys)}
    for group in groups.values():
        group["members"] = [each for each in group["members"] if f"{each['run']} {each['id']}" in places]
    runs = list(answers.dumps.runs)
    pairs = itertools.permutations(runs, 2) if len(runs) <= MAX_RUNS else ()
    return {
        **{"rows": [answers.listed_row(row) for row in rows], "total": answers.dumps.count(filter) or len(rows)},
        **{"episodes": episodes, "places": places, "texts": texts, "groups": groups},
        **{"state": answers.state() | {"filter": "", "notes": []}, "summary": answers.summary(filter)},
        **{"metrics": answers.metrics(), "timeline": answers.timeline(filter), "diagnosis": answers.diagnosis(filter)},
        "compare": {f"{a} {b}": answers.compare(a, b, filter) for a, b in pairs},
    }


def static_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    return {file.name: file.read_bytes() for file in (resources.files("areal_lite.tools.view") / "static").iterdir()}


def page_with(data: Mapping[str, Any]) -> str:
    """Return the page with its scripts, styles and ``data``."""
    files = {name: content.decode() for name, content in static_files().items()}
    script, style = bundle(files), files["page.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page, charset = files["index.html"], '<meta charset="utf-8">'
    for old, new in (
        (charset, f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="static/page.css">', f"<style>{style}</style>"),
        ('<script type="module" src="static/app.js"></script>', ""),
        ("<body>", f'<body>\n<script type="application/json" id="data">{script_json(data)}</script>'),
        ("</body>", f'<script type="module">{script}</script>\n</body>'),
    ):
        assert old in page, old
        page = page.replace(old, new, 1)
    return page


def script_json(data: Any) -> str:
    """Return JSON that means the same inside a script element, and cannot end it."""
    return to_json(data).decode().translate(_UNSAFE)


def bundle(files: Mapping[str, str], entry: str = "app.js") -> str:
    """Return the modules that ``entry`` needs as one script; their top-level names must differ."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        done[name] = ""  # modules may need each other
        for needed in _IMPORT.findall(files[name]):
            add(needed)
        done[name] = done.pop(name) + f"// {name}\n" + _EXPORT.sub("", _IMPORT.sub("", files[name]))

    add(entry)
    return "\n".join(done.values())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
