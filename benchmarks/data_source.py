"""What a data source of a million rows on disk costs: construction, draws, saving its state.

python benchmarks/data_source.py [--rows 1000000]
"""

from __future__ import annotations
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
import datasets

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from benchmarks.report import Figure, make_parser, write_figures

GROUPS, MEMBERS = 256, 8


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.rounds = 2000, 2
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        made = datasets.Dataset.from_dict(
            {
                "prompt": [f"What is {i} + {i * 7 % 1000}?" for i in range(args.rows)],
                "answer": [str(i + i * 7 % 1000) for i in range(args.rows)],
            }
        )
        made.save_to_disk(folder)
        del made
        dataset = datasets.load_from_disk(folder)
        memory, clock = _memory_mib(), time.perf_counter()
        source = RolloutDataSourceWithBuffer(
            dataset, SourceSettings(n_samples_per_prompt=MEMBERS, seed=1, shuffle=True, name=folder)
        )
        construction = time.perf_counter() - clock
        print(f"{args.rows:,} rows, construction: {construction:.3f} s, ", end="")
        print(f"{_memory_mib() - memory:.0f} MiB more at the peak")
        draws, saves = [], []
        for step in range(args.rounds):
            clock = time.perf_counter()
            groups = source.get_samples(GROUPS)
            draws.append(1e3 * (time.perf_counter() - clock))
            clock = time.perf_counter()
            source.save(step, Path(folder))
            saves.append(1e3 * (time.perf_counter() - clock))
            source.mark_trained(groups)
        print(f"get_samples({GROUPS}) x {MEMBERS}: median {statistics.median(draws):.2f} ms, worst {max(draws):.2f} ms")
        print(f"state save, {GROUPS} groups owed: median {statistics.median(saves):.2f} ms, worst {max(saves):.2f} ms")
    figures = [
        Figure("construction", construction, "s"),
        Figure(f"get_samples({GROUPS})", statistics.median(draws), "ms"),
        Figure("saving the state", statistics.median(saves), "ms"),
    ]
    write_figures(args.json, figures)


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
