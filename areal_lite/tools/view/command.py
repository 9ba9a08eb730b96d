"""``areal-lite view``: its arguments; a server of the page, or the page as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_lite.tools.argument_types import positive_integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serves a page of runs on 127.0.0.1, also while they write. docs/view.md describes it."
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="RUN", help="a run's folder, a folder of runs or dumps, or a dump")
    add("--filter", default="", metavar="FILTER", help="what to show first, or to export; such as 'status=failed'")
    add("--port", type=positive_integer, metavar="N", help="port of the page (default: 8642, or any free one)")
    add("--no-browser", action="store_true", help="only print the address")
    add("--export", type=Path, metavar="FILE.html", help="write the page to one file that needs no server, and end")


def run(options: argparse.Namespace) -> int:
    if options.export is not None:
        from areal_lite.tools.view.single_file import export_page

        print(export_page(options.paths, options.export, filter=options.filter))
        return 0
    from areal_lite.tools.view.page_server import serve_page

    serve_page(options.paths, port=options.port, browser=not options.no_browser, filter=options.filter)
    return 0
