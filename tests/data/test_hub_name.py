"""A name that the hub does not give is an error within two seconds; huggingface_hub's own code asks the hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import json, sys, time
import huggingface_hub
from areal_lite.errors import ConfigError
from areal_lite.data.hub_name import check_hub_name
began, message = time.monotonic(), ""
try:
    check_hub_name("areal-lite/a-model", key="reward_model")
except ConfigError as error:
    message = str(error)
print(json.dumps([time.monotonic() - began, message]))
"""


def check(home: Path, endpoint: str, **variables: str) -> tuple[float, str]:
    """Return the seconds and the error of the check in a new process."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **variables}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seconds, message = json.loads(done.stdout)
    return seconds, message


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_cached_model_needs_no_hub(file: str, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--areal-lite--a-model"
    for path, content in (("refs/main", "c0ffee"), (f"snapshots/c0ffee/{file}", "{}")):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(content)
    assert check(tmp_path, "http://127.0.0.1:9")[1] == ""


@pytest.mark.parametrize("answers", ["nobody", "silence", "offline"])
def test_a_hub_that_cannot_be_reached_is_an_error_within_two_seconds(answers: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1] if answers == 'silence' else 9}"
        offline = {"HF_HUB_OFFLINE": "1"} if answers == "offline" else {}
        seconds, message = check(tmp_path, endpoint, **offline)
    assert seconds < 2
    assert message.startswith(
        "reward_model 'areal-lite/a-model' is neither a directory nor in the cache of the Hugging"
    )
    assert f"and {endpoint} does not give it (" in message
    assert "check the name and the network" in message
