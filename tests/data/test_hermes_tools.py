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
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, "text", {"type": "text", "text": "b"}]
    [result] = in_hermes_form([{"role": "tool", "content": parts}], None)
    assert result == {"role": "user", "content": "<tool_response>\na\nb\n</tool_response>"}


def test_a_template_may_write_tools_with_the_prompt_for_an_answer():
    tokenizer = train_tokenizer("{{ messages[0].content }}", special=("<end>",), eos="<end>")
    prompted = "{{ messages[0].content }}{{ tools | string if tools and add_generation_prompt }}"
    assert drops_tools(tokenizer, {})
    assert not drops_tools(tokenizer, {"chat_template": prompted})
    tokenizer.chat_template = {"default": prompted}
    assert not drops_tools(tokenizer, {})
