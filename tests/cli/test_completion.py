"""The printed scripts complete commands, options, values, files and config keys."""

import shutil
import subprocess
import sys
import pytest

BASH = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$(($# - 2))
_areal_lite
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    def make(shell):
        path = tmp_path_factory.mktemp("scripts") / shell
        command = [sys.executable, "-m", "areal_lite", "completion", shell]
        path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return path

    return make


@pytest.fixture(scope="module")
def bash(script):
    path = script("bash")

    def complete(*words, cwd):
        command = ["bash", "-c", BASH, "bash", str(path), "areal-lite", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["pl"], ["plan", "plot"]),
        (["train", "my"], ["my.yaml", "my_runs"]),
        (["train", "my.yaml", "rollout.group_"], ["rollout.group_size="]),
        (["sft", "my.yaml", "trainer.averag"], ["trainer.averaging="]),
        (["plan", "--j"], ["--json"]),
        (["init", "name", "--template", "mul"], ["multi-turn"]),
        (["completion", "f"], ["fish"]),
        (["dpo", "my.yaml", "rollout."], []),  # a key of other commands
    ],
)
def test_bash_completes(bash, tmp_path, words, completed):
    (tmp_path / "my.yaml").touch()
    (tmp_path / "my_runs").mkdir()
    assert sorted(bash(*words, cwd=tmp_path)) == completed


def test_every_command_is_in_every_script(script):
    from areal_lite.cli.commands import COMMANDS

    for shell in ("bash", "zsh", "fish"):
        text = script(shell).read_text()
        assert not [name for name in COMMANDS if name not in text]
        assert "trainer.learning_rate" in text
        if shutil.which(shell):
            assert subprocess.run([shell, "-n", str(script(shell))], capture_output=True).returncode == 0
