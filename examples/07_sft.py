"""`areal-lite sft` from Python: memorize 32 made-up answers, then check what the model says.

OMP_WAIT_POLICY=PASSIVE python examples/07_sft.py [MODEL_FOLDER] [key=value ...]
"""

from __future__ import annotations
import sys
import time
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.config.loader import load_config
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.data import load_rows
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.tools.run.progress import progress_line


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct", *overrides: str) -> None:
    config = load_config(
        "configs/sft.yaml",
        [f"model_path={model_path}", f"trial_name={time.strftime('%Y%m%d-%H%M%S')}", *overrides],
        root=SFTConfig,
    )
    summary = run_supervised(config, on_step=lambda step, metrics: print(progress_line(step, metrics)))
    assert summary.model_dir is not None
    model = AutoModelForCausalLM.from_pretrained(summary.model_dir)  # nosec B615 # a folder
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)  # nosec B615 # a folder
    rows = load_rows(config.train_dataset)
    correct = 0
    for row in rows:
        question, answer = row["messages"]
        ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
        generated = output[0, ids.shape[1] :].tolist()
        ended = generated[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(generated, skip_special_tokens=True)
        correct += ended and text == answer["content"]
        print(f"{question['content']} {text!r}{'' if ended else ' ...'}")
    print(f"{correct} of {len(rows)} answers memorized and ended; written to {summary.run_dir}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # to import examples.made_up; `areal-lite` does the same
    main(*sys.argv[1:])
