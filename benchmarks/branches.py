"""Forward and backward over agent episodes that branch: every prefix once, against one sequence per path.

    python benchmarks/branches.py [--keep-reasoning] [--layers 2] [--width 576] [--threads 1] [--repeats 3]

The work: groups of episodes of one task, each of 8 turns. A turn sends the task, the earlier answers without their
reasoning, and the tools' output; so each turn's answer, with its reasoning, is a leaf of its own. After turns 3 and 6
a sub-agent starts from the history and has 3 turns, each of which extends the one before. After turn 5 the history is
compacted: a summary is sampled, and the later turns see the task and the summary only. Lengths are log-normal (a fixed
seed). Sampled tokens are trained once, in the sequence they were sampled in. With ``--keep-reasoning`` a turn's history
keeps it, so that all turns up to a compaction are one path. A Llama of SmolLM2-135M's width, or ``--width``, with few
layers and a small vocabulary, in the dtype that ``trainer.dtype: auto`` chooses here.

*request by request* trains each request of an agent alone, as trainers do that see calls and no episodes. *path by
path* lays out each path of the trees alone, in micro-batches of like lengths. *tree* is what the trainer does. All
compute the same loss through the same code, and take turns; a process each measures the peak of memory
above the loaded model. ``ratio`` is how many times as fast the tree is; ``allowed`` is the paths' tokens over the
distinct prefixes, the fewest that anyone could compute. The bar is ratio >= 0.8 * allowed.
"""

from __future__ import annotations
import multiprocessing
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api.trajectory import TokenSequence
from areal_lite.models.policy_model import resolve_dtype
from areal_lite.trainer.forward.microbatches import num_inputs, plan_blocks, plan_microbatches, tree_length
from benchmarks.packing import VOCABULARY, Plan, alone, make_scorer, run
from benchmarks.report import Figure, make_parser, write_figures
from benchmarks.roofline import smollm2_config

MAX_TOKENS = 8192
SUB_AGENT_AFTER, COMPACTED_AFTER = (3, 6), 5  # turns


class Episode:
    """One episode's requests, as an agent makes them: prompts and answers."""

    def __init__(self, rng: np.random.Generator, task: list[int], *, turns: int, keep_reasoning: bool) -> None:
        self.requests: list[tuple[list[int], list[int]]] = []
        self._rng = rng
        history = task
        for turn in range(1, turns + 1):
            reasoning, answer = self._text(120), self._text(60)
            self.requests.append((history, reasoning + answer))
            history = history + reasoning * keep_reasoning + answer + self._text(150)
            if turn in SUB_AGENT_AFTER:
                self._sub_agent(history)
            if turn == COMPACTED_AFTER:
                summary = self._text(120)
                self.requests.append((history, summary))
                history = task + summary

    def _sub_agent(self, history: list[int]) -> None:
        """Add three requests, each of which extends the one before."""
        prompt = history + self._text(40)
        for _ in range(3):
            answer = self._text(80)
            self.requests.append((prompt, answer))
            prompt = prompt + answer + self._text(100)

    def paths(self) -> list[tuple[list[int], list[int]]]:
        """Return ids and sampled positions of each path: a request that extends all of a path is a part of it."""
        paths: list[tuple[list[int], list[int]]] = []
        for prompt, answer in self.requests:
            extended = [place for place, (ids, _) in enumerate(paths) if prompt[: len(ids)] == ids]
            before = paths.pop(extended[0])[1] if extended else []
            paths.append((prompt + answer, before + [*range(len(prompt), len(prompt) + len(answer))]))
        return paths

    def _text(self, median_tokens: int) -> list[int]:
        length = int(np.clip(self._rng.lognormal(np.log(median_tokens), 0.5), 4, 4 * median_tokens))
        return self._rng.integers(0, VOCABULARY, length).tolist()


