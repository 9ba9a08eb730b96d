"""A config loads completely, or is refused with all its errors."""

import dataclasses
import json
from pathlib import Path
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, RunConfig
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dump import dump_config
from areal_lite.config.keys import describe_fields
from areal_lite.config.loader import KINDS, class_of, load_config
from areal_lite.config.rollout_config import FaultsConfig
from areal_lite.config.rules import check_rollouts, check_training
from areal_lite.config.run_config import EvaluationConfig, ExperimentConfig
from areal_lite.config.server_config import check_server
from areal_lite.config.supervised_config import DPOConfig, SFTConfig, SFTDatasetConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.tools.run.config import help_text, section_list

MINIMAL = """\
experiment_name: exp
model_path: models/tiny
workflow: my.Agent
train_dataset: {path: rows.jsonl}
trainer: {total_steps: 2, learning_rate: 1e-5}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes = MINIMAL, name: str = "run.yaml") -> str:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write


def refused(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_minimal_file_gives_the_defaults(write):
    config = load_config(write())
    assert config.trainer == TrainerConfig(total_steps=2, learning_rate=1e-5)
    assert config.seed == 1


def test_an_override_of_a_section_leaves_its_alias_as_it_is(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "experiment_name: e\nmodel_path: m\nworkflow: my.Agent\ntrainer: {total_steps: 1, learning_rate: 1.0e-5}\n"
        "train_dataset: &rows {path: x.jsonl, kwargs: {a: 1}}\neval_dataset: *rows\n"
    )
    config = load_config(path, ["eval_dataset.path=test.jsonl", "eval_dataset.kwargs.a=2"])
    train, held_out = config.train_dataset, config.eval_dataset
    assert [(one.path, one.kwargs) for one in (train, held_out)] == [("x.jsonl", {"a": 1}), ("test.jsonl", {"a": 2})]


def test_names_and_tokenizer_are_copied_into_rollout(write):
    config = load_config(write(), ["trial_name=t", "fileroot=out", "seed=7"])
    rollout = config.rollout
    assert (rollout.experiment_name, rollout.trial_name, rollout.fileroot, rollout.seed) == (
        "exp",
        "t",
        "out",
        7,
    )
    assert rollout.tokenizer_path == "models/tiny"
    assert load_config(write(), ["rollout.tokenizer_path=other"]).rollout.tokenizer_path == "other"


@pytest.mark.parametrize("name", ["20240115_123456", "2024_01_15", "013015", "7"])
def test_a_name_of_digits_stays_as_it_is_written(write, name):
    config = load_config(write(), [f"trial_name={name}"])
    assert (config.trial_name, config.run_dir.name) == (name, name)


def test_numbers_of_yaml_1_1_are_read_as_people_mean_them(write):
    config = load_config(write(), ["trainer.total_steps=1_000", "seed=010", "train_dataset.path=0123"])
    assert (config.trainer.total_steps, config.seed, config.train_dataset.path) == (1000, 10, "0123")
    given = ["train_dataset.kwargs={size: 10_000, low: -1_000_000, some: 1_0, none: 0, hex: 0x10}"]
    kwargs = {"size": 10_000, "low": -1_000_000, "some": "1_0", "none": 0, "hex": 16}
    assert load_config(write(), given).train_dataset.kwargs == kwargs
    for name, says in (
        ("1.10", "the number 1.1 becomes a folder: put it in quotes"),
        ("12:30", "'12:30' becomes a fol"),
    ):
        assert says in refused(write(), f"trial_name={name}")
    assert load_config(write(), ["trial_name='1.10'"]).trial_name == "1.10"


def test_a_reference_to_what_rollout_takes_from_the_run_names_the_run(write):
    for name, of_run in (("trial_name", "trial_name"), ("seed", "seed"), ("tokenizer_path", "model_path")):
        says = f"'rollout.{name}' has no value of its own: write ${{{of_run}}}"
        assert says in refused(write(), f"workflow_kwargs={{x: '${{rollout.{name}}}'}}")
    given = ["rollout.seed=7", "workflow_kwargs={x: '${rollout.seed}'}"]
    assert load_config(write(), given).workflow_kwargs == {"x": 7}


def test_a_home_folder_is_expanded_in_every_path(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write(), ["reward_model=~/rm", "rollout_cache=~/cache", "checkpoint.resume=~/runs/step_1"])
    assert (config.reward_model, config.rollout_cache) == ("/home/me/rm", "/home/me/cache")
    assert config.checkpoint.resume == "/home/me/runs/step_1"


def test_a_rollout_value_that_contradicts_a_top_level_value_is_refused(write):
    top = ["trial_name=t", "fileroot=out", "seed=1"]
    text = refused(write(), *top, "rollout.trial_name=b", "rollout.fileroot=else", "rollout.seed=2")
    assert "rollout.trial_name: 'b' contradicts trial_name 't' at the top: remove it from rollout" in text
    assert "rollout.fileroot: 'else' contradicts" in text
    assert "rollout.seed: 2 contradicts seed 1 at the top" in text


def test_a_value_that_only_the_rollout_section_sets_is_the_runs(write):
    config = load_config(write(), ["rollout.fileroot=/logs", "rollout.seed=7"])
    assert (config.fileroot, config.rollout.fileroot) == ("/logs", "/logs")
    assert (config.seed, config.rollout.seed) == (7, 7)
    assert "seed: -1: it must be greater than or equal to 0" in refused(write(), "rollout.seed=-1")


def test_a_models_folder_may_begin_with_the_users(write):
    changes = ["model_path=~/m", "trainer.critic={model_path: ~/c, learning_rate: 1}", "trainer.advantage=gae"]
    config = load_config(write(), changes)
    assert (config.model_path, config.trainer.critic.model_path) == tuple(str(Path.home() / name) for name in "mc")


def test_tool_key_is_another_name_of_tools_key(write):
    config = load_config(write(), ["train_dataset.tool_key=functions"])
    assert config.train_dataset.tools_key == "functions"
    Path("again.yaml").write_text(dump_config(config))
    assert load_config("again.yaml") == config
    text = refused(write(), "train_dataset={path: x, tool_key: functions, tools_key: other}")
    assert "train_dataset: tools_key is 'other' and tool_key 'functions', two names of one key: remove one" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [("apply_chat_template_kwargs", "{a: 1}"), ("tools_in_system_prompt", "true"), ("return_raw_chat", "true")],
)
def test_what_needs_the_chat_template_is_refused_without_it(write, key, value):
    text = refused(write(), f"train_dataset={{path: x, apply_chat_template: false, {key}: {value}}}")
    assert f"train_dataset: apply_chat_template is false, and {key} is " in text


@pytest.mark.parametrize(("key", "value"), [("apply_chat_template_kwargs", {"a": 1}), ("tools_in_system_prompt", True)])
def test_conversations_without_the_chat_template_take_no_option_of_it(key, value):
    with pytest.raises(
        ValueError, match=f"apply_chat_template is false, and {key} is {value}, which needs the template"
    ):
        SFTDatasetConfig(path="x", max_length=9, apply_chat_template=False, **{key: value})


def test_all_errors_are_reported_at_once_with_file_key_value_rule_and_meaning(write):
    path = write("""
