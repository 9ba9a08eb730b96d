"""A conversation has the template's own tokens; each assistant message is trained once, and nothing else."""

import json
import logging
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from areal_lite.data.chat.chat_tokens import Rendering, Shortfall, render_conversation, tokenize_messages
from areal_lite.errors import ConfigError
from tests.fixtures.chat_templates import CHATML, FAMILIES, family_tokenizer, train_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": None}}}
CONSECUTIVE = [name for name, family in FAMILIES.items() if family.consecutive_answers]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def template_ids(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)


def trained_texts(tokenizer, sequence):
    """Return the text of each run of trained tokens."""
    runs, before = [], False
    for token, trained in zip(*sequence, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run) for run in runs]


def trained(tokenizer, messages, tools=None):
    """Return the trained text of each sequence."""
    sequences = tokenize_messages(tokenizer, messages, tools)
    return ["".join(trained_texts(tokenizer, sequence)) for sequence in sequences]


# Words of the corpus with blanks and marks of all families: merges across borders, text that looks like a turn.
marks = sorted({token for family in FAMILIES.values() for token in family.special})
snippets = st.sampled_from(["hello", " world", "the answer", "\n", "\n\n", "  ", "é日本", "user\n", *marks])
texts = st.lists(snippets | st.text(max_size=4), max_size=5).map("".join)
answers = st.builds(assistant, texts) | st.builds(
    lambda thought, content: assistant(content, reasoning_content=thought), texts, texts
)
calls = st.builds(
    lambda content, result: [
        assistant(content, tool_calls=[CALL]),
        {"role": "tool", "content": result},
    ],
    st.none() | texts,
    texts,
)
rounds = st.builds(
    lambda question, called, answer: [user(question), *sum(called, []), answer],
    texts,
    st.lists(calls, max_size=2),
    answers,
)
conversations = st.builds(
    lambda system, parts: [{"role": "system", "content": text} for text in system] + sum(parts, []),
    st.lists(texts, max_size=1),
    st.lists(rounds, min_size=1, max_size=3),
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(messages=conversations, tools=st.sampled_from([None, TOOLS]), question=st.none() | texts)
def test_any_conversation_has_the_templates_tokens_and_each_answer_is_trained_once(name, messages, tools, question):
    # R-B1, R-B4, R-B6
    tokenizer, answer = family_tokenizer(name), FAMILIES[name].answer
    if question is not None:
        messages = [*messages, user(question)]

    sequences = tokenize_messages(tokenizer, messages, tools)

    expected = [answer(message) for message in messages if message["role"] == "assistant"]
    prefixes = {tuple(template_ids(tokenizer, messages[:n], tools)): n for n in range(1, len(messages) + 1)}
    ends = [prefixes[tuple(sequence.input_ids)] for sequence in sequences]
    assert ends == sorted(set(ends))
    for sequence in sequences:
        assert len(sequence.loss_mask) == len(sequence.input_ids)
        assert any(sequence.loss_mask)
        assert not sequence.loss_mask[0]
        # What is missing of an answer is blank, and stands in one token with the template's blanks before it.
        for text in trained_texts(tokenizer, sequence):
            whole = expected.pop(0)
            assert whole.endswith(text)
            missing = whole.removesuffix(text)
            assert missing.strip() == ""
            assert not missing or name != "mistral"  # no blanks before an answer there
    assert expected == []


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(messages=conversations)
def test_text_of_other_roles_never_changes_what_is_trained(name, messages):
    tokenizer = family_tokenizer(name)
    others = [message if message["role"] == "assistant" else message | {"content": "x"} for message in messages]
    assert trained(tokenizer, messages) == trained(tokenizer, others)


SEED_EXAMPLE = [
    {"role": "system", "content": "You are a helpful assistant."},
    user("1+1="),
    assistant("1+1=2"),
    user("Explain why."),
    assistant('The equation "1 + 1 = 2" is a fundamental truth in basic arithmetic.'),
]


def test_the_tokens_are_the_templates_and_the_mask_is_at_the_answers():
    # R1, R5, R6
    tokenizer = family_tokenizer("chatml")
    [(ids, mask)] = tokenize_messages(tokenizer=tokenizer, messages=SEED_EXAMPLE)
    assert ids == template_ids(tokenizer, SEED_EXAMPLE)
    end = "<|im_end|>"
    trained = [token for token, trains in zip(ids, mask, strict=True) if trains]
    assert tokenizer.decode(trained) == f"1+1=2{end}{SEED_EXAMPLE[4]['content']}{end}"
    assert tokenizer.decode(ids[: mask.index(True)]).endswith("1+1=<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_turn_is_trained_and_later_text_is_not(name):
    # R-B1
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    for sequence in tokenize_messages(tokenizer, SEED_EXAMPLE):
        for text in trained_texts(tokenizer, sequence):
            assert text.endswith(family.eos)
            assert text.count(family.eos) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_rendered_and_a_tool_call_without_content_is_trained(name):
    # R-B2, R-B6
    tokenizer = family_tokenizer(name)
    messages = [user("hello"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "3"}]
    [sequence] = tokenize_messages(tokenizer, messages, TOOLS)
    assert sequence.input_ids == template_ids(tokenizer, messages, TOOLS)
    assert '"description": "adds"' in tokenizer.decode(sequence.input_ids)
    [text] = trained_texts(tokenizer, sequence)
    assert text.strip() == FAMILIES[name].answer(messages[1]).strip()
    assert json.dumps(CALL["function"], ensure_ascii=False) in text
    assert tokenize_messages(tokenizer, messages, []) == tokenize_messages(tokenizer, messages)


def test_a_call_that_the_template_does_not_render_is_an_error():
    # R-B6: the answer would be trained without it.
    tokenizer = train_tokenizer(
        CHATML.replace("message.tool_calls or []", "[]"), special=("<|im_end|>",), eos="<|im_end|>"
    )
    with pytest.raises(ConfigError, match=r"messages\[1\] calls the tool 'add', but the chat template does not"):
        tokenize_messages(tokenizer, [user("hello"), assistant("so", tool_calls=[CALL])])


@pytest.mark.parametrize("content", [" hello", "\n\nhello", "hello \n", "  ", "", "\n", "é日🙂", "hello<|im_end|>"])
@pytest.mark.parametrize("name", FAMILIES)
def test_blanks_around_an_answer_are_accepted(name, content):
    # R-B4
    tokenizer = family_tokenizer(name)
    messages = [user("hello"), assistant(content)]
    [sequence] = tokenize_messages(tokenizer, messages)
    assert sequence.input_ids == template_ids(tokenizer, messages)
    expected = FAMILIES[name].answer(messages[1])
    assert "".join(trained_texts(tokenizer, sequence)).lstrip() == expected.lstrip()


def test_a_token_that_crosses_the_start_of_an_answer_is_not_trained():
    # R-B4: merges of this tokenizer join the template's line end with the answer's first word.
    tokenizer = train_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>", use_regex=False)
    for content, crossing, rest in (("the answer", "t\nthe answ", "er"), ("\nso be it", "\n\nso be", " it")):
        messages = [user("so"), assistant(content)]
        [sequence] = tokenize_messages(tokenizer, messages)
        assert sequence.input_ids == template_ids(tokenizer, messages)
        assert crossing in [tokenizer.decode(token) for token in sequence.input_ids]
        assert trained_texts(tokenizer, sequence) == [f"{rest}<|im_end|>"]

    unmarked = (
        "{% for m in messages %}{{ ('\n' if m.role == 'user' else '<answer>') + m.content }}{% endfor %}"
        "{{ '<answer>' if add_generation_prompt }}"
    )
    tokenizer = train_tokenizer(unmarked, special=("<answer>", "<eos>"), eos="<eos>", use_regex=False)
    [sequence] = tokenize_messages(tokenizer, [user("so"), assistant("why not"), user("</think>")])
    assert tokenizer.decode(sequence.input_ids[-1]) == " not\n</think>"
    assert trained_texts(tokenizer, sequence) == ["why"]


def test_an_answer_that_starts_inside_a_token_with_a_leading_space_is_detected():
    # R-B4: as with Llama 3, the offsets of " hello" begin at the h.
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for trim in (False, True):
        tokenizer = train_tokenizer(template, special=("<end>",), eos="<end>", trim_offsets=trim)
        [sequence] = tokenize_messages(tokenizer, [user("so"), assistant("hello world")])
        assert trained_texts(tokenizer, sequence) == [" world<end>"]


def test_special_tokens_with_trailing_blanks_and_a_second_end_mark_are_handled():
    # R-B1: as with Phi 3; the last mark ends the conversation, not the turn.
    template = (
        "hello{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    special = ("<|user|>", "<|assistant|>", "<|end|>", "<|end_of_document|>")
    messages = [assistant("hello"), user("so"), assistant("world")]
    for trim in (False, True):
        tokenizer = train_tokenizer(
            template, special=special, eos="<|end_of_document|>", rstrip=True, trim_offsets=trim
        )
        [sequence] = tokenize_messages(tokenizer, messages)
        assert sequence.input_ids == template_ids(tokenizer, messages)
        assert trained_texts(tokenizer, sequence) == ["hello<|end|>", "world<|end|>"]


def test_without_an_end_mark_the_whole_rendered_answer_is_trained():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = train_tokenizer(template, special=("<user>", "<assistant>", "<eos>"), eos="<eos>")
    [sequence] = tokenize_messages(tokenizer, [user("so"), assistant("hello"), user("so"), assistant("<eos>")])
    assert trained_texts(tokenizer, sequence) == ["hello\n\n", "<eos>\n\n"]


def test_an_unknown_token_is_not_an_end_mark():
    words = ["<unk>", "<eos>", "so", "add"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ ' ' + m.content + ('' if m.tool_calls else ' <eos>') }}{% endfor %}",
    )
    messages = [user("so"), assistant("add what"), assistant("add what", tool_calls=[CALL])]
    [sequence] = tokenize_messages(tokenizer, messages)
    assert tokenizer.decode(sequence.input_ids).split() == ["so", "<eos>", *["add", "<unk>", "<eos>"] * 2][:-1]
    assert sequence.loss_mask == [False] * 2 + [True] * 5


def test_the_first_character_of_a_question_is_not_trained():
    # Its tokens have the same offsets.
    bare = train_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", special=("<eos>",), eos="<eos>")
    [sequence] = tokenize_messages(bare, [user("🙂"), assistant("hello")])
    assert trained_texts(bare, sequence) == ["hello"]
    assert len(sequence.input_ids) > 2


def test_a_conversation_longer_than_the_model_reads_is_no_warning(monkeypatch, caplog):
    # Whoever cuts the sequences knows.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = train_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    tokenizer.model_max_length = 2
    tokenize_messages(tokenizer, [user("so"), assistant("hello")])
    assert caplog.text == ""


def test_a_sequence_has_one_bos_and_never_trains_its_first_token():
    for name in ("llama", "mistral"):
        tokenizer = family_tokenizer(name)
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
        [sequence] = tokenize_messages(tokenizer, SEED_EXAMPLE)
        assert sequence.input_ids.count(tokenizer.bos_token_id) == 1
    bare = train_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", special=("<eos>",), eos="<eos>")
    [sequence] = tokenize_messages(bare, [assistant("hello world")])
    assert sequence.loss_mask == [False] + [True] * (len(sequence.input_ids) - 1)
    assert len(sequence.input_ids) > 1


@pytest.mark.parametrize("name", CONSECUTIVE)
@pytest.mark.parametrize(
    "messages",
    [
        [user("so"), assistant("hello"), assistant("world")],
        [assistant("hello"), user("so"), assistant("world")],
        [assistant("hello"), assistant("world")],
        [assistant("hello"), user("so")],
    ],
)
def test_an_answer_may_come_first_or_follow_another(name, messages):
    # R-B5
    tokenizer = family_tokenizer(name)
    sequences = tokenize_messages(tokenizer, messages)
    assert len(sequences) == 1 or FAMILIES[name].rewrites
    texts = [text for sequence in sequences for text in trained_texts(tokenizer, sequence)]
    assert texts == [FAMILIES[name].answer(m) for m in messages if m["role"] == "assistant"]
    assert sequences[-1].input_ids in [template_ids(tokenizer, messages[:n]) for n in range(1, 4)]


def test_a_default_system_text_before_a_first_answer_is_not_trained():
    # R-B5
    template = "{{ '<|im_start|>system\nhello<|im_end|>\n' }}" + CHATML
    tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    content = "world<|im_start|>assistant\nhello"
    assert trained(tokenizer, [assistant(content), user("so")]) == [f"{content}<|im_end|>"]


def test_a_first_answer_without_a_prompt_begins_with_the_text():
    tokenizer = train_tokenizer(
        "{% for m in messages %}{{ m.content }}<eos>{% endfor %}", special=("<eos>",), eos="<eos>"
    )
    [rendered] = render_conversation(tokenizer, [assistant("hello")])
    assert (rendered.spans, rendered.shortfalls) == (((0, len("hello<eos>")),), frozenset())


def test_a_template_that_strips_thoughts_gives_one_sequence_per_answer():
    tokenizer = family_tokenizer("qwen_thinking")
    thought = {"reasoning_content": "why"}
    messages = [user("so"), assistant("hello", **thought), user("so"), assistant("world", **thought)]

    sequences = tokenize_messages(tokenizer, messages)

    assert [s.input_ids for s in sequences] == [template_ids(tokenizer, messages[:n]) for n in (2, 4)]
    block = "<think>\nwhy\n</think>\n\n"
    assert [trained_texts(tokenizer, s) for s in sequences] == [
        [f"{block}hello<|im_end|>"],
        [f"{block}world<|im_end|>"],
    ]


def test_answers_between_tool_calls_share_a_sequence_though_thoughts_are_stripped():
    tokenizer = family_tokenizer("qwen_thinking")
    messages = [
        user("so"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "3"},
        assistant("hello"),
    ]
    [sequence] = tokenize_messages(tokenizer, messages)
    assert len(trained_texts(tokenizer, sequence)) == 2


def test_a_question_that_an_answer_changes_is_an_error_or_written_as_in_the_prompt():
    # Mistral Nemo writes the system text only before a question without an answer.
    marked = "{{ 'the ' if message.role == 'user' and loop.last }}{{ message.content }}"
    template = CHATML.replace("{{ message.content }}", marked)
    tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    messages = [user("so"), assistant("why"), user("so"), assistant("not")]
    first, second = tokenize_messages(tokenizer, messages)
    assert tokenizer.decode(first.input_ids).startswith(
        "<|im_start|>user\nthe so<|im_end|>\n<|im_start|>assistant\nwhy"
    )
    assert "not<|im_end|>" in tokenizer.decode(second.input_ids)
    assert trained(tokenizer, messages) == ["why<|im_end|>", "not<|im_end|>"]
    bare = "{% for m in messages %}{{ 'the ' if loop.last and m.role == 'user' }}{{ m.content }}"
    bare += "{{ '<end>' if m.role == 'assistant' }}{% endfor %}"
    tokenizer = train_tokenizer(bare, special=("<end>",), eos="<end>")
    with pytest.raises(ConfigError, match=r"messages\[1\]: the chat template prompts for this answer with 'the so"):
        tokenize_messages(tokenizer, [user("so"), assistant("why")])


def test_the_beginning_of_an_answer_may_be_in_its_prompt():
    template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nhello\n{% endif %}")
    tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    assert trained(tokenizer, [user("so"), assistant("hello\nwhy")])[0].endswith("hy<|im_end|>")
    [rendered] = render_conversation(tokenizer, [user("so"), assistant("he")])
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["he<|im_end|>"]
    assert rendered.shortfalls == {Shortfall.OTHER_PROMPT}


def test_an_end_mark_that_only_a_further_message_brings_is_trained_after_every_answer():
    # As Apertus and Hunyuan 3.
    template = (
        "{% for m in messages %}{{ '<end>' if not loop.first and m.role == 'user' }}<{{ m.role }}>{{ m.content }}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = train_tokenizer(template, special=("<user>", "<assistant>", "<end>"), eos="<end>")
    for messages in ([user("so"), assistant("why")], [user("so"), assistant("why"), user("so"), assistant("why")]):
        [text] = trained(tokenizer, messages)
        assert text == "why<end>" * (len(messages) // 2)
        assert tokenizer.decode(tokenize_messages(tokenizer, messages)[0].input_ids).endswith("<assistant>why<end>")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt or messages[-1].role == 'assistant' }}",
        "{% for m in messages %}{{ '<assistant>' if not loop.first }}{{ m.content }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}",
    ],
)
def test_the_header_of_the_next_message_is_no_end_mark(template):
    tokenizer = train_tokenizer(template, special=("<user>", "<assistant>", "<eos>"), eos="<eos>")
    assert trained(tokenizer, [user("so"), assistant("why")]) == ["why"]
    assert trained(tokenizer, [user("so"), assistant("why"), user("so")]) == ["why"]


