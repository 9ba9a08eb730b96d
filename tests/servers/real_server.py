"""A running server, the model it serves as transformers computes it, and a line that can be cut."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lite.api import ModelResponse
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.infra.loop_thread import LoopThread


@dataclass(frozen=True)
class RealServer:
    """Where a server listens and the folder of the model it was started with."""

    backend: str
    address: str
    model: Path


def named_server(backend: str) -> RealServer:
    """Return the server the environment names; skips the test where it names none."""
    variable = f"AREAL_LITE_{backend.upper()}_ADDRESS"
    address, model = os.environ.get(variable), os.environ.get("AREAL_LITE_SERVER_MODEL")
    if not address or not model:
        pytest.skip(
            f"needs a running {backend} server (float32): set {variable} to its host:port and "
            "AREAL_LITE_SERVER_MODEL to the folder of the model it serves"
        )
    return RealServer(backend, address, Path(model))


class Policy:
    """A checkpoint folder as transformers computes it in float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab_size: int = self.model.config.vocab_size

    def answer_logits(self, response: ModelResponse) -> torch.Tensor:
        """Return ``[output_len, vocabulary]`` logits, each computed from all tokens before it."""
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits[response.input_len - 1 : -1]

    def logprobs(self, response: ModelResponse, temperature: float = 1.0) -> torch.Tensor:
        """Return ``[output_len]`` log-probs of the answer at ``temperature``."""
        scores = torch.log_softmax(self.answer_logits(response) / temperature, dim=-1)
        return scores.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]


def prompt(model: Path, text: str = "Tell me a long story about a fox.") -> list[int]:
    """Return the ids of one user message."""
    tokenizer: Any = load_tokenizer(str(model))
    chat = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.encode(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
        add_special_tokens=False,
    )
    return ids


class CuttableLine:
    """A TCP relay to a server; :meth:`cut` does to the client what the server's death would."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = LoopThread("cuttable-line")
        self._listener: asyncio.Server | None = self._loop.call(self._listen())

    async def _listen(self) -> asyncio.Server:
        listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        return listener

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, to_writer}
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))
        self._writers -= {writer, to_writer}

    async def _cut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """End every connection and accept no more."""
        self._loop.call(self._cut())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._loop.stop()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
