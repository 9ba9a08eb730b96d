"""areal-lite doctor: what is broken gets a line with its fix, and nothing changes."""

from __future__ import annotations
import fcntl
import importlib.metadata
import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.processes.sandbox import ProcessLimits
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.tools.doctor import doctor_model, doctor_run, doctor_sandbox
from areal_lite.tools.doctor.doctor import doctor
from areal_lite.trainer.objectives.aggregation import LossTerms
from areal_lite.trainer.objectives.policy_loss import PolicyInputs
from tests.e2e.agents import LetterAgent
from tests.fixtures.tiny_model import CHAT_TEMPLATE, EOS_ID, build_tiny_model

Disk = namedtuple("Disk", "total used free")
Breaks = Callable[[Path], None]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    device = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
    values: dict[str, Any] = {
        "experiment_name": "checked",
        "fileroot": str(tmp_path / "runs"),
        "model_path": str(model),
        "workflow": "tests.e2e.agents.LetterAgent",
        "train_dataset": {"path": "tests.e2e.agents.rows"},
        "rollout": {"group_size": 8, "consumer_batch_size": 4, "gconfig": {"max_new_tokens": 8}},
        "server": device,
        "trainer": {"total_steps": 9, "learning_rate": 1e-3, **device},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def examine(config: Path | None, *overrides: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines."""
    lines: list[str] = []
    code = doctor(None if config is None else str(config), overrides, show=lambda finding: lines.append(str(finding)))
    return code, lines


def the_line(lines: list[str], level: str, part: str) -> str:
    """Return the only line of a level that has ``part``."""
    (line,) = [line for line in lines if line.startswith(level) and part in line]
    return line


def not_finite(inputs: PolicyInputs) -> LossTerms:
    """A loss that is nan, but not for the few toy tokens that it is tried on."""
    return LossTerms(inputs.policy * (float("nan") if len(inputs.policy) > 12 else 1.0))


class HopelessAgent(LetterAgent):
    """Gets no reward."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once."""
        return 0.0 * await super().run(data, **extra_kwargs)


# -- the machine -------------------------------------------------------------------------------------


def test_without_a_config_the_machine_alone_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "python 3.",
        "packages have the versions",
        "torch ",
        "of memory are free",
        "of disk",
        "nothing to fix",
    ):
        assert part in out
    assert "model" not in out.replace("a small model", "")


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "orjson":
            raise importlib.metadata.PackageNotFoundError
        return {"openai": "1.0", "peft": "0.1"}.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, lines = examine(None)
    assert code == 64
    line = the_line(lines, "fix", "openai is 1.0, and areal-lite needs >=3")
    assert "orjson is missing (needs >=3.10)" in line
    assert "pip install --upgrade areal-lite" in line
    assert "pip install 'peft>=0.20'" in the_line(lines, "warning", "peft is 0.1, and an extra")


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10, 9, 1_000_000_000))
    code, lines = examine(None)
    assert code == 0
    the_line(lines, "warning", "only 1.0 GB of disk are free here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decodes without it")
def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("areal_lite.models.policy_model.has_bfloat16", lambda: True)
    code, lines = examine(None)
    assert code == 0
    the_line(
        lines,
        "warning",
        "there is no C++ compiler: in bfloat16 the embedded server takes up to twice as long, and a training step a",
    )
    monkeypatch.setenv("CXX", "true")
    assert not any("compiler" in line for line in examine(None)[1])


def test_a_cpu_without_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("areal_lite.models.policy_model.has_bfloat16", lambda: False)
    lines = examine(None)[1]
    the_line(lines, "ok", "the CPU has no instructions for bfloat16: dtype auto is float32")
    assert not any("compiler" in line for line in lines)


