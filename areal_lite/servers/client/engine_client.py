"""Answers from inference servers: one model call over aborts, weight updates, failures and interruption.

Guarantees that an answer has each of its tokens once, in order, with the log-prob and version of the server that
sampled it, and that the receiver of a streamed answer gets exactly these. Runs on one event loop.

A weight update wants every server to stop, and answers take minutes. Designs that do not work:

- Wait until the servers are idle. The longest of a thousand answers holds all servers for minutes in every step.
- Drop what runs and ask again. The longest answers never end where updates come faster than they do, and what is left
  is biased towards short ones.
- Pause, load, resume, with all answers kept on the server. The server holds their KV caches, computed with the old
  weights, over the update; and nothing is gained when another server is free. It is ``weight_update_pause: keep``.

So an update aborts. A server returns the tokens so far, and :meth:`EngineClient.generate` asks for the rest with them
as part of the prompt, at whichever server is next. One answer then mixes versions, and so each token is labelled by the
server's reply and never by the client's version at either end of the call. A stream whose connection breaks is treated
likewise: what arrived counts, the rest is asked for.

That rests on a server being able to continue an answer from its tokens. It is not for a schema, regex or grammar,
except on the embedded server: others would begin the constraint anew, in the middle of a document. Such an answer
"must stay": updates keep it on its server, and an abort starts it over, which fails if its tokens were passed on.

Two things keep aborts from becoming a loop. Generation is held from the first pause of an update until its end, or what
one server aborts would go to the next, to be aborted there. And aborts in a row without a new token are counted, with
growing pauses, and fail the call in the end: some server aborts whatever it gets.

What can still fail: an interrupted call whose server does not answer within ``INTERRUPT_GRACE_S`` loses its tokens;
its episode samples them again when it is run again.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode
from areal_lite.api.image_span import Images, check_images
from areal_lite.api.io_struct import ModelRequest, ModelResponse, TokenPrefix
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.vision.image_store import EncodedImages, ImageStore
from areal_lite.errors import ServerError
from areal_lite.servers.client.answer import Answer, continued, own_copy, said_full, take_recorded, token_budget
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.client.request_sender import SEND_ERRORS, RequestSender, pause_s, reason_of
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, ServerRequests
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.pool.reconciler import Reconciler
from areal_lite.servers.pool.request_gate import RequestGate, Servers
from areal_lite.servers.pool.server_pool import Server, ServerPool
from areal_lite.servers.pool.sglang_router import Router, router_pool
from areal_lite.servers.weights.published_weights import PublishedWeights

MAX_FRUITLESS_ABORTS = 8
INTERRUPT_GRACE_S = 2.0
"""Seconds a server has to return the tokens of interrupted calls."""


class EngineClient:
    """A client of all servers; ``open`` and ``close`` on the loop it is used on."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        identity: ModelIdentity | None = None,
        on_outage: Callable[[ServerError], None] | None = None,
    ) -> None:
        self.pool = ServerPool(config.addresses)
        self._config = config
        self.requests = ServerRequests(config, dialect_of(config.backend))
        self._images = EncodedImages(ImageStore.of_run(config.run_dir))
        targets = self.pool if config.router is None else router_pool(config.router)
        self.gate = RequestGate(targets, patience_s=config.faults.outage_patience_s, on_outage=on_outage)
        servers = Servers(config, self.pool, self.requests, self.gate)
        self._reconciler = Reconciler(servers, identity=identity)
        self._router = None if config.router is None else Router(servers, self._reconciler)
        self._sender = RequestSender(servers, self._reconciler, self._router)
        self._calls: set[Answer] = set()
        self._said_full = False

    async def open(self) -> None:
        """Compare every server with what the run wants; see :class:`Reconciler`."""
        await self._reconciler.open()
        if self._router is not None:
            await self._router.open()

    async def close(self) -> None:
        await self._reconciler.close()
        await self.requests.aclose()

    def move_server(self, former: str, address: str) -> None:
        self._reconciler.move(former, address)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Have the servers load ``weights``; see :class:`Reconciler`. No generation is sent once a server pauses."""
        try:
            await self._reconciler.update_weights(weights)
            if self._router is not None:
                await self._router.update(weights.version)
        finally:
            self.gate.release("update")
            self.gate.wake_all()

    async def probe(
        self, input_ids: list[int], num_tokens: int, images: Images = ()
    ) -> list[tuple[str, list[int], list[float]]]:
        """Return the greedy answer of each server that is up to one prompt: URL, tokens, log-probs."""
        gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=num_tokens, ignore_eos=True)

        async def ask(server: Server) -> tuple[str, list[int], list[float]] | None:
            answer = Answer(ModelRequest(input_ids=input_ids, gconfig=gconfig, images=images), None, must_stay=False)
            answer.pngs = self._images.of(images)
            call = answer.next_call(input_ids, num_tokens, seed=None)
            body = self.requests.dialect.generate_body(call)
            try:
                chunk = await self._sender.send_once(call, body, server, self.requests.reader(call))
            except SEND_ERRORS as error:
                self._reconciler.failed(server, reason_of(error))
                return None
            return (server.url, chunk.tokens, chunk.logprobs) if chunk.tokens else None

        answers = await asyncio.gather(*(ask(server) for server in self.pool.servers if server.usable))
        if not (found := [answer for answer in answers if answer is not None]):
            raise ServerError(f"no server answers: {self.pool.servers[0].last_failure or 'all are down'}")
        return found

    def metrics(self) -> dict[str, float]:
        """Return the figures of each server as ``INDEX/NAME``, and of the router as ``router/NAME``."""
        figures = self.pool.metrics()
        if self._router is not None:
            figures |= {f"router/{name}": value for name, value in self.gate.pool.servers[0].metrics().items()}
        return figures

    def counts(self) -> dict[str, float]:
        """Return the requests that took more than one try, and the sampled tokens."""
        tokens = sum(server.tokens for server in self.gate.pool.servers)
        return {"retried_requests": float(self._sender.retried), "generated_tokens": float(tokens)}

    async def generate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer; see ``InferenceEngine.agenerate``."""
        episode = episode_context.current().episode
        must_stay = req.gconfig.is_constrained and not self.requests.dialect.continues_constraints
        answer = Answer(req, episode, must_stay=must_stay)
        if episode is not None and episode.oldest_version is None:
            episode.oldest_version = self.requests.version
        prefix = req.prefix or continued(req.input_ids, episode)
        self._calls.add(answer)
        self.gate.running += 1
        try:
            response = await self._generate(answer, prefix)
            if episode is not None:
                episode.server = answer.server
                episode.calls.append(own_copy(response, prefix))
            if answer.interrupted:
                # The workflow would act on half an answer, so the call stays until the cancellation that follows.
                answer.parked.set()
                await asyncio.Event().wait()
            return response
        finally:
            self._calls.discard(answer)
            self.gate.running -= 1

    async def _generate(self, answer: Answer, prefix: TokenPrefix) -> ModelResponse:
        req = answer.req
        seed = self._seed(answer.episode) if req.gconfig.seed is None else req.gconfig.seed
        budget = token_budget(req, prefix.num_accepted, self.requests.limits)
        # Without a prefix of its own, the caller may extend its list while the answer is sampled.
        input_ids = prefix.tolist() if req.prefix is None else req.input_ids
        if req.images:
            check_images(req.images, len(input_ids))
            answer.pngs = await asyncio.to_thread(self._images.of, req.images)
        recorded = take_recorded(answer.episode, input_ids, req.images)
        finish = "abort" if recorded is None else answer.begin_with(recorded)
        fruitless = 0
        while finish == "abort" and not answer.ends_early:
            if answer.response.output_len >= budget:
                finish = "length"
                break
            chunk, tries = await self._sender.send(answer.next_call(input_ids, budget, seed), answer)
            answer.extend(chunk, tries)
            assert chunk.finish is not None, "a reply has its end"
            finish = chunk.finish
            if finish == "abort" and answer.response.output_len < budget and not answer.ends_early:
                if answer.must_stay:
                    answer.start_over()
                fruitless = 0 if answer.response.output_tokens and chunk.tokens else fruitless + 1
                if fruitless > MAX_FRUITLESS_ABORTS:
                    assert answer.server is not None
                    raise ServerError(
                        f"{answer.server.url} aborted request {req.rid} {fruitless} times in a row without a token"
                    )
                if fruitless:
                    await asyncio.sleep(pause_s(fruitless, first_s=0.01, longest_s=1.0))
        response = answer.finish(input_ids, finish)
        window = self.requests.limits.window(req.gconfig)
        self._said_full = self._said_full or said_full(response, window, req.gconfig.max_new_tokens)
        return response

    def _seed(self, episode: Episode | None) -> int | None:
        config = self._config
        if episode is None or episode.seed_name is None or config.seed is None or config.backend != "embedded":
            return None
        name = f"{config.seed}/{episode.seed_name}/{episode.member_idx}/{episode.num_calls}"
        episode.num_calls += 1
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

    async def interrupt(self, episodes: Sequence[Episode]) -> None:
        """End the calls of these episodes and record the tokens they have sampled. The calls never return, so the
        caller must cancel the episodes next. Calls whose server does not answer in time lose their tokens."""
        chosen = {id(episode) for episode in episodes}
        for episode in episodes:
            episode.interrupted = True
        answers = [answer for answer in self._calls if id(answer.episode) in chosen]
        self.gate.wake_all()  # those that wait for a server have nothing to return, and must see the interruption
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERRUPT_GRACE_S), asyncio.TaskGroup() as tasks:
                for answer in answers:
                    tasks.create_task(self._end(answer))

    async def cut_short(self, rid: str) -> None:
        """Have the call of a request return the tokens so far, if it still runs."""
        for answer in [answer for answer in self._calls if answer.req.rid == rid]:
            answer.is_cut = True
            self.gate.wake_all()
            await self._abort(answer)

    async def _end(self, answer: Answer) -> None:
        await self._abort(answer)
        await answer.parked.wait()

    async def _abort(self, answer: Answer) -> None:
        if answer.server is not None:
            for server in [answer.server] if self._router is None else self.pool.servers:
                with contextlib.suppress(ServerError, *REQUEST_ERRORS):
                    await self.requests.control(server, self.requests.dialect.abort(answer.rid))
