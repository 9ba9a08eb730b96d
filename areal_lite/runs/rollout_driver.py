"""Drives rollouts on the first rank: data source and engine in, batches with rewards out."""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Sequence
from areal_lite.api.trajectory import Group, TurnRewards
from areal_lite.config.run_config import RunConfig
from areal_lite.data.batch.data_proto import DataProto, object_array
from areal_lite.data.batch.data_proto_file import BatchCache
from areal_lite.data.batch.rollout_dump import dump_rollouts
from areal_lite.data.batch.training_batch import data_proto_of
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.packer.data_packer import row_of, training_batch
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.row_streams import CurriculumRows
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import VISION_MODELS, stored_config
from areal_lite.models.policy_model import resolve_device
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.engine_stack import engine_metrics
from areal_lite.runs.evaluation import Evaluation, evaluate
from areal_lite.runs.folder.resuming import Start
from areal_lite.runs.folder.run_directory import append_batch
from areal_lite.runs.run_data import TrainingData, tokenizer_path, workflow_rows
from areal_lite.servers.client.teacher import Teacher
from areal_lite.trainer.forward.scalar_model import ValueScorer, load_reward_model, rewards_of
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Batch

logger = logging.getLogger(__name__)


class RolloutDriver:
    """Makes the batches of a run and reports trained ones to its data source; ``engine`` is set once it runs."""

    engine: RemoteInfEngine

    def __init__(self, config: RunConfig, start: Start, data: TrainingData) -> None:
        """Load and check all inputs, with the data source at the position of ``start``; raises ConfigError."""
        algorithm = Algorithm(config.trainer, max_new_tokens=config.rollout.gconfig.max_new_tokens)
        if start.checkpoint is not None:
            data.source.load(start.step, start.checkpoint)
        self.data = data
        self._config = config
        self._workflow = data.workflow
        rows = config.eval_dataset
        self.held_out = workflow_rows(config, rows, is_train=False, workflow=self._workflow) if rows else []
        self._baselines = "baselines" in algorithm.needs
        self._cache = _batch_cache(config, baselines=self._baselines)
        self._reward_model = make_reward_model(config)
        self._teacher = make_teacher(config)
        self._groups: list[Group] = []

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: whole groups with rewards, and baselines if the estimator needs them. A
        ``DataProto`` if it went through the user's own packer or, with ``rollout_cache``, a file."""
        self._groups = []
        packer = self.data.packer
        if self._cache is None:
            groups = self._generate(step)
            return groups if type(packer) is DecoderOnlyLLMDataPacker else training_batch(packer, groups)
        batch = self._cache.batch(step, lambda: training_batch(packer, self._generate(step)))
        if not self._groups:  # draw the cached batch's rows, so that later steps get other rows
            source = self.data.source
            source.mark_trained(source.get_samples(self._config.rollout.consumer_batch_size))
        return batch

    def mark_trained(self, step: int, batch: Batch) -> None:
        """Tell the data source, curriculum and dataset that a step's batch was trained; dump its ids and scores. The
        last two get a ``DataProto``, with the dataset row of each sequence as ``rows`` unless it was cached."""
        self.data.source.mark_trained(group.samples for group in self._groups)
        if self._config.rollout.dump_to_file and self._groups:
            append_batch(self._config.run_dir, step, self._groups)
        if self._config.dump_scores and self._groups:
            self._dump(step)
        stream = self.data.source.rows
        curriculum = stream if isinstance(stream, CurriculumRows) else None
        grows = step < self._config.trainer.steps and hasattr(self.data.dataset, "on_batch_end")
        if curriculum is None and not grows:
            return
        proto = batch if isinstance(batch, DataProto) else data_proto_of(batch)
        if self._groups:
            rows = object_array(row_of(group) for group in self._groups for _ in group.sequences)
            proto = DataProto(proto.batch, {**proto.non_tensor_batch, "rows": rows}, proto.meta_info)
        if curriculum is not None:
            curriculum.update(proto)
        if grows:
            self.data.dataset.on_batch_end(proto)

    def evaluate(self) -> Evaluation | None:
        return evaluate(self.engine, self._config, self.held_out, self._workflow) if self.held_out else None

    def metrics(self) -> dict[str, float]:
        source = self.data.source
        rewards: dict[str, list[float]] = defaultdict(list)
        for group in self._groups:
            if (part := group.data.get("data_source")) is not None:
                rewards[f"rollout/env/{part}/reward"] += group.rewards
        metadata = {name: value for name, value in source.get_metadata().items() if isinstance(value, int | float)}
        return {
            **{name: sum(own) / len(own) for name, own in rewards.items() if own},
            **{f"data/metadata/{name}": float(value) for name, value in metadata.items()},
            "data/epoch": float(source.epoch_id),
            "data/owed_groups": float(source.num_owed),
            "data/buffered_groups": float(source.get_buffer_length()),
            "data/dropped_groups": float(source.dropped.total()),
            **engine_metrics(self.engine),
        }

    def scalars(self) -> dict[str, float]:
        """Return the means of what episodes recorded since the last step; greedy baselines are evaluation episodes."""
        return self.engine.take_scalars(is_eval=True) | self.engine.take_scalars()

    def _generate(self, step: int) -> list[Group]:
        config, workflow = self._config, self._workflow
        kwargs = workflow.kwargs(config, config.rollout.gconfig)
        groups = self.engine.prepare_batch(self.data.source, workflow.workflow, kwargs, config.should_accept_fn)
        if step == config.trainer.steps:
            self.engine.close_source(self.data.source)
        self._groups = groups
        apply_reward_model(self._reward_model, groups, config)
        if self._teacher is not None:
            self._teacher.score([sequence for group in groups for sequence in group.sequences])
        if self._baselines:
            self._generate_baselines(groups)
        return groups

    def _generate_baselines(self, groups: Sequence[Group]) -> None:
        """Give each group the reward of one greedy episode, or its own mean reward if that episode failed."""
        kwargs = self._workflow.kwargs(self._config, self._config.rollout.gconfig.new(greedy=True))
        rows = [dict(group.data) for group in groups]
        greedy = self.engine.rollout_batch(rows, self._workflow.workflow, kwargs, group_size=1, is_eval=True)
        apply_reward_model(self._reward_model, [answer for answer in greedy if answer.rewards], self._config)
        for group, answer in zip(groups, greedy, strict=True):
            rewards = answer.rewards or group.rewards
            group.baseline = sum(rewards) / len(rewards)
        if failed := sum(not answer.rewards for answer in greedy):
            logger.warning(
                "%d of %d greedy episodes failed: their baseline is the mean reward of the group", failed, len(groups)
            )

    def _dump(self, step: int) -> None:
        tokenizer = load_tokenizer(tokenizer_path(self._config))
        lines = [(g, s, t.prompt_len(s.path)) for g in self._groups for t in g.trajectories for s in t.sequences]
        facts = [t.reward_extra for g in self._groups for t in g.trajectories for _ in t.sequences]
        names = dict.fromkeys(name for each in facts for name in each)
        columns = {
            "input": [tokenizer.decode(sequence.input_ids[:start]) for _, sequence, start in lines],
            "output": [tokenizer.decode(sequence.input_ids[start:]) for _, sequence, start in lines],
            "gts": [group.samples[0].label for group, _, _ in lines],
            "score": [sequence.reward or 0.0 for _, sequence, _ in lines],
        }
        extra = {name: [each.get(name) for each in facts] for name in names}
        extra |= {"task_id": [str(group.task_id) for group, _, _ in lines]}
        dump_rollouts(self._config.run_dir / "scores", step, columns, extra)


