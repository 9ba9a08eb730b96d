"""The filter language of ``inspect`` and ``view``: ``reward<0.5 status=failed turns>3 text~"regex"``.

A filter is terms of key, operator and value. A space or ``and`` joins two terms that must both hold; ``or``, ``not``
and parentheses work as in Python. A comparison with a missing value is false, ``KEY=none`` finds missing values, and
``!=`` and ``!~`` are true exactly where ``=`` and ``~`` are false. Regular expressions are Python's, found anywhere.

:func:`parse` checks a filter, :func:`to_sql` makes it a condition on the index, whose values are SQL parameters.
"""

import re
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from importlib import resources
from typing import NamedTuple
import orjson
from areal_lite.api.failure import FailureKind
from areal_lite.api.trajectory import EpisodeStatus
from areal_lite.errors import ConfigError, did_you_mean


class Kind(StrEnum):
    """Type of a key's values; it decides the operators and the SQL."""

    NUMBER = "number"
    ID = "id"
    """An integer or text that few rows share, compared as text; a regular expression calls Python for every row."""
    NAME = "text"
    """Text that many rows share."""
    NAMES = "texts"
    """A list of texts; a comparison holds if it holds for one of them."""
    FILE = "file"
    RUN = "run"
    TEXT = "full text"
    """The texts of all turns, which are only in the dumps."""


class Key(NamedTuple):
    """A key of the filter language, from keys.toml."""

    name: str
    kind: Kind
    meaning: str
    alias: str
    values: tuple[str, ...]
    """All values it can have; empty for any."""


_VALUES: dict[str, tuple[str, ...]] = {"status": (*EpisodeStatus, "untrained"), "error_kind": tuple(FailureKind)}
KEYS = {
    name: Key(name, Kind(row["kind"]), row["meaning"], row.get("alias", ""), _VALUES.get(name, ()))
    for name, row in tomllib.loads((resources.files("areal_lite.tools.inspect") / "keys.toml").read_text()).items()
}
"""Every key by name, in the order of the docs."""
_NAMES = KEYS | {key.alias: key for key in KEYS.values() if key.alias}
_RECORDED = re.compile(r"(reward|counts)/[\w./-]+")
SORT_KEYS = tuple(key.name for key in KEYS.values() if key.kind in (Kind.NUMBER, Kind.ID))
PATH = "(SELECT path FROM files WHERE id = e.file)"
"""SQL of the path of a row's file."""
_NUMERIC = ("<=", ">=", "!=", "=", "<", ">")
_TEXTUAL = ("!=", "!~", "=", "~")


class Term(NamedTuple):
    """One comparison; ``value`` None stands for a missing value."""

    key: Key
    op: str
    value: float | str | None


class Not(NamedTuple):
    """True where ``part`` is false."""

    part: "Expr"


class Both(NamedTuple):
    """``and`` of parts, or ``or`` if ``either``; without parts every row matches."""

    parts: "tuple[Expr, ...]"
    either: bool = False


Expr = Term | Not | Both
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<paren>[()])
      | (?P<word>and|or|not)(?![\w.])(?!\s*(?:[<>]=?|!?[=~]))
      | (?P<key>[A-Za-z_][\w./-]*)\s*(?P<op><=|>=|!=|!~|==|=|<|>|~)\s*
        (?:"(?P<quoted>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<bare>(?:\([^\s()]*\)|[^\s()"'])+))
    )""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")
_DEPTH = 100
_TOKENS = 500
_EXAMPLE = 'Example: status=failed (reward<0.5 or turns>3) text~"not sure"'


def parse(text: str) -> Expr:
    """Return the filter ``text``; one without terms matches everything."""
    parser = _Parser(text)
    if parser.take("end"):
        return Both(())
    expr = parser.either(0)
    if not parser.take("end"):
        raise parser.error("a ')' has no '('")
    return expr


