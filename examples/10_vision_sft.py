"""`areal-lite sft` on pictures, then how often the model is right by transformers' own generation, also without seeing.

python examples/tiny_vlm.py
OMP_WAIT_POLICY=PASSIVE python examples/10_vision_sft.py [MODEL_FOLDER] [colour or count] [key=value ...]
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
from areal_lite.data import load_rows
from areal_lite.data.vision.image_encoder import image_encoder
from areal_lite.runs.supervised_run import run_supervised


def main(model_path: str = "runs/models/tiny-vlm", task: str = "colour", *overrides: str) -> None:
    tasks = [f"{section}.kwargs.task={task}" for section in ("train_dataset", "eval_dataset")]
    given = [f"model_path={model_path}", f"trial_name={time.strftime('%Y%m%d-%H%M%S')}", *tasks, *overrides]
    config = load_config("configs/vision_sft.yaml", given, root=SFTConfig)
    summary = run_supervised(config)
    assert summary.model_dir is not None
    assert config.eval_dataset is not None
    print(f"{accuracy(summary.model_dir, load_rows(config.eval_dataset)):.3f} of new pictures answered")
    config.eval_dataset.kwargs["hidden"] = "squares"
    print(f"{accuracy(summary.model_dir, load_rows(config.eval_dataset)):.3f} of blank ones")


def accuracy(model_dir: Path, rows: Any) -> float:
    """Return the share of rows that the model in a folder answers right."""
    model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)  # nosec B615 # a folder
    tokenizer = AutoTokenizer.from_pretrained(model_dir)  # nosec B615 # a folder
    encoder = image_encoder(str(model_dir), tokenizer, model_dir)
    assert encoder is not None
    right = 0
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        parts = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>")}]
        messages = [{"role": "user", "content": parts}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        image = encoder.stored(row["images"][0])
        ids, (span,) = encoder.expanded(tokenizer.encode(prompt, add_special_tokens=False), [image])
        inputs: dict[str, Any] = encoder.processor.pixels(encoder.store.read(image.sha256))
        if encoder.processor.has_axes:
            kinds = [int(span.offset <= place < span.end) for place in range(len(ids))]
            inputs["mm_token_type_ids"] = torch.tensor([kinds])
        else:
            inputs["pixel_values"] = inputs["pixel_values"][None]  # images of each row of a batch
        made = model.generate(torch.tensor([ids]), **inputs, do_sample=False, max_new_tokens=8)
        right += tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True) == answer
    return right / len(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # to import examples.squares; `areal-lite` does the same
    main(*sys.argv[1:])