def make_reward_model(config: RunConfig) -> ValueScorer | None:
    if config.reward_model is None:
        return None
    return ValueScorer(load_reward_model(config.reward_model, device=resolve_device(config.trainer.device)))


def make_teacher(config: RunConfig) -> Teacher | None:
    if config.trainer.kl is None or config.trainer.kl.teacher is None:
        return None
    if stored_config(config.model_path).get("model_type") in VISION_MODELS:
        raise ConfigError(f"trainer.kl.teacher scores tokens alone, and {config.model_path} reads images: remove it")
    patience_s = config.rollout.faults.outage_patience_s
    return Teacher(config.trainer.kl.teacher, tokenizer_path=tokenizer_path(config), patience_s=patience_s)


def apply_reward_model(model: ValueScorer | None, groups: Sequence[Group], config: RunConfig) -> None:
    """Replace the workflow's rewards by those of ``model``, if there is one."""
    if model is None:
        return
    sequences = [sequence for group in groups for sequence in group.sequences]
    rewards = rewards_of(model, sequences, max_tokens=config.trainer.max_tokens_per_microbatch).tolist()
    for sequence, reward in zip(sequences, rewards, strict=True):
        sequence.reward, sequence.episode_reward, sequence.token_rewards = reward, None, None
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.join_rewards(TurnRewards("mean"))


def _batch_cache(config: RunConfig, *, baselines: bool) -> BatchCache | None:
    if config.rollout_cache is None:
        return None
    sections = {
        **{f"rollout.{n}": dataclasses.asdict(getattr(config.rollout, n)) for n in ("gconfig", "rewards", "agents")},
        "train_dataset": dataclasses.asdict(config.train_dataset),
        "workflow_kwargs": config.workflow_kwargs,
    }
    names = ["model_path", "seed", "env", "workflow", "reward_model", "should_accept_fn", "data_packer"]
    names += ["rollout_global_dataset", "buffer_filter"]
    of_rollout = ("group_size", "consumer_batch_size", "turn_rewards", "tokenizer_path")
    return BatchCache(
        config.rollout_cache,
        {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
        | {name: getattr(config, name) for name in names}
        | {f"rollout.{name}": getattr(config.rollout, name) for name in of_rollout}
        | {"greedy baselines": baselines, "teacher": config.trainer.kl and config.trainer.kl.teacher},
    )