model_path: m
workflow: w.A
seed: x
learning_rate: 1
train_dataset: {path: x, max_samples: 0}
rollout: {grup_size: 3, trial_name: a/b}
trainer: [1]
""")
    lines = refused(path).splitlines()
    assert sorted(lines) == [
        "run.yaml: experiment_name: required, but missing. Folder of the experiment under fileroot.",
        "run.yaml: rollout.trial_name: 'a/b' becomes a folder: use at most 100 letters, digits, '.', '_' and '-', and "
        "begin with a letter or digit. Folder of this run under the experiment.",
        "run.yaml: rollout: unknown key 'grup_size'; did you mean 'group_size'?",
        "run.yaml: seed: 'x': it must be a valid integer, unable to parse string as an integer. "
        "Seed of data order, sampling and training.",
        "run.yaml: train_dataset.max_samples: 0: it must be greater than or equal to 1. "
        "Limit on the number of rows: the first ones or, with shuffle, a random subset drawn with the run's seed.",
        "run.yaml: trainer: [1]: it must be a section: indented 'key: value' lines. Optimizer, algorithm and losses.",
        "run.yaml: unknown key 'learning_rate'; did you mean 'trainer.learning_rate'?",
    ]


ALIAS_BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: the file is empty: write a mapping with at least experiment_name, model_path"),
        ("# nothing\n", "the file is empty"),
        ("- 1\n", "run.yaml: the file holds a list: write a mapping"),
        ("seed: 1\nseed: 2\n", "run.yaml: line 2, column 1: duplicate key 'seed'"),
        (
            "rollout:\n  gconfig: {greedy: true, greedy: false}\n",
            "line 2, column 27: duplicate key 'greedy'",
        ),
        ("seed: [1\ntrial", "run.yaml: line 2, column 6: while parsing a flow sequence: expected ',' or ']'"),
        ("seed: @x\n", "line 1, column 7: while scanning for the next token: found character '@'"),
        ("? [a]\n: 1\n", "found unhashable key"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: 2024-13-45\n", "run.yaml: not YAML: month must be in 1..12"),
        ("a: \x01\n", "run.yaml: not YAML: "),
        ("[" * 5000, "nested too deeply"),
        (ALIAS_BOMB, "run.yaml: its aliases (*name) repeat values so often that there are over 10000: use"),
        ("a: &a [*a]\n", "run.yaml: its aliases (*name) repeat values so often"),
        (b"a: \xff\n", "run.yaml: byte 3 is not UTF-8"),
        ("#" * (1 << 20) + "\n", "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_not_a_yaml_mapping_is_refused_with_its_position(write, text, message):
    assert message in refused(write(text))


SUPERVISED = """\
experiment_name: exp
model_path: models/tiny
train_dataset: {path: rows.jsonl, max_length: 64}
trainer: {batch_size: 2, learning_rate: 1e-5}
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_file_selects_its_class_and_reinforcement_learning_is_the_default(write, kind):
    named, unnamed = write(SUPERVISED + f"kind: {kind}\n", "named.yaml"), write(SUPERVISED, "unnamed.yaml")
    config = load_config(named, root=ExperimentConfig)
    assert type(config) is class_of(kind)
    assert load_config(named, root=class_of(kind)) == config
    assert load_config(unnamed, root=class_of(kind)) == config  # the command implies it
    assert load_config(unnamed, [f"kind={kind}"], root=ExperimentConfig) == config
    Path("again.yaml").write_text(dump_config(config))  # as a run saves it
    assert load_config("again.yaml", root=ExperimentConfig) == config
    assert type(load_config(write(), root=ExperimentConfig)) is RunConfig


