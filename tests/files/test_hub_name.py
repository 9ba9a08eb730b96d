"""A name that the hub does not give is an error within two seconds; huggingface_hub's own code asks the hub."""

from __future__ import annotations
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
import huggingface_hub.constants
import pytest
from areal_lite.errors import ConfigError
from areal_lite.files import model_path

CHECK = """
import huggingface_hub.constants
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_hub_name
message = ""
try:
    check_hub_name("areal-lite/a-model", key="reward_model")
except ConfigError as error:
    message = str(error)
print(message)
"""


def check(home: Path, endpoint: str, **variables: str) -> str:
    """Return the error of the check in a new process."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **variables}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_cached_model_needs_no_hub(file: str, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--areal-lite--a-model"
    for path, content in (("refs/main", "c0ffee"), (f"snapshots/c0ffee/{file}", "{}")):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(content)
    assert check(tmp_path, "http://127.0.0.1:9") == ""


@pytest.mark.parametrize("answers", ["nobody", "silence", "offline"])
def test_a_hub_that_cannot_be_reached_is_an_error_within_two_seconds(answers: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1] if answers == 'silence' else 9}"
        offline = {"HF_HUB_OFFLINE": "1"} if answers == "offline" else {}
        message = check(tmp_path, endpoint, **offline)
    assert model_path.TIMEOUT_S < 2  # it asks once, and waits no longer
    assert message.startswith(
        "reward_model 'areal-lite/a-model' is neither a directory nor in the cache of the Hugging"
    )
    assert f"and {endpoint} does not give it (" in message
    assert "check the name and the network" in message


class Hub(BaseHTTPRequestHandler):
    """A hub whose answer is in the name of the model: ``STATUS-ERROR``."""

    asked: list[bool]
    """Of each question, whether its thread ends with the program."""

    def do_HEAD(self) -> None:
        self.asked.extend(thread.daemon for thread in threading.enumerate() if thread.name == "areal-lite-hub")
        status, _, error = self.path.split("/")[2].partition("-")
        self.send_response(int(status))
        self.send_header("X-Error-Code", error)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    constants = huggingface_hub.constants
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    monkeypatch.setattr(model_path, "TIMEOUT_S", 50.0)  # a busy machine may answer late
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    huggingface_hub.close_session()  # the next one reads the environment
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Hub
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()
    model_path.check_hub_name.cache_clear()


@pytest.mark.parametrize("answer", ["200", "404-EntryNotFound", "429", "503"])
def test_a_model_that_the_hub_has_or_may_have_is_accepted(answer: str, hub: type[Hub]) -> None:
    model_path.check_hub_name(f"owner/{answer}")
    assert hub.asked == [True]


@pytest.mark.parametrize(
    ("answer", "error"), [("404-RepoNotFound", "RepositoryNotFoundError: 404"), ("410", ": .*410")]
)
def test_a_model_that_the_hub_does_not_have_is_an_error_with_its_answer(
    answer: str, error: str, hub: type[Hub]
) -> None:
    message = rf"model_path 'owner/{answer}' is neither .* does not give it \(.*{error}.*\): check the name"
    with pytest.raises(ConfigError, match=message):
        model_path.check_hub_name(f"owner/{answer}")
    assert hub.asked == [True]


def test_a_cached_model_is_not_asked_for(tmp_path: Path, hub: type[Hub]) -> None:
    repository = tmp_path / "models--owner--404-RepoNotFound"
    for path, content in (("refs/main", "c0ffee"), ("snapshots/c0ffee/config.json", "{}")):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(content)
    model_path.check_hub_name("owner/404-RepoNotFound")
    assert hub.asked == []


def test_a_folder_or_an_odd_text_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    names = ("owner/name", "name", "folder", "./name", "a name")
    assert [model_path.is_hub_name(name) for name in names] == [True, True, False, False, False]
