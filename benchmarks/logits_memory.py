"""Peak memory of log-probs and their gradients, against the model's own activations.

python benchmarks/logits_memory.py [--tokens 8192] [--vocabulary 151936]
"""

from __future__ import annotations
import argparse
import multiprocessing
import resource
import sys
from functools import partial
from pathlib import Path
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.models.kernels.ragged_attention import Segments
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.packed_model import PackedSequences
from benchmarks.report import Figure, make_parser, write_figures

MEBIBYTE = 1 << 20
WAYS = ("decoder", "scores", "scores, frozen head")


def measure(arguments: argparse.Namespace, way: str) -> float:
    """Return the MiB that a forward and backward pass took above what was there before."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=arguments.tokens,
        tie_word_embeddings=arguments.tied,
    )
    model = Qwen2ForCausalLM(config)
    scorer = TokenScorer(model, temperature=arguments.temperature)
    lengths = [arguments.tokens // 8] * 8
    ids = torch.randint(arguments.vocabulary, (sum(lengths),))
    packed = PackedSequences(
        input_ids=ids,
        position_ids=torch.arange(lengths[0]).repeat(8),
        segments=Segments.causal(lengths),
        is_causal=True,
        predicted_at=torch.arange(len(ids)),
        targets=ids,
        lengths=lengths,
        num_pairs=len(ids) * (lengths[0] + 1) // 2,
    )
    if "frozen" in way:
        model.requires_grad_(False)
        model.model.layers.requires_grad_(True)
    before = peak()
    with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bfloat16):
        result = scorer.states(packed) if way == "decoder" else scorer(packed).logprobs
    result.sum().backward()
    return peak() - before


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.tokens, arguments.vocabulary, arguments.layers = 1024, 8192, 1
    # A process for each: a peak never falls. Here nothing was computed yet, so that a fork of this one starts clean.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        took = dict(zip(WAYS, pool.imap(partial(measure, arguments), WAYS), strict=True))
    for way in WAYS:
        print(f"{way:>20}: {took[way]:7.0f} MiB, {took[way] / took['decoder']:.2f} times the decoder's own")
    logits = arguments.tokens * arguments.vocabulary * 4 / MEBIBYTE
    print(f"{'full logits':>20}: {3 * logits:7.0f} MiB for three float32 copies (logits, log-softmax, gradient)")
    figures = [Figure(way, took[way], "MiB", ratio=took[way] / took["decoder"]) for way in WAYS]
    write_figures(arguments.json, figures)


if __name__ == "__main__":
    main()