@pytest.mark.parametrize(
    ("text", "root", "message"),
    [
        (
            "kind: sft\n",
            DPOConfig,
            "run.yaml: kind: 'sft': use the command areal-lite sft",
        ),
        ("kind: reward_model\n", RunConfig, "use the command areal-lite reward-model"),
        (
            "workflow: mine.Agent\n",
            SFTConfig,
            "a file with a workflow is reinforcement learning: use areal-lite train",
        ),
        (
            "kind: rl\n",
            ExperimentConfig,
            "run.yaml: kind: 'rl': it must be sft | dpo | reward_model, or absent for reinforcement",
        ),
        ("kind: [sft]\n", SFTConfig, "kind: ['sft']: it must be sft | dpo | reward_model"),
        (
            "",
            ExperimentConfig,
            "run.yaml: neither kind nor workflow: set kind: sft | dpo | reward_model, or a workflow",
        ),
        ("kind: dpo\nsed: 1\n", ExperimentConfig, "run.yaml: unknown key 'sed'; did you mean 'seed'?"),
    ],
)
def test_a_config_of_the_wrong_kind_is_refused(write, text, root, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(SUPERVISED + text), root=root)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reward_model_with_adapters_is_refused(write):
    with pytest.raises(ConfigError, match="trainer: lora is set, but reward models do not support adapters"):
        load_config(write(SUPERVISED), ["trainer.lora={}"], root=class_of("reward_model"))


