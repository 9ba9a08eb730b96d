"""Tokens per second of forward and backward over sequences of very different lengths, by how they are laid out.

    python benchmarks/packing.py [--layers 1] [--threads 1] [--device cpu] [--repeats 2]

The work: 64 sequences of log-normal length (median 150, sigma 1, at most 2,048 tokens; a fixed seed), every
token but the first trained, a Llama of SmolLM2-135M's width with few layers and a small vocabulary, bfloat16
autocast. All ways compute the same loss through the same code; only the layout differs, and the ways
take turns. Micro-batches hold at most 4,096 tokens with their padding.

*padded*: all 64 padded on the right to the longest, 8 sequences a pass. *padded by 8*: each 8 in the order they
come, padded to the longest of these. *bucketed*: micro-batches of like lengths (what the trainers do on a CPU).
*masked*: sequences side by side in one bin that fills a micro-batch, kept apart by a mask of all tokens by all.
*side by side*: the same without a mask; attention is by a kernel for different lengths on a GPU (what the trainers
do there), one sequence after another on a CPU.

One run on one core of an AMD EPYC (Zen 4, AVX512-BF16), torch 2.13, seconds of the process:

                    forward passes   with padding   tokens/s   ratio
    padded          8                68,096         788        1.00
    padded by 8     8                41,216         1,352      1.72
    bucketed        11               16,357         2,798      3.55
    masked          4                15,293         1,318      1.67
    side by side    4                15,293         2,357      2.99
"""

from __future__ import annotations
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.batch.partition import get_seqlen_balanced_partitions
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.microbatches import Block, num_inputs, plan_microbatches
from areal_lite.trainer.forward.packed_model import pack
from benchmarks.report import Figure, make_parser, of_limit, write_figures
from benchmarks.roofline import limits, smollm2_config, training_limit

MAX_TOKENS = 4096
VOCABULARY = 4096
Plan = list[list[Block]]


def make_scorer(config: Any, device: torch.device) -> TokenScorer:
    torch.manual_seed(0)
    return TokenScorer(LlamaForCausalLM(config).to(device), temperature=1.0)


def make_sequences(count: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(150), 1.0, count), 2, 2048).astype(int)
    return [
        TokenSequence(
            input_ids=rng.integers(0, VOCABULARY, length),
            loss_mask=np.arange(length) > 0,
            reward=0.0,
            group_id=str(number),
        )
        for number, length in enumerate(lengths)
    ]


def alone(index: int, lengths: list[int]) -> Block:
    return Block((index,), (0,), lengths[index])


def padded(lengths: list[int]) -> Plan:
    longest = max(lengths)
    return [[replace(block, length=longest) for block in blocks] for blocks in padded_by_8(lengths)]


def padded_by_8(lengths: list[int]) -> Plan:
    return [
        [alone(i, lengths) for i in range(start, min(start + 8, len(lengths)))] for start in range(0, len(lengths), 8)
    ]


def bucketed(lengths: list[int]) -> Plan:
    return [[alone(i, lengths) for i in batch] for batch in plan_microbatches(lengths, max_tokens=MAX_TOKENS)]


def filled(lengths: list[int]) -> list[list[int]]:
    return get_seqlen_balanced_partitions(lengths, -(-sum(lengths) // MAX_TOKENS))


def masked(lengths: list[int]) -> Plan:
    batches = filled(lengths)
    return [
        [Block(tuple(batch), (0,) * len(batch), sum(lengths[i] for i in batch), is_chain=False)] for batch in batches
    ]


def side_by_side(lengths: list[int]) -> Plan:
    return [[alone(i, lengths) for i in batch] for batch in filled(lengths)]


WAYS: dict[str, Callable[[list[int]], Plan]] = {
    "padded": padded,
    "padded by 8": padded_by_8,
    "bucketed": bucketed,
    "masked": masked,
    "side by side": side_by_side,
}


def run(
    scorer: TokenScorer,
    sequences: list[TokenSequence],
    plan: Plan,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[float, float]:
    """Return the seconds of forward and backward (on a CPU those it computed, whatever else runs), and the loss."""
    scorer.zero_grad()
    trained = sum(sequence.num_trained_tokens for sequence in sequences)
    total = torch.zeros((), device=device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    began = clock()
    for blocks in plan:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logprobs = scorer(pack(sequences, blocks, device=device)).logprobs
        loss = -logprobs.sum() / trained
        loss.backward()
        total += loss.detach()
    loss_per_token = total.item()  # waits for the device
    return (clock() - began) / (torch.get_num_threads() if device.type == "cpu" else 1), loss_per_token


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    config = smollm2_config()
    config.num_hidden_layers, config.vocab_size = args.layers, VOCABULARY
    if args.smoke:
        args.repeats, config.hidden_size, config.intermediate_size = 1, 144, 144
    scorer, sequences = make_scorer(config, device), make_sequences(4 if args.smoke else 64)
    lengths = [num_inputs(sequence) for sequence in sequences]
    plans = {name: make(lengths) for name, make in WAYS.items()}
    run(scorer, sequences, plans["bucketed"][-1:], device)  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    losses: dict[str, float] = {}
    for _ in range(args.repeats):
        for name, plan in plans.items():
            scorer.ragged = name == "side by side" and scorer.read_ragged()
            took, losses[name] = run(scorer, sequences, plan, device)
            seconds[name].append(took)
    print(f"{sum(lengths)} tokens in {len(lengths)} sequences, the longest of {max(lengths)}")
    slowest = min(seconds["padded"])
    limit = None
    if device.type == "cpu":
        best_rates = limits(args.threads, torch.bfloat16, smoke=args.smoke)
        limit = sum(lengths) / training_limit(config, best_rates, tokens=sum(lengths), trained=sum(lengths))
    figures = []
    print(f"{'':>12}{'forward passes':>16}{'with padding':>14}{'tokens/s':>10}{'ratio':>7}{'loss':>10}")
    for name, plan in plans.items():
        computed = sum(len(blocks) * max(block.length for block in blocks) for blocks in plan)
        computed = sum(lengths) if name == "side by side" else computed
        best = min(seconds[name])
        figures.append(Figure(name, sum(lengths) / best, "tokens/s", ratio=slowest / best, limit=limit))
        print(
            f"{name:>12}{len(plan):>16}{computed:>14}{sum(lengths) / best:>10.0f}{slowest / best:>7.2f}"
            f"{losses[name]:>10.5f}  {of_limit(figures[-1])}"
        )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
