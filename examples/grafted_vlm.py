"""Give SmolLM2-135M eyes: Idefics3 around the pretrained language model, with a small random tower and connector.

python examples/grafted_vlm.py [FOLDER]    # default: runs/models/SmolLM2-135M-eyes

The words are there, the eyes have to be trained: ``areal-lite sft configs/grafted_sft.yaml``. A picture of
:mod:`examples.squares` is 16 x 16 pixels and has 4 tokens, and 3 around them.
"""

from __future__ import annotations
import sys
from pathlib import Path
import torch
from smollm2 import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EDGE = 16  # of a picture, in pixels


def main(folder: str = "runs/models/SmolLM2-135M-eyes", seed: str = "0") -> None:
    source = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)  # nosec B615 # a folder
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(int(seed))
    words = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # nosec B615 # a folder
    words.resize_token_embeddings(len(tokenizer))
    config = Idefics3Config(
        text_config=words.config.to_dict(),
        vision_config={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "image_size": EDGE, "patch_size": 4},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(words.model.state_dict())
    model.generation_config = words.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"longest_edge": EDGE}
    Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False).save_pretrained(folder)
    print(f"wrote {Path(folder).resolve()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
