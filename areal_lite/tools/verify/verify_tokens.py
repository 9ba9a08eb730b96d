"""Checks of training facts: what the trainer wrote of each token, against dumps, config and metrics.jsonl.

A step's file names its groups, so these checks also hold for asynchronous runs. Advantages and importance weights are
computed again with the trainer's own functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
import numpy as np
from numpy.typing import NDArray
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ArealLiteError
from areal_lite.tools.inspect.training_facts import fact_files, open_table
from areal_lite.tools.replay.dump_reader import read_group
from areal_lite.tools.verify.verify_run import DumpedGroup, Record, Run, differs, some
from areal_lite.tools.verify.verify_steps import algorithm_of, comparable, fill_advantages, step_metrics

Finding = tuple[str, str]
Key = tuple[str, int | None]
"""Task id and ``sample_idx`` of a line."""
TOKEN_MISMATCH = 1.0
"""Difference of one token's log-probs (nats) that rounding rarely explains."""
_RARELY = 1e-3
"""Share of a step's tokens that may differ by more."""
TOKEN_CHECKS = ("training facts", "advantages", "importance weights", "trainer log-probs")
_ABSOLUTE, _RELATIVE, _HALF_RELATIVE = 1e-4, 1e-3, 0.05
"""Tolerances between two computations of a value. The last one is for log-probs of half precision that were computed
twice, before the advantages and in the update."""
_FILLED = {
    **{"behaviour_logprobs": "behaviour", "proximal_logprobs": "proximal", "reference_logprobs": "reference"},
    **{"values": "values", "sum_squared_probs": "sum_squared_probs", "log_kept": "log_kept"},
}
"""Columns that the trainer's functions need, and their names in its StepTokens."""


class _Rows:
    """The training facts of a step."""

    def __init__(self, path: Path, root: Path) -> None:
        from pyarrow import types  # type: ignore[import-untyped]

        with open_table(path, root) as file:
            table = file.read().combine_chunks()
        lists = {name: table[name].chunk(0) for name in table.column_names if types.is_list(table[name].type)}
        self.keys: list[Key] = list(zip(table["task_id"].to_pylist(), table["sample_idx"].to_pylist(), strict=True))
        self.rewards: list[float] = table["reward"].to_pylist()
        self.baselines = table["baseline"].to_pylist() if "baseline" in table.column_names else None
        self.ends = np.cumsum(lists["token_idx"].value_lengths().to_numpy())
        """End offset of each row's tokens in the columns."""
        self.columns = {name: column.flatten().to_numpy(zero_copy_only=False) for name, column in lists.items()}
        """The lists of all rows, joined: ``[T]``, NaN for null."""


def token_findings(run: Run, *, scored: bool) -> Iterator[Finding]:
    """Check the training facts of every recorded step; ``scored``, the rewards were scored again."""
    if (config := comparable(run)) is None:
        return
    if not (files := fact_files(run.root)):
        reward = "" if scored else "each episode's own reward (score it again with --reward PKG.FN), and "
        run.unproved.append(f"{reward}what each token trained with: set dump_training for runs")
        return
    if missing := [record["step"] for record in run.steps if record["step"] not in files]:
        text = f"the steps {some(missing)} have no training facts"
        if run.complete:
            yield "training facts", text
        else:
            run.unproved.append(text)
    algorithm = None
    try:
        algorithm = algorithm_of(config)
    except ArealLiteError as error:
        run.unproved.append(f"advantages and importance weights: {error}")
    groups = {str(group.task): group for group in run.trained}
    trained: dict[Key, int] = {}
    for record in run.steps:
        step = record["step"]
        if step not in files:
            continue
        try:
            rows = _Rows(files[step], run.root)
            again = [key for key in rows.keys if trained.setdefault(key, step) != step]
            findings = [("training facts", f"line {sample} of task {task} trained before") for task, sample in again]
            findings += _check_step(run, config, record, rows, groups, algorithm)
        except OSError as error:
            run.unread.append(f"{files[step].relative_to(run.root)}: {error.strerror or error}")
            continue
        except Exception as error:  # of a table that somebody made by hand, any
            findings = [("training facts", f"it cannot be checked: {type(error).__name__}: {error}")]
        yield from ((name, f"step {step}: {text}") for name, text in findings)


def _check_step(
    run: Run, config: RunConfig, record: Record, rows: _Rows, groups: Mapping[str, DumpedGroup], algorithm: Any
) -> Iterator[Finding]:
    import torch
    from areal_lite.trainer.rl.policy_step import Step

    tasks = list(dict.fromkeys(task for task, _ in rows.keys))
    if unknown := [task for task in tasks if task not in groups]:
        yield "training facts", f"the tasks {some(unknown)} trained, and the dumps do not have them as accepted"
        return
    keys: list[Key] = [(task, line) for task in tasks for line in groups[task].lines]
    dumped = [read_group(run.root / groups[task].file, root=run.root) for task in tasks]
    if keys != rows.keys or record["train/sequences"] != len(keys):
        yield "training facts", f"{len(rows.keys)} rows are not the {len(keys)} accepted lines of its tasks"
        return
    sequences = [sequence for group in dumped for sequence in group.sequences]
    faults = list(_row_faults(sequences, rows, with_rewards=config.reward_model is None))
    yield from (("training facts", fault) for fault in faults)
    if faults:
        return
    for sequence, reward in zip(sequences, rows.rewards, strict=True):
        sequence.reward = reward
        if config.reward_model is not None:
            sequence.episode_reward = None  # the model's reward of an episode is a mean
    step = Step.of(dumped, version=record["step"] - 1, device=torch.device("cpu"))
    for name in _FILLED.keys() & rows.columns.keys():
        column, attribute = torch.tensor(rows.columns[name], dtype=torch.float32), _FILLED[name]
        setattr(step.tokens, attribute, column if attribute == "behaviour" else column.nan_to_num())
    if rows.baselines is not None:
        step.baselines = torch.tensor(list(dict(zip(step.episodes, rows.baselines, strict=True)).values()))
    if algorithm is not None:
        yield from _recomputed(step, algorithm, rows, record)
    difference = np.abs(_differences(step, rows))
    wrong = np.flatnonzero(difference > TOKEN_MISMATCH)
    if config.trainer.proximal == "trainer" and len(wrong) > _RARELY * np.count_nonzero(~np.isnan(difference)):
        far = f"differ by up to {np.nanmax(difference):.2f} nats between trainer and engine"
        yield "trainer log-probs", f"{len(wrong)} tokens of {_lines(rows, wrong)} {far}"
    yield from _same_as_metrics(step, rows, record, config)


