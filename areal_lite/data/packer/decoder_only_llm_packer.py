"""The packer of text-only language models: Llama, Qwen2.5, Qwen3, Qwen3-MoE, DeepSeek-V3.

Guarantees that a token trains if and only if the policy sampled it and nobody excluded it: recorded tokens are never
tokenized again. The loss mask is aligned to the token itself, over the whole sequence; the trainer shifts it by one.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any
import numpy as np
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.prompt_encoder import PromptEncoder
from areal_lite.data.packer.data_packer import DataPacker, RolloutOutput
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)


class DecoderOnlyLLMDataPacker(DataPacker):
    """Rows are text, conversations, or dicts with a prompt column that is one of the two."""

    @property
    def encoder(self) -> PromptEncoder:
        """Encodes the prompts of rows; ConfigError if the tokenizer lacks the chat template that they need."""
        return PromptEncoder(self.config, self.tokenizer)

    def get_rollout_input(self, item: Any) -> Any:
        """Return text unchanged, a list of messages rendered by the chat template up to the start of the answer. A dict
        is returned as it is: the workflow reads its columns. ConfigError for another type, or without template."""
        return item if isinstance(item, str | Mapping) else self.encoder.encode(item).text

    def get_policy_input(
        self, sample: Any, rollout_output: RolloutOutput, n_ignore_prefix_tokens: int = 0
    ) -> TokenSequence:
        """Return the whole training sequence of one answer. TypeError for an output that is none of those below,
        ConfigError for a row without prompt, ValueError without finite reward or prompt, or for too short an answer.

        Args:
            sample: The dataset row, or a :class:`Sample` with its prompt. Ignored if the output is recorded.
            rollout_output: A recorded :class:`TokenSequence` or :class:`Sample`, whose tokens and reward are taken as
                they are; or, for a single turn, the answer's ids, or its text. Then the reward is that of ``sample``,
                or its column ``reward``, and 0 if there is none.
            n_ignore_prefix_tokens: Number of the answer's first tokens to mask.
        """
        if not isinstance(rollout_output, Sample | TokenSequence):
            source = _row_sample(sample, self.config)
            if isinstance(source.prompt, str):
                prompt_ids = self._encode(source.prompt)
            else:
                columns = source.row if isinstance(source.row, Mapping) else {}
                prompt_ids = self.encoder.encode({**columns, self.config.prompt_key: source.prompt}).input_ids
            rollout_output = self.single_turn_sample(source, prompt_ids, rollout_output)
        return mask_prefix(rollout_output, n_ignore_prefix_tokens)

    def policy_compute_max_len(self, processed_samples: Sequence[TokenSequence]) -> int:
        """Return the length, in tokens, of the longest; ValueError if there is none."""
        if not processed_samples:
            raise ValueError("there are no sequences to collate: give at least one")
        return max(map(len, processed_samples))

    def policy_collate_fn(self, processed_samples: Sequence[TokenSequence], computed_max_len: int) -> dict[str, Any]:
        """Return the batch of :func:`collate_sequences`, padded on the right. ValueError if a sequence is longer than
        ``computed_max_len``; ConfigError if the tokenizer has neither a padding nor an end token."""
        from areal_lite.data.batch.training_batch import collate_sequences

        return collate_sequences(processed_samples, computed_max_len, pad_token_id=_pad_token_id(self.tokenizer))

    def single_turn_sample(self, row: Any, prompt_ids: Sequence[int], output: RolloutOutput) -> Sample:
        """Return a new sample of one turn: the prompt of a row or sample, and ``output`` as what was sampled."""
        source = _row_sample(row, self.config)
        if isinstance(output, str):
            output = self._encode(output)
        elif not isinstance(output, list):
            raise TypeError(
                f"a rollout output is a TokenSequence, a list of token ids or text, not {type(output).__name__}: pass "
                "what the engine sampled"
            )
        sample = Sample(source.index, group_index=source.group_index, row=source.row, prompt=source.prompt)
        sample.append(prompt_ids)
        sample.append(output, sampled=True)
        sample.reward = 0.0 if source.reward is None else source.reward
        return sample

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _row_sample(row: Any, config: DatasetConfig) -> Sample:
    """Return a dataset row as a pending sample with its prompt and, if any, reward; a sample as it is."""
    if isinstance(row, Sample):
        return row
    if not isinstance(row, Mapping):
        return Sample(prompt=row)
    if config.prompt_key not in row:
        raise ConfigError(
            f"a row has the columns {sorted(map(str, row))}, but no {config.prompt_key!r}: set the dataset's prompt_key"
        )
    sample = Sample(row=dict(row), prompt=row[config.prompt_key])
    sample.reward = row.get("reward")
    return sample


def mask_prefix(output: Sample | TokenSequence, n_ignore_prefix_tokens: int) -> TokenSequence:
    """Return a recorded output with its first ``n_ignore_prefix_tokens`` trained tokens masked."""
    sequence = output.to_sequence() if isinstance(output, Sample) else output
    trained = np.flatnonzero(sequence.loss_mask)
    if not 0 <= n_ignore_prefix_tokens <= len(trained):
        raise ValueError(
            f"n_ignore_prefix_tokens is {n_ignore_prefix_tokens}: the answer has {len(trained)} tokens to train, so "
            f"it must be from 0 to {len(trained)}"
        )
    if not n_ignore_prefix_tokens:
        return sequence
    loss_mask = sequence.loss_mask.copy()
    loss_mask[trained[:n_ignore_prefix_tokens]] = False
    return dataclasses.replace(sequence, loss_mask=loss_mask)


def _pad_token_id(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has neither a pad_token nor an eos_token, so batches cannot be padded: set pad_token in "
            "its tokenizer_config.json"
        )
    _warn_of_eos(tokenizer.name_or_path, tokenizer.eos_token)
    return int(tokenizer.eos_token_id)


@functools.cache
def _warn_of_eos(name: str, token: str) -> None:
    logger.warning("tokenizer %s has no pad_token: batches are padded with its eos_token %r", name, token)