class _Parser:
    """Recursive descent; ``tokens`` are (type, match) pairs that end with ("end", None)."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, re.Match[str] | None]] = []
        begin = 0
        while text[begin:].strip():
            if (match := _TOKEN.match(text, begin)) is None:
                rest, rule = text[begin:].strip(), "a term begins with a key"
                if name := re.match(r"[\w.]+", rest):
                    needs = "an operator and a value; quote a value with spaces, quotes or unmatched parentheses"
                    rule = f"{name[0]!r} needs {needs}"
                raise _error(rest, f"{rule}. {_EXAMPLE}")
            self.tokens.append((match["paren"] or match["word"] or "term", match))
            begin = match.end()
        self.tokens.append(("end", None))
        if len(self.tokens) > _TOKENS:
            raise _error(text, f"more than {_TOKENS} terms and parentheses")

    def either(self, depth: int) -> Expr:
        parts = [self.both(depth)]
        while self.take("or"):
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else Both(tuple(parts), either=True)

    def both(self, depth: int) -> Expr:
        parts = [self.part(depth, "a term is missing")]
        while self.tokens[self.at][0] in ("and", "term", "not", "("):
            self.take("and")
            parts.append(self.part(depth, "'and' needs a term after it"))
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def part(self, depth: int, rule: str) -> Expr:
        """Return a term, a negation or what parentheses hold; where there is none, ``rule`` is the error."""
        if depth > _DEPTH:
            raise self.error(f"more than {_DEPTH} parentheses or 'not' inside each other")
        if self.take("not"):
            return Not(self.part(depth + 1, "'not' needs a term after it"))
        if self.take("("):
            inner = self.either(depth + 1)
            if not self.take(")"):
                raise self.error("a '(' has no ')'")
            return inner
        match = self.tokens[self.at][1]
        if match is None or not self.take("term"):
            raise self.error(rule)
        return _term(match)

    def take(self, kind: str) -> bool:
        found = self.tokens[self.at][0] == kind
        self.at += found
        return found

    def error(self, rule: str) -> ConfigError:
        match = self.tokens[self.at][1]
        return _error(self.text[: len(self.text) if match is None else match.end()], f"{rule}. {_EXAMPLE}")


def _error(where: str, rule: str) -> ConfigError:
    return ConfigError(f"filter, at {where.strip()[:80]!r}: {rule}")


def _term(match: re.Match[str]) -> Term:
    source, op = match[0], match["op"].replace("==", "=")
    if (key := key_named(match["key"])) is None:
        hint = did_you_mean(match["key"], _NAMES, ";")
        raise _error(source, f"no key {match['key']!r}{hint} Keys: {', '.join(KEYS)}")
    quoted = match["quoted"] if match["quoted"] is not None else match["single"]
    escaped = r"\\([\"'])" if "~" in op else r"\\([\"'\\])"  # a regular expression keeps its backslashes
    value = match["bare"] if quoted is None else re.sub(escaped, r"\1", quoted)
    allowed = _NUMERIC if key.kind is Kind.NUMBER else ("~", "!~") if key.kind is Kind.TEXT else _TEXTUAL
    if op not in allowed:
        raise _error(source, f"{key.name} is a {key.kind} and takes {' '.join(allowed)}")
    if op in ("~", "!~"):
        try:
            re.compile(value)
        except re.error as error:
            rule = f"no regular expression: {error}. Put a backslash before a literal . ( [ * + ?"
            raise _error(source, rule) from None
    elif quoted is None and value in ("none", "null") and op in ("=", "!="):
        return Term(key, op, None)
    elif key.kind is Kind.NUMBER:
        if not _NUMBER.match(value):
            raise _error(source, f"{key.name} needs a number such as 0.5, or none, not {value!r}")
        return Term(key, op, float(value))
    elif key.values and value not in key.values:
        raise _error(source, f"{key.name} is one of {', '.join(key.values)}, not {value!r}")
    if not is_utf8(value):
        raise _error(source.encode(errors="replace").decode(), "the value is not UTF-8")
    return Term(key, op, value)


def key_named(name: str) -> Key | None:
    """Return a key by its name or alias; ``reward/NAME`` and ``counts/NAME`` are keys without being in ``KEYS``."""
    recorded = Key(name, Kind.NUMBER, "a part of the reward, or a count", "", ()) if _RECORDED.fullmatch(name) else None
    return _NAMES.get(name, recorded)


def parse_sort(sort: str) -> tuple[str, bool, str]:
    """Return the key to sort by, True if it descends, and its SQL; raises ConfigError."""
    key, descending = key_named(sort.removeprefix("-")), sort[0] == "-"
    if key is None or not (key.name in SORT_KEYS or "/" in key.name):
        keys = ", ".join(SORT_KEYS)
        raise ConfigError(f"cannot sort by {sort!r}; use one of {keys}, with - before it for descending")
    return key.name, descending, f"{column_of(key)} {'DESC' if descending else 'ASC'} NULLS LAST, e.id"


def terms(expr: Expr) -> Iterator[Term]:
    """Yield the comparisons of an expression."""
    if isinstance(expr, Term):
        yield expr
    else:
        for part in (expr.part,) if isinstance(expr, Not) else expr.parts:
            yield from terms(part)


def needs_text(expr: Expr) -> bool:
    return any(term.key.kind is Kind.TEXT for term in terms(expr))


def to_sql(expr: Expr) -> tuple[str, list[float | str]]:
    """Return an SQL condition, where NULL counts as false, and its parameters. It calls the functions ``matches``,
    ``text_matches`` and ``run_name``, which :mod:`.dump_index` defines."""
    if isinstance(expr, Not):
        condition, values = to_sql(expr.part)
        return f"NOT coalesce({condition}, 0)", values
    if isinstance(expr, Term):
        if expr.op[0] == "!":
            return to_sql(Not(Term(expr.key, expr.op[1:], expr.value)))
        if expr.value is None:
            return f"+{column_of(expr.key)} IS NULL", []
        return _term_sql(expr.key, expr.op, expr.value)
    if not expr.parts:
        return "1", []
    # CASE is the only form whose order SQLite keeps: what reads the dumps comes last.
    parts = [to_sql(part) for part in sorted(expr.parts, key=needs_text)]
    conditions = [condition for condition, _ in parts]
    parameters = [value for _, values in parts for value in values]
    if not needs_text(expr):
        return "(" + (" OR " if expr.either else " AND ").join(conditions) + ")", parameters
    if expr.either:
        return "CASE " + " ".join(f"WHEN {c} THEN 1" for c in conditions) + " ELSE 0 END", parameters
    return "CASE " + " ".join(f"WHEN NOT coalesce({c}, 0) THEN 0" for c in conditions) + " ELSE 1 END", parameters


def column_of(key: Key) -> str:
    """Return the SQL of a key's value."""
    if "/" in key.name:
        return f"json_extract(e.numbers, '$.\"{key.name}\"')"
    return {Kind.RUN: "run_name()", Kind.FILE: "e.file"}.get(key.kind, f'e."{key.name}"')


