"""A real server, the model it serves as transformers computes it, and a line that can be cut."""

from __future__ import annotations
import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
import aiohttp
import torch
from transformers import AutoModelForCausalLM
from areal_lite.api import ModelResponse
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.rollout.loop_thread import LoopThread
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.dialects.dialect import ControlCall
from tests.real_servers.launch import real_process

SMOLLM2 = Path("runs/models/SmolLM2-135M-Instruct")


@dataclass(frozen=True)
class RealServer:
    """Where a server listens and the folder of the model it was started with."""

    backend: str
    address: str
    model: Path

    async def running(self) -> float:
        """Return how many requests it computes or queues."""
        async with aiohttp.ClientSession(f"http://{self.address}") as session:
            if self.backend == "sglang":
                async with session.get("/v1/loads?include=core") as reply:
                    loads = (await reply.json())["loads"]
                    return float(sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads))
            async with session.get("/metrics") as reply:
                lines = (await reply.text()).splitlines()
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
                return sum(float(line.split()[-1]) for line in lines if line.startswith(names))

    async def until(self, busy: bool) -> None:
        """Return when the server is busy or idle.

        Raises:
            TimeoutError: After 10 s.
        """
        async with asyncio.timeout(10):
            while bool(await self.running()) != busy:  # noqa: ASYNC110 -- another program's state
                await asyncio.sleep(0.1)

    async def abort_all(self) -> None:
        """Abort every request behind the engine's back."""
        dialect = dialect_of(self.backend)  # type: ignore[arg-type]
        for call in (dialect.pause(), dialect.resume):
            await self._post(call)

    async def _post(self, call: ControlCall) -> None:
        async with (
            aiohttp.ClientSession(f"http://{self.address}") as session,
            session.post(call.path, json=call.body) as reply,
        ):
            assert reply.status == 200, await reply.text()


@contextmanager
def real_server(backend: str, folder: Path) -> Iterator[RealServer]:
    """Use the server that the environment names, or start one; skip the test if there is neither."""
    model = Path(os.environ.get("AREAL_LITE_SERVER_MODEL", SMOLLM2)).absolute()
    if address := os.environ.get(f"AREAL_LITE_{backend.upper()}_ADDRESS"):
        yield RealServer(backend, address, model)
    else:
        with real_process(backend, model, folder) as server:
            yield RealServer(backend, server.address.removeprefix("http://"), model)


class Policy:
    """A checkpoint folder as transformers computes it in float32, with the tokenizer in ``tokenizer`` or its own."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        self.path = path
        self.tokenizer: Any = load_tokenizer(str(tokenizer or path))
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
        return chosen(self.answer_logits(response) / temperature, response.output_tokens)

    def constrained_logprobs(self, response: ModelResponse, may_follow: Callable[[str, str], bool]) -> torch.Tensor:
        """Return ``[output_len]`` log-probs at temperature 1 of an answer under a grammar, renormalized over the
        tokens that it allows: those with ``may_follow(text so far, text of the token)``, and the end token if the text
        may end, that is ``may_follow(text so far, "")``.
        """
        texts = self.tokenizer.batch_decode([[token] for token in range(self.vocab_size)])
        logits = self.answer_logits(response)
        for place, row in enumerate(logits):
            text = self.tokenizer.decode(response.output_tokens[:place])
            allowed = torch.tensor([bool(more) and may_follow(text, more) for more in texts])
            allowed[self.tokenizer.eos_token_id] = may_follow(text, "")
            row[~allowed] = -torch.inf
        return chosen(logits, response.output_tokens)


def chosen(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return ``[n]`` log-probs of the ``tokens`` that were sampled from ``[n, vocabulary]`` logits."""
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


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