def _row_faults(sequences: Sequence[TokenSequence], rows: _Rows, *, with_rewards: bool) -> Iterator[str]:
    """Yield what differs between dumped sequences and their rows: trained tokens, the engine's log-probs, rewards."""
    trained, behaviour = (np.split(rows.columns[name], rows.ends[:-1]) for name in ("token_idx", "behaviour_logprobs"))
    for sequence, key, reward, at, seen in zip(sequences, rows.keys, rows.rewards, trained, behaviour, strict=True):
        where = f"line {key[1]} of task {key[0]}"
        dumped = np.flatnonzero(sequence.loss_mask)
        if not np.array_equal(dumped, at):
            yield f"{where} trained the tokens {some(at)}, and its dumped mask has {some(dumped)}"
        elif sequence.logprobs is not None:
            wrong = ~np.isnan(seen) & (sequence.logprobs[at] != seen.astype(np.float32))
            if wrong.any():
                yield f"{where} trained {wrong.sum()} tokens with other log-probs of the engine than its dump has"
        if with_rewards and differs(sequence.reward, reward):
            yield f"{where} trained with the reward {reward}, and its dump has {sequence.reward}"


def _recomputed(step: Any, algorithm: Any, rows: _Rows, record: Record) -> Iterator[Finding]:
    """Compute importance weights and advantages as the trainer does, and compare them token by token."""
    tokens = step.tokens
    algorithm.shape_rewards(step.scores, tokens)
    if algorithm.kl_place == "reward":
        algorithm.kl_coef = record["train/reward_kl_coef"]
        algorithm.penalize(tokens, len(step.scores))
    weights = rows.columns["importance_weights"]
    at = np.flatnonzero(~np.isnan(weights))
    behaviour = tokens.behaviour_or_proximal()[at]
    tokens.correction[at] = algorithm.correction(tokens.proximal[at], behaviour, tokens.episodes[at])
    expected = np.where(np.isnan(weights), np.nan, tokens.correction.numpy())
    rounding = _HALF_RELATIVE if algorithm.needs_proximal_early and algorithm.config.dtype != "float32" else _RELATIVE
    yield from _compared("importance weights", weights, expected, rounding, rows, "trainer.correction of its log-probs")
    fill_advantages(step, algorithm)
    expected = tokens.advantages.numpy()
    yield from _compared("advantages", rows.columns["advantages"], expected, rounding, rows, "the rewards of the dump")


def _compared(
    name: str, found: NDArray[Any], expected: NDArray[Any], rounding: float, rows: _Rows, source: str
) -> Iterator[Finding]:
    wrong = np.flatnonzero(~np.isclose(found, expected, rtol=rounding, atol=_ABSOLUTE, equal_nan=True))
    if len(wrong):
        where, first = _lines(rows, wrong), wrong[0]
        yield name, f"{len(wrong)} tokens of {where} differ, such as {found[first]}: {source} gives {expected[first]}"


def _lines(rows: _Rows, tokens: NDArray[Any]) -> str:
    """Name the lines that the tokens belong to."""
    keys = [rows.keys[row] for row in np.unique(np.searchsorted(rows.ends, tokens, side="right"))]
    return f"line {some((f'{sample} of task {task}' for task, sample in keys), 3)}"


def _differences(step: Any, rows: _Rows) -> NDArray[Any]:
    """Return ``[T]``, trainer minus engine of the tokens of the current version, NaN elsewhere."""
    tokens = step.tokens
    known = (tokens.versions.numpy() == step.version) & ~np.isnan(rows.columns["proximal_logprobs"])
    return np.where(known, (tokens.proximal + tokens.log_kept - tokens.behaviour).numpy(), np.nan)


def _same_as_metrics(step: Any, rows: _Rows, record: Record, config: RunConfig) -> Iterator[Finding]:
    """Compare means over the tokens with metrics.jsonl."""
    columns, tokens = rows.columns, step.tokens
    computed = ~np.isnan(columns["policy_logprobs"])
    log_ratio = (columns["policy_logprobs"] - columns["proximal_logprobs"])[computed].astype(np.float64)
    per_token = {
        "entropy": columns["entropy"][computed],
        "correction_weight": columns["importance_weights"][computed],
        "engine_mismatch/log_prob_diff_mean": np.abs(_differences(step, rows))[computed],
    }
    if "." not in config.trainer.loss:
        per_token["ratio"] = np.exp(log_ratio)
    means = {name: float(np.nanmean(each)) for name, each in per_token.items() if not np.isnan(each).all()}
    tokens.advantages.copy_(tokens.advantages.new_tensor(columns["advantages"]))
    for name, value in (means | step_metrics(step, record, config)).items():
        known = record.get(f"train/{name}")  # null if it was not finite
        if known is not None and differs(known, value, relative=_RELATIVE):
            yield "trainer log-probs", f"{name} is {known} in metrics.jsonl, and {value} by its tokens"
