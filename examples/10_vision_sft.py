"""`areal-lite sft` on pictures from Python, then how often the saved model is right by transformers' own generation:
on pictures that it has not seen, and on blank ones, where it can only guess.

python examples/tiny_vlm.py
OMP_WAIT_POLICY=PASSIVE python examples/10_vision_sft.py [MODEL_FOLDER] [TASK] [key=value ...]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from areal_lite.config.loader import load_config
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.data.vision.image_encoder import image_encoder
from areal_lite.runs.supervised_run import run_supervised


def main(model_path: str = "runs/models/tiny-vlm", task: str = "colour", *overrides: str) -> None:
    tasks = [f"{section}.kwargs.task={task}" for section in ("train_dataset", "eval_dataset")]
    trial = f"trial_name={time.strftime('%Y%m%d-%H%M%S')}"
    config = load_config(
        "configs/vision_sft.yaml", [f"model_path={model_path}", trial, *tasks, *overrides], root=SFTConfig
    )
    summary = run_supervised(config)
    assert summary.model_dir is not None
    for blank in (False, True):
        share = accuracy(summary.model_dir, task=task, blank=blank)
        print(f"{share:.3f} of 128 {'blank' if blank else 'unseen'} pictures answered")


def accuracy(model_dir: Path, *, task: str, blank: bool, size: int = 128) -> float:
    """Return the share of right answers of the model in a folder to pictures that training does not have."""
    from examples.squares import rows

    model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)  # nosec B615 # a folder
    tokenizer = AutoTokenizer.from_pretrained(model_dir)  # nosec B615 # a folder
    encoder = image_encoder(str(model_dir), tokenizer, model_dir)
    assert encoder is not None
    right = 0
    for row in rows(size, seed=2, task=task, blank=blank):
        question, answer = row["messages"]
        parts = [{"type": "image"}, {"type": "text", "text": question["content"].removeprefix("<image>")}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        image = encoder.stored(row["images"][0])
        ids, (span,) = encoder.expanded(tokenizer.encode(prompt, add_special_tokens=False), [image])
        inputs: dict[str, Any] = encoder.processor.pixels(encoder.store.read(image.sha256))
        kinds = torch.zeros(1, len(ids), dtype=torch.int64)
        kinds[0, span.offset : span.end] = 1
        output = model.generate(
            torch.tensor([ids]), **inputs, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=8
        )
        right += tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True) == answer["content"]
    return right / size


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # to import examples.squares; `areal-lite` does the same
    main(*sys.argv[1:])
