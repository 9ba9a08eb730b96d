"""A filter finds exactly the lines for which it holds, whatever they contain."""

from __future__ import annotations
import json
import tempfile
from pathlib import Path
from typing import Any
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.filters import KEYS, Kind, parse
from tests.tools.inspect.dump_lines import Line, failed, holds, line, schema_1, turn, write

TEXTS = st.sampled_from(["", "a", "Timeout", "a b", "main", "stop", 'say "no"', "back\\slash", "7", "é\n☃", "%_"])
PATTERNS = st.sampled_from(["a", "^a$", "Time|no", "[0-9]", "s.op", r"back\\s", "☃", "%", '"', ""])
NUMBERS = st.sampled_from([None, 0, 1, 2, 0.5, -1.5, 3])
TURNS = st.builds(
    turn,
    st.sampled_from(["prompt", "assistant", "environment"]),
    TEXTS | st.none(),
    st.integers(0, 3),
    stop_reason=TEXTS.filter(bool) | st.none(),
    agent=TEXTS.filter(bool) | st.none(),
)
LINES = st.builds(
    lambda base, values, turns, timings: base | values | {"turns": turns, "timings": timings},
    st.sampled_from([line(), failed(), schema_1(), line("name 7")]),
    st.fixed_dictionaries(
        {},
        optional={
            "reward": NUMBERS,
            "episode_reward": NUMBERS,
            "seqlen": st.integers(0, 3),
            "head_version": st.none() | st.integers(0, 3),
            "tail_version": st.none() | st.integers(0, 3),
            "task_id": st.integers(0, 3) | TEXTS,
            "group_id": TEXTS,
            "error": st.none() | TEXTS,
            "error_type": st.none() | TEXTS,
        },
    ),
    st.lists(TURNS, max_size=3),
    st.fixed_dictionaries({"finished_at": NUMBERS, "run_s": NUMBERS, "queued_s": NUMBERS}),
)


def quoted(text: str, op: str) -> str:
    text = text if "~" in op else text.replace("\\", "\\\\")
    return '"' + text.replace('"', '\\"') + '"'


@st.composite
def terms(draw: Any) -> str:
    key = draw(st.sampled_from(list(KEYS.values())))
    space = draw(st.sampled_from(["", " "]))
    if key.kind is Kind.NUMBER:
        op = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="]))
        value = str(draw(NUMBERS.filter(lambda number: number is not None)))
        if op in ("=", "!=") and draw(st.booleans()):
            value = "none"
    elif key.kind is Kind.TEXT:
        op, value = draw(st.sampled_from(["~", "!~"])), None
    else:
        op, value = draw(st.sampled_from(["=", "!=", "~", "!~"])), None
    if value is None:
        if "~" in op:
            value = quoted(draw(PATTERNS), op)
        elif draw(st.booleans()) and key.kind is not Kind.RUN:
            value = "none"
        else:
            value = quoted(draw(st.sampled_from(key.values) if key.values else TEXTS), op)
    return f"{draw(st.sampled_from([key.name, key.alias or key.name]))}{space}{op}{space}{value}"


FILTERS = st.recursive(
    terms(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" ", " and ", " or "]), inner).map("".join),
        inner.map("not {}".format),
        inner.map("({})".format),
        inner.map("not ({})".format),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(["rollout/0/1", "rollout/2/a", "eval-rollout/1/3"]), st.lists(LINES, max_size=3)),
    st.lists(FILTERS, min_size=1, max_size=6),
)
def test_a_filter_finds_the_lines_for_which_it_holds(files: dict[str, list[Line]], filters: list[str]) -> None:
    files["rollout/0/0"] = [line()]
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in files.items():
            write(Path(folder, "exp", "run", f"{name}.jsonl"), *lines)
        with Dumps.open(folder) as dumps:
            assert dumps.problems() == []
            for text in filters:
                expr = parse(text)
                expected = {
                    f"{name}.jsonl:{number}"
                    for name, lines in files.items()
                    for number, record in enumerate(lines, 1)
                    if holds(
                        expr,
                        json.loads(json.dumps(record)),
                        scope=name.split("/")[0],
                        version=int(name.split("/")[1]),
                        file=f"{name}.jsonl",
                        run="exp/run",
                    )
                }
                found = dumps.page(text, limit=100)
                assert {row["id"] for row in found.rows} == expected, text
                assert found.total == len(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewrd<1", "no key 'rewrd'; did you mean 'reward'? Keys: reward, status, error"),
        ("reward<high", "reward needs a number such as 0.5, or none, not 'high'"),
        ("reward~1", "reward is a number and takes <= >= != = < >"),
        ("status<failed", "status is a text and takes != !~ = ~"),
        ("status=broken", "status is one of accepted, rejected, failed, cancelled, untrained, not 'broken'"),
        ("error_kind=timeout", "error_kind is one of deadline, engine"),
        ("text=hello", "text is a full text and takes ~ !~"),
        ('text~"("', "no regular expression: missing ), unterminated subpattern at position 0. Put a backslash"),
        ("failed", "'failed' needs an operator and a value"),
        ("reward<", "'reward' needs an operator and a value"),
        ('text~"open', "'text' needs an operator and a value"),
        ("(reward<1", "a '(' has no ')'"),
        ("reward<1)", "a ')' has no '('"),
        ("reward<1 or", "a term is missing"),
        ("reward<1 and", "'and' needs a term after it"),
        ("not", "'not' needs a term after it"),
        ("()", "a term is missing"),
        ("; drop table episodes", "a term begins with a key"),
        ("(" * 600, "more than 500 terms"),
        ("(" * 200 + "reward<1" + ")" * 200, "more than 100 parentheses"),
        ("task=\udcff", "the value is not UTF-8"),
    ],
)
def test_a_wrong_filter_is_an_error_with_place_rule_and_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert said in str(raised.value)
    assert str(raised.value).startswith("filter, at ")


def test_spaces_words_and_quotes_group_terms_as_in_python() -> None:
    assert parse("reward<1 or turns>2 tokens=3") == parse("reward<1 or (turns>2 and tokens=3)")
    assert parse("not reward<1 turns>2") == parse("(not reward < 1) and turns > 2")
    assert parse("error~(a|b)") == parse('error~"(a|b)"')
    assert parse("(error~a)") == parse("error~a")
    assert parse("error~'say \"no\"'") == parse(r'error~"say \"no\""')
    assert parse("") == parse("  ")
