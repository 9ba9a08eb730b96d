"""Real servers for the tests here, as `make test-servers` installs them."""

from __future__ import annotations
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest

pytest.register_assert_rewrite("tests.real_servers.agent_contract", "tests.real_servers.contract")

from areal_lite.api import InferenceEngineConfig  # noqa: E402
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine  # noqa: E402
from areal_lite.servers.weights.weight_folder import publish_weights  # noqa: E402
from tests.real_servers.contract import distances  # noqa: E402
from tests.real_servers.real_server import Policy, RealServer, real_server  # noqa: E402


@pytest.fixture(scope="class")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with the starting weights."""
    with real_server(request.cls.backend, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="class")
def policy(server: RealServer) -> Policy:
    """The model the server started with, in float32."""
    return Policy(server.model)


@pytest.fixture(scope="class")
def perturbed(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The same model with 5 % noise, published the way the trainer publishes."""
    import torch

    other = Policy(policy.path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    folder = publish_weights(other.model, tmp_path_factory.mktemp("weights"), 1)
    return Policy(folder, tokenizer=policy.path)


@pytest.fixture
def config(server: RealServer, tmp_path: Path) -> dict[str, Any]:
    """What every engine here is made with."""
    return {
        "backend": server.backend,
        "addresses": [server.address],
        "fileroot": str(tmp_path),
        "tokenizer_path": str(server.model),
        "agents": {"tools_in_system_prompt": True},
    }


@pytest.fixture
def engine(config: dict[str, Any]) -> Iterator[RemoteInfEngine]:
    """An engine on the server."""
    with RemoteInfEngine(InferenceEngineConfig(**config)) as engine:
        yield engine


@pytest.fixture
def restored(server: RealServer, config: dict[str, Any]) -> Iterator[None]:
    """Gives the server its starting weights back, as version 0, after the test."""
    yield
    with RemoteInfEngine(InferenceEngineConfig(**config)) as engine:
        engine.update_weights_from_disk(str(server.model), 0)


# -- the table of results in docs/servers.md ---------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs/servers.md"
BEGIN, END = "<!-- table of real servers: begin -->", "<!-- table of real servers: end -->"
NAMES = {
    "TestSGLang": "SGLang",
    "TestSGLangPair": "SGLang",
    "TestSGLangTraining": "SGLang",
    "TestSGLangAdapters": "SGLang",
    "TestVLLM": "vLLM",
    "TestVLLMPair": "vLLM",
    "TestVLLMTraining": "vLLM",
    "TestVLLMAdapters": "vLLM",
}
RESULTS = Path("runs/servers.json")
"""Outcome of each promise and value of each figure, by server; a run updates those of its own tests."""
results: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A promise that a server does not keep must fail there; once it holds, the test says so."""
    for item in items:
        broken = getattr(getattr(item, "cls", None), "broken_promises", {})
        if reason := broken.get(getattr(item, "originalname", "")):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a promise."""
    parts = report.nodeid.partition("[")[0].split("::")
    if parts[-2] not in NAMES or (report.when != "call" and not report.failed):
        return
    promise = parts[-1].removeprefix("test_").replace("_", " ")
    outcome = "yes" if report.passed else f"no: {getattr(report, 'wasxfail', 'FAILED')}"
    cells = results.setdefault(NAMES[parts[-2]], {})
    cells[promise] = outcome if cells.get(promise, "yes") == "yes" else cells[promise]
    cells.update(report.user_properties)
    if distances:
        name = "largest difference of log-probs"
        cells[name] = f"{max(*distances, float(cells.get(name, 0))):.0e}"
        distances.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table; `UPDATE_TABLE=1` writes it into docs/servers.md."""
    if not results:
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for server, cells in results.items():
        known[server] = known.get(server, {}) | cells
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1))
    lines = [f"| promise | {' | '.join(known)} |", "|---" * (len(known) + 1) + "|"]
    for name in dict.fromkeys(name for cells in known.values() for name in cells):
        lines.append(f"| {name} | {' | '.join(cells.get(name, '-') for cells in known.values())} |")
    table = "\n".join(lines) + "\n"
    terminalreporter.write_line(table)
    if os.environ.get("UPDATE_TABLE"):
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}")
