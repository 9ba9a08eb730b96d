"""doctor --from: what a config of verl, slime or AReaL means here, for each of its keys and defaults."""

from __future__ import annotations
import inspect
import json
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.tools.doctor.ported import ORIGINS, Difference, Ported, default_of, ported
from areal_lite.trainer.estimators.advantage_estimators import gae

VERL = """
defaults: [ppo_trainer, _self_]
data:
  train_files: rows.parquet
  train_batch_size: 64
  shuffle: true
  max_response_length: ${data.max_prompt_length}
  max_prompt_length: 100
  reward_fn_key: data_source
actor_rollout_ref:
  model: {path: some/model}
  actor:
    ppo_mini_batch_size: 16
    clip_ratio_high: 0.28
    optim: {lr: 1e-6}
  rollout:
    name: ???
    n: 1
algorithm:
  adv_estimator: grpo
  rollout_correction: {rollout_rs: "token_k1,seq_sum_k3", rollout_rs_threshold: 2.0}
custom_reward_function: {path: no_such_file.py}
"""

SLIME = """#!/bin/bash
# don't stop at this quote
ROLLOUT_ARGS=(
   --prompt-data "/rows with spaces.jsonl"
   --rollout-batch-size 32 --n-samples-per-prompt 8
   --global-batch-size 128
   # --rollout-shuffle
   --rollout-max-response-len=1024
   --num-rollout ${STEPS}
)
GRPO_ARGS=(--advantage-estimator gspo
   --eps-clip 3e-4
   --use-tis)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --eval-prompt-data aime aime.jsonl \\
   ${ROLLOUT_ARGS[@]}
"""

AREAL = """
experiment_name: math
gconfig: {n_samples: 4, max_new_tokens: 1024}
rollout: {consumer_batch_size: "${train_dataset.batch_size}", max_head_offpolicyness: 2}
train_dataset: {path: gsm8k, batch_size: 8, type: rl}
actor:
  eps_clip: 0.4
  reward_norm: {mean_level: group, std_level: group}
  recompute_logprob: true
  optimizer: {lr: 1.0e-5, beta2: 0.95}
recover: {mode: auto}
"""


def of(folder: Path, origin: str, text: str, name: str = "") -> Ported:
    path = folder / (name or ("run.sh" if text.startswith("#!") else "run.yaml"))
    path.write_text(text)
    return ported(origin, str(path))


def named(result: Ported, key: str) -> Difference:
    """Return the first comparison of a key of ours."""
    return next(each for each in result.keys if each.key == key)


def written(result: Ported) -> dict[str, Any]:
    """Return what must be written because the default here is another, by key."""
    return {each.key: each.value for each in reversed(result.keys) if each.differs}


def test_a_config_of_verl(tmp_path: Path) -> None:
    result = of(tmp_path, "verl", VERL)
    keys = written(result)
    assert keys["rollout.consumer_batch_size"] == 64 and keys["trainer.minibatches_per_step"] == 4
    assert keys["rollout.gconfig.max_new_tokens"] == 100  # a reference of the file
    assert keys["trainer.loss_kwargs.clip_eps_high"] == 0.28 and "trainer.loss_kwargs.clip_eps" not in keys
    assert keys["trainer.correction.reject"] == "token_k1,seq_sum_k3"
    assert keys["trainer.correction.reject_bounds"] == "0.5_2.0,2.0"  # the inverse, for k1 alone
    advantages = {each.value for each in result.keys if each.key == "trainer.advantage"}
    assert advantages == {"reinforce"}  # a group of one, whichever key of verl's says so
    unset = {each.key: each.value for each in result.keys if each.differs and not each.given}
    assert unset["trainer.correction.level"] == "none" and unset["trainer.loss_kwargs.dual_clip"] == 3.0
    assert unset["trainer.weight_decay"] == 0.01 and unset["trainer.total_epochs"] == 30
    shuffle = named(result, "train_dataset.shuffle")
    assert (shuffle.given, shuffle.value, shuffle.default, shuffle.differs) == (True, True, True, False)
    rate = named(result, "trainer.learning_rate")
    assert (rate.given, rate.value, rate.differs) == (True, 1e-6, True)
    assert result.not_carried_over == ["custom_reward_function.path", "data.reward_fn_key"]


