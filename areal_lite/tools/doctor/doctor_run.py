"""Checks of ``areal-lite doctor`` on a run: folder, settings and nodes, then servers, an episode and a training step.
They write to a temporary folder. Servers that were running before keep their weights."""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from areal_lite.config.run_config import CheckpointConfig, RunConfig
from areal_lite.config.supervised_config import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.vision.image_encoder import image_encoder
from areal_lite.errors import EpisodeError, ServerError, StarvationError, TrainingError
from areal_lite.files.model_path import check_model_path
from areal_lite.models.policy_model import resolve_device
from areal_lite.runs.engine_stack import generating_engine
from areal_lite.runs.entry_points import check_trainable
from areal_lite.runs.folder.resuming import Start, find_start
from areal_lite.runs.folder.run_directory import check_disposable, take_lock
from areal_lite.runs.rl_run import make_trainer
from areal_lite.runs.rollout_driver import RolloutDriver
from areal_lite.runs.run_data import tokenizer_path, training_data, with_steps
from areal_lite.runs.server_probe import NUM_TOKENS, compare_logprobs, image_prompt, probe_prompt, usual_difference
from areal_lite.runs.supervised_run import datasets, run_supervised
from areal_lite.runs.training_run import with_dtypes
from areal_lite.servers.dialects import dialect_of
from areal_lite.tools.doctor.doctor_machine import Findings, ok, warning

_GROUP = 2
_ROWS = 8
_CLOCK_S = 1.0
"""Difference of clocks that is worth a warning: times in dumps and metrics are each node's own."""


def run_folder(config: RunConfig | SupervisedConfig) -> Findings:
    """Check that a run can start or resume in its folder, and that no live run holds it."""
    path = config.run_dir
    if (lock := path / ".lock").exists():
        with lock.open() as file:
            take_lock(file.fileno(), path)
    total = config.trainer.total_steps
    start = find_start(config, sys.maxsize if total is None else total)
    if start.checkpoint is not None:
        done = "nothing to do, all steps are trained" if start.is_done else f"training resumes after step {start.step}"
        yield ok(f"{path}: {done}")
        return
    if (path / "metrics.jsonl").exists():
        check_disposable(config, path)
    yield ok(f"{path}: a new run")


def settings(config: RunConfig | SupervisedConfig) -> Findings:
    """Check what the run itself checks before anything expensive starts: devices, options, workflow, rows."""
    if isinstance(config, SupervisedConfig):
        resolve_device(config.trainer.device)
        return  # the training step reads the rows
    check_trainable(config)
    data = training_data(config)
    driver = RolloutDriver(config, Start(evaluates=False), data)
    count = "generated" if data.dataset is None else f"{len(data.dataset):,}"
    steps = config.trainer.total_steps if data.dataset is None else with_steps(config, len(data.dataset)).trainer.steps
    yield ok(f"workflow {config.workflow}, {count} training rows, {len(driver.held_out):,} held out, {steps:,} steps")


def cluster(config: RunConfig | SupervisedConfig) -> Findings:
    """Reserve what a run with ``launch: ray`` wants, compare the nodes, and check folder, clock and a port of each."""
    if config.launch != "ray":
        return
    from areal_lite.cluster.ray_places import bundles_of, rank_bundles, ray_places
    from areal_lite.cluster.ray_session import check_ray

    check_ray(config.ray)
    bundles = [*rank_bundles(config), *bundles_of(config)]
    with TemporaryDirectory() as logs, ray_places(config, Path(logs), bundles) as places:
        yield ok(f"Ray at {places.address} has all that the run wants, with the code and the model of this machine")
        root = Path(config.fileroot).expanduser()
        blind = places.blind(root) if root.is_dir() else []
        for role, place in places.items():
            host, port = place.listen_at("", 0)
            ahead, sight = place.clock_s(), "does not see" if place.host in blind else "sees"
            text = f"{role}: node {host} {sight} {config.fileroot}, port {port} is free, clock {ahead:+.1f} s"
            yield warning(f"{text}: set the clocks") if abs(ahead) > _CLOCK_S else ok(text)


def dry_run_findings(config: RunConfig | SupervisedConfig) -> Findings:
    """Check all that a run checks before servers and models start: its folder, its settings, every row."""
    yield from run_folder(config)
    yield from settings(config)
    if isinstance(config, SupervisedConfig):
        check_model_path(config.model_path)
        train, held_out = datasets(config)
        yield ok(f"{len(train):,} training items, {len(held_out or ()):,} held out")


def rollouts(config: RunConfig) -> Findings:
    """Start or reach the servers, run the episodes of one row, and train one step on them."""
    with TemporaryDirectory(prefix="areal-lite-doctor-") as folder:
        small = with_dtypes(_small_rollouts(config, folder))
        driver = RolloutDriver(small, Start(evaluates=False), training_data(small))
        began = time.monotonic()
        with generating_engine(small, Path(folder)) as engine:
            yield from _servers(config, engine, began)
            driver.engine = engine
            try:
                batch = driver.batch(1)
            except StarvationError as error:
                raise EpisodeError(f"no episode succeeded. {driver.engine.failures.table(1) or str(error)}") from error
            yield from _spread_rewards(batch)
            began = time.monotonic()
            skipped: list[Any] = []
            trainer = make_trainer(small, skipped.append)
            yield from _compare(small, engine, trainer)
            yield from images(small, engine, trainer)
            metrics = trainer.train_step(batch, version=0)
            if skipped:
                raise TrainingError(f"the update of one training step is not finite: {skipped[0]}")
            took = f"{time.monotonic() - began:.1f} s"
            yield ok(f"training step: loss {metrics['loss']:+.4f}, gradient {metrics['grad_norm']:.4f}, {took}")