def test_tools_that_the_template_does_not_render_are_an_error():
    template = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    tokenizer = train_tokenizer(template, special=("<|im_end|>",), eos="<|im_end|>")
    with pytest.raises(ConfigError, match="the chat template does not render tools.*tools_in_system_prompt"):
        tokenize_messages(tokenizer, [user("so"), assistant("why")], TOOLS)


OPENS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("message.content.split('</think>')[-1]", "hello<|im_end|>"),  # as DeepSeek R1
        ("'<think></think>' + message.content", "</think>hello<|im_end|>"),  # as Nemotron 3
        ("'<b>' + message.content", "<b>hello<|im_end|>"),
    ],
)
def test_a_thought_that_only_the_prompt_opens_is_no_part_of_the_answer(written, expected):
    template = OPENS.replace("{{ message.content }}", f"{{{{ {written} if message.role != 'user' else 'so' }}}}")
    tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    messages = [user("so"), assistant("hello")]
    [rendered] = render_conversation(tokenizer, messages)
    assert rendered.shortfalls == {Shortfall.OTHER_PROMPT}
    assert trained(tokenizer, messages) == [expected]
    assert trained(tokenizer, messages[1:])[0].endswith(expected)
    [rendered] = render_conversation(tokenizer, [user("so"), assistant("<think>\nwhy</think>hello")])
    assert (Shortfall.NO_THOUGHT in rendered.shortfalls) == ("split" in written)