def test_a_missing_file_suggests_similar_names(write):
    write(name="grpo_gsm8k.yaml")
    assert refused("grpo_gsm8.yaml") == "grpo_gsm8.yaml: no such file; did you mean 'grpo_gsm8k.yaml'?"
    assert refused("no/x.yaml") == "no/x.yaml: no such file; there is no folder no either"
    assert "cannot be read: Is a directory" in refused(".")


def test_a_byte_order_mark_is_accepted(write):
    assert load_config(write("\ufeff" + MINIMAL)).experiment_name == "exp"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.groupsize=1",
            "run.yaml, override 'rollout.groupsize=1': rollout: unknown key 'groupsize'; did you mean 'group_size'?",
        ),
        ("group_size=1", "unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        ("rollout.dump_training=1", "unknown key 'dump_training': it is a top-level key; write it outside of the sec"),
        ("rollot.group_size=1", "unknown key 'rollot'; did you mean 'rollout'?"),
        ("zzz=1", "unknown key 'zzz'; the keys here are experiment_name, trial_name"),
        ("seed.x=1", "run.yaml, override 'seed.x=1': seed: {'x': 1}: it must be a valid integer"),
        ("workflow_kwargs.a.b=1", "workflow_kwargs.a is 3, not a section"),
        ("seed", "override 'seed': write section.key=value"),
        ("=1", "write section.key=value"),
        (
            "rollout.group_size=0",
            "run.yaml, override 'rollout.group_size=0': rollout.group_size: 0: it must be greater",
        ),
        ("rollout.addresses=[a", "override 'rollout.addresses=[a': line 1, column 3"),
        ("trainer=null", "run.yaml, override 'trainer=null': trainer: null: it must be a section"),
    ],
)
def test_a_bad_override_is_reported_with_the_file(write, override, message):
    assert message in refused(write(MINIMAL + "workflow_kwargs: {a: 3}\n"), override)


def test_overrides_are_yaml_and_the_last_one_wins(write):
    config = load_config(
        write(),
        [
            "rollout.addresses=[a:1, b:2]",
            "rollout.group_size=2",
            "rollout.group_size=4",
            "eval_dataset.path=held.jsonl",
            "eval_dataset.kwargs.deep.er=1e-3",
            "rollout.gconfig.top_k=null",
            "workflow_kwargs={commit: 1e5f3a2, rate: 2E5}",
            "train_dataset.path=reasoning-gym:chain_sum",
            "rollout.gconfig.stop=['=', 'b']",
        ],
    )
    assert config.rollout.addresses == ["a:1", "b:2"]
    assert config.rollout.group_size == 4
    assert config.eval_dataset == DatasetConfig(path="held.jsonl", kwargs={"deep": {"er": 0.001}})
    assert config.rollout.gconfig == GenerationHyperparameters(stop=["=", "b"])
    assert config.workflow_kwargs == {"commit": "1e5f3a2", "rate": 2e5}
    assert config.train_dataset.path == "reasoning-gym:chain_sum"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        [
            "1e-5",
            "no",
            "1_000",
            "0x1",
            "~",
            "1e5f",
            "\x85",
            "a\u2028b",
            "2024-01-01",
            "=",
            "<<",
            "1:30",
            ".inf",
            "-.5e1",
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
kwargs = st.dictionaries(st.text(min_size=1, max_size=8), json_values, max_size=3)
positive = st.floats(0, exclude_min=True, allow_infinity=False, allow_subnormal=False)
configs = st.builds(
    RunConfig,
    experiment_name=names,
    trial_name=names,
    fileroot=st.text(),
    model_path=st.text(min_size=1),
    seed=st.integers(0),
    workflow=st.text(),
    workflow_kwargs=kwargs,
    train_dataset=st.builds(DatasetConfig, path=st.text(), kwargs=kwargs, max_samples=st.none() | st.integers(1)),
    eval_dataset=st.none() | st.builds(DatasetConfig, path=st.text()),
    rollout=st.builds(
        InferenceEngineConfig,
        addresses=st.lists(st.text(), max_size=2),
        faults=st.builds(FaultsConfig, request_timeout_s=positive),
        gconfig=st.builds(GenerationHyperparameters, stop=st.none() | st.lists(st.text(), max_size=2)),
    ),
    trainer=st.builds(TrainerConfig, total_steps=st.integers(1), learning_rate=positive),
    evaluation=st.builds(EvaluationConfig),
)


@given(config=configs)
def test_a_dumped_config_loads_back_equal(tmp_path_factory, config):
    rollout = dataclasses.replace(
        config.rollout,
        experiment_name=config.experiment_name,
        trial_name=config.trial_name,
        seed=config.seed,
        fileroot=config.fileroot,
        tokenizer_path=config.model_path,
    )
    resolved = dataclasses.replace(config, rollout=rollout)
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_config(resolved), "utf-8")
    assert load_config(path) == resolved


