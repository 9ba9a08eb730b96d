"""Log-probs of sampled tokens under another model: the teacher of on-policy distillation.

Guarantees that each log-prob belongs to the token that it is recorded for: a teacher with another vocabulary is
refused at the start, and a reply must name the ids that were sent. A teacher that is away for a moment is waited for.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
import numpy as np
import orjson
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.trainer_config import TeacherConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.request_sender import pause_s, reason_of
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, RefusedError, ServerRequests
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.dialects.dialect import BadResponse, ErrorReply
from areal_lite.servers.pool.server_pool import ServerPool

_BYTES_PER_TOKEN = 512  # bytes of a reply that a token may take: several times what servers send
_MOST_REQUESTS = 64  # requests at once to a server, which computes each as a whole


class Teacher:
    """Scores sequences on running servers, all of which serve one model with the ``tokenizer_path``'s vocabulary."""

    def __init__(self, config: TeacherConfig, *, tokenizer_path: str, patience_s: float) -> None:
        """Compare vocabularies: ConfigError if they differ, ServerError if a server is away for ``patience_s``."""
        self._engine = InferenceEngineConfig(backend=config.backend, addresses=config.addresses)
        self._dialect = dialect_of(config.backend)
        self._servers = ServerPool(config.addresses, key="trainer.kl.teacher.addresses").servers
        self._patience_s = patience_s
        asyncio.run(self._check(config, tokenizer_path))

    def score(self, sequences: Sequence[TokenSequence]) -> None:
        """Set the ``reference_logprobs`` of the sequences, 0 before the first sampled token. Raises ServerError."""
        asyncio.run(self._score(sequences))

    async def _check(self, config: TeacherConfig, tokenizer_path: str) -> None:
        async with aclosing(ServerRequests(self._engine, self._dialect)) as requests:
            for server in self._servers:
                try:
                    model = (await requests.info(server)).model
                except (ErrorReply, *REQUEST_ERRORS) as error:
                    raise ServerError(f"the teacher {server.url} {reason_of(error)}: start it before the run") from None
                _check_vocabulary(config.tokenizer_path or model, tokenizer_path, server.url)

    async def _score(self, sequences: Sequence[TokenSequence]) -> None:
        requests = ServerRequests(self._engine, self._dialect)
        room = asyncio.Semaphore(_MOST_REQUESTS * len(self._servers))

        async def one(number: int, sequence: TokenSequence) -> None:
            async with room:
                start = max(0, int(sequence.loss_mask.argmax()) - 1)  # what is before is a prompt, also of others
                scores = await self._scores(requests, number, sequence.input_ids.tolist(), start)
            sequence.reference_logprobs = np.array([0.0] * (start + 1) + scores, np.float32)

        try:
            async with aclosing(requests), asyncio.TaskGroup() as tasks:
                for number, sequence in enumerate(sequences):
                    tasks.create_task(one(number, sequence))
        except* ServerError as errors:
            raise errors.exceptions[0] from None

    async def _scores(self, requests: ServerRequests, number: int, ids: list[int], start: int) -> list[float]:
        """Ask the servers in turn until one answers."""
        began, attempt, limit = time.monotonic(), 0, 2**16 + _BYTES_PER_TOKEN * len(ids)
        body, path = self._dialect.score_body(ids, start), self._dialect.generate_path
        while True:
            server = self._servers[(number + attempt) % len(self._servers)]
            try:
                reply = await requests.ask(
                    server, "POST", path, body, timeout_s=self._engine.faults.request_timeout_s, max_bytes=limit
                )
                return self._dialect.parse_scores(orjson.loads(reply), ids, start)
            except RefusedError as error:
                raise ServerError(f"the teacher cannot score {len(ids)} tokens: {error}") from None
            except (BadResponse, ErrorReply, orjson.JSONDecodeError, *REQUEST_ERRORS) as error:
                attempt += 1
                if time.monotonic() - began > self._patience_s:
                    raise ServerError(
                        f"no teacher answered for {self._patience_s:g} s; the last, {server.url}, {reason_of(error)}"
                    ) from None
                await asyncio.sleep(pause_s(attempt))


def _check_vocabulary(teacher_path: str | None, tokenizer_path: str, url: str) -> None:
    fix = "set trainer.kl.teacher.tokenizer_path to a folder with its tokenizer"
    if teacher_path is None:
        raise ConfigError(f"the teacher {url} does not say where its model is: {fix}")
    try:
        teacher = load_tokenizer(teacher_path).get_vocab()
    except ConfigError as error:
        raise ConfigError(f"the tokenizer of the teacher {url} cannot be read: {error}; {fix}") from None
    own = load_tokenizer(tokenizer_path).get_vocab()
    if teacher != own:
        different = len({token for token, _ in teacher.items() ^ own.items()})
        raise ConfigError(
            f"the teacher {url} has another tokenizer than {tokenizer_path}: {different} tokens differ. Its log-probs "
            "would be of other tokens: choose a teacher of the same family"
        )