def test_an_eos_directly_after_the_end_mark_is_trained_if_it_stays_there():
    # As Command R7B; Phi 4 writes its EOS only at the end of the conversation.
    for eos, text in (("<eos>", "hello<end><eos>"), ("{{ '<eos>' if loop.last }}", "hello<end>")):
        template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}<end>{eos}{{% endfor %}}"
        template += "{% if add_generation_prompt %}<assistant>{% endif %}"
        tokenizer = train_tokenizer(template, special=("<user>", "<assistant>", "<end>", "<eos>"), eos="<eos>")
        assert trained(tokenizer, [user("so"), assistant("hello"), user("so"), assistant("hello")]) == [text * 2]


PARTS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_a_template_that_writes_only_parts_or_only_texts_gets_them():
    # As Idefics 3, which writes nothing for text.
    parts = [{"type": "text", "text": "hello"}]
    for template in (PARTS, CHATML):
        tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
        for content in ("hello", parts):
            messages = [user("so"), assistant(content)]
            [sequence] = tokenize_messages(tokenizer, messages)
            assert tokenizer.decode(sequence.input_ids).startswith("<|im_start|>user\nso<|im_end|>")
            assert trained(tokenizer, messages) == ["hello<|im_end|>"]


def test_a_first_answer_in_parts_ends_with_the_mark_of_answers_in_parts():
    tokenizer = train_tokenizer(PARTS, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    messages = [assistant([{"type": "text", "text": "hello"}]), user([{"type": "text", "text": "so"}])]
    assert trained(tokenizer, messages) == ["hello<|im_end|>"]


def test_an_image_is_never_dropped_for_a_template_that_writes_only_texts():
    tokenizer = train_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    question = user([{"type": "text", "text": "so"}, {"type": "image"}])
    with pytest.raises(ConfigError, match=r"messages\[1\]: the chat template does not write its text 'hello'"):
        tokenize_messages(tokenizer, [question, assistant("hello")])


def test_an_answer_that_the_template_leaves_out_is_an_error():
    template = CHATML.replace("{{ message.content }}", "{{ message.content if message.role == 'user' }}")
    tokenizer = train_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    with pytest.raises(ConfigError, match="an answer: the chat template does not write its text.*chat_template"):
        tokenize_messages(tokenizer, [user("so"), assistant("hello")])
    sometimes = CHATML.replace("{{ message.content }}", "{{ message.content if message.content != 'hello' }}")
    tokenizer = train_tokenizer(sometimes, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    with pytest.raises(ConfigError, match=r"messages\[1\]: the chat template does not write its text 'hello'"):
        tokenize_messages(tokenizer, [user("so"), assistant("hello")])


def test_what_a_template_leaves_out_beside_a_written_answer_is_noted():
    tokenizer = family_tokenizer("llama")
    [plain] = render_conversation(tokenizer, [user("so"), assistant("hello")])
    assert plain.shortfalls == frozenset()
    [thought] = render_conversation(tokenizer, [user("so"), assistant("hello", reasoning_content="why")])
    assert thought.shortfalls == {Shortfall.NO_THOUGHT}
    [text] = render_conversation(tokenizer, [user("so"), assistant("hello", tool_calls=[CALL])])
    assert text.shortfalls == {Shortfall.NO_TEXT_WITH_CALLS}
    [header] = render_conversation(tokenizer, [user("so"), assistant("hello", reasoning_content="assistant")])
    assert header.shortfalls == {Shortfall.NO_THOUGHT}
    [blank] = render_conversation(tokenizer, [user("so"), assistant(" ", tool_calls=[CALL])])
    assert blank.shortfalls == frozenset()


def test_variables_and_another_template_reach_the_template():
    tokenizer = family_tokenizer("chatml")
    template = "{% for m in messages %}{{ word + m.content + '<|im_end|>' }}{% endfor %}"
    [sequence] = tokenize_messages(
        tokenizer,
        [user("so"), assistant("it")],
        template_kwargs={"chat_template": template, "word": "hello "},
    )
    assert tokenizer.decode(sequence.input_ids) == "hello so<|im_end|>hello it<|im_end|>"


def test_a_conversation_without_an_answer_is_one_sequence_that_trains_nothing():
    # R-B7
    [sequence] = tokenize_messages(family_tokenizer("qwen_thinking"), [user("so"), user("hello")])
    assert not any(sequence.loss_mask)
    assert len(sequence.input_ids) > 2


def test_without_the_template_contents_are_joined_unchanged():
    # R2, R3
    tokenizer = family_tokenizer("llama")
    messages = [user(" so\n"), assistant(""), assistant("\nhello"), assistant(""), user("x")]
    [(ids, mask)] = tokenize_messages(tokenizer, messages, None, False)
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in (" so\n", "\nhello", "x")]
    assert ids == sum(pieces, [])
    assert mask == [False] * len(pieces[0]) + [True] * len(pieces[1]) + [False] * len(pieces[2])
    [joined] = render_conversation(tokenizer, messages, None, Rendering(apply_chat_template=False))
    assert joined.spans == ((4, 4), (4, 10), (10, 10))
    assert joined.joints == (0, 4, 4, 10, 10)
    with pytest.raises(ConfigError, match=r"messages\[0\] has content that is not text"):
        tokenize_messages(tokenizer, [assistant(None, tool_calls=[CALL])], None, False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a non-empty list"),
        ("hello", "must be a non-empty list"),
        (None, "must be a non-empty list"),
        ([user("so"), "hello"], r"messages\[1\] is 'hello'"),
        ([{"from": "human", "value": "so"}], r"messages\[0\] is .*it must have 'role'"),
        ([{"role": "user", "text": "so"}], r"messages\[0\] of role 'user' has content None"),
        ([user("so"), assistant(None)], r"messages\[1\].*only a message with tool_calls may have none"),
        ([user("so"), assistant(3)], r"messages\[1\].*content 3"),
        ([user("so"), assistant("", tool_calls=["add"])], r"cannot write messages\[:2\]"),
        (
            [user("so"), assistant("a"), assistant("b")],
            r"messages\[:3\] \(TemplateError: an answer must follow a question\)",
        ),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_message(messages, message):
    with pytest.raises(ConfigError, match=message):
        tokenize_messages(family_tokenizer("mistral"), messages)


def test_a_tokenizer_without_template_or_offsets_is_refused():
    # R-B3
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ConfigError, match="SlowTokenizer is a slow tokenizer"):
        tokenize_messages(SlowTokenizer(), SEED_EXAMPLE)
    bare = train_tokenizer(None, special=("<eos>",), eos="<eos>")
    with pytest.raises(ConfigError, match="cannot write messages.*chat_template is not set"):
        tokenize_messages(bare, SEED_EXAMPLE)