def supervised(config: SupervisedConfig) -> Findings:
    """Train one step on the first rows."""
    assert isinstance(config, SFTConfig | DPOConfig | RewardModelConfig)
    with TemporaryDirectory(prefix="areal-lite-doctor-") as folder:
        data, trainer = config.train_dataset, config.trainer
        trainer = replace(trainer, total_steps=1, batch_size=min(trainer.batch_size, _GROUP), sp_size=1, tp_size=1)
        rows = replace(data, max_samples=min(data.max_samples or _ROWS, _ROWS))
        changes: dict[str, Any] = {"train_dataset": rows, "eval_dataset": None, "trainer": trainer}
        small = replace(config, **_without_files(folder), **changes)
        metrics: dict[str, float] = {}
        summary = run_supervised(small, on_step=lambda step, record: metrics.update(record))
        if metrics["train/skipped_updates"]:
            raise TrainingError("the update of one training step is not finite")
        yield ok(f"training step: loss {metrics['train/loss']:+.4f} in {summary.seconds:.1f} s")


def _without_files(folder: str) -> dict[str, Any]:
    return {"fileroot": folder, "checkpoint": CheckpointConfig(every_minutes=None), "tracking": [], "save_model": False}


def _small_rollouts(config: RunConfig, folder: str) -> RunConfig:
    gconfig = config.rollout.gconfig
    rollout = replace(
        config.rollout,
        fileroot=folder,
        group_size=min(config.rollout.group_size, _GROUP),
        consumer_batch_size=1,
        over_sampling_groups=0,
        gen_batch_size=None,
        dump_to_file=False,
        faults=replace(
            config.rollout.faults,
            failed_group_retries=0,
            max_empty_batches=1,
            episode_timeout_s=min(config.rollout.faults.episode_timeout_s, 300.0),
            outage_patience_s=min(config.rollout.faults.outage_patience_s, 30.0),
        ),
        gconfig=gconfig.new(max_new_tokens=min(gconfig.max_new_tokens, 64)),
    )
    return replace(
        config,
        **_without_files(folder),
        rollout=rollout,
        trainer=replace(config.trainer, total_steps=1, total_epochs=None, minibatches_per_step=1),
        eval_dataset=None,
        should_accept_fn=None,  # it may reject the only group
        rollout_cache=None,
        dump_scores=False,
        dump_training=False,
        profile_steps=[],
        memory_snapshot_steps=[],
    )


def _servers(config: RunConfig, engine: Any, began: float) -> Findings:
    whose = "answers" if config.rollout.addresses else f"started in {time.monotonic() - began:.1f} s"
    for server in engine.servers:
        name = f"server {server.url}"
        if server.state == "down":
            yield warning(f"{name} is down: {server.reason}. Start it, or remove it from rollout.addresses")
        else:
            yield ok(f"{name} {whose} and serves {server.info.model or 'a model that it does not name'}")


def _spread_rewards(batch: Any) -> Findings:
    """Show the rewards; make equal ones differ, because a batch without advantages computes nothing."""
    if not isinstance(batch, list):  # packed by the user's own packer
        return
    rewards = [reward for group in batch for reward in group.rewards]
    yield ok(f"{len(rewards)} episodes of one row with rewards {', '.join(f'{reward:.3f}' for reward in rewards)}")
    if len(set(rewards)) == 1:
        first = batch[0].trajectories[0]
        first.reward = rewards[0] + 1.0
        for sequence in first.sequences:
            sequence.reward = sequence.episode_reward = first.reward


def _compare(config: RunConfig, engine: Any, trainer: Any) -> Findings:
    prompt = probe_prompt(load_tokenizer(tokenizer_path(config)))
    usual = usual_difference(config)
    for url, figure in compare_logprobs(trainer, prompt, engine.probe(prompt, NUM_TOKENS)).items():
        text = f"log-probs of {url} and of the trainer differ by {figure:.4f} nats on average"
        yield ok(text) if figure <= usual else warning(f"{text}, more than the {usual:g} of rounding")


def images(config: RunConfig, engine: Any, trainer: Any) -> Findings:
    """Show one image to each server: how it is sent, and whether server and trainer see the same."""
    tokenizer = load_tokenizer(tokenizer_path(config))
    encoder = image_encoder(tokenizer_path(config), tokenizer, config.rollout.run_dir)
    if encoder is None:
        return
    prompt, spans = image_prompt(tokenizer, encoder)
    answers, failure = [], ""
    try:
        answers = engine.probe(prompt, NUM_TOKENS, spans)
    except ServerError as error:
        failure = str(error)
    usual = usual_difference(config)
    figures = compare_logprobs(trainer, prompt, answers, images=spans, warn_above=math.inf) if answers else {}
    for server in engine.servers:
        wire, risk = dialect_of(config.rollout.backend).image_wire(server.info)
        text = f"server {server.url} takes images as {wire}"
        if (figure := figures.get(server.url)) is None:
            yield warning(f"{text}, but it gave no answer: {server.last_failure or failure}")
            continue
        text += f"; its log-probs and those of the trainer differ by {figure:.4f} nats on average"
        risks = [risk] if risk else []
        risks += [] if figure <= usual else [f"that is more than the {usual:g} of rounding"]
        yield warning("; ".join([text, *risks])) if risks else ok(text)