# -- config, workflow, rows, folder ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says", "fix"),
    [
        ("rollout.grup_size=2", "unknown key 'grup_size'", "did you mean 'group_size'?"),
        ("workflow=tests.e2e.agents.Nobody", "'Nobody'", "LetterAgent"),
        ("train_dataset.path=nowhere.jsonl", "nowhere.jsonl", ""),
        ("rollout.group_size=1", "a group of one has no baseline", "Use 2 or more"),
        ("trainer.loss=ppoo", "ppoo", "ppo"),
        pytest.param(
            "trainer.device=cuda",
            "trainer.device is 'cuda' but torch sees no GPU",
            "use 'auto'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("model_path=path/to/model", "model_path 'path/to/model' does not exist", "it must be a directory with"),
    ],
)
def test_a_wrong_setting_is_explained(
    config: Path, override: str, says: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(config), override]) == 64
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("fix  ")]
    assert any(says in line and fix in line for line in lines), out
    assert "nothing to fix" not in out


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
def test_escapes_from_the_sandbox_of_a_run_are_tried(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = "take 512 MiB of memory"
    monkeypatch.setattr(doctor_sandbox, "ATTEMPTS", {attempt: doctor_sandbox.ATTEMPTS[attempt]})
    sandboxed = "rollout.agents.sandbox=bubblewrap", "model_path=/nowhere"
    the_line(examine(config, *sandboxed)[1], "ok", f"sandbox bubblewrap: no program in it can {attempt}")
    monkeypatch.setattr(doctor_sandbox, "LIMITS", ProcessLimits())
    the_line(examine(config, *sandboxed)[1], "fix", f"sandbox is bubblewrap, and a program in it can {attempt}: use")
    monkeypatch.setattr(doctor_sandbox, "ATTEMPTS", {"speak no Python": "("})
    the_line(examine(config, *sandboxed)[1], "fix", "sandbox bubblewrap: cannot try to speak no Python")
    monkeypatch.setenv("PATH", "/nowhere")
    the_line(examine(config, *sandboxed)[1], "fix", "rollout.agents.sandbox is 'bubblewrap', and no box starts: ")


def test_nothing_is_started_while_something_is_to_fix(config: Path) -> None:
    code, lines = examine(config, "model_path=/nowhere")
    assert code == 64
    assert lines[-1].startswith("warning  servers, episode and training step not tried")


def test_a_live_run_and_a_finished_run_in_the_folder_are_seen(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/checked/trial"
    folder.mkdir(parents=True)
    loaded = load_config(config)
    with (folder / ".lock").open("w+") as lock:
        lock.write("4321")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, lines = examine(config)
        assert code == 73
        assert "stop it, or choose another trial_name" in the_line(lines, "fix", f"{folder} is held by a run")
        assert "(pid 4321)" in "".join(lines)
    assert [str(f) for f in doctor_run.run_folder(loaded)] == [f"ok       {folder}: a new run"]
    (folder / "model").mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="already holds a training run.*choose another name"):
        list(doctor_run.run_folder(loaded))


# -- the model ---------------------------------------------------------------------------------------


def without_a_weight(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def cut_off(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_unknown_type(model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"model_type": "nobody_knows"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_a_weight, "has no weights for ['model.norm.weight']: give the folder of a complete causal LM"),
        (cut_off, "is cut off. Save the checkpoint again"),
        (of_unknown_type, "nobody_knows"),
        (lambda model: (model / "config.json").unlink(), "has no config.json: give the directory"),
        (lambda model: (model / "model.safetensors").unlink(), "has no *.safetensors file: save the model"),
    ],
)
def test_a_damaged_model_folder_is_explained(config: Path, model: Path, damage: Breaks, says: str) -> None:
    damage(model)
    code, lines = examine(config)
    assert code == 64
    the_line(lines, "fix", says)


def template(model: Path, text: str | None) -> None:
    """Give the tokenizer this chat template."""
    for path in model.glob("chat_template*"):
        path.unlink()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = text
    tokenizer.save_pretrained(model)


def tokenizer_findings(config: Path, *overrides: str) -> list[str]:
    return [str(finding) for finding in doctor_model.tokenizer(load_config(config, overrides))]


REWRITES = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] if message.role == 'assistant' and not loop.last else message.content -}}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # the thoughts of earlier answers go


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CHAT_TEMPLATE, []),
        (REWRITES, ["answers with thoughts as text: message 3, of the user, changes message 2: '<think>"]),
        (
            REWRITES.replace("{% endif %}", "<think>{% endif %}"),
            ["answers: message 2, of the assistant, changes the prompt of answer 2: '<think>"],
        ),
        ("{% for each in messages %}{{ each.role }}{% endfor %}", ["answers: the template leaves them out"]),
        ("{{ raise_exception('no') }}", ["answers: the chat template cannot write messages[:6] (TemplateError: no)"]),
    ],
)
def test_a_template_that_writes_another_history_is_told_with_its_turn(
    model: Path, text: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    template(model, text)
    assert main(["doctor", str(model), "--template"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for start in found:
        the_line(lines, "warning", start)
    if not found:
        the_line(lines, "ok", "answers: 6 messages are written alike")
        the_line(lines, "ok", "answers with thoughts as text: 6 messages")


def test_a_template_is_of_one_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [str(model), "seed=1"]):
        assert main(["doctor", *words, "--template"]) == 64
        assert "--template looks at one model" in capsys.readouterr().err


def test_a_tokenizer_without_a_chat_template_is_to_fix(config: Path, model: Path) -> None:
    template(model, None)
    code, lines = examine(config)
    assert code == 64
    assert "use that of an instruction-tuned model" in the_line(lines, "fix", "has no chat template")
    with pytest.raises(ConfigError, match="chat_template.jinja in its folder"):
        list(doctor_run.dry_run_findings(load_config(config, [])))


def test_rows_that_bring_their_template_or_need_none_are_fine(config: Path, model: Path) -> None:
    template(model, None)
    given = yaml.safe_dump({"chat_template": CHAT_TEMPLATE}, default_style='"')
    for settings in ("train_dataset.apply_chat_template=false", f"train_dataset.apply_chat_template_kwargs={given}"):
        lines = tokenizer_findings(config, settings)
        assert not [line for line in lines if "no chat template" in line]
        assert any("stops generation" in line for line in lines) == ("kwargs" in settings)


def test_a_missing_tokenizer_is_to_fix(config: Path) -> None:
    code, lines = examine(config, "rollout.tokenizer_path=/nowhere")
    assert code == 64
    assert "name a folder with tokenizer.json" in the_line(lines, "fix", "no tokenizer can be loaded from '/nowhere'")


def test_it_says_whether_the_template_renders_tools(config: Path, model: Path) -> None:
    lines = tokenizer_findings(config)
    the_line(lines, "warning", "does not render tools: for tools set rollout.agents.tools_in_system_prompt: true")
    the_line(tokenizer_findings(config, "rollout.agents.tools_in_system_prompt=true"), "ok", "into the system prompt")


def test_it_says_that_the_template_renders_tools(config: Path, model: Path) -> None:
    template(model, "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHAT_TEMPLATE)
    the_line(tokenizer_findings(config), "ok", "the chat template renders tools")


def test_a_template_that_opens_think_needs_room_for_reasoning(config: Path, model: Path) -> None:
    template(model, CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    line = the_line(tokenizer_findings(config), "warning", "opens <think>")
    assert "within max_new_tokens 8" in line and "raise rollout.gconfig.max_new_tokens to 256" in line
    the_line(tokenizer_findings(config, "rollout.gconfig.max_new_tokens=256"), "ok", "opens <think>")


def test_an_answer_that_ends_with_the_models_own_token_is_fine(config: Path) -> None:
    the_line(tokenizer_findings(config), "ok", "answers end with '<|im_end|>', which stops generation and is trained")


def test_an_end_of_turn_that_is_text_is_a_warning(config: Path, model: Path) -> None:
    template(model, CHAT_TEMPLATE.replace("<|im_end|>", "END"))
    line = the_line(tokenizer_findings(config), "warning", "ends an answer without a special token")
    assert "use a template that writes an end token" in line


def test_an_end_of_turn_that_the_model_does_not_know_is_a_warning(config: Path, model: Path) -> None:
    template(model, CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>"))
    line = the_line(tokenizer_findings(config), "warning", "answers end with '<|endoftext|>' (id 0)")
    assert "and the model with [2]" in line and "set rollout.gconfig.stop_token_ids: [0]" in line


def test_an_end_of_turn_that_was_never_trained_is_a_warning(config: Path, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][EOS_ID] *= 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    line = the_line(tokenizer_findings(config), "warning", "hardly been trained to end its answers")
    assert "or train it with SFT first" in line


def test_too_little_memory_or_disk_is_to_fix(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(config)
    monkeypatch.setattr(doctor_model, "free_memory", lambda: 1000.0)
    with pytest.raises(ValueError, match=r"need 0.0 GB of memory \(cpu\).*use a smaller model, trainer.lora"):
        list(doctor_model.room(loaded))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1000, 0, 1000))
    code, lines = examine(config)
    assert code == 74
    assert "lower checkpoint.keep, or set fileroot" in the_line(lines, "fix", "3 checkpoints and the model need")


def test_memory_counts_optimizer_server_reference_and_critic(config: Path) -> None:
    def needs(*overrides: str) -> float:
        (need,) = doctor_model._needs(load_config(config, overrides), parameters=10).values()
        return need

    assert needs() == 10 * (16 + 4)
    assert needs("server.dtype=bfloat16", "server.replicas=2") == 10 * (16 + 2 * 2)
    assert needs("rollout.addresses=[127.0.0.1:1]", "trainer.kl={coef: 0.1}") == 10 * (16 + 4)


def test_what_each_rank_needs_and_how_many_read_a_sequence_together(config: Path) -> None:
    assert doctor_model._on_ranks(load_config(config, ["trainer.sp_size=2"]), 10**9).text == (
        "under torchrun each rank's weights and optimizer need 8.0 GB on 2, 4.0 GB on 4, 2.0 GB on 8 ranks; sp_size "
        "can be 1, 2, 4; tp_size can be 1, 2"
    )
    code, lines = examine(config, "trainer.sp_size=3")
    assert code == 64
    the_line(lines, "fix", "has 4 attention heads, which the ranks divide equally: use one of 1, 2, 4 as sp_size")


# -- servers, episode, step --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running server of the tiny model."""
    model = build_tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    with EmbeddedServer(model_path=str(model), dtype="float32", num_threads=1, device="cpu") as server:
        yield server.address


def test_a_run_that_can_start_is_tried_and_leaves_nothing(config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, lines = examine(config)
    assert code == 0, lines
    assert not [line for line in lines if line.startswith("fix")]
    the_line(lines, "ok", "started in")
    the_line(lines, "ok", "2 episodes of one row with rewards")
    the_line(lines, "ok", "of the trainer differ by 0.0000 nats")
    the_line(lines, "ok", "training step: loss")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_step_has_a_gradient_although_rewards_are_equal(config: Path, server: str) -> None:
    code, lines = examine(
        config, "workflow=tests.tools.doctor.test_doctor.HopelessAgent", f"rollout.addresses=[{server}]"
    )
    assert code == 0, lines
    the_line(lines, "ok", "with rewards 0.000, 0.000")
    assert "gradient 0.0000" not in the_line(lines, "ok", "training step: loss")


def test_running_servers_keep_their_weights(config: Path, server: str) -> None:
    import urllib.request

    def served() -> Any:
        with urllib.request.urlopen(f"{server}/model_info") as reply:
            return json.load(reply)

    before = served()
    code, lines = examine(config, f"rollout.addresses=[{server}, 127.0.0.1:9]")
    assert code == 0, lines
    the_line(lines, "ok", f"server {server} answers and serves ")
    down = the_line(lines, "warning", "server http://127.0.0.1:9 is down: ")
    assert "Start it, or remove it from rollout.addresses" in down
    assert served() == before


def test_servers_that_do_not_answer_are_to_fix(config: Path) -> None:
    code, lines = examine(config, "rollout.addresses=[127.0.0.1:9]")
    assert code == 75
    assert "Are they up, and does rollout.addresses name them?" in the_line(lines, "fix", "no inference server answers")


def test_a_server_of_another_model_is_to_fix(config: Path, server: str, model: Path) -> None:
    build_tiny_model(model, seed=3)
    code, lines = examine(config, f"rollout.addresses=[{server}]")
    assert code == 64
    assert "Serve model_path, or fix rollout.addresses" in the_line(lines, "fix", "nats on average")


def test_an_agent_that_raises_is_to_fix_with_its_error(config: Path, server: str) -> None:
    code, lines = examine(config, "workflow=tests.e2e.agents.BrokenAgent", f"rollout.addresses=[{server}]")
    assert code == 70
    line = the_line(lines, "fix", "no episode succeeded")
    assert "RuntimeError: the agent is broken" in line


def test_a_step_that_is_not_finite_is_to_fix(config: Path, server: str) -> None:
    code, lines = examine(
        config, "trainer.loss=tests.tools.doctor.test_doctor.not_finite", f"rollout.addresses=[{server}]"
    )
    assert code == 70
    the_line(lines, "fix", "not finite")


@pytest.fixture
def sft(config: Path, model: Path, tmp_path: Path) -> Path:
    """The config of a supervised run on rows.jsonl."""
    rows = (json.dumps({"prompt": f"say {n}", "response": "yes"}) + "\n" for n in range(20))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    values: dict[str, Any] = {
        "kind": "sft",
        "experiment_name": "checked",
        "fileroot": str(tmp_path / "runs"),
        "model_path": str(model),
        "train_dataset": {"path": str(tmp_path / "rows.jsonl"), "max_length": 64},
        "trainer": {"batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "num_threads": 1},
    }
    config.write_text(yaml.safe_dump(values))
    return config


def test_supervised_runs_try_a_step_on_the_first_rows(sft: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, lines = examine(sft)
    assert code == 0, lines
    the_line(lines, "ok", "training step: loss +")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "no conversation"}))
    code, lines = examine(sft)
    assert code == 64
    assert "set messages_key, or prompt_key and response_key" in the_line(lines, "fix", "'messages'")


# -- a dry run ---------------------------------------------------------------------------------------


def test_a_dry_run_checks_what_a_run_checks_and_starts_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(config), "--dry-run", "trial_name=other"]) == 0
    out = capsys.readouterr().out
    assert "runs/checked/other: a new run" in out
    assert "workflow tests.e2e.agents.LetterAgent, 16 training rows, 0 held out" in out
    epochs = ["trainer.total_steps=null", "trainer.total_epochs=3", "rollout.consumer_batch_size=5"]
    assert main(["train", "--dry-run", str(config), "trial_name=other", *epochs]) == 0
    assert "0 held out, 9 steps" in capsys.readouterr().out
    assert main(["train", "--dry-run", str(config), "rollout.group_size=1"]) == 64
    assert "a group of one has no baseline" in capsys.readouterr().err
    assert main(["train", str(config), "workflow=tests.e2e.agents.Nobody", "--dry-run"]) == 64
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_sft_reads_every_row(sft: Path, tmp_path: Path) -> None:
    assert main(["sft", str(sft), "--dry-run"]) == 0
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "say 20", "response": None}))
    assert main(["sft", str(sft), "--dry-run"]) == 64
    assert not (tmp_path / "runs").exists()
