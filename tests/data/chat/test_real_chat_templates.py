"""Real chat templates train each answer with its end mark, and nothing else; docs/chat_templates.md lists them.

python -m tests.data.chat.test_real_chat_templates  # writes the table

"""

from __future__ import annotations
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple
import pytest
from areal_lite.data.chat.chat_tokens import Rendering, Shortfall, render_conversation, tokens_of
from areal_lite.errors import ConfigError
from tests.data.template_cases import CONVERSATIONS
from tests.fixtures.real_templates import NAMES, real_tokenizer

PAGE = Path(__file__).parents[3] / "docs/chat_templates.md"
START = "| template |"
KINDS = ("question", "answer", "thought", "result", "argument")
TEXTS = ["system text", *(f"{kind} {number}" for kind in KINDS for number in ("one", "two"))]
MARK_WORDS = {
    Shortfall.NO_END_MARK: "no end mark",
    Shortfall.NO_THOUGHT: "thoughts left out",
    Shortfall.NO_TEXT_WITH_CALLS: "text beside calls left out",
    Shortfall.OTHER_PROMPT: "prompt differs from what is trained",
}


class Outcome(NamedTuple):
    answers: list[str]
    """What is trained of each answer, in order."""
    shortfalls: frozenset[Shortfall]
    refused: str
    """The error, if there is one."""
    sequences: int


@functools.cache
def outcome(name: str, case: str) -> Outcome:
    tokenizer, (messages, tools) = real_tokenizer(name), CONVERSATIONS[case]
    try:
        rendered = render_conversation(tokenizer, messages, tools)
    except ConfigError as error:
        return Outcome([], frozenset(), str(error), 0)
    answers = []
    for sequence in rendered:
        ids, mask = tokens_of(tokenizer, sequence)
        runs = "".join("1" if trains else "0" for trains in mask)
        answers += [tokenizer.decode(ids[run.start() : run.end()]) for run in re.finditer("1+", runs)]
    return Outcome(answers, rendered[0].shortfalls, "", len(rendered))


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_real_template_trains_the_answers_with_their_end_marks_and_nothing_else(name: str, case: str) -> None:
    found = outcome(name, case)
    if found.refused:
        assert why_refused(found.refused) in ACCEPTED_REFUSALS, found.refused
        return
    messages, _ = CONVERSATIONS[case]
    expected = [message for message in messages if message["role"] == "assistant"]
    assert len(found.answers) == len(expected)
    for message, text in zip(expected, found.answers, strict=True):
        own = [message["content"] or "argument one"]
        thought = message.get("reasoning_content")
        if thought and Shortfall.NO_THOUGHT not in found.shortfalls:
            own.append(thought)
        assert all(text.count(one) == 1 for one in own)
        assert not [other for other in TEXTS if other not in own and other in text and other != thought]
        before, _, after = text.rpartition(own[0])
        if not message.get("tool_calls"):
            # A header, a channel or an empty thought may come before the answer, only its end mark after it.
            assert len(before.replace(thought or "", "")) < 100
            if Shortfall.NO_END_MARK in found.shortfalls:
                assert after.strip() in ("", end_mark(name))
            else:
                assert after.strip() == end_mark(name)
                assert after.endswith(special_tokens(name))


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("Apertus-8B-Instruct", "<|assistant_end|>"),  # written once a question follows
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("GLM-4.6", ""),
        ("GLMEdge", ""),  # always writes the next header
        ("Kimi-K3", "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
        ("Phi-3-medium", "<|end|>"),
        ("Qwen-Qwen3-0.6B", "<|im_end|>"),
        ("llama-cpp-rwkv-world", ""),
        ("microsoft-Phi-3.5-mini-instruct", "<|end|>"),  # its EOS ends the conversation, not the turn
        ("openai-gpt-oss-120b", "<|return|>"),
        ("tencent-Hy3", "<｜hy_eos:opensource｜>"),  # written once a question follows
        ("trl-idefics3", "<end_of_utterance>"),
        ("unsloth-Apriel-1.5", "<|end|>"),
    ],
)
def test_the_end_marks_of_known_templates(name: str, mark: str) -> None:
    assert end_mark(name) == mark


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Apriel-1.6-15b-Thinker-fixed", "{}\n[BEGIN FINAL RESPONSE]\n{}\n<|end|>"),
        ("tencent-Hy3", "{}</think:opensource>{}<｜hy_eos:opensource｜>"),
    ],
)
def test_thoughts_train_where_the_next_question_writes_the_end_mark_and_takes_the_thoughts_away(
    name: str, wanted: str
) -> None:
    found = outcome(name, "thinking")
    assert found.answers == [wanted.format("thought one", "answer one"), wanted.format("thought two", "answer two")]
    assert Shortfall.NO_THOUGHT not in found.shortfalls


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_next_role_trains_the_token_of_the_next_message_where_there_is_no_end_mark(name: str, case: str) -> None:
    """GLM stops at the next message's header: a user's after an answer, an observation's after calls."""
    (messages, tools), tokenizer = CONVERSATIONS[case], real_tokenizer(name)
    by_mark = outcome(name, case)
    if by_mark.refused:
        return
    rendered = render_conversation(tokenizer, messages, tools, Rendering(end_of_turn="next_role"))
    spans = [sequence.text[start:end] for sequence in rendered for start, end in sequence.spans]
    if not name.startswith("GLM-") and name != "trl-glm4moe":
        assert spans == [one.text[s:e] for one in render_conversation(tokenizer, messages, tools) for s, e in one.spans]
        assert rendered[0].shortfalls == by_mark.shortfalls
        return
    answers = [message for message in messages if message["role"] == "assistant"]
    for message, span, plain in zip(answers, spans, by_mark.answers, strict=True):
        assert span.removesuffix("<|observation|>" if message.get("tool_calls") else "<|user|>") == plain
        assert span != plain
    assert Shortfall.NO_END_MARK not in rendered[0].shortfalls
    assert len(rendered) == by_mark.sequences


