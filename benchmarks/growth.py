"""How costs grow: episodes in flight, episodes of a run, turns, rows, sequence length, also by ranks that read one
sequence together, servers.

    python benchmarks/growth.py [--only turns servers] [--sizes 1 1000] [--episodes 1000000] [--draw docs/growth.svg]

Each size is measured in a process of its own. The table and the picture show each figure at every size; a figure per
unit that stays level grows no faster than the work. Bar: the memory of one engine grows by at most 0.5 MB per 100,000
episodes.
"""

from __future__ import annotations
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.growth_curves import CURVES, Measured
from benchmarks.report import Figure, make_parser, write_figures


def show(name: str, points: dict[int, Measured]) -> None:
    """Print a curve as a Markdown table."""
    sizes = sorted(points)
    print(f"\n| {CURVES[name][3]} | {' | '.join(f'{size:,}' for size in sizes)} |\n|---{'|---' * len(sizes)}|")
    for column in points[sizes[-1]]:
        values = (points[size].get(column) for size in sizes)
        print(f"| {column} | {' | '.join('' if value is None else f'{value:.3g}' for value in values)} |", flush=True)


def draw(curves: dict[str, dict[int, Measured]], out: Path) -> None:
    """Save a picture of each figure over its value at the smallest size."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth"}):
        rows = -(-len(curves) // 2)
        picture = Picture(figsize=(12, 3.4 * rows), layout="constrained")
        for place, (name, points) in enumerate(curves.items(), 1):
            axes = picture.add_subplot(rows, 2, place, xscale="log", yscale="log", xlabel=CURVES[name][3])
            axes.set(title=name.replace("_", " "), ylabel="of the smallest size")
            for column in points[max(points)]:
                shown = sorted((size, measured[column]) for size, measured in points.items() if column in measured)
                if len(shown) > 1:
                    sizes, values = zip(*shown, strict=True)
                    ratios = [value / values[0] for value in values]
                    axes.plot(sizes, ratios, marker=".", label=f"{column}: {values[0]:.3g} to {values[-1]:.3g}")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.3), max(high, 3))
            axes.grid(alpha=0.3)
            axes.legend(fontsize="x-small")
        picture.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Measure, print and draw."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CURVES, default=list(CURVES), metavar="CURVE", help=", ".join(CURVES)
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="instead of each curve's own")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="size of the curve episodes")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="save a picture there")
    args = parser.parse_args()
    curves: dict[str, dict[int, Measured]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for name in args.only:
            measure, sizes, smoke_sizes, _ = CURVES[name]
            chosen = args.sizes or (smoke_sizes if args.smoke else [args.episodes] if name == "episodes" else sizes)
            curves[name] = {}
            for points in (map if args.smoke else pool.map)(measure, chosen):
                curves[name] |= points
            show(name, curves[name])
    if args.draw is not None:
        draw(curves, args.draw)
    figures = [
        Figure(f"{name} {size:,}: {column.rpartition(', ')[0]}", value, column.rpartition(", ")[2])
        for name, points in curves.items()
        for size, measured in points.items()
        for column, value in measured.items()
    ]
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