ascii_text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8).filter(lambda t: "${" not in t)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ascii_text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ascii_text, inner, max_size=3),
        max_leaves=6,
    )
)
def test_an_override_accepts_any_json(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "override.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, [f"workflow_kwargs.x={json.dumps(value)}"])
    assert config.workflow_kwargs == {"x": value}


REFUSED_SETTINGS = [
    ("trainer.loss_scale=100", "trainer: loss_scale is 100, but only loss_aggregation"),
    ("trainer.loss_aggregation=seq-mean-token-sum-norm", "divides by loss_scale"),
    (
        "trainer.correction={min_weight: 0.5}",
        "trainer.correction: min_weight is 0.5, which needs outside: mask",
    ),
    ("trainer.correction={outside: mask, min_weight: 2, max_weight: 1}", "every token would be masked"),
    ("trainer.correction={outside: mask, level: sequence}", "set level: token"),
    ("trainer.correction={outside: mask, normalize: true}", "normalize has no effect with outside: mask"),
    ("trainer.correction={level: none, normalize: true}", "normalize has no effect with level: none"),
    ("trainer.correction={level: none, max_weight: 2}", "max_weight is 2.0, but level: none"),
    ("trainer.correction={reject_bounds: '1'}", "reject_bounds is '1' without reject"),
    (
        "trainer={proximal: behaviour, correction: {reject: token_k2, reject_bounds: '1'}}",
        "correction sets reject",
    ),
    ("trainer={proximal: behaviour, correction: {max_weight: 2}}", "correction sets max_weight"),
    ("trainer.kl={coef: 0.1, target: 0.5}", "trainer.kl: target is 0.5, .* set place: reward"),
    ("trainer.kl={coef: 0.1, place: reward, horizon: 9}", "horizon is 9.0, but without target"),
    ("trainer.kl={coef: 0.1, place: reward, estimator: k3+}", "a reward has no gradient: use k3"),
    ("trainer.kl={coef: 0.1, place: reward, unbiased: true}", "unbiased is set with place reward"),
    ("trainer.kl={coef: 0.1, estimator: k2, unbiased: true}", "and estimator k2"),
    ("trainer={critic: {learning_rate: 1.0, updates_before_policy: 5}}", "would never be trained"),
    ("rollout.gconfig.n_samples=2", "rollout.gconfig: n_samples is 2: .* rollout.group_size"),
    ("rollout.eval_gconfig.n_samples=2", "rollout.eval_gconfig: n_samples is 2: .* evaluation.group_size"),
]


@pytest.mark.parametrize(("override", "says"), REFUSED_SETTINGS, ids=[override for override, _ in REFUSED_SETTINGS])
def test_contradictory_and_unused_settings_are_refused(write, override, says):
    key, _, value = override.partition("=")
    if key == "trainer":
        value = value.replace("{", "{total_steps: 3, learning_rate: 1.0, ", 1)
    with pytest.raises(ConfigError, match=says):
        load_config(write(), [f"{key}={value}"])


def test_corrections_without_importance_weights_work_with_proximal_behaviour(write):
    correction = "{level: none, max_episode_kl: 0.5}"
    changes = [f"trainer.correction={correction}", "trainer.proximal=behaviour"]
    assert load_config(write(), changes).trainer.correction.max_episode_kl == 0.5


def test_a_dumped_config_masks_keys_and_tokens(write):
    config = load_config(
        write(), ["workflow_kwargs={api_key: abc, url: u, list: [sk-0123456789abcdef], max_tokens: 5}"]
    )
    assert yaml.safe_load(dump_config(config))["workflow_kwargs"] == {
        "api_key": "***",
        "url": "u",
        "list": ["***"],
        "max_tokens": 5,
    }


CONFIGS = sorted(Path(__file__).parents[2].glob("configs/**/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_in_the_repository_loads(path):
    config = load_config(path, root=ExperimentConfig)
    kind = yaml.safe_load(path.read_text()).get("kind")
    assert type(config) is (class_of(kind) if kind in KINDS else RunConfig)
    if isinstance(config, RunConfig):
        check_rollouts(config)
        check_training(config)
        check_server(config.server)
    assert dump_config(config)


def test_help_shows_type_default_and_meaning_of_every_key():
    fields = {field.key: field for field in describe_fields(RunConfig)}
    assert fields["rollout.group_size"] == (
        "rollout.group_size",
        "integer >= 1",
        "1",
        "Episodes per dataset row. Group-based advantages compare their rewards.",
    )
    assert fields["trainer.learning_rate"][1:3] == ("number > 0", None)
    assert fields["trainer.adam_betas"][1:3] == ("list of 2 numbers >= 0 and < 1", "[0.9, 0.999]")
    assert fields["trainer.kl.target"][1:3] == ("number > 0 or null", "null")
    assert fields["rollout.backend"].type == "sglang | vllm | embedded"
    assert fields["rollout.eval_gconfig.greedy"].type == "true or false"
    assert fields["server.port"].type == "integer >= 0 and <= 65535"
    assert all(field.meaning for field in fields.values())


def test_help_lists_experiment_and_trial_once_and_a_lone_engine_has_defaults():
    keys = [field.key for field in describe_fields(RunConfig)]
    for shared in ("experiment_name", "trial_name", "fileroot", "seed"):
        assert shared in keys and f"rollout.{shared}" not in keys
    assert "rollout.gconfig.seed" in keys
    alone, named = InferenceEngineConfig(), InferenceEngineConfig(experiment_name="e", fileroot="f", seed=-3)
    assert (str(alone.run_dir), alone.seed) == ("runs/experiment/trial", None)
    assert (str(named.run_dir), named.seed) == ("f/e/trial", -3)
    assert InferenceEngineConfig(tokenizer_path="~/m").tokenizer_path == str(Path.home() / "m")
    assert InferenceEngineConfig(fileroot="~/f").run_dir == Path.home() / "f/experiment/trial"


@pytest.mark.parametrize("root", [RunConfig, ExperimentConfig, *map(class_of, KINDS)])
def test_help_of_every_config_kind_is_complete_and_fits_eighty_columns(root):
    assert all(field.meaning for field in describe_fields(root))
    assert max(map(len, help_text(root, "all").splitlines())) <= 80
    assert max(map(len, section_list(root).splitlines())) <= 80


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("episode_timeout_s", "rollout.faults.episode_timeout_s"),
        ("agent_isolation", "rollout.agents.isolation"),
        ("tools_in_system_prompt", "rollout.agents.tools_in_system_prompt"),
        ("reward_key", "rollout.rewards.key"),
    ],
)
def test_a_key_of_a_sub_section_written_in_rollout_is_refused_with_where_it_belongs(write, key, new):
    says = f"unknown key '{key}': write {new}"
    assert refused(write(), f"rollout.{key}=1") == f"run.yaml, override 'rollout.{key}=1': rollout: {says}"
    assert refused(write(MINIMAL + f"rollout: {{{key}: 1}}\n")) == f"run.yaml: rollout: {says}"


def test_help_of_rollout_fits_on_a_screen_and_names_its_sections():
    lines = help_text(RunConfig, "rollout", 120).splitlines()
    assert len(lines) <= 50
    assert "rollout.faults: Retries, patience and timeouts. --help rollout.faults" in lines
    assert "rollout.faults.on_error  (drop_episode | drop_group | raise; default drop_episode)" in help_text(
        RunConfig, "rollout.faults", 120
    )