def _match_sql(column: str, op: str, value: str) -> str:
    """Compare a text column; a regular expression without special characters needs no call into Python."""
    if op == "=":
        return f"{column} = ?"
    return f"instr({column}, ?) > 0" if is_literal(value) else f"({column} IS NOT NULL AND matches({column}, ?))"


def is_utf8(text: str) -> bool:
    """Return True if ``text`` has no lone surrogates, which SQLite refuses."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def is_literal(pattern: str) -> bool:
    """Return True if a regular expression matches only its own text."""
    return not set(pattern) & set(".^$*+?{}[]\\|()")


def _term_sql(key: Key, op: str, value: float | str) -> tuple[str, list[float | str]]:
    column, text = column_of(key), str(value)
    match key.kind:
        case Kind.NUMBER:
            return f"+{column} {op} ?", [value]
        case Kind.TEXT:
            return f"text_matches({PATH}, e.offset, e.length, ?)", [text]
        case Kind.RUN | Kind.NAME:
            return _match_sql(column, op, text), [text]
        case Kind.ID:
            if op == "=" and re.fullmatch(r"0|-?[1-9]\d{0,17}", text, re.ASCII):
                return f"(+{column} = ? OR +{column} = ?)", [text, int(text)]
            return _match_sql(f"CAST({column} AS TEXT)", op, text), [text]
        case Kind.FILE:
            return f"+{column} IN (SELECT id FROM files WHERE {_match_sql('path', op, text)})", [text]  # nosec B608 # our columns, bound values
        case Kind.NAMES if op == "=":
            return f"instr({column}, ?) > 0", [f"\n{orjson.dumps(text).decode()}\n"]
        case Kind.NAMES:
            return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE {_match_sql('value', op, text)})", [text]  # nosec B608 # our columns, bound values
