"""A body that begins like an earlier one gives what parsing all of it would give."""

from __future__ import annotations
import json
from typing import Any
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.session.chat_request import cache_request_body

TEXTS = st.text('ab"\\[]{},:\n\N{SNOWMAN}', max_size=8) | st.sampled_from(["messages", '"messages":[', "]}"])
VALUES = st.recursive(
    TEXTS | st.integers(-9, 9), lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXTS, v, max_size=2)
)
MESSAGES = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3) | VALUES, min_size=1, max_size=4)
FIELDS = st.dictionaries(TEXTS.filter(lambda name: name != "messages"), VALUES, max_size=2)
AFTER = st.dictionaries(TEXTS.map("z{}".format), VALUES, max_size=2)


def dumped(before: Any, messages: Any, after: Any, *, indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps({**before, "messages": messages, **after}, indent=indent, ensure_ascii=ascii_only).encode()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_an_earlier_beginning_and_the_rest_are_the_whole_body(data: st.DataObject) -> None:
    draw = data.draw
    style: Any = {"indent": draw(st.sampled_from([None, 2])), "ascii_only": draw(st.booleans())}
    before, messages = draw(FIELDS), draw(MESSAGES)
    earlier = dumped(before, messages, draw(AFTER), **style)
    longer = messages + draw(st.lists(VALUES, max_size=3))
    body = dumped(before, longer, draw(AFTER), **style)
    beginning = cache_request_body(earlier)
    if beginning is None:  # the name comes again, further inside
        assert earlier.count(b'"messages"') > 1
        return
    assert cache_request_body(body, beginning) == cache_request_body(body)
    rest = beginning.cut_from(body)
    if rest is None:
        assert body.count(b'"messages"') > 1
        return
    whole = orjson.loads(body)
    assert {**orjson.loads(rest), "messages": messages + orjson.loads(rest)["messages"]} == whole


@pytest.mark.parametrize(
    ("earlier", "body"),
    [
        (b'{"messages":[1]}', b'{"messages":[12]}'),
        (b'{"messages":[1]}', b'{"messages":[1,]}'),
        (b'{"messages":[1]}', b'{"messages":[1 2]}'),
        (b'{"messages":[1]}', b'{"messages":[1,2],"messages":[3]}'),
        (b'{"messages":[1],"messages":[2]}', b'{"messages":[1,2]}'),
        (b'{"a":{"messages":[1]},"messages":5}', b'{"a":{"messages":[1,2]},"messages":[]}'),
        (b'{"a":"messages"}', b'{"a":"messages"}'),
        (b'{"messages":[1],"n":1}', b'{ "messages":[1,2]}'),
    ],
)
def test_a_body_that_does_not_go_on_after_the_earlier_messages_is_parsed_whole(earlier: bytes, body: bytes) -> None:
    beginning = cache_request_body(earlier)
    assert beginning is None or beginning.cut_from(body) is None
