"""AReaL's helpers that areal_lite itself has no need for; those for tracing do nothing, as dumps have all times."""

import base64
import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar
from areal_lite.config.dotted_path import load_object
from areal_lite.data.chat.tokenizer import load_processor, load_tokenizer
from areal_lite.data.vision.image_source import png_of

F = TypeVar("F", bound=Callable[..., Any])


def import_from_string(module_path: str) -> Any:
    """Return the object at ``package.module.Name``; ConfigError if there is none."""
    return load_object(module_path, where="module_path")


def getLogger(name: str | None = None, type_: str | None = None) -> logging.Logger:
    """Return the standard library's logger ``name``; AReaL's ``type_`` of output is ignored."""
    return logging.getLogger(name)


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
) -> Any:
    """Return the rendered conversation as a list of token ids, or as text with ``tokenize=False``."""
    rendered = tokenizer.apply_chat_template(messages, tokenize=tokenize, **kwargs)
    return list(rendered["input_ids"]) if isinstance(rendered, Mapping) else rendered


@functools.cache
def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub name, ConfigError if there is none; without a pad token, its end token
    pads. ``fast_tokenizer`` is ignored: the model's own kind is loaded. A ``padding_side`` None is its own."""
    tokenizer = copy.deepcopy(load_tokenizer(model_name_or_path))  # the shared one stays as it is
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if padding_side is not None:
        tokenizer.padding_side = padding_side
    return tokenizer


def load_hf_processor_and_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> tuple[Any, Any]:
    """Return the processor (None for a model that reads only text) and the tokenizer; ConfigError without them."""
    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side)
    return load_processor(model_name_or_path), tokenizer


def image2base64(images: Any) -> list[str]:
    """Return PIL images as base64 of PNG files."""
    return [base64.b64encode(png_of(image)).decode() for image in (images if isinstance(images, list) else [images])]


AgentRequest = AgentResponse = SimpleNamespace
AgentRunnable = EventEmitter = Any
"""Types of chat agents of AReaL's Agent Service, whose ``run(request, emitter=...)`` returns a text."""


class Category:
    """AReaL's categories of trace events."""

    COMPUTE, COMM, IO, SYNC = "compute", "comm", "io", "sync"
    SCHEDULER, INSTR, MISC = "scheduler", "instr", "misc"


def trace_perf(*names: Any, **options: Any) -> Callable[[F], F]:
    """Return a decorator that leaves the function as it is."""
    return lambda function: function


trace_session = session_context = trace_perf


def trace_scope(name: str, category: Any = None, args: Any = None, **payload: Any) -> nullcontext[None]:
    """Return a context manager, also an async one, that does nothing."""
    return nullcontext()


atrace_scope = atrace_session_phase = trace_scope
