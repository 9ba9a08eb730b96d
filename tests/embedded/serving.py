"""A real server in the test's event loop, a client, and plain transformers as a reference."""

from __future__ import annotations
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
import aiohttp
import torch
from areal_lite.api import InferenceEngineConfig
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.scheduler import Scheduler
from areal_lite.embedded.startup import build, listening
from areal_lite.processes.http_limits import HttpLimits
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.programs.server_program import ServedModel


class Client:
    """JSON calls to one server."""

    def __init__(self, session: aiohttp.ClientSession, scheduler: Scheduler, address: str) -> None:
        self.session = session
        self.address = address
        self.scheduler = scheduler

    async def call(self, path: str, body: Any = None, *, raw: bytes | io.BytesIO | None = None) -> tuple[int, Any]:
        """POST, or GET without a body; return status and parsed JSON, or text."""
        method = "GET" if body is None and raw is None else "POST"
        data = raw if raw is not None else (None if body is None else json.dumps(body).encode())
        async with self.session.request(method, path, data=data) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    def pace(self) -> None:
        """Make each step take a moment, so that 200 tokens are not there before this test goes on."""
        step = self.scheduler.step
        self.scheduler.step = lambda: (time.sleep(0.003), step())[1]  # type: ignore[method-assign]

    async def generate(self, prompt: list[int], *, rid: str | None = None, **params: Any) -> Any:
        """Return the reply to one prompt, with log-probs; greedy by default."""
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "rid": rid,
        }
        status, reply = await self.call("/generate", body | {"sampling_params": {"temperature": 0} | params})
        assert status == 200, reply
        return reply

    @asynccontextmanager
    async def stream(self, prompt: list[int], **params: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Yield the events of a streamed call."""
        rid = params.pop("rid", None)
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "stream": True,
            "rid": rid,
            "sampling_params": params,
        }
        async with self.session.post("/generate", data=json.dumps(body).encode()) as response:

            async def events() -> AsyncIterator[Any]:
                async for line in response.content:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])

            yield events()


@asynccontextmanager
async def serving(
    path: Path,
    *,
    seed: int = 0,
    weight_version: str = "0",
    deterministic: bool = False,
    limits: HttpLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """Serve ``path`` in float32 on one thread."""
    config = EmbeddedServerConfig(**{"dtype": "float32", "device": "cpu", "num_threads": 1} | settings)
    served = ServedModel(model_path=str(path), seed=seed, weight_version=weight_version, deterministic=deterministic)
    server = build(config, path, served)
    async with (
        listening(server, host="127.0.0.1", port=0, **({} if limits is None else {"limits": limits})) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Content-Type": "application/json"}) as session,
    ):
        yield Client(session, server.model.scheduler, f"127.0.0.1:{port}")


@asynccontextmanager
async def engine_client(client: Client, **settings: Any) -> AsyncIterator[EngineClient]:
    """Connect the engine's client to the same server."""
    engine = EngineClient(InferenceEngineConfig(backend="embedded", addresses=[client.address], **settings))
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


def load(path: Path) -> Any:
    """Return the model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-prob of each output id in one plain forward pass."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def reported(reply: Any) -> list[float]:
    """Return the reply's log-probs after checking that they belong to its ids."""
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply["output_ids"]
    return [entry[0] for entry in entries]


def worst(first: list[float], second: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