def test_groups_and_advantages_of_verl(tmp_path: Path) -> None:
    grouped = VERL.replace("n: 1", "n: 8")
    assert named(of(tmp_path, "verl", grouped), "trainer.advantage").value == "grpo"
    without = grouped.replace("adv_estimator: grpo", "adv_estimator: grpo\n  norm_adv_by_std_in_grpo: false")
    assert named(of(tmp_path, "verl", without), "trainer.advantage").value == "dr_grpo"
    critic = written(of(tmp_path, "verl", grouped.replace("adv_estimator: grpo", "adv_estimator: gae")))
    assert critic["trainer.advantage"] == "gae" and critic["trainer.critic.learning_rate"] == 1e-5
    penalty = grouped.replace("clip_ratio_high: 0.28", "use_kl_loss: true\n    clip_ratio_low: 0.1")
    keys = written(of(tmp_path, "verl", penalty))
    assert (keys["trainer.kl.place"], keys["trainer.kl.coef"], keys["trainer.kl.estimator"]) == ("loss", 0.001, "k3")
    assert (keys["trainer.loss_kwargs.clip_eps"], keys["trainer.loss_kwargs.clip_eps_high"]) == (0.1, 0.2)


def test_hydras_overrides_in_a_script(tmp_path: Path) -> None:
    script = (
        "#!/bin/sh\npython3 -m verl.trainer.main_ppo \\\n  data.shuffle=False +data.seed=7 trainer.logger='[a]' $@\n"
    )
    result = of(tmp_path, "verl", script)
    assert {each.key: each.value for each in result.keys if each.given} == {"train_dataset.shuffle": False, "seed": 7}
    assert result.not_carried_over == ["trainer.logger"]


def test_a_script_of_slime(tmp_path: Path) -> None:
    result = of(tmp_path, "slime", SLIME)
    keys = written(result)
    assert keys["train_dataset.path"] == "/rows with spaces.jsonl" and keys["eval_dataset.path"] == "aime.jsonl"
    assert keys["rollout.consumer_batch_size"] == 32 and keys["rollout.group_size"] == 8
    assert keys["trainer.minibatches_per_step"] == 2 and keys["rollout.gconfig.max_new_tokens"] == 1024
    assert keys["trainer.loss"] == "gspo" and not named(result, "trainer.advantage").differs
    assert not named(result, "trainer.loss_kwargs.clip_eps").differs  # 3e-4 is gspo's own
    assert not named(result, "trainer.correction.level").differs and keys["trainer.correction.max_weight"] == 2.0
    unset = {each.key: each.value for each in result.keys if each.differs and not each.given}
    assert unset["train_dataset.shuffle"] is False and unset["train_dataset.apply_chat_template"] is False
    assert unset["train_dataset.prompt_key"] == "input" and unset["trainer.lr_schedule"] == "linear"
    assert result.not_carried_over == ["actor_num_nodes", "num_rollout"]  # a shell variable is not known


def test_slimes_arguments_as_yaml(tmp_path: Path) -> None:
    result = of(tmp_path, "slime", "rollout-shuffle: true\ndisable_rollout_global_dataset: true\nnum-gpus: 8\n")
    assert not named(result, "train_dataset.shuffle").differs
    assert written(result)["rollout_global_dataset"] is False
    assert written(result)["train_dataset.path"] == "areal_lite.data.source.row_streams.empty_rows"
    assert result.not_carried_over == ["num_gpus"]


def test_a_config_of_areal(tmp_path: Path) -> None:
    result = of(tmp_path, "areal", AREAL)
    keys = written(result)
    assert keys["rollout.consumer_batch_size"] == 8 and keys["rollout.max_head_offpolicyness"] == 2
    assert keys["rollout.group_size"] == 4 and keys["trainer.loss_kwargs.clip_eps"] == 0.4
    assert keys["trainer.adam_betas"] == [0.9, 0.95] and keys["trainer.correction.level"] == "none"
    assert not named(result, "trainer.advantage").differs and not named(result, "trainer.proximal").differs
    assert keys["trainer.minibatches_per_step"] == 4 and keys["evaluation.at_start"] is False
    assert not named(result, "checkpoint.resume").differs
    assert result.not_carried_over == ["train_dataset.type"]
    bare = written(of(tmp_path, "areal", "experiment_name: e\n"))
    assert bare["trainer.advantage"] == "reinforce" and bare["trainer.proximal"] == "behaviour"
    assert bare["checkpoint.resume"] == "never" and "trainer.kl.coef" not in bare
    penalty = written(of(tmp_path, "areal", "ref: {path: some/model}\n"))
    assert (penalty["trainer.kl.coef"], penalty["trainer.kl.place"]) == (0.1, "reward")