def special_tokens(name: str) -> tuple[str, ...]:
    return tuple(token.content for token in real_tokenizer(name).added_tokens_decoder.values())


ACCEPTED_REFUSALS = {"the template raises", "it writes no tools", "it writes no tool calls", "it writes no last answer"}


def why_refused(error: str) -> str:
    reasons = {
        "cannot write messages": "the template raises",
        "does not render tools": "it writes no tools",
        "does not render it": "it writes no tool calls",
        "does not write its text": "it writes no last answer",
    }
    return next((reason for words, reason in reasons.items() if words in error), error)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_as_json_text_and_empty_lists_of_calls_are_written_like_objects_and_none(name: str) -> None:
    messages, tools = CONVERSATIONS["tools"]
    if outcome(name, "tools").refused:
        return
    as_text = [
        {**message, "tool_calls": [openai_form(call) for call in message.get("tool_calls", ())]}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]
    given, wanted = (render_conversation(real_tokenizer(name), each, tools) for each in (as_text, messages))
    assert [each.text for each in given] == [each.text for each in wanted]


def openai_form(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def end_mark(name: str) -> str:
    """Return what the template writes after a plain answer."""
    for case in ("single turn", "tools"):
        found = outcome(name, case)
        if found.answers:
            return found.answers[-1].rpartition("answer one")[2].strip()
    return ""


def test_few_conversations_are_refused_and_each_of_these_by_the_template() -> None:
    refused = {(name, case): outcome(name, case).refused for name in NAMES for case in CONVERSATIONS}
    assert len(NAMES) >= 90
    others = [key for key, error in refused.items() if error and key[1] != "tools"]
    assert {name for name, _ in others} == {
        "CohereForAI-c4ai-command-r-plus-tool_use",  # needs tools
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",  # needs tools
        "fireworks-ai-llama-3-firefunction-v2",  # needs functions, a variable of its own
        "google-gemma-2-2b-it",  # no system role
        "google-gemma-7b-it",  # no system role
        "mistralai-Mistral-7B-Instruct-v0.2",  # no system role
        "yandex-YandexGPT-5-Lite-8B-instruct",  # does not write the last answer
    }


def test_the_page_has_the_table_of_all_templates() -> None:
    """To update it: python -m tests.data.chat.test_real_chat_templates"""
    assert PAGE.read_text().partition(START)[2] == table().partition(START)[2]


def table() -> str:
    lines = [f"{START} end mark | thinking | tools | warnings and refusals |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, NAMES)]) + "\n"


def _line(name: str) -> str:
    plain, thinking, tools = (outcome(name, case) for case in ("single turn", "thinking", "tools"))
    mark = end_mark(name)
    notes = [MARK_WORDS[one] for one in sorted(plain.shortfalls or tools.shortfalls, key=list(Shortfall).index)]
    refusals: dict[str, list[str]] = {}
    for case in CONVERSATIONS:
        if (error := outcome(name, case).refused) and case != "tools":
            refusals.setdefault(_reason(error), []).append(case)
    notes += [f"{', '.join(cases)} refused: {reason}" for reason, cases in refusals.items()]
    cells = [
        name,
        _code(mark) if mark else "none",
        _thinking(thinking),
        _reason(tools.refused) if tools.refused else "trained",
        "; ".join(notes),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _thinking(found: Outcome) -> str:
    if found.refused:
        return "refused"
    if Shortfall.NO_THOUGHT in found.shortfalls:
        return "left out"
    return "trained" if found.sequences == 1 else "trained, a sequence per answer"


def _reason(error: str) -> str:
    if (inner := re.search(r"cannot write messages\[:\d+\] \(\w+: (.*)\): fix", error)) is not None:
        return f"the template raises {_code(inner[1])}"
    return why_refused(error)


def _code(text: Any) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(START)[0] + table())
