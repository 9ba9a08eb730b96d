"""slime's view of an episode: a row and one linear sequence of tokens.

A data source hands out and takes back samples; the record of an episode is the
:class:`~areal_lite.api.trajectory.Trajectory`. Tokens, loss mask, log-probs and versions have equal length:
:meth:`Sample.append` checks it. Sampled tokens are kept as spans, so that a stopped episode can resume from them.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple, Self
import numpy as np
from areal_lite.api.image_span import Images, images_of, plain_images
from areal_lite.api.trajectory import TokenSequence

Prompt = str | list[dict[str, Any]]
Reward = float | dict[str, Any]
_GIVEN = ("index", "group_index", "position", "row", "prompt", "label", "metadata")


class SampleStatus(StrEnum):
    """Progress of a sample."""

    PENDING = "pending"
    """Nothing is sampled yet."""
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a token limit."""
    ABORTED = "aborted"
    """Stopped by the run; it resumes from its tokens."""
    FAILED = "failed"
    """Failed; it never trains."""


class Span(NamedTuple):
    """Sampled tokens ``[start, end)`` of one model call."""

    start: int
    end: int
    stop_reason: str
    """stop, length, or abort if the call was cut off."""


class Sample:
    """slime's view of one episode of a group: its row and one linear token sequence.

    Args:
        index: Number of the sample in the run; samples that one episode fans out into share it.
        group_index: Number or name of its group in the run.
        position: Index of its row in the dataset; None without a dataset.
        row: The dataset row, usually a dict; copied on first access.
        label: Reference to judge the answer by.
        metadata: Anything; JSON values survive a restart.
    """

    Status = SampleStatus

    def __init__(
        self,
        index: int | None = None,
        *,
        group_index: int | str | None = None,
        position: int | None = None,
        row: Any = None,
        prompt: Prompt = "",
        label: Any = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.index = index
        self.group_index = group_index
        self.position = position
        self._row: Any = None
        self._shared_row = row
        self.mini_batch: tuple[Any, int] | None = None
        """Function that returns the inputs of its mini-batch's rows, and its index there; None for a row alone."""
        self.prompt = prompt
        self.label = label
        self.metadata: dict[str, Any] = {} if metadata is None else metadata
        self.response = ""
        self.reward: Reward | None = None
        self.status = SampleStatus.PENDING
        self.attempts = 0
        """Times its episode failed."""
        self.tokens: list[int] = []
        """``[T]`` ids of prompt, answers and the text between them."""
        self.loss_mask: list[int] = []
        """``[T]`` 1 where the policy sampled the token and it trains."""
        self.logprobs: list[float] = []
        """``[T]`` behaviour log-probs in nats, 0 where not sampled, NaN where not recorded."""
        self.versions: list[int] = []
        """``[T]`` policy version of each sampled token, -1 elsewhere."""
        self.spans: list[Span] = []
        """The sampled spans, one per model call, in order."""
        self.images: Images = ()
        """Images among the tokens."""

    def sibling(self, index: int | None) -> "Sample":
        """Return another pending sample of the same row and group, with ``metadata`` and ``attempts``."""
        sibling = Sample(index, group_index=self.group_index, position=self.position, row=self._shared_row)
        sibling.mini_batch, sibling.attempts = self.mini_batch, self.attempts
        sibling.prompt, sibling.label = deep_copy(self.prompt), deep_copy(self.label)
        sibling.metadata = deep_copy(self.metadata)
        return sibling

    @property
    def row(self) -> Any:
        """The dataset row, its own copy; an empty dict without one."""
        if self._row is None:
            self._row = deep_copy({} if self._shared_row is None else self._shared_row)
        return self._row

    @property
    def response_length(self) -> int:
        """Number of tokens from the first sampled one to the end."""
        return len(self.tokens) - self.spans[0].start if self.spans else 0

    def append(
        self,
        tokens: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        sampled: bool = False,
        trained: bool | None = None,
        stop_reason: str = "stop",
    ) -> None:
        """Add tokens at the end; all or, on an error, none. ValueError if lengths differ, an id or log-prob is invalid,
        or tokens that were not sampled have log-probs, versions or training.

        Args:
            logprobs: Behaviour log-probs in nats, one per token; only of sampled tokens.
            versions: Policy versions, one per token; only of sampled tokens.
            sampled: True if the policy wrote them: they become a span.
            trained: True if they train; None is the same as ``sampled``, False keeps sampled tokens out.
            stop_reason: Why a span ended: stop, length, or abort if it was cut off.
        """
        trained = sampled if trained is None else trained
        count = len(tokens)
        if not count:
            return
        if not sampled and (logprobs is not None or versions is not None or trained):
            raise ValueError(
                f"{self._name()}: only sampled tokens have log-probs and versions and train: set sampled=True, or "
                "leave the others out"
            )
        for name, values in (("logprobs", logprobs), ("versions", versions)):
            if values is not None and len(values) != count:
                raise ValueError(f"{self._name()}: {name} has {len(values)} entries for {count} tokens")
        if any(type(token) is not int or token < 0 for token in tokens):
            raise ValueError(f"{self._name()}: a token id is an int from 0, not one of {tokens[:8]!r}...")
        if logprobs is not None and not all(map(math.isfinite, logprobs)):
            raise ValueError(f"{self._name()}: log-probs must be finite: keep the server's values")
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(trained)] * count)
        self.logprobs.extend(logprobs if logprobs is not None else [math.nan if sampled else 0.0] * count)
        self.versions.extend(versions if versions is not None else [-1] * count)
        if sampled:
            self.spans.append(Span(start, start + count, stop_reason))

    def reset(self) -> None:
        """Discard what was sampled: the sample is pending again."""
        self.tokens, self.loss_mask, self.logprobs, self.versions, self.spans = [], [], [], [], []
        self.response, self.reward, self.status, self.images = "", None, SampleStatus.PENDING, ()

    def get_reward_value(self, reward_key: str | None = None) -> float:
        """Return the reward, or its entry ``reward_key``; ValueError if there is none; with index and key."""
        reward: Any = self.reward
        if reward_key is not None:
            reward = reward.get(reward_key) if isinstance(reward, Mapping) else None
        if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(
                f"{self._name()}: the reward{f' [{reward_key!r}]' if reward_key else ''} is {reward!r} in "
                f"{self.reward!r}: it must be a finite number; name the right reward_key, or skip samples without one"
            )
        return float(reward)

    def to_sequence(self) -> TokenSequence:
        """Return the tokens as a sequence to train on; ValueError without finite reward, or if the first token trains.
        Log-probs are None if no trained token has one, else NaN where missing; versions None if no token has one."""
        loss_mask = np.array(self.loss_mask, np.bool_)
        logprobs = np.array(self.logprobs, np.float32)
        versions = np.array(self.versions, np.int64)
        recorded = np.isfinite(logprobs[loss_mask]).any()
        logprobs[~loss_mask & np.isnan(logprobs)] = 0
        return TokenSequence(
            input_ids=np.array(self.tokens, np.int64),
            loss_mask=loss_mask,
            logprobs=logprobs if recorded else None,
            versions=versions if (versions >= 0).any() else None,
            reward=self.get_reward_value(),
            group_id="" if self.group_index is None else str(self.group_index),
            task_id=str(self.metadata.get("task_id", "")),
            member_idx=self.index,
            images=self.images,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a new dict; the status is its string value."""
        return {name: deep_copy(getattr(self, name)) for name in (*_GIVEN, "response", "reward", "attempts")} | {
            "status": self.status.value,
            "tokens": list(self.tokens),
            "loss_mask": list(self.loss_mask),
            "logprobs": [None if math.isnan(value) else value for value in self.logprobs],
            "versions": list(self.versions),
            "spans": [list(span) for span in self.spans],
            "images": plain_images(self.images),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the sample of :meth:`to_dict`; ``record`` is not modified, and its unknown keys are kept in
        ``metadata``. ValueError if lengths differ, or the status is unknown."""
        values: dict[str, Any] = deep_copy(dict(record))
        sample = cls(**{name: values.pop(name) for name in _GIVEN if name in values})
        sample.response, sample.reward = values.pop("response", ""), values.pop("reward", None)
        sample.status = SampleStatus(values.pop("status", SampleStatus.PENDING))
        sample.attempts = values.pop("attempts", 0)
        sample.tokens = values.pop("tokens", [])
        sample.spans = [Span(*span) for span in values.pop("spans", [])]
        sample.images = images_of(values.pop("images", []))
        for name in ("loss_mask", "logprobs", "versions"):
            column = values.pop(name, None) or []
            if len(column) != len(sample.tokens):
                raise ValueError(
                    f"{sample._name()}: {name} has {len(column)} entries for {len(sample.tokens)} tokens: the record "
                    "is broken"
                )
            setattr(sample, name, column)
        sample.logprobs = [math.nan if value is None else value for value in sample.logprobs]
        end = 0
        for span in sample.spans:
            if not end <= span.start <= span.end <= len(sample.tokens):
                raise ValueError(f"{sample._name()}: the span {tuple(span)} does not fit {len(sample.tokens)} tokens")
            end = span.end
        values.pop("response_length", None)
        sample.metadata |= values
        return sample

    def _name(self) -> str:
        return f"sample {self.index}"

    def __repr__(self) -> str:
        return (
            f"Sample(index={self.index}, group_index={self.group_index}, status={self.status.value}, "
            f"tokens={len(self.tokens)}, reward={self.reward})"
        )


def with_own_containers(value: Any, *, deep: bool = False) -> Any:
    """Return a copy with new dicts and lists; the values in them, such as images, are shared unless ``deep``."""
    kind = type(value)
    if kind is dict:
        return {key: with_own_containers(item, deep=deep) for key, item in value.items()}
    if kind is list:
        return [with_own_containers(item, deep=deep) for item in value]
    return copy.deepcopy(value) if deep and kind not in (str, int, float, bool, bytes, type(None)) else value


def deep_copy(value: Any) -> Any:
    """Return a deep copy; quick for JSON values."""
    return with_own_containers(value, deep=True)
