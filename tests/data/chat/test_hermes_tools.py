"""Tools, calls and results as plain messages, and templates that do not write tools."""

from areal_lite.data.chat.hermes_tools import drops_tools, in_hermes_form
from tests.fixtures.chat_templates import train_tokenizer

CALL = {"type": "function", "function": {"name": "größe", "arguments": {"von": "Bär"}}}


def test_tools_and_calls_keep_their_letters():
    messages = in_hermes_form([{"role": "assistant", "content": "", "tool_calls": [CALL]}], [{"name": "größe"}])
    assert '<tools>\n{"name": "größe"}\n</tools>' in messages[0]["content"]
    call = '<tool_call>\n{"name": "größe", "arguments": {"von": "Bär"}}\n</tool_call>'
    assert messages[1] == {"role": "assistant", "content": call}


def test_of_a_result_in_parts_the_texts_are_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "other"}, "text", {"type": "text", "text": "b"}]
    [result] = in_hermes_form([{"role": "tool", "content": parts}], None)
    assert result == {"role": "user", "content": "<tool_response>\na\nb\n</tool_response>"}


def test_the_images_of_a_result_stay_parts_between_the_marks():
    def text(value):
        return {"type": "text", "text": value}

    parts = [text("a"), {"type": "image"}]
    messages = [{"role": "tool", "content": parts}, {"role": "tool", "content": "b"}]
    [result] = in_hermes_form(messages, None)
    before, after = text("<tool_response>\n"), text("\n</tool_response>")
    assert result["content"] == [before, *parts, after, text("\n"), text("<tool_response>\nb\n</tool_response>")]


def test_a_template_may_write_tools_with_the_prompt_for_an_answer():
    tokenizer = train_tokenizer("{{ messages[0].content }}", special=("<end>",), eos="<end>")
    prompted = "{{ messages[0].content }}{{ tools | string if tools and add_generation_prompt }}"
    assert drops_tools(tokenizer, {})
    assert not drops_tools(tokenizer, {"chat_template": prompted})
    tokenizer.chat_template = {"default": prompted}
    assert not drops_tools(tokenizer, {})


def test_the_results_of_one_turn_share_a_message_after_the_system_text():
    name = {"name": "add"}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "first", "tool_calls": [name | {"arguments": "{}"}, {"function": name}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "3"},
    ]
    system, *plain = in_hermes_form(messages, [name])
    assert (system["role"], system["content"][:17]) == ("system", "Be kind.\n\n# Tools")
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    results = [f"<tool_response>\n{number}\n</tool_response>" for number in (1, 2, 3)]
    assert plain == [
        messages[1],
        {"role": "assistant", "content": f"first\n{call}\n{call}"},
        {"role": "user", "content": "\n".join(results[:2])},
        messages[5],
        {"role": "user", "content": results[2]},
    ]
    assert in_hermes_form([], [name]) == [{"role": "system", "content": plain_tools(system)}]
    assert in_hermes_form(messages[:2], None) == messages[:2]


def plain_tools(system):
    return system["content"].removeprefix("Be kind.\n\n")


def test_a_template_that_refuses_a_probe_is_asked_with_another():
    tokenizer = train_tokenizer("{{ messages[0].content }}", special=("<end>",), eos="<end>")
    refuses = "{{ raise_exception('no') if %s }}"
    for template, drops in (
        (refuses % "true", False),
        (refuses % "messages | length == 1", True),
        (refuses % "messages | length == 1" + "{{ tools }}", False),
        ("{{ tools if messages | length > 1 }}", False),
    ):
        assert drops_tools(tokenizer, {"chat_template": template}) == drops