def test_every_key_of_ours_exists_and_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "experiment_name: e\nmodel_path: m\ntrain_dataset: {path: p}\ntrainer: {learning_rate: 1, total_steps: 1}"
    )
    optional = {"trainer.kl": {"coef": 1}, "trainer.critic": {"learning_rate": 1}, "trainer.lora": {}}
    sections = {"custom_cls", "sampler", "datagen"}
    for keys in ORIGINS.values():
        for key, _ in keys:
            parts = key.split(".")
            if parts[0] == "eval_dataset" or parts[1:2] and parts[1] in sections or "kwargs" in key:
                continue
            given = [f"{name}={json.dumps(value)}" for name, value in optional.items() if key.startswith(name)]
            value: Any = load_config(path, given)
            for part in parts:
                value = getattr(value, part)  # an unknown key is an AttributeError
    assert default_of("trainer.loss_aggregation", "gspo") == "seq-mean-token-mean"
    assert default_of("trainer.loss_kwargs.clip_eps", "gspo") == 3e-4 and default_of("trainer.loss_kwargs.x") is None
    assert {name: default_of(f"trainer.advantage_kwargs.{name}") for name in ("gamma", "lam")} == {
        name: inspect.signature(gae).parameters[name].default for name in ("gamma", "lam")
    }
    assert default_of("trainer.adam_betas") == [0.9, 0.999] and default_of("model_path") is None


def test_the_lines_name_defaults_then_values_then_what_is_lost(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    assert main(["doctor", "--from", "slime", str(tmp_path / "run.sh")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "warning  train_dataset.shuffle: false; slime defaults to rollout_shuffle: false, the default here is true"
        in lines
    )
    assert "write    rollout.group_size: 8; slime sets n_samples_per_prompt: 8, the default here is 1" in lines
    assert lines[-1] == "warning  num_rollout is not carried over: no key here says the same with this value"
    levels = [line.split()[0] for line in lines]
    assert levels == sorted(levels[:-2], key=["warning", "write", "ok"].index) + ["warning"] * 2
    assert len(lines) == len(set(lines))


def test_json_has_every_key_and_nothing_of_the_config_is_imported(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_ported.py").write_text("raise SystemExit('imported')")
    (tmp_path / "run.yaml").write_text(
        f"{VERL}\nreward: {{fn: evil_ported.fn}}\n".replace("no_such_file", "evil_ported")
    )
    assert main(["doctor", "--from", "verl", str(tmp_path / "run.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["origin"] == "verl" and "reward.fn" in found["not_carried_over"]
    batch = next(each for each in found["keys"] if each["key"] == "rollout.consumer_batch_size")
    assert batch == {
        **{"origin_key": "data.train_batch_size", "origin_value": 64, "given": True, "why": ""},
        **{"key": "rollout.consumer_batch_size", "value": 64, "default": 1, "differs": True},
    }
    assert "evil_ported" not in sys.modules


def test_the_environment_stays_out(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    result = of(tmp_path, "areal", AREAL + "trial_name: ${oc.env:A_SECRET}\nseed: ${no.such.key}\n")
    assert "hunter2" not in str(list(result.lines())) and {"trial_name", "seed"} <= set(result.not_carried_over)


@pytest.mark.parametrize(
    ("origin", "text", "says"),
    [
        ("verl", "", "run.yaml holds no keys: give a YAML of verl, or a shell script"),
        ("verl", "[1]", "run.yaml holds no keys"),
        ("verl", "a: [", "run.yaml"),
        ("areal", VERL.replace("data:", "dates:"), "run.yaml: none of its .* keys is one of AReaL's: is --from right?"),
        ("slime", "#!/bin/sh\necho", "run.sh: none of its 0 keys is one of slime's"),
        (
            "verl",
            "actor_rollout_ref: {actor: {policy_loss: {loss_mode: [1]}}}",
            r"loss_mode is \[1\], no value that verl",
        ),
        ("verl", "trainer: {critic_warmup: .inf}\nalgorithm: {adv_estimator: gae}", "critic_warmup is inf, no value"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, origin: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        of(tmp_path, origin, text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json"], "--json is for --from: name the system whose config it is"),
        (["--from", "verl"], "--from verl compares one file: give CONFIG, and no key=value"),
        (["--from", "verl", "run.yaml", "a=1"], "--from verl compares one file"),
        (["--from", "verl", "no_such.yaml"], "no_such.yaml: no such file"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, capsys: Any) -> None:
    assert main(["doctor", *arguments]) == 64
    assert says in capsys.readouterr().err
