"""Bring up the server: load the model, start the model thread, answer requests until a signal."""

from __future__ import annotations
import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from aiohttp import web
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.routes.http_server import Routes, application
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.processes.http_limits import HttpLimits, SurplusConnection
from areal_lite.processes.ports import check_port
from areal_lite.processes.quick_import import quick_import
from areal_lite.servers.programs.embedded_server import cpu_threads
from areal_lite.servers.programs.server_program import ServedModel

if TYPE_CHECKING:
    from areal_lite.embedded.model_thread import ModelThread
    from areal_lite.embedded.routes.generation_routes import GenerationRoutes

_LIMITS = HttpLimits(max_body_bytes=64 * 2**20)
_TOO_MANY = b'{"error": {"message": "too many connections: close some"}}'

Extend: TypeAlias = "Callable[[GenerationRoutes, web.Application], None]"
"""Adds routes to the server's application; they generate with ``events``."""


class ModelServer(NamedTuple):
    """A model in its thread, and the routes to it."""

    model: ModelThread
    generation: GenerationRoutes
    others: tuple[Routes, ...]


def resolve_model_path(model_path: str) -> Path:
    """Return the directory of a model; download it if ``model_path`` is a name on the Hugging Face Hub. Raises
    ConfigError if the directory cannot be served, or the download fails."""
    check_model_path(model_path)
    check_image_model(model_path)
    local = Path(model_path).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        return Path(snapshot_download(model_path, allow_patterns=patterns))  # nosec B615 # the user's config names it; no code
    except Exception as error:
        raise ConfigError(
            f"model_path {model_path!r} is not a directory, and its download from the Hugging Face Hub failed "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}). Check the name and "
            "the network, or give a directory with config.json and weights."
        ) from error


def serve(
    config: EmbeddedServerConfig, served: ServedModel, *, on_ready: Callable[[str, int], None], extend: Extend | None
) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` gets host and port once requests are answered. Raises ConfigError if
    model, port or device cannot be used; if possible before torch is imported."""
    directory = resolve_model_path(served.model_path)
    check_port(config.host, config.port)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Torch has threads for each thread that computes; more of them than cores sleep between operations. These end.
    with quick_import(), ThreadPoolExecutor(1) as loading:
        server = loading.submit(build, config, directory, served).result()

    async def until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with listening(server, host=config.host, port=config.port, extend=extend) as port:
            on_ready(config.host, port)
            await stop.wait()

    asyncio.run(until_signal())


def build(config: EmbeddedServerConfig, directory: Path, served: ServedModel) -> ModelServer:
    """Load the model in ``directory`` and connect the parts; ``listening`` starts them."""
    import torch
    from transformers import AutoTokenizer
    from areal_lite.data.vision.image_processor import load_image_processor
    from areal_lite.embedded.grammar import GrammarCompiler
    from areal_lite.embedded.model_runner import ModelRunner, load_model
    from areal_lite.embedded.model_thread import ModelThread
    from areal_lite.embedded.routes.control_routes import ControlRoutes
    from areal_lite.embedded.routes.generation_routes import GenerationRoutes
    from areal_lite.embedded.routes.weight_routes import WeightRoutes
    from areal_lite.embedded.scheduler import BatchLimits, Scheduler
    from areal_lite.models.out_of_memory import is_out_of_memory
    from areal_lite.models.policy_model import resolve_device, resolve_dtype
    from areal_lite.models.vision_model import text_decoder

    on = resolve_device(config.device, key="device")
    device = on.type
    torch.set_num_threads(cpu_threads(config))
    if served.deterministic and device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    model = load_model(directory, dtype=resolve_dtype(config.dtype, on), device=device)
    tokenizer = AutoTokenizer.from_pretrained(directory)  # nosec B615 # a folder
    longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
    context_length = config.context_length or longest
    if context_length > longest:
        raise ConfigError(f"context_length is {context_length}: {directory} attends to {longest} at most.")
    # If a request is alone in the batch, its shapes and its slot are always the same.
    batch_size = 1 if served.deterministic else config.max_running_requests
    # Slots beyond the batch keep the KV of finished turns for an agent's next turn.
    slots = batch_size + max(4, batch_size // 2)
    processor = load_image_processor(str(directory)) if text_decoder(model) is not None else None
    try:
        runner = ModelRunner(
            model, slots=slots, context_length=context_length, exact=served.deterministic, image_processor=processor
        )
        runner.check_against_plain_forward()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out for the KV of {slots} slots of {context_length} tokens ({error}): lower "
            f"server.max_running_requests from {config.max_running_requests} or server.context_length from "
            f"{context_length}"
        ) from error

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    eos_ids = eos_token_ids(model, tokenizer)
    scheduler = Scheduler(
        runner,
        eos_ids=eos_ids,
        decode=decode,
        limits=BatchLimits(
            max_running_requests=batch_size,
            max_total_tokens=config.max_total_tokens or batch_size * context_length,
            max_prefill_tokens=config.max_prefill_tokens or (512 if device == "cpu" else 8192),
        ),
        weight_version=served.weight_version,
        keep_prefixes=not served.deterministic,
    )
    thread = ModelThread(scheduler)
    weights = WeightRoutes(thread, str(directory))
    generation = GenerationRoutes(
        thread,
        weights,
        decode=decode,
        grammars=GrammarCompiler(tokenizer, vocab_size=runner.vocab_size, eos_ids=eos_ids),
        seed=served.seed,
    )
    description = {
        "model_type": model.config.model_type,
        "architectures": model.config.architectures,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "num_threads": cpu_threads(config),
    }
    return ModelServer(thread, generation, (weights, ControlRoutes(thread, weights, description)))


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an output: those of the generation config, the config and the tokenizer."""
    ids: set[int] = set()
    text_config = model.config.get_text_config()
    for given in (model.generation_config.eos_token_id, text_config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(given) if isinstance(given, list) else {given} if given is not None else set()
    return frozenset(ids)


@asynccontextmanager
async def listening(
    server: ModelServer, *, host: str, port: int, extend: Extend | None = None, limits: HttpLimits = _LIMITS
) -> AsyncIterator[int]:
    """Answer requests inside the ``async with``; yields the port."""
    loop = asyncio.get_running_loop()
    server.model.start(loop)
    app = application((server.generation, *server.others), host=host, limits=limits)
    if extend is not None:
        extend(server.generation, app)

    def protocol() -> asyncio.BaseProtocol:
        assert runner.server is not None
        is_surplus = len(runner.server.connections) >= limits.max_connections
        return SurplusConnection(_TOO_MANY) if is_surplus else runner.server()

    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=limits.request_timeout_s,
        lingering_time=min(10.0, limits.request_timeout_s),
    )
    await runner.setup()
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=4096)
        with closing(await loop.create_server(protocol, sock=listener, backlog=4096)):
            yield listener.getsockname()[1]
    finally:
        await runner.cleanup()
        server.model.close()
