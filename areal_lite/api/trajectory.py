"""The record of an episode, and of the group of episodes of one dataset row.

A model call becomes a :class:`Turn` when its episode ends; the turns of an episode are a tree, because an agent may
continue a conversation in several ways. Each :class:`TokenSequence` is a path through that tree that trains; its
columns and those of its turns share memory. Nothing is padded here, and nothing that was sampled is ever tokenized
again. The tensor dict of AReaL is a view (:mod:`areal_lite.api.tensor_dict`).
"""

from __future__ import annotations
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from areal_lite.api.failure import Failure
from areal_lite.api.image_span import Images, check_images

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TaskId = int | str


class EpisodeStatus(StrEnum):
    """The four ends of an episode; each episode has exactly one."""

    ACCEPTED = "accepted"
    """Trains."""
    REJECTED = "rejected"
    """Finished, but refused by the workflow, by the filter, or as stale."""
    FAILED = "failed"
    """Broken by an error or a timeout; see ``failure``."""
    CANCELLED = "cancelled"
    """Stopped by the run."""


class TurnRole(StrEnum):
    """Who wrote the tokens of a turn."""

    PROMPT = "prompt"
    """The environment, at the beginning of a conversation."""
    ASSISTANT = "assistant"
    """The model, in one call."""
    ENVIRONMENT = "environment"
    """The environment, after a call: user, tool, chat template."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One model call, or what the environment wrote before one; ``n`` tokens."""

    role: TurnRole
    parent: int | None = None
    """Index in ``Trajectory.turns`` of the turn before it; None at the beginning of a conversation."""
    start: int = 0
    """Tokens before it on its path."""
    ids: NDArray[Any]
    """``[n]`` integer."""
    loss_mask: NDArray[np.bool_]
    """``[n]`` True where the policy sampled the token and it trains."""
    logprobs: NDArray[Any] | None = None
    """``[n]`` float, behaviour log-probs in nats, 0 where not sampled; None if not recorded."""
    versions: NDArray[Any] | None = None
    """``[n]`` integer, policy version of each sampled token, -1 elsewhere; None if not recorded."""
    stop_reason: str | None = None
    """End of a model call: stop, length, tool_calls, or abort if it was cut off."""
    started: float | None = None
    """Wall clock of the call, seconds since the epoch."""
    latency_s: float | None = None
    text: str | None = None
    """The tokens as text, if decoded; only the ids are exact."""
    agent: str | None = None
    """Name of the agent that made the model call, ``main`` or a sub-agent; None if unknown."""
    server: str | None = None
    """URL of the server that answered the model call; None if unknown."""
    images: Images = ()
    """Images among its tokens, offsets from its first token."""

    @property
    def end(self) -> int:
        """Tokens on its path up to its end."""
        return self.start + len(self.ids)


COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions", "token_rewards")
"""Fields of a sequence that are arrays, with an entry per token."""


