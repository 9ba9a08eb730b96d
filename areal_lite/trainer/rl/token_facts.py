"""Values of the trainer for each trained token, as one Parquet file per step.

A row is a trained sequence, a list column has an entry per trained token; docs/trajectories.md describes them.
Guarantees that a file is whole or absent and has the tokens of all ranks, and that a step that is trained again after
a resume replaces its file. A token has the values of its own update: with several minibatches, ``policy_logprobs``
follows the updates of the minibatches before it, and every other column belongs to the start of the step.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.files.whole_files import storing, write_whole
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Step

_ROW_GROUP = 64  # rows that are decoded to read one of them


@dataclass(frozen=True, slots=True)
class TokenFacts:
    step: int
    sequences: Sequence[TokenSequence]
    baselines: Sequence[float] | None  # greedy reward on each sequence's row, if the estimator needs it
    columns: Mapping[str, NDArray[np.float32]]  # ``[T]`` by name, in the order of the sequences; NaN if not computed


def token_facts(step: Step, algorithm: Algorithm) -> TokenFacts:
    """Return the facts of a finished step, whose values the ranks have shared."""
    tokens, config = step.tokens, algorithm.config
    nothing = torch.full_like(tokens.policy, math.nan)
    early = torch.full_like(tokens.known, algorithm.needs_proximal_early)
    computed, known = tokens.computed, tokens.computed | tokens.known | early
    columns = {
        "behaviour_logprobs": tokens.behaviour,
        "advantages": tokens.advantages,
        "policy_logprobs": torch.where(computed, tokens.policy, nothing),
        "proximal_logprobs": torch.where(known, tokens.proximal, nothing),
        "importance_weights": torch.where(computed | early, tokens.correction, nothing),
        "clipped": torch.where(computed, _clipped(step, config.loss), nothing),
        "entropy": torch.where(computed, step.statistics.get("entropy", nothing), nothing),
        "log_kept": torch.where(known, tokens.log_kept, nothing),
    }
    if not bool(columns["log_kept"].nan_to_num().any()):
        del columns["log_kept"]
    if config.kl is not None:
        columns["reference_logprobs"] = tokens.reference
    if config.critic is not None:
        columns |= {"values": tokens.values, "returns": tokens.returns}
    if "sum_squared_probs" in algorithm.needs:
        columns["sum_squared_probs"] = tokens.sum_squared_probs
    return TokenFacts(
        step=step.version + 1,
        sequences=step.sequences,
        baselines=None if step.baselines is None else step.baselines[torch.tensor(step.episodes)].tolist(),
        columns={name: values.cpu().numpy() for name, values in columns.items()},
    )


def _clipped(step: Step, loss: str) -> Tensor:
    """Return ``[T]``, -1 and 1 where the lower or the upper bound of the ratio decided the loss, 0 elsewhere."""
    tokens, statistics = step.tokens, step.statistics
    shares = [statistics[name] for name in ("clip_fraction", "clip_fraction_lower") if name in statistics]
    decided = torch.stack([tokens.policy, *shares])[1:].nan_to_num().sum(0) > 0
    # The ratio of an episode leaves its band on the side that the advantage pushes to.
    side = tokens.advantages if loss == "gspo" else tokens.policy - tokens.proximal
    return torch.where(side < 0, -1.0, 1.0) * decided


@contextmanager
def facts_writer(folder: Path) -> Iterator[Callable[[TokenFacts], None]]:
    """Yield a function that writes ``folder/STEP.parquet`` in a thread, one step behind at most. A full disk is a
    StorageError of its next call, or at the end."""
    pending: list[Future[None]] = []

    def wait() -> None:
        while pending:
            pending.pop().result()

    def write(facts: TokenFacts) -> None:
        wait()
        pending.append(thread.submit(write_facts, folder / f"{facts.step}.parquet", facts))

    with ThreadPoolExecutor(1, thread_name_prefix="areal-lite-facts") as thread:
        yield write
    wait()


def write_facts(path: Path, facts: TokenFacts) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    sequences = facts.sequences
    positions = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
    offsets = pa.array(np.cumsum([0, *map(len, positions)]), pa.int32())

    def lists(values: Any, kind: Any) -> Any:
        return pa.ListArray.from_arrays(offsets, pa.array(values, from_pandas=True).cast(kind))

    table: dict[str, Any] = {
        "task_id": pa.array([sequence.task_id for sequence in sequences]),
        "group_id": pa.array([sequence.group_id for sequence in sequences]),
        "member_idx": pa.array([sequence.member_idx for sequence in sequences], pa.int32()),
        "sample_idx": pa.array(list(_sample_indices(sequences)), pa.int32()),
        "reward": pa.array([sequence.reward for sequence in sequences], pa.float64()),
    }
    if facts.baselines is not None:
        table["baseline"] = pa.array(facts.baselines, pa.float64())
    table["token_idx"] = lists(np.concatenate(positions), pa.int32())
    for name, values in facts.columns.items():
        table[name] = lists(values, pa.int8() if name == "clipped" else pa.float32())
    buffer = io.BytesIO()
    keys = [name for name in table if not isinstance(table[name], pa.ListArray)]
    options = {"compression": "zstd", "use_dictionary": keys, "write_statistics": keys}
    parquet.write_table(pa.table(table), buffer, row_group_size=_ROW_GROUP, **options)
    with storing(path, "free disk space or fix its permissions"):
        write_whole(path, buffer.getvalue())


def _sample_indices(sequences: Sequence[TokenSequence]) -> Iterator[int | None]:
    """Yield the ``sample_idx`` of each sequence's dumped line; None if its episode is unknown. A dump has the lines of
    a task's episodes in order, and one line for an episode that left no sequence."""
    counts = Counter((sequence.task_id, sequence.member_idx) for sequence in sequences)
    passed: Counter[tuple[str, int]] = Counter()
    for sequence in sequences:
        task, member = sequence.task_id, sequence.member_idx
        if member is None:
            yield None
        else:
            yield sum(max(1, counts[task, before]) for before in range(member)) + passed[task, member]
            passed[task, member] += 1
