"""Seconds of one training step, by phase, against plain right-padded Hugging Face doing the same work.

    python benchmarks/train_step.py [--model FOLDER] [--threads 2] [--steps 4]

The work: 8 prompts of 40 to 50 tokens, 8 answers each of 2 to 16 tokens, every group with an advantage
(nothing is left out), GRPO, bfloat16 autocast over float32 weights, AdamW. Without --model a random
model of SmolLM2-135M's shape is made. *plain*: the sequences right-padded in micro-batches of the same
cap, logits of every position, torch's default AdamW. Both start from the same weights and take turns.

What makes the difference: a group's prompt is computed once and padding not at all, logits only at trained positions,
all between the matrix products in C++, fused AdamW, and freed memory that the process keeps (to a tenth of growth).
Tried and not kept: pure bfloat16 weights, huge pages, gradients of weights in parts or of transposed copies (faster
with one thread, slower with two).
"""

from __future__ import annotations
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import collate_sequences
from areal_lite.servers.weights.weight_folder import publish_weights
from areal_lite.trainer.forward.microbatches import plan_microbatches
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from areal_lite.trainer.rl.token_facts import write_facts
from benchmarks.report import Figure, make_parser, of_limit, write_figures
from benchmarks.roofline import Limits, limits, smollm2_config, training_limit
from tests.fixtures.tiny_model import build_tiny_model

MAX_TOKENS = 1024
LEARNING_RATE = 1e-6


def make_model(folder: str) -> str:
    torch.manual_seed(0)
    LlamaForCausalLM(smollm2_config()).save_pretrained(folder)
    return folder


def make_batch(seed: int, vocabulary: int) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    batch = []
    for group in range(8):
        prompt = rng.integers(3, vocabulary, rng.integers(40, 51))
        for member in range(8):
            ids = np.concatenate([prompt, rng.integers(3, vocabulary, rng.integers(2, 17))])
            mask = np.arange(len(ids)) >= len(prompt)
            batch.append(TokenSequence(input_ids=ids, loss_mask=mask, reward=float(member % 2), group_id=str(group)))
    return batch


def distinct_tokens(batch: Sequence[TokenSequence]) -> int:
    """Return the tokens whose states must be computed: each group's prompt once."""
    prompts = {sequence.group_id: int((~sequence.loss_mask).sum()) for sequence in batch}
    return sum(prompts.values()) + sum(sequence.num_trained_tokens for sequence in batch)


class PlainTrainer:
    """The same step as anyone would write it first."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def train_step(self, sequences: Sequence[TokenSequence]) -> float:
        rewards = np.array([s.reward for s in sequences]).reshape(8, 8)
        centred = rewards - rewards.mean(1, keepdims=True)
        advantages = (centred / (centred.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
        num_loss_tokens = sum(sequence.num_trained_tokens for sequence in sequences)
        self.optimizer.zero_grad()
        total = 0.0
        for chosen in plan_microbatches([len(s.input_ids) for s in sequences], max_tokens=MAX_TOKENS):
            length = max(len(sequences[i].input_ids) for i in chosen)
            ids = torch.zeros(len(chosen), length, dtype=torch.long)
            mask = torch.zeros(len(chosen), length, dtype=torch.bool)
            attention = torch.zeros_like(ids)
            for line, i in enumerate(chosen):
                size = len(sequences[i].input_ids)
                ids[line, :size] = torch.from_numpy(sequences[i].input_ids)
                mask[line, :size] = torch.from_numpy(sequences[i].loss_mask)
                attention[line, :size] = 1
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[..., 0]
            weight = torch.from_numpy(advantages[chosen]).float()[:, None].expand_as(logprobs)
            ratio = (logprobs - logprobs.detach()).exp()
            losses = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
            loss = losses[mask[:, 1:]].sum() / num_loss_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            arguments.model, arguments.steps = str(build_tiny_model(Path(folder) / "model")), 1
        model_path = arguments.model or make_model(folder)
        config = TrainerConfig(
            total_steps=100,
            learning_rate=LEARNING_RATE,
            max_tokens_per_microbatch=MAX_TOKENS,
            num_threads=arguments.threads,
            device="cpu",
        )
        # Facts are written in the step, so that their whole cost shows; a run writes them in a thread.
        facts = partial(write_facts, Path(folder) / "facts.parquet")
        ours, plain = PolicyTrainer(config, model_path=model_path, seed=0, on_facts=facts), PlainTrainer(model_path)
        records: list[dict[str, float]] = []
        plain_seconds: list[float] = []
        work: list[tuple[Limits, int, int]] = []
        for step in range(arguments.steps + 1):  # the first warms up
            sequences = make_batch(step, plain.model.config.vocab_size)
            length = max(len(sequence.input_ids) for sequence in sequences)
            columns = collate_sequences(sequences, length, pad_token_id=0)
            metrics = ours.train_step(DataProto.from_single_dict(columns), version=step)
            began = time.perf_counter()
            loss = plain.train_step(sequences)
            plain_seconds.append(time.perf_counter() - began)
            records.append(metrics)
            # Each step has its own limit, for the speed of a shared machine drifts.
            rates = limits(arguments.threads, torch.bfloat16, smoke=arguments.smoke)
            work.append((rates, distinct_tokens(sequences), int(metrics["trained_tokens"])))
            print(
                f"step {step}: {metrics['seconds_step']:.2f} s, plain {plain_seconds[-1]:.2f} s; "
                f"loss {metrics['loss']:.5f}, plain {loss:.5f}; {metrics['trained_tokens']:.0f} trained tokens"
            )
        names = ("advantages", "forward", "backward", "optimizer", "facts", "step")
        medians = {name: statistics.median(r[f"seconds_{name}"] for r in records[1:]) for name in names}
        for name, seconds in medians.items():
            print(f"{name:>10}: {seconds:.3f} s")
        share = statistics.median(r["seconds_facts"] / r["seconds_step"] for r in records[1:])
        print(f"training facts take {100 * share:.2f} % of a step")
        least = [
            training_limit(plain.model.config, rates, tokens=tokens, trained=trained) for rates, tokens, trained in work
        ]

        def median(figure: str, *phases: str, reference: float | None = None) -> Figure:
            """Return the phases' seconds in the middle one of all steps, by their distance to the limit."""
            seconds = [sum(record[f"seconds_{phase}"] for phase in phases) for record in records]
            pairs = sorted(list(zip(seconds, least, strict=True))[1:], key=lambda pair: pair[0] / pair[1])
            value, limit = pairs[len(pairs) // 2]
            return Figure(figure, value, "s", ratio=reference and value / reference, limit=limit)

        plainly = statistics.median(plain_seconds[1:])
        step = median("training step", "step", reference=plainly)
        passes = median("forward and backward", "forward", "backward")
        for figure in (step, passes):
            print(f"median {figure.figure}: {figure.value:.2f} s, {of_limit(figure)} s")
        print(f"median plain step: {plainly:.2f} s")
        began = time.perf_counter()
        publish_weights(ours.model, Path(folder) / "weights", 1)
        publishing = time.perf_counter() - began
        print(f"publish_weights: {publishing:.2f} s")
        phases = [Figure(f"median {name}", seconds, "s") for name, seconds in medians.items()]
        write_figures(arguments.json, [step, passes, *phases, Figure("publish_weights", publishing, "s")])


if __name__ == "__main__":
    main()