def make_sequences(
    groups: int, members: int, *, turns: int, keep_reasoning: bool
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Return a sequence of each request, and one of each path."""
    rng = np.random.default_rng(0)
    requests, paths = [], []
    for group in range(groups):
        task = rng.integers(0, VOCABULARY, 400).tolist()
        for member in range(members):
            episode = Episode(rng, task, turns=turns, keep_reasoning=keep_reasoning)
            for prompt, answer in episode.requests:
                where = range(len(prompt), len(prompt) + len(answer))
                requests.append(make_sequence(prompt + answer, where, str(group), member))
            paths += [make_sequence(ids, trained, str(group), member) for ids, trained in episode.paths()]
    return requests, paths


def make_sequence(ids: list[int], trained: Iterable[int], group_id: str, member_idx: int) -> TokenSequence:
    mask = np.zeros(len(ids), bool)
    mask[list(trained)] = True
    names = {"group_id": group_id, "member_idx": member_idx}
    return TokenSequence(input_ids=np.array(ids), loss_mask=mask, reward=0.0, **names)  # type: ignore[arg-type]


def each_alone(sequences: list[TokenSequence]) -> Plan:
    lengths = [num_inputs(sequence) for sequence in sequences]
    return [[alone(i, lengths) for i in batch] for batch in plan_microbatches(lengths, max_tokens=MAX_TOKENS)]


def tree(sequences: list[TokenSequence], balance_length: int) -> Plan:
    every = range(len(sequences))
    bundles = plan_blocks(sequences, every, max_tokens=MAX_TOKENS, balance_length=balance_length)
    blocks = [block for bundle in bundles for block in bundle]
    plan = plan_microbatches([block.length for block in blocks], max_tokens=MAX_TOKENS)
    return [[blocks[i] for i in batch] for batch in plan]


def num_tokens(plan: Plan) -> int:
    return sum(block.length for blocks in plan for block in blocks)


def distinct_prefixes(sequences: list[TokenSequence]) -> int:
    """Return the fewest tokens that anyone could compute."""
    groups = {sequence.group_id for sequence in sequences}
    members = [[i for i, sequence in enumerate(sequences) if sequence.group_id == group] for group in groups]
    return sum(tree_length(sequences, group) for group in members)


class Workload:
    """The model, the sequences and both plans."""

    def __init__(self, args: Any) -> None:
        torch.set_num_threads(args.threads)
        self.device = torch.device(args.device)
        config = smollm2_config()
        config.num_hidden_layers, config.vocab_size = args.layers, VOCABULARY
        config.hidden_size, config.intermediate_size = args.width, args.width * 8 // 3
        config.num_attention_heads, config.num_key_value_heads = args.width // 64, args.width // 192
        if args.smoke:
            config.hidden_size, config.intermediate_size = 144, 144
        self.dtype = resolve_dtype("auto", self.device)
        self.scorer = make_scorer(config, self.device)
        options = {"turns": args.turns, "keep_reasoning": args.keep_reasoning}
        requests, paths = make_sequences(args.groups, args.members, **options)
        self.sequences = {"request by request": requests, "path by path": paths, "tree": paths}
        self.plans = {
            "request by request": each_alone(requests),
            "path by path": each_alone(paths),
            "tree": tree(paths, self.scorer.balance_length),
        }

    def step(self, way: str) -> tuple[float, float]:
        """Return the seconds of one forward and backward pass over everything, and the loss."""
        return run(self.scorer, self.sequences[way], self.plans[way], self.device, dtype=self.dtype)


def memory(args: Any, way: str) -> float:
    """Return by how many MiB one step raises the peak of memory."""
    work = Workload(args)
    if work.device.type != "cpu":
        before = torch.cuda.memory_allocated()
        work.step(way)
        return float(torch.cuda.max_memory_allocated() - before) / (1 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far was of loading
    before = _status("VmRSS")
    work.step(way)
    return _status("VmHWM") - before


def _status(name: str) -> float:
    """Return a figure of this process in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--keep-reasoning", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=576, help="a multiple of 192")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.smoke:
        args.repeats = args.layers = args.groups = args.members = 1
        args.turns = 3
    ways = ("request by request", "path by path", "tree")
    # A process for each: a peak never falls. Here nothing was computed yet, so that a fork of this one starts clean.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        peaks = dict(zip(ways, pool.imap(partial(memory, args), ways), strict=True))
    work = Workload(args)
    tokens = {way: num_tokens(work.plans[way]) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    for _ in range(args.repeats):
        for way in ways:
            took, losses[way] = work.step(way)
            seconds[way].append(took)
    allowed = tokens["path by path"] / distinct_prefixes(work.sequences["tree"])
    medians = {way: median(seconds[way]) for way in ways}
    ratio = medians["path by path"] / medians["tree"]
    requests, paths = (len(work.sequences[way]) for way in ways[:2])
    print(f"{requests} requests, {paths} paths, {work.dtype}, {args.layers} layers, {args.threads} threads")
    figures = []
    for way in ways:
        speed = tokens["path by path"] / medians[way]
        print(
            f"{way:>18}: {tokens[way]:>8,} tokens, {medians[way]:7.2f} s, {speed:8,.0f} tokens of paths/s, "
            f"{peaks[way]:6,.0f} MiB, loss {losses[way]:.6f}"
        )
        figures.append(Figure(way, speed, "tokens/s", ratio=medians["path by path"] / medians[way]))
        figures.append(Figure(f"{way}: memory", peaks[way], "MiB", ratio=peaks[way] / peaks["path by path"]))
    over_requests = medians["request by request"] / medians["tree"]
    print(f"the tree takes 1/{over_requests:.2f} of the time of requests alone")
    print(f"ratio to paths {ratio:.2f}, allowed by the tokens {allowed:.2f}: {ratio / allowed:.2f} of it (bar 0.80)")
    figures.append(Figure("share of the allowed ratio", ratio / allowed, "share"))
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
