"""What is sent to a child process: loaded there by name, without running the main script again."""

from __future__ import annotations
import os
import pickle
import queue
import subprocess
import sys
from pathlib import Path
import pytest
from areal_lite.processes.child_process import ChildProcess, pickled_object
from tests.fork_server import IN_A_FORK

PATH = {"PYTHONPATH": str(Path(__file__).parents[2])}
SCRIPT = f"""{IN_A_FORK}
from areal_lite.agents.isolation.agent_processes import pickled_agent
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.rollout.episodes.workflow_resolution import pickled_workflow

class Agent:
    async def run(self, data, **extra):
        return 1.0

"""
SENDS = {
    "agent": "pickled_agent(Agent())",
    "workflow": "pickled_workflow(Agent, {}, InferenceEngineConfig(workers=2))",
}


@pytest.mark.parametrize("what", SENDS)
def test_a_script_that_would_run_again_in_every_process_is_refused(what: str, tmp_path: Path) -> None:
    for main, refused in ((SENDS[what], True), (f"if __name__ == '__main__':\n    {SENDS[what]}", False)):
        script = tmp_path / "script.py"
        script.write_text(f"{SCRIPT}{main}\n")
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ | PATH)
        assert (done.returncode != 0) == refused, done.stderr
        assert (f"lives in {script}, which every process would run again as a whole" in done.stderr) == refused


def test_elsewhere_an_object_is_loaded_in_the_folder_and_from_the_paths_of_its_process(tmp_path: Path) -> None:
    sent = pickled_object(tmp_path, name="it", hint="")
    program = """
import os, pickle, sys
from areal_lite.processes.child_process import prepare
before = os.getcwd(), [*sys.path]
sent, folder = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2]
prepare(sent, elsewhere=True)
assert str(pickle.loads(sent.pickled)) == before[0]
assert (os.getcwd(), sys.path) == before
prepare(sent, elsewhere=False)
assert os.getcwd() == folder
"""
    words = [sys.executable, "-c", program, pickle.dumps(sent).hex(), str(Path.cwd())]
    subprocess.run(words, cwd=tmp_path, check=True, env=os.environ | PATH)


def test_a_program_whose_end_another_took_still_ends_here_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that shares this process may wait for any child, as a handler of SIGCHLD does."""
    waitid = os.waitid

    def late(*given: int) -> object:
        os.waitpid(given[1], 0)
        return waitid(*given)

    monkeypatch.setattr(os, "waitid", late)
    reads, writes = os.pipe()
    ends: queue.SimpleQueue[None] = queue.SimpleQueue()
    child = ChildProcess(
        ["sh", "-c", "sleep 1000 &"],
        environment={},
        output=None,
        pass_fds=(writes,),
        on_end=lambda: ends.put(None),
    )
    os.close(writes)
    ends.get(timeout=10)
    assert child.wait(0) == 0
    assert os.read(reads, 1) == b""  # only once no process holds the other end: the one in the background was killed
    os.close(reads)
