"""The log-prob probe: do the servers serve the model that the trainer trains?

Each server answers one fixed prompt greedily; the trainer computes the log-probs of the same tokens. bfloat16 servers
differ from the trainer by 0.03 nats on average, float32 ones from a float32 trainer by 1e-5, another model by about 1.
"""

import io
import logging
from collections.abc import Sequence
from typing import Any
import numpy as np
from areal_lite.api.image_span import Images
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.run_config import RunConfig
from areal_lite.data.vision.image_encoder import ImageEncoder
from areal_lite.errors import ConfigError
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)
PROMPT = "The three largest cities of France are"
NUM_TOKENS = 16
MAX_DIFFERENCE = 0.25  # mean |difference| in nats beyond which a server serves another model: 8 times that of bfloat16
USUAL_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}  # nats that rounding explains, by the lower precision of both
Answer = tuple[str, list[int], list[float]]  # URL of a server, and the tokens of its answer with their log-probs


def usual_difference(config: RunConfig) -> float:
    """Return the mean |difference| in nats that the rounding of this run explains."""
    return USUAL_DIFFERENCE["float32" if config.trainer.dtype == config.server.dtype == "float32" else "bfloat16"]


def compare_logprobs(
    trainer: PolicyTrainer,
    prompt: Sequence[int],
    answers: Sequence[Answer],
    *,
    images: Images = (),
    warn_above: float | None = None,
) -> dict[str, float]:
    """Return the mean |difference| in nats of each server, by URL; call it on every rank. With ``warn_above``, warn of
    servers beyond it; else log all figures, and raise ConfigError for another model."""
    sequences = []
    for _, tokens, logprobs in answers:
        ids = np.array([*prompt, *tokens])
        mask = np.arange(len(ids)) >= len(prompt)
        column = np.array([0.0] * len(prompt) + logprobs)
        sequences.append(TokenSequence(input_ids=ids, loss_mask=mask, logprobs=column, images=images))
    ours = trainer.logprobs_of(sequences).cpu().numpy()
    theirs = np.concatenate([logprobs for _, _, logprobs in answers])
    owners = np.repeat(np.arange(len(answers)), [len(tokens) for _, tokens, _ in answers])
    figures = {url: float(np.abs(ours - theirs)[owners == index].mean()) for index, (url, _, _) in enumerate(answers)}
    for url, figure in figures.items():
        if warn_above is None:
            logger.info("server %s: mean |log-prob - trainer's| is %.4f nats over %d tokens", url, figure, NUM_TOKENS)
        elif not figure <= warn_above:
            logger.warning(
                "the log-probs of server %s differ from the trainer's by %.4f nats on average, more than the %g of "
                "rounding: look at train/engine_mismatch in the metrics, and restart the server",
                *(url, figure, warn_above),
            )
    wrong = {url: figure for url, figure in figures.items() if not figure <= MAX_DIFFERENCE}
    if wrong and warn_above is None:
        named = ", ".join(f"{url} ({figure:.2f} nats)" for url, figure in wrong.items())
        raise ConfigError(
            f"the log-probs of {named} differ from the trainer's by more than {MAX_DIFFERENCE} nats on average: they "
            "serve another model, or not the weights they acknowledged. Serve model_path, or fix rollout.addresses"
        )
    return figures


def probe_prompt(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode(PROMPT, add_special_tokens=False)
    return ids or [0]


def image_prompt(tokenizer: Any, encoder: ImageEncoder) -> tuple[list[int], Images]:
    """Return a question about an image, which is stored: ids and its span."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 40, 40)).save(file, "PNG")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encoder.expanded(tokenizer.encode(text, add_special_tokens=False), [encoder.stored(file.getvalue())])
