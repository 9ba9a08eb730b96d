"""No secret reaches config.yaml, a dump, a log line or an error, and no control character a terminal."""

from __future__ import annotations
import io
import json
import logging
import time
from pathlib import Path
import pytest
import yaml
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, ProcessRecord, Trajectory
from areal_lite.cli import main as cli
from areal_lite.config.dump import dump_config
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import SafeFormatter, command_without_secrets, without_secrets
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text

PLANTED = "PLANTED-0123456789abcdef"
TEXTS = (
    f"key sk-{PLANTED} refused",
    f"hf_{PLANTED}",
    f"'al_{PLANTED}'",
    f"ghp_{PLANTED}.",
    f"Authorization: Bearer {PLANTED}",
    f"http://user:{PLANTED}@10.0.0.7:30000/v1/chat",
    f"http://user:p@{PLANTED}@10.0.0.7:30000/v1/chat",
    f"https://{PLANTED}@host/x",
    f"GET https://host/v1?model=m&api_key={PLANTED}&n=1",
    f"https://bucket/rows.jsonl?X-Amz-Signature=s&sig={PLANTED}",
    f'{{"api_key": "{PLANTED}", "n": 1}}',
    f"password={PLANTED}",
    f"client_secret: {PLANTED}",
    f"serve --api-key {PLANTED} --port 1",
    f"serve --hf-token={PLANTED}",
    f"eyJ{PLANTED}.{PLANTED}.x",
)
"""A secret in each form in which texts have one."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a secret that only the environment knows."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "no pattern, just words")
    return "no pattern, just words"


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_of_every_form_is_replaced(text: str) -> None:
    assert "PLANTED" not in without_secrets(text) and "***" in without_secrets(text)


def test_what_is_no_secret_stays() -> None:
    for text in (
        "http://127.0.0.1:30000/v1 gave HTTP 503: max_tokens=512, stop_token_ids: [2], tokens: 7, key 'a' is missing",
        '{"url":"http://127.0.0.1:30000","mail":"a@b.c"}',
        "git@github.com:a/b.git; mailto:a@b.c; the token budget is 5; --max-tokens 5; token_idx=3",
    ):
        assert without_secrets(text) == text


def test_a_command_loses_the_arguments_of_its_secret_flags() -> None:
    command = ["run", "--api-key", PLANTED, f"--token={PLANTED}", "--max-tokens", "5"]
    assert command_without_secrets(command) == ["run", "--api-key", "***", "--token=***", "--max-tokens", "5"]


@pytest.mark.parametrize("text", ["-" * 100_000, "&a" * 50_000, "://" * 50_000, "password " * 20_000, "sk-" * 50_000])
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    without_secrets(text)
    assert time.process_time() - began < 5


def test_a_recorded_config_has_no_secret(tmp_path: Path, environment: str) -> None:
    values = {
        **{"experiment_name": "e", "model_path": "m", "workflow": "my.Agent"},
        "train_dataset": {"path": f"https://user:{PLANTED}@host/rows.jsonl?token={PLANTED}"},
        "trainer": {"total_steps": 1, "learning_rate": 1e-5},
        "server": {"backend": "sglang", "args": {"api-key": PLANTED, "tp": 2}},
        "rollout": {"backend": "sglang"},
        "workflow_kwargs": {
            **{"password": PLANTED, "system_prompt": "password: swordfish", "key": "${oc.env:SOME_SERVICE_TOKEN}"}
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    recorded = dump_config(load_config(tmp_path / "run.yaml"))
    assert "PLANTED" not in recorded and environment not in recorded
    kept = yaml.safe_load(recorded)
    assert kept["server"]["args"] == {"api-key": "***", "tp": 2}
    assert kept["workflow_kwargs"]["system_prompt"] == "password: swordfish"  # the run's own words


def test_a_dump_has_no_secret_in_errors_and_programs(environment: str) -> None:
    said = "\n".join((*TEXTS, environment))
    process = ProcessRecord(
        command=["run", "--api-key", PLANTED], returncode=1, timed_out=False, seconds=0.1, stdout=said, stderr=said
    )
    failure = Failure(FailureKind.AGENT, "ValueError", "no", said)
    trajectory = Trajectory(
        member_idx=0, status=EpisodeStatus.FAILED, sequences=[], failure=failure, processes=[process]
    )
    group = Group(task_id=1, group_id="1", status=EpisodeStatus.FAILED, data={}, trajectories=[trajectory])
    text = dump_text(dump_lines(group)).decode()
    assert "PLANTED" not in text and environment not in text
    assert json.loads(text)["processes"][0]["command"] == ["run", "--api-key", "***"]


def test_a_log_line_and_an_error_have_no_secret_and_no_control_character(
    environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\n".join((*TEXTS, environment, "\x1b[2J\x9b2J\u202e"))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(SafeFormatter("%(message)s"))
    try:
        raise ValueError(said)
    except ValueError as error:
        handler.handle(logging.makeLogRecord({"msg": "%s", "args": (said,), "exc_info": (ValueError, error, None)}))
    cli._report(ConfigError(said))
    for text in (stream.getvalue(), capsys.readouterr().err):
        assert "PLANTED" not in text and environment not in text and r"\x1b[2J" in text
        assert not set(text) & set("\x1b\x9b\u202e")
