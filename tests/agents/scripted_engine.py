"""A fake inference engine with scripted answers, and small real tokenizers with three families of chat templates."""

from __future__ import annotations
import asyncio
import functools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any
from areal_lite.agents.doors.completions import ChatCompletions
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.io_struct import ModelRequest, ModelResponse

CHATML = """
{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- set turn = namespace(index=0) %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\n\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if (message.role == 'user') != (turn.index % 2 == 0) %}
            {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
        {%- endif %}
        {%- set turn.index = turn.index + 1 %}
        {%- if message.role == 'user' %}{{- '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}
        {%- else %}{{- message.content + eos_token }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
QWEN3 = (  # drops the thoughts of earlier answers
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
FAMILIES = {  # template, end of answer, beginning of text, other special tokens
    "chatml": (CHATML, "<|im_end|>", None, ["<|im_start|>", "<|endoftext|>"]),
    "llama3": (
        LLAMA3,
        "<|eot_id|>",
        "<|begin_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    ),
    "mistral": (MISTRAL, "</s>", "<s>", ["[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "qwen3": (QWEN3, "<|im_end|>", None, ["<|im_start|>", "<|endoftext|>"]),
}
_CORPUS = [
    "the answer is the largest number of all the numbers, say 12, 89, 41 and 7",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>',
    "hello there, how are you today? I am well. user assistant system tool\n\n\n",
]


@functools.cache
def tokenizer(family: str = "chatml") -> Any:
    """Return a byte-level BPE tokenizer with merges, so that tokenizing a text anew can differ from sampled ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, end, begin, others = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as Qwen's
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[end, *([begin] if begin else []), *others], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(_CORPUS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token=begin, pad_token=end)
    made.chat_template = template
    return made


class ScriptedEngine:
    """Answers ``agenerate`` from a script and remembers every request and answer.

    Args:
        answers: One entry per call: a text, which is encoded and ended with the end token; ids, taken as
            they are, cut by length where they do not end with the end token; or an exception to raise. A
            function is called with the request and returns one of these.
        family: Tokenizer.
    """

    def __init__(self, answers: Iterable[Any] | Callable[[ModelRequest], Any], family: str = "chatml") -> None:
        self.tokenizer = tokenizer(family)
        self._answers = answers if callable(answers) else iter(answers)
        self.requests: list[ModelRequest] = []
        self.responses: list[ModelResponse] = []
        self._sampled = 0

    async def cut_short(self, rid: str) -> bool:
        return False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        answer = self._answers(req) if callable(self._answers) else next(self._answers)
        await asyncio.sleep(0)  # as a real engine, let other requests in
        if isinstance(answer, Exception):
            raise answer
        end = self.tokenizer.eos_token_id
        if isinstance(answer, str):
            answer = [*self.tokenizer.encode(answer, add_special_tokens=False), end]
        ids = answer[: req.gconfig.max_new_tokens]
        first = self._sampled
        self._sampled += len(ids)
        response = ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=list(ids),
            # each sampled token has a log-prob of its own, exact in float32
            output_logprobs=[-(i + 1) / 1024 for i in range(first, self._sampled)],
            output_versions=[(i // 3) % 7 for i in range(first, self._sampled)],
            stop_reason="stop" if ids and ids[-1] in req.gconfig.stop_token_ids else "length",
            tokenizer=req.tokenizer,
            metadata=req.metadata,
        )
        self.responses.append(response)
        if req.on_tokens is not None:  # in pieces of 0 to 4 tokens
            at, draw = 0, random.Random(0)
            while at < len(ids):
                end = at + draw.randrange(5)
                req.on_tokens(response.output_tokens[at:end], response.output_logprobs[at:end])
                at = end
                await asyncio.sleep(0)
        return response


def random_ids(draw: random.Random, family: str, length: int) -> list[int]:
    """Return ids as a model may sample them: no special token, and seldom what their text would be tokenized to."""
    special = {i for i, token in tokenizer(family).added_tokens_decoder.items() if token.special}
    return draw.choices([i for i in range(len(tokenizer(family))) if i not in special], k=length)


async def create(session: ChatSession, body: Any) -> dict[str, Any]:
    """Answer a chat completion without HTTP."""
    call = ChatCompletions(json.dumps(body).encode(), session)
    return call.reply(await session.answer(call.request, call.id))
