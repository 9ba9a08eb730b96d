"""A reinforcement-learning run: :meth:`RLRun.fit` is the algorithm.

The first rank also drives rollouts and owns engine, data source and files; the others train on what it broadcasts.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
import torch
from transformers.utils.logging import disable_progress_bar
from areal_lite.config.run_config import RunConfig
from areal_lite.config.server_config import gpus_on_node
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.source.rollout_data_source import state_bytes, state_path
from areal_lite.errors import ServerError
from areal_lite.models.parallel.ranks import Ranks, broadcast_batch, broadcast_json
from areal_lite.models.policy_model import resolve_device
from areal_lite.models.truncation import Truncation
from areal_lite.runs import training_run
from areal_lite.runs.engine_stack import generating_engine, with_scalars
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.folder.resuming import find_start
from areal_lite.runs.older_policy import OlderPolicy, older_policy
from areal_lite.runs.profiling import MemorySnapshots, StepProfiler
from areal_lite.runs.rollout_driver import RolloutDriver
from areal_lite.runs.run_data import WorkflowChoice, tokenizer_path, training_data, with_steps
from areal_lite.runs.server_probe import NUM_TOKENS, Answer, compare_logprobs, probe_prompt, usual_difference
from areal_lite.runs.stopping import Stopped, interruptible, stop_together
from areal_lite.servers.programs.server_program import gpu_groups
from areal_lite.servers.weights.publisher import Publish, weight_publisher
from areal_lite.trainer.learner import OnSkip
from areal_lite.trainer.metrics import OnStep
from areal_lite.trainer.rl.policy_step import Batch
from areal_lite.trainer.rl.policy_trainer import EngineSampling, OnFacts, PolicyTrainer
from areal_lite.trainer.rl.token_facts import facts_writer
from areal_lite.trainer.seeding import trainer_threads

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class RLRun(training_run.TrainingRun[Evaluation]):
    config: RunConfig
    trainer: PolicyTrainer
    driver: RolloutDriver | None  # None on ranks other than the first
    profiler: StepProfiler
    snapshots: MemorySnapshots
    publish_version: Publish
    older: OlderPolicy | None
    devices: int
    _last_record: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    """Moment of the last record, on the monotonic clock, and the tokens generated until then."""

    def run(self) -> training_run.Summary[Evaluation]:
        """Train up to ``total_steps`` and save the model; servers that were running before get the weights first."""
        if self.start.checkpoint is None:
            if self.config.rollout.addresses or (self.config.older_policy and self.config.older_policy.addresses):
                self.publish()  # they may still serve the weights of an earlier run
            self.compare_with_servers()
        return super().run()

    def fit(self) -> None:
        """Train up to ``total_steps``: generate, train, publish the weights; evaluate and save when due.
        :meth:`PolicyTrainer.train_step` lists the stages of training: log-probs, values, advantages, updates."""
        while self.step < self.total_steps:
            with self.profiler(self.step + 1), self.snapshots(self.step + 1):
                began = time.monotonic()
                probed = self.probe_if_due()
                batch = self.generate()
                generated, self.under_way = time.monotonic(), self.step + 1
                metrics = self.trainer.train_step(batch, version=self.step) | probed
                self.step += 1
                if self.driver is not None:
                    self.driver.mark_trained(self.step, batch)
                trained = time.monotonic()
                self.publish()
                self.log(metrics, began, generated, trained)
                self.save_if_due()
            self.evaluate_if_due()

    def generate(self) -> Batch:
        self.files.check_start()
        return broadcast_batch(self.on_lead_rank(lambda driver: driver.batch(self.step + 1)))

    def publish(self) -> None:
        """Publish the weights as version ``step`` for the servers to load; wait for them unless asked to stop."""
        self.files.check_start()
        if self.older is not None:
            self.older.follow(self.step)  # before episodes of this version start
        weights = self.publish_version(self.step)
        if self.driver is not None:
            with suppress(Stopped), interruptible():
                self.driver.engine.update_weights(weights)

    def compare_with_servers(self, *, warn_above: float | None = None) -> dict[str, float]:
        """Compare log-probs (:mod:`server_probe`); with ``warn_above`` the result is empty if no server answers."""
        prompt = probe_prompt(load_tokenizer(self.tokenizer_path))

        def ask(driver: RolloutDriver) -> list[Answer]:
            with suppress(*[ServerError] if warn_above is not None else []):
                return driver.engine.probe(prompt, NUM_TOKENS)
            return []

        answers = broadcast_json(self.on_lead_rank(ask))
        return compare_logprobs(self.trainer, prompt, answers, warn_above=warn_above) if answers else {}

    def probe_if_due(self) -> dict[str, float]:
        """Compare servers and trainer every ``rollout.faults.probe_every_steps``; return the largest difference."""
        every = self.config.rollout.faults.probe_every_steps
        if every == 0 or self.step == self.start.step or self.step % every:
            return {}
        figures = self.compare_with_servers(warn_above=usual_difference(self.config))
        return {"probe_log_prob_diff": max(figures.values())} if figures else {}

    def log(self, metrics: dict[str, float], began: float, generated: float, trained: float) -> None:
        """Record the metrics of the step; the moments are of the monotonic clock."""
        if self.driver is not None:
            now = time.monotonic()
            engine = self.driver.metrics()
            (since, before), self._last_record = self._last_record, (now, engine["rollout/generated_tokens"])
            metrics = {
                **training_run.with_prefix("train", metrics),
                "timing/rollout_wait_s": generated - began,
                "timing/weight_update_s": now - trained,
                "timing/step_s": now - began,
                "perf/throughput": metrics["tokens"] / (now - began) / self.devices,
                "perf/generated_tokens_per_second": (self._last_record[1] - before) / (now - (since or self.started)),
                **engine,
            }
            record = training_run.StepMetrics(with_scalars(metrics, self.driver.scalars()))
            record.total_steps = self.total_steps
            record.top_cause = self.driver.engine.failures.top_cause()
            self.record_step(record, began=began)

    def evaluate(self) -> None:
        if (result := self.on_lead_rank(RolloutDriver.evaluate)) is not None:
            self.record_evaluation(result, result.metrics())

    def on_lead_rank(self, work: Callable[[RolloutDriver], T]) -> T | None:
        """Return the result of ``work`` on the first rank; the others wait for it and get None; raises Stopped."""
        result = None
        with suppress(Stopped):
            if self.driver is not None:
                with interruptible():
                    result = work(self.driver)
        stop_together()
        return result

    def resume_from(self, checkpoint: Path) -> None:
        super().resume_from(checkpoint)
        self.publish()
        if self.older is not None:
            self.older.resume(self.step)
        self.compare_with_servers()

    def save(self) -> None:
        """Start writing a checkpoint once the groups that it was trained on are dumped."""
        if self.driver is not None:
            self.driver.engine.flush_dumps()
        super().save()

    def data_state(self) -> dict[str, bytes]:
        assert self.driver is not None
        return {str(state_path("", self.step)): state_bytes(self.driver.data.source.state_dict())}


def run_rl(
    config: RunConfig,
    on_step: OnStep | None,
    *,
    workflow: WorkflowChoice | None = None,
    make_run: Callable[..., RLRun] = RLRun,
) -> training_run.Summary[Evaluation]:
    """Train a policy; call it on every rank, after the ranks have joined. ``make_run`` may return a subclass."""
    config = training_run.with_dtypes(config)
    data = training_data(config, workflow) if Ranks.current().rank == 0 else None
    if config.trainer.total_epochs is not None:
        config = with_steps(config, broadcast_json(data and len(data.dataset)))
    start = find_start(config, config.trainer.steps)
    if start.is_done:
        return training_run.summary_of_finished(config, start)
    driver = RolloutDriver(config, start, data) if data is not None else None
    with ExitStack() as stack:
        files = stack.enter_context(training_run.open_run_files(config, start, on_step))
        disable_progress_bar()  # type: ignore[no-untyped-call]
        load = cache(partial(open_trainer, config, files, stack))
        # Servers measure the free memory of a GPU while they start, and it may be the trainer's.
        early = load if resolve_device(config.trainer.device).type == "cpu" else lambda: None
        if driver is not None:
            driver.engine = stack.enter_context(generating_engine(config, files.run_dir, meanwhile=early))
        trainer, started = load(), time.monotonic()
        dtype = getattr(torch, config.server.dtype)
        way = broadcast_json(driver and driver.engine.config.weight_update)  # nodes may need another one
        rollout, enter = replace(config.rollout, weight_update=way), stack.enter_context
        return make_run(
            config=config,
            files=files,
            start=start,
            trainer=trainer,
            total_steps=config.trainer.steps,
            tokenizer_path=tokenizer_path(config),
            dtype=dtype,
            started=started,
            driver=driver,
            devices=num_devices(config),
            publish_version=enter(weight_publisher(rollout, trainer.model, files.run_dir / "weights", dtype)),
            older=enter(older_policy(config, driver.engine if driver else None, trainer.model, files.run_dir, dtype)),
            profiler=enter(StepProfiler(config.profile_steps, files.run_dir / "profile")),
            snapshots=MemorySnapshots(config.memory_snapshot_steps, files.run_dir / "memory"),
        ).run()


def num_devices(config: RunConfig) -> int:
    if config.rollout.addresses:
        of_servers = 0
    elif config.launch == "ray":
        of_servers = config.server.replicas * gpus_on_node(config.server, config.cluster.n_gpus_per_node)
    else:
        of_servers = sum(len(gpus.split(",")) for gpus in gpu_groups(config.server) if gpus)
    return Ranks.current().size + of_servers


def open_trainer(config: RunConfig, files: training_run.RunFiles, stack: ExitStack) -> PolicyTrainer:
    """Return the policy trainer of a run; with ``dump_training`` it writes training facts until ``stack`` closes."""
    logger.info("loading %s into the trainer", config.model_path)
    writes = config.dump_training and Ranks.current().rank == 0
    on_facts = stack.enter_context(facts_writer(files.run_dir / "training")) if writes else None
    return make_trainer(config, files.record_skipped_update, on_facts)


def make_trainer(config: RunConfig, on_skip: OnSkip, on_facts: OnFacts | None = None) -> PolicyTrainer:
    gconfig = config.rollout.gconfig
    truncation = Truncation(
        top_p=gconfig.top_p, top_k=gconfig.top_k, min_p=gconfig.min_p, reported=config.reports_truncated
    )
    trainer = PolicyTrainer(
        replace(config.trainer, num_threads=trainer_threads(config.trainer)),
        model_path=config.model_path,
        seed=config.seed,
        sampling=EngineSampling(
            temperature=gconfig.effective_temperature,
            truncation=truncation if gconfig.is_truncated else None,
            max_new_tokens=gconfig.max_new_tokens,
        ),
        on_skip=on_skip,
        on_facts=on_facts,
    )
    training_run.give_images(trainer, config.model_path, config.run_dir)
    return trainer
