"""slime's ``args`` as dataset and settings, so that ``RolloutDataSourceWithBuffer(args)`` works as there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError


def settings_of(args: Any) -> SourceSettings:
    """Return the settings that ``args`` name; those that are missing have slime's defaults."""
    given = _given(args)
    return SourceSettings(
        n_samples_per_prompt=args.n_samples_per_prompt,
        seed=given.get("rollout_seed", 42),
        shuffle=given.get("rollout_shuffle", False),
        prompt_key=given.get("input_key", "input"),
        label_key=given.get("label_key"),
        metadata_key=given.get("metadata_key"),
        reward_key=given.get("reward_key"),
        buffer_filter=given.get("buffer_filter_path"),
        slime_args=args,
    )


def dataset_of(args: Any) -> tuple[Any, SourceSettings]:
    """Return the dataset that ``args`` name, None without ``rollout_global_dataset``, and the settings."""
    settings = settings_of(args)
    if not args.rollout_global_dataset:
        return None, settings
    given = _given(args)
    if missing := [name for name in ("prompt_data", "hf_checkpoint") if name not in given]:
        raise ConfigError(f"rollout_global_dataset is true, and args has no {missing[0]}: set it")
    from areal_lite.data.chat.tokenizer import load_tokenizer
    from areal_lite.data.rows.rl_dataset import RLHFDataset

    longest = given.get("rollout_max_prompt_len")
    config = DatasetConfig(
        path=args.prompt_data,
        prompt_key=settings.prompt_key,
        label_key=settings.label_key,
        tool_key=given.get("tool_key"),
        apply_chat_template=given.get("apply_chat_template", False),
        max_prompt_length=longest,
        filter_overlong_prompts=longest is not None,
    )
    dataset = RLHFDataset(args.prompt_data, load_tokenizer(args.hf_checkpoint), config)
    settings = replace(settings, name=str(args.prompt_data))
    if config.apply_chat_template:
        assert dataset.encoder is not None
        encoder = dataset.encoder
        settings = replace(settings, render=lambda row: encoder.encode(row).text)
    return dataset, settings


def _given(args: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if value is not None}
