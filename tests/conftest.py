"""Settings of all tests, and the model and server that most runs of tests share."""

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
import pytest
from hypothesis import settings
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from tests import fork_server
from tests.fixtures.tiny_model import build_tiny_model

os.environ["PYTHONHASHSEED"] = "0"  # as the command sets it, which would else start anew in each child process
fork_server.install()

# A loaded machine is no bug; pytest-timeout bounds each test.
settings.register_profile("areal_lite", deadline=None)
settings.load_profile("areal_lite")


# Nothing that imports and collection leave is garbage; to scan it again and again takes as long as many tests.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Keep what commands cache, such as indexes of dumps, out of the user's own cache, and compile each kernel once."""
    folder = tempfile.TemporaryDirectory(prefix="areal-lite-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name
    if "CXX" not in os.environ and shutil.which("c++"):  # workers of these tests inherit it
        compiler = Path(folder.name) / "c++"
        compiler.write_bytes(Path(__file__).with_name("compile_once.sh").read_bytes())
        compiler.chmod(0o755)
        os.environ["CXX"] = str(compiler)
    if hasattr(config, "workerinput"):
        fork_server.start()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


LONGEST = (
    "benchmarks/test_smoke.py",
    "tools/verify/test_verify.py",
    "e2e/test_supervised.py",
    "cli/test_commands.py",
    "servers/programs/test_server_group.py",
    "trainer/checkpoint/test_crash_resume.py",
    "rollout/workers/test_worker_pool.py",
    "models/parallel/test_distributed.py",
    "e2e/test_training_run.py",
    "rollout/test_loop_watchdog.py",
    "agents/isolation/test_agent_isolation.py",
    "models/parallel/test_mesh.py",
    "e2e/test_algorithms.py",
    "e2e/test_stopping.py",
    "cluster/test_own_ray.py",
    "tools/inspect/test_foreign_folder.py",
    "trainer/rl/test_episode_credit.py",
    "tools/env_check/test_env_check.py",
    "examples/test_examples.py",
    "e2e/test_resume.py",
    "servers/pool/test_server_faults.py",
    "models/test_attention_windows.py",
    "trainer/rl/test_naive_step.py",
    "e2e/test_seed_examples.py",
    "e2e/test_self_play.py",
    "cli/test_rank_end.py",
    "api/test_reward_wrapper.py",
    "e2e/test_verl_rows.py",
    "e2e/test_started_servers.py",
    "e2e/test_exact_resume.py",
    "data/supervised/test_sft_dataset.py",
    "trainer/rl/test_policy_trainer.py",
    "trainer/checkpoint/test_crash_states.py",
    "e2e/test_smollm2.py",
    "servers/client/test_server_requests.py",
    "servers/programs/test_embedded_server.py",
    "embedded/test_windows.py",
)
"""Files that take 10 seconds or more, the longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the longest files, so that no worker is left with one at the end (with ``--no-loadscope-reorder``)."""
    if not hasattr(config, "workerinput"):
        return
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[str]:
    """Return the address of a server of the tiny model, for runs that need none of their own: each publishes its first
    weights there. To start one takes longer than to train.
    """
    with EmbeddedServer(model_path=str(tiny_model), dtype="float32", num_threads=1, device="cpu") as server:
        yield server.address


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: a task of another test that is collected may log a traceback, for which Python 3.11
    calls ``ast.parse``, and that fails inside another ``ast.parse``.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def stray_exceptions(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the exceptions of tasks that nobody awaited since the test began, without those of tests before it."""
    gc.collect()
    caplog.clear()

    def found() -> list[str]:
        gc.collect()
        return [message for message in caplog.messages if "never retrieved" in message]

    return found
