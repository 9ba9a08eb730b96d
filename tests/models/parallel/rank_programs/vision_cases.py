"""One update on sequences with images, of which a rank may have none; run as a program, it writes what came out."""

from __future__ import annotations
import sys
from pathlib import Path
from typing import Any
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from areal_lite.config.trainer_config import LearnerConfig
from areal_lite.models.parallel.ranks import gather_json, join_ranks
from areal_lite.models.policy_model import load_policy
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.learner import Learner
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut
from tests.fixtures.tiny_vlm import IMAGE_ID
from tests.fixtures.vision_sequences import Part, Pictures

CPU = torch.device("cpu")
CASES = ("train", "frozen")


def compute(folder: Path, case: Any) -> tuple[dict[str, Tensor], list[int]]:
    """Return log-probs and gradients, and how many micro-batches of each rank had images among its tokens."""
    pictures = Pictures(folder, folder / "images")
    picture = pictures.image(0)
    made: list[list[Part]] = [
        [10, 3, picture, 4, 11, 12, 13, 20, 21, 22, 23],
        [10, 3, picture, 4, 11, 12, 14, 15],
        [10, 11, 12],
        [30, 31, 32, 33],
    ]
    batch = [pictures.sequence(parts, 2, placeholder=IMAGE_ID) for parts in made]
    scorer = TokenScorer(load_policy(str(folder), device=CPU, vision=case), temperature=1.0)
    scorer.pixels = pictures.pixels
    config = LearnerConfig(learning_rate=1e-3, device="cpu", dtype="float32", vision=case, max_grad_norm=1e9)
    learner = Learner(scorer, config, config, total_steps=1)
    # Two units: all images are in one of them.
    cut = StepCut(batch, learner.module, ranks=learner.ranks, device=CPU, units=["a", "a", "b", "b"])
    logprobs, with_images = torch.zeros(8), 0

    def loss_of(part: Microbatch) -> Tensor:
        nonlocal with_images
        images = learner.module.own_part(part.packed)[0].images
        with_images += bool(images and images.images)
        found: Tensor = learner.module(part.packed).logprobs
        if not part.counts:
            return found.sum() * 0
        logprobs[part.tokens] = found.detach()
        return (found * torch.linspace(0.5, 1.5, 8)[part.tokens]).sum()

    learner.update(lambda _: cut(range(4), 1000), loss_of)
    found = {"logprobs": learner.ranks.sum_(logprobs)}
    for name, parameter in scorer.model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found, gather_json(with_images)


if __name__ == "__main__":
    out, folder = map(Path, sys.argv[2:])
    with join_ranks(CPU, sp_size=int(sys.argv[1])) as ranks:
        for case in CASES:
            found, with_images = compute(folder, case)
            if ranks.rank == 0:
                save_file(found, out / f"{case}.safetensors", {"with_images": str(sorted(with_images))})
