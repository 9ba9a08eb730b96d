"""Where the time of a decode step and of a training step goes, with the model's own forward pass and with ours.

    python benchmarks/step_profile.py [--model FOLDER] [--threads 2] [--draw docs/step_profile.svg]

Decode: 64 requests in flight, 70 tokens each. Training: the step of benchmarks/train_step.py. torch's profiler gives
each operation's own time; ``between`` is what is left of the step: Python, autograd and waking threads. The profiler's
records take memory that the process has kept, so clearing large gradients is slow here; a plain step spends a few ms.
The decode step is timed without the profiler too, beside its limit by benchmarks/roofline.py.
"""

from __future__ import annotations
import statistics
import sys
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import collate_sequences
from areal_lite.embedded.decoder import lean_decoder_kernels
from areal_lite.embedded.model_runner import ModelRunner, load_model
from areal_lite.models.kernels import fused_decoder_kernels, score_kernels
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from benchmarks.report import Figure, make_parser, of_limit, write_figures
from benchmarks.roofline import decode_limit, limits
from benchmarks.train_step import LEARNING_RATE, MAX_TOKENS, make_batch, make_model
from tests.fixtures.tiny_model import build_tiny_model

KINDS = {  # the first whose part is in an operation's name
    "matrix products": ("mm", "linear", "baddbmm", "::product", "packed_product"),
    "attention": ("scaled_dot_product", "attend"),
    "clearing memory": ("fill", "zero"),
    "softmax and exponentials": ("softmax", "exp", "silu", "gate", "score"),
    "optimizer": ("adamw",),
    "casts and copies": ("copy", "cat", "index", "gather", "scatter", "clone", "embedding"),
    "other operations": ("aten::", "compiled::"),
}
CONTEXT = 70
"""Tokens of each request in flight."""
Profile = dict[str, float]
"""Milliseconds of a step by kind."""


def profiled(step: Callable[[], object], repeats: int) -> Profile:
    """Return the mean of ``repeats`` steps after two that warm up."""
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        total = time.perf_counter() - began
    found: Counter[str] = Counter()
    for event in profiler.key_averages():
        for kind, parts in KINDS.items():
            if event.key.startswith(("aten::", "mkldnn::", "compiled::")) and any(part in event.key for part in parts):
                found[kind] += event.self_cpu_time_total / 1e3 / repeats
                break
    found["between"] = max(0.0, 1e3 * total / repeats - found.total())
    return {kind: found[kind] for kind in (*KINDS, "between")}


def record_calls(library: Any, names: Iterable[str]) -> None:
    """Show the compiled functions to the profiler."""

    def recorded(name: str, function: Any) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            with record_function(f"compiled::{name}"):
                function(*arguments)

        return call

    for name in names:
        setattr(library, name, recorded(name, getattr(library, name)))


def decode_profiles(model: str, *, in_flight: int, repeats: int) -> tuple[dict[str, Profile], list[float]]:
    """Return a decode step with the model's own forward pass and with the lean one, and the seconds of plain ones."""
    length = CONTEXT
    runner = ModelRunner(
        load_model(Path(model), dtype="bfloat16", device="cpu"), slots=in_flight, context_length=2 * length
    )
    slots, lean = list(range(in_flight)), runner._lean
    runner.forward(slots, [list(range(3, 3 + length))] * in_flight, [0] * in_flight)
    profiles, seconds = {}, []

    def step() -> None:
        runner.forward(slots, [[5]] * in_flight, [length] * in_flight)

    for name, chosen in (("the model's own", None), ("ours", lean)):
        runner._lean = chosen
        step()
        seconds.append(statistics.median(timeit.repeat(step, number=1, repeat=2 * repeats)))
        if chosen is not None and isinstance(chosen._operations, lean_decoder_kernels.CompiledOperations):
            record_calls(chosen._operations._library, lean_decoder_kernels._ARGUMENTS)
        profiles[name] = profiled(step, repeats)
    return profiles, seconds


def training_profiles(model: str, *, threads: int, repeats: int) -> dict[str, Profile]:
    """Return a training step with the model's own forward pass and with the fused one."""
    config = TrainerConfig(
        total_steps=100,
        learning_rate=LEARNING_RATE,
        max_tokens_per_microbatch=MAX_TOKENS,
        num_threads=threads,
        device="cpu",
    )
    trainer = PolicyTrainer(config, model_path=model, seed=0)
    sequences = make_batch(0, trainer.model.config.vocab_size)
    length = max(len(sequence.input_ids) for sequence in sequences)
    batch = DataProto.from_single_dict(collate_sequences(sequences, length, pad_token_id=0))
    operations = fused_decoder_kernels.fused_decoder_operations(torch.bfloat16)
    if isinstance(operations, fused_decoder_kernels.CompiledOperations):
        record_calls(operations._library, fused_decoder_kernels._ARGUMENTS)
        record_calls(score_kernels.score_library(), score_kernels._ARGUMENTS)
    profiles, fused = {}, trainer._policy._fused
    for name, chosen in (("the model's own", ()), ("ours", fused)):
        trainer._policy._fused = chosen
        profiles[name] = profiled(lambda: trainer.train_step(batch, version=0), repeats)
    return profiles


def draw(steps: dict[str, dict[str, Profile]], out: Path) -> None:
    """Save a picture: a bar for each way to compute each step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "steps"}):
        picture = Picture(figsize=(10, 4.5), layout="constrained")
        for place, (title, profiles) in enumerate(steps.items(), 1):
            axes = picture.add_subplot(len(steps), 1, place, title=title, xlabel="ms")
            left = dict.fromkeys(profiles, 0.0)
            for kind in (*KINDS, "between"):
                axes.barh(list(profiles), [p[kind] for p in profiles.values()], left=list(left.values()), label=kind)
                left = {name: left[name] + profile[kind] for name, profile in profiles.items()}
            axes.invert_yaxis()
        axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.35))
        picture.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Profile, print and draw."""
    parser = make_parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="save a picture there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or (str(build_tiny_model(Path(folder) / "tiny")) if args.smoke else make_model(folder))
        torch.set_num_threads(args.threads)
        in_flight, repeats = (2, 1) if args.smoke else (64, 5)
        decode, seconds = decode_profiles(model, in_flight=in_flight, repeats=4 * repeats)
        rates = limits(args.threads, torch.bfloat16, smoke=args.smoke)
        config = AutoConfig.from_pretrained(model)
        best_ms = 1e3 * in_flight / decode_limit(config, rates, in_flight=in_flight, context=CONTEXT)
        steps = {
            "decode step": decode,
            "training step": training_profiles(model, threads=args.threads, repeats=repeats),
        }
    for title, profiles in steps.items():
        print(f"\n| {title}, ms | {' | '.join(profiles)} |\n|---|{'---|' * len(profiles)}")
        for kind in (*KINDS, "between"):
            print(f"| {kind} | {' | '.join(f'{profile[kind]:.0f}' for profile in profiles.values())} |")
        print(f"| in all | {' | '.join(f'{sum(profile.values()):.0f}' for profile in profiles.values())} |")
    if args.draw is not None:
        draw(steps, args.draw)
    own, ours = (1e3 * value for value in seconds)
    figures = [Figure("decode step without the profiler, ours", ours, "ms", ratio=ours / own, limit=best_ms)]
    print(f"\ndecode step without the profiler: {own:.1f} and {ours:.1f} ms, ours {of_limit(figures[0])} ms")
    for title, profiles in steps.items():
        own, ours = (sum(profile.values()) for profile in profiles.values())
        figures.append(Figure(f"{title}, ours", ours, "ms", ratio=ours / own))
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