@dataclass(slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One path of tokens that trains, unpadded; every column is aligned to the token itself. ValueError if lengths
    differ, spans are wrong, or the loss mask has the first token, which nothing predicts."""

    input_ids: NDArray[Any]
    """``[T]`` integer: prompt, answers, and the environment's tokens between them."""
    loss_mask: NDArray[np.bool_]
    """``[T]`` True where the policy sampled the token and this sequence trains it."""
    logprobs: NDArray[Any] | None = None
    """``[T]`` float, behaviour log-probs in nats; None if not recorded, NaN where one is missing."""
    versions: NDArray[Any] | None = None
    """``[T]`` integer, policy version of each sampled token, -1 elsewhere; None if unknown."""
    reward: float | None = None
    episode_reward: float | None = None
    """Reward of its episode; None: the mean of ``reward`` over the episode's sequences."""
    token_rewards: NDArray[Any] | None = None
    """``[T]`` float, whose sum is ``reward``, if tokens are rewarded one by one; then its episode has no other."""
    reference_logprobs: NDArray[Any] | None = None
    """``[T]`` float, log-probs in nats under a teacher, 0 at the first token; None if the trainer has the reference."""
    place: tuple[tuple[int, ...], int] | None = None
    """``path`` and ``turn_idx``, if known."""
    owner: weakref.ref[Trajectory] | None = None
    """The trajectory that finds them otherwise."""
    group_id: str = ""
    """Episodes with the same id are each other's baseline."""
    task_id: str = ""
    member_idx: int | None = None
    """Its episode in the group; None counts it as an episode of its own."""
    multi_modal_inputs: dict[str, Any] | None = None
    """Inputs of the model besides tokens, such as pixel values; None for text only."""
    images: Images = ()
    """Images among its tokens, in order."""

    def __post_init__(self) -> None:
        length, where = len(self.input_ids), f"task {self.task_id}: " if self.task_id else ""
        for name in COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != length:
                raise ValueError(
                    f"{where}{name} has {len(column)} entries but input_ids has {length}: give one per token"
                )
        if length and self.loss_mask[0]:
            raise ValueError(
                f"{where}loss_mask is True at the first token, which no token predicts: "
                "set it to False there, or start the sequence with a BOS token"
            )
        if self.images:
            check_images(self.images, length, self.loss_mask)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)

    @property
    def path(self) -> tuple[int, ...]:
        """Its turns, as indices into ``Trajectory.turns``; empty if unknown."""
        return self._find_place()[0]

    @property
    def turn_idx(self) -> int:
        """Model calls on its path before the last one."""
        return self._find_place()[1]

    def _find_place(self) -> tuple[tuple[int, ...], int]:
        if self.place is None and self.owner is not None and (trajectory := self.owner()) is not None:
            _ = trajectory.turns  # sets the place
        return self.place or ((), 0)

    @property
    def score(self) -> float | None:
        """``episode_reward``, ``reward`` without one: the mean over an episode's sequences is its reward."""
        return self.reward if self.episode_reward is None else self.episode_reward

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that train."""
        return int(self.loss_mask.sum())

    def trained_versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest policy version of the trained tokens; None if unknown."""
        if self.versions is None:
            return None
        known = self.versions[self.loss_mask]
        content = known.tobytes()
        if content == content[: known.itemsize] * len(known):  # as is usual
            known = known[:1]
        sampled = {version for version in known.tolist() if version >= 0}
        return (min(sampled), max(sampled)) if sampled else None

    def staleness(self, version: int) -> int | None:
        """Return ``version`` minus the version of the oldest trained token; None if unknown."""
        versions = self.trained_versions()
        return None if versions is None else version - versions[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A program that an agent ran, and how it ended."""

    command: list[str]
    returncode: int
    """Exit status; negative for the signal that ended it."""
    timed_out: bool
    """True if it was killed at the timeout of its call, or because its episode was stopped."""
    seconds: float
    stdout: str
    """The last 64 KiB."""
    stderr: str
    """The last 64 KiB."""


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """Numbers, values and programs that an episode's code records while it runs."""

    counts: dict[str, float] = field(default_factory=dict)
    """Numbers of an agent's episode: answers, forks, ..., and the parts of its reward as ``reward/NAME``."""
    reward_extra: dict[str, float | str | None] = field(default_factory=dict)
    """Values that the reward function returned beside the last reward, by name."""
    scalars: list[tuple[str, float]] = field(default_factory=list)
    """Numbers that the episode's code recorded, by metric name."""
    processes: list[ProcessRecord] = field(default_factory=list)
    """Programs that the agent ran, in the order they ended."""


RECORDED = tuple(Recorded.__dataclass_fields__)


class TurnRewards(NamedTuple):
    """How the rewards of single turns make the reward of their episode."""

    rule: Literal["sum", "mean", "last"] = "sum"
    discount: float = 1.0
    """Factor on a turn's reward, in a sum, for each rewarded turn before it."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Trajectory(Recorded):
    """The record of one episode."""

    member_idx: int = 0
    """Its index in the group."""
    status: EpisodeStatus
    failure: Failure | None = None
    """Why it failed or was cancelled; None otherwise."""
    sequences: list[TokenSequence] = field(default_factory=list)
    """Sequences to train on; empty unless the episode finished with data."""
    reward: float | None = None
    """Reward of the episode; see :meth:`join_rewards`."""
    has_loss_mask: bool = True
    """False if the workflow's tensor dict has no loss mask; then nothing trains."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Other keys of a workflow's tensor dict, beside tokens and rewards, per sequence."""
    make_turns: Callable[[], list[Turn]] = list
    made_turns: list[Turn] | None = None

    @property
    def turns(self) -> list[Turn]:
        """All model calls and the environment's turns, parents before children; made when first asked for."""
        if self.made_turns is None:
            made = self.made_turns = self.make_turns()
            self.make_turns = lambda: made  # the calls go; another thread that asks meanwhile gets the same
        return self.made_turns

    def trained_versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest policy version of all trained tokens; None if unknown."""
        return _range_of([sequence.trained_versions() for sequence in self.sequences])

    def join_rewards(self, by: TurnRewards) -> None:
        """Set ``reward`` from those of the sequences, in the order of their answers; None if no sequence has one. A sum
        takes ``episode_reward`` where sequences have it: their own hold later rewards already, or are all that one."""
        rewards = [sequence.reward for sequence in self.sequences if sequence.reward is not None]
        known = {sequence.episode_reward for sequence in self.sequences}
        if not rewards or by.rule == "last":
            self.reward = rewards[-1] if rewards else None
        elif by.rule == "mean":
            self.reward = sum(rewards) / len(rewards)
        else:
            discounted = (by.discount**turn * reward for turn, reward in enumerate(rewards))
            self.reward = math.fsum(discounted if None in known else known)  # type: ignore[arg-type]

    def prompt_len(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path come before its first model call; all of them if it has none."""
        turns = [self.turns[turn] for turn in path]
        return next((turn.start for turn in turns if turn.role is TurnRole.ASSISTANT), turns[-1].end if turns else 0)

    def path_to(self, turn: int) -> list[int]:
        """Return the indices of the turns from the beginning of a conversation to ``turns[turn]``."""
        path = [turn]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the model wrote in this episode, trained or not."""
        return sum(len(turn.ids) for turn in self.turns if turn.role is TurnRole.ASSISTANT)


def _range_of(ranges: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    known = [each for each in ranges if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def scope_name(is_eval: bool) -> str:
    """Return the folder and metric scope of training or evaluation episodes."""
    return "eval-rollout" if is_eval else "rollout"


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The episodes of one dataset row: the unit of baselines and of the batch."""

    task_id: TaskId
    group_id: str
    status: EpisodeStatus
    data: Mapping[str, Any]
    """The workflow's input."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """One per episode, by ``member_idx``."""
    failure: Failure | None = None
    """Why the group failed or was cancelled; None otherwise."""
    rejection: str | None = None
    samples: list[Any] = field(default_factory=list)
    """The group as its data source handed it out; empty for a row that was submitted by hand."""
    baseline: float | None = None
    """Reward of a greedy episode on the same row, if the estimator needs it."""
    is_eval: bool = False
    start_order: int = 0
    """Place in the order in which groups started."""
    start_version: int = 0
    head_version: int | None = None
    """Version of the oldest trained token."""
    tail_version: int | None = None
    """Version of the newest trained token."""
    queued_s: float = 0.0
    """Seconds from submission to start."""
    run_s: float = 0.0
    """Seconds from start to end."""
    finished_at: float = 0.0
    """Wall clock, seconds since the epoch."""

    def __post_init__(self) -> None:
        self.note_versions()
        self._name_parts()

    def note_versions(self) -> None:
        """Set ``head_version`` and ``tail_version`` from the trained tokens."""
        versions = _range_of([t.trained_versions() for t in self.trajectories])
        self.head_version, self.tail_version = versions or (None, None)

    def _name_parts(self) -> None:
        """Copy the group's status to its trajectories and its ids to their sequences; an episode's own end stays."""
        task_id = str(self.task_id)
        for trajectory in self.trajectories:
            if trajectory.reward is None:
                trajectory.join_rewards(TurnRewards("mean"))  # as in older dumps
            if trajectory.status is EpisodeStatus.ACCEPTED:
                trajectory.status, trajectory.failure = self.status, self.failure
            for sequence in trajectory.sequences:
                sequence.group_id, sequence.task_id = self.group_id, task_id
                sequence.member_idx, sequence.episode_reward = trajectory.member_idx, trajectory.reward
                if sequence.reward is None:
                    sequence.reward = trajectory.reward

    def end_as(self, status: EpisodeStatus, *, failure: Failure | None = None, rejection: str | None = None) -> None:
        """Change how an accepted group ends: rejected as stale, or cancelled."""
        self.status, self.failure, self.rejection = status, failure, rejection
        self._name_parts()

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of all episodes, episode by episode."""
        return [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]

    @property
    def error(self) -> str | None:
        """Why the group does not train, as text; None for an accepted one."""
        return self.rejection if self.failure is None else self.failure.text

    @property
    def rewards(self) -> list[float]:
        """The reward of each episode that left data and a reward."""
        return [t.reward for t in self.trajectories if t.sequences and t.reward is not None]

    @property
    def trajectory(self) -> dict[str, Any] | None:
        """AReaL's tensor dict of the group, made on demand; None if no episode left data."""
        from areal_lite.api.tensor_dict import tensor_dict_of

        return tensor_dict_of(self.trajectories)
