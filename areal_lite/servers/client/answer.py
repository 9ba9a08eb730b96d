"""The answer to one model request while it is sampled, over all generation calls that it takes, and as it is kept. Of
the answers that an episode keeps, prompts that extend one share its ids, and a rerun takes them as its own."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from areal_lite.api.episode_context import Episode
from areal_lite.api.image_span import Images
from areal_lite.api.io_struct import ModelRequest, ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.errors import ConfigError, ContextOverflowError, ServerError
from areal_lite.servers.dialects.dialect import Chunk, GenerationCall, ServerLimits

logger = logging.getLogger(__name__)

COLUMNS = ("output_tokens", "output_logprobs", "output_versions", "output_top_logprobs")
"""The fields of a response that have an entry per token."""
MAX_BRANCHES = 8  # latest answers of an episode that a prompt may extend to share their ids


class Answer:
    """The response while it grows, and what its next call needs."""

    def __init__(self, req: ModelRequest, episode: Episode | None, *, must_stay: bool) -> None:
        self.req = req
        self.rid = req.rid  # of its last request to a server
        self.episode = episode
        self.must_stay = must_stay  # it cannot be continued after an abort: its server would begin its constraint anew
        self.server = None if episode is None else episode.server
        """Server of its last request; before the first, the preferred server."""
        self.response = ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=[],
            output_logprobs=[],
            output_versions=[],
            started=time.time(),
            attempts=0,
            rid=req.rid,
            tokenizer=req.tokenizer,
            metadata=req.metadata,
            images=req.images,
        )
        self.pngs: Mapping[str, str] = {}  # images of the prompt, in base64 by sha256
        self.is_cut = False  # its client has left: it ends with the tokens that it has
        self.parked = asyncio.Event()  # set once the call was interrupted and has kept its tokens
        self.broken_streams = 0
        self._began = time.monotonic()

    @property
    def interrupted(self) -> bool:
        return self.episode is not None and self.episode.interrupted

    @property
    def ends_early(self) -> bool:
        return self.is_cut or self.interrupted

    def next_call(self, input_ids: list[int], budget: int, seed: int | None) -> GenerationCall:
        gconfig, tokens = self.req.gconfig, self.response.output_tokens
        num_tokens = len(tokens)
        return GenerationCall(
            input_ids=input_ids + tokens if num_tokens else input_ids,
            gconfig=gconfig,
            rid=self.rid,
            max_new_tokens=budget - num_tokens,
            min_new_tokens=max(0, min(gconfig.min_new_tokens, budget) - num_tokens),
            seed=seed,
            num_continued=num_tokens,
            top_logprobs=self.req.top_logprobs,
            stream=self.req.on_tokens is not None,
            images=self.req.images,
            pngs=self.pngs,
        )

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._count_first_token()
        assert self.req.on_tokens is not None
        self.req.on_tokens(tokens, logprobs)

    def _count_first_token(self) -> None:
        self.response.ttft = self.response.ttft or time.monotonic() - self._began

    def begin_with(self, recorded: ModelResponse) -> str:
        """Begin with a recorded answer, if it has all that is asked for; return its stop reason."""
        lacks_top = self.req.top_logprobs and len(recorded.output_top_logprobs) != len(recorded.output_tokens)
        if lacks_top or (self.must_stay and recorded.stop_reason == "abort"):
            return "abort"
        for name in COLUMNS:
            setattr(self.response, name, getattr(recorded, name).copy())
        if self.req.on_tokens is not None and recorded.output_tokens:
            self.receive(recorded.output_tokens, recorded.output_logprobs)
        return recorded.stop_reason

    def extend(self, chunk: Chunk, attempts: int = 1) -> None:
        """Add the tokens of a call that was sent ``attempts`` times."""
        self._count_first_token()
        response = self.response
        response.attempts += attempts
        response.output_tokens += chunk.tokens
        response.output_logprobs += chunk.logprobs
        response.output_versions += chunk.versions or ()
        response.output_top_logprobs += chunk.top_logprobs

    def start_over(self) -> None:
        """Forget an aborted constrained answer: the server would begin the constraint anew after its tokens."""
        if self.req.on_tokens is not None and self.response.output_tokens:
            assert self.server is not None
            raise ServerError(
                f"{self.server.url} aborted request {self.req.rid}, a streamed answer under a schema, regex or "
                "grammar, which it cannot continue. Send it without on_tokens, or use the embedded server"
            )
        for name in COLUMNS:
            setattr(self.response, name, [])

    def finish(self, input_ids: list[int], stop_reason: str) -> ModelResponse:
        response = self.response
        response.input_tokens, response.stop_reason = input_ids, stop_reason
        response.latency = time.monotonic() - self._began
        if response.attempts and self.server is not None:
            response.server = self.server.url
        return response


def said_full(response: ModelResponse, window: int, wanted_tokens: int) -> bool:
    """Warn if an answer of up to ``wanted_tokens`` filled the window; return if it did. Callers ask until warned."""
    prompt, answer = response.input_len, response.output_len
    full = prompt + answer >= window
    if response.stop_reason != "length" or not (full or answer < wanted_tokens):
        return False
    logger.warning(
        "an answer ended after %d tokens because with its prompt of %d it filled the window%s, not at its own end: "
        "shorten prompts, or raise gconfig.max_tokens and the server's context length. Later ones are not logged",
        answer,
        prompt,
        f" of {window} tokens" if full else "",
    )
    return True


def token_budget(req: ModelRequest, num_accepted: int, limits: ServerLimits) -> int:
    """Return the maximum tokens of the answer; the first ``num_accepted`` ids, which a server took, pass unchecked."""
    ids, gconfig = req.input_ids, req.gconfig
    if gconfig.n_samples != 1:
        raise ConfigError(
            f"gconfig.n_samples is {gconfig.n_samples}: one request gives one answer; use gconfig.new(n_samples=1)"
        )
    if req.top_logprobs < 0:
        raise ConfigError(f"top_logprobs is {req.top_logprobs}: it is a number of tokens, 0 for none")
    if not ids:
        raise ConfigError("input_ids is empty: a prompt has at least one token")
    vocab_size = limits.vocab_size  # an id beyond it ends an SGLang server
    new = ids[num_accepted:]
    if set(map(type, new)) - {int} or min(new, default=0) < 0 or (vocab_size and max(new, default=0) >= vocab_size):
        bad = next(i for i in new if type(i) is not int or i < 0 or (vocab_size and i >= vocab_size))
        raise ConfigError(
            f"input_ids holds {bad!r}: ids are plain ints from 0 to below the vocabulary size"
            f"{'' if vocab_size is None else f' {vocab_size}'}; a tensor needs .tolist()"
        )
    window = limits.window(gconfig)
    budget = min(gconfig.max_new_tokens, window - len(ids))
    if budget < 1:
        raise ContextOverflowError(
            f"the prompt has {len(ids)} tokens and the window {window}, so no token can be sampled: shorten the "
            "prompt, or raise gconfig.max_tokens or the server's context length"
        )
    return budget


def continued(ids: list[int], episode: Episode | None) -> TokenPrefix:
    """Return a prompt; if it extends one of the episode's latest answers, it shares that one's ids."""
    if episode is not None and isinstance(ids, list):
        for call in reversed(episode.calls[-MAX_BRANCHES:]):
            before, end = call.prompt, call.input_len + call.output_len
            if ids[before.length : end] == call.output_tokens and ids[: before.length] == before.tolist():
                return before.extended(ids[before.length :])
    return TokenPrefix(list(ids), len(ids))


def own_copy(response: ModelResponse, prefix: TokenPrefix) -> ModelResponse:
    """Return a copy for the record: a workflow may build its next prompt in the answer's lists, not in ``prefix``."""
    own = SharedPromptResponse.of(response, prefix)
    for name in COLUMNS:
        setattr(own, name, getattr(response, name).copy())
    return own


def take_recorded(episode: Episode | None, input_ids: list[int], images: Images = ()) -> ModelResponse | None:
    """Take the answer that an earlier run of the episode got to this prompt."""
    answers = [] if episode is None else episode.recorded.get(len(input_ids), [])
    for index, answer in enumerate(answers):
        if answer.images == images and answer.prompt.tolist() == input_ids:
            return answers.pop(index)
    return None
