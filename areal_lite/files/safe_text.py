"""Text that others wrote, made safe to show and to keep: control characters written out, secrets replaced by ``***``.

A secret is a text with the form of a known kind of key, the password or token of a URL, a value that is named as one,
or the value of an environment variable of this process whose name says that it is one.
"""

import logging
import os
import re
from collections.abc import Sequence
from functools import lru_cache

HIDDEN = "***"
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except newline and tab, and marks that reverse the reading direction."""
_NAME = r"(?:api[_-]?key|passwd|password|secret|(?:secret|access)[_-]key|(?:access|api|auth|hf)[_-]?token)"
SECRET_KEY = re.compile(rf"(?:{_NAME}|^token)$", re.IGNORECASE)  # names of config keys whose value is a secret
SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
_SHORTEST = 8  # characters of a variable's value that is looked for; a shorter one may be part of any text
_PREFIXED = r"(?:sk-|al_|hf_|gh[opsu]_|github_pat_|xox[abprs]-)[\w-]{8,}"
_KINDS = rf"{_PREFIXED}|AKIA[A-Z0-9]{{16}}|AIza[\w-]{{30,}}|eyJ[\w-]{{9,}}\.[\w.-]{{9,}}"
_FORMS = (
    re.compile(rf"()(?<![\w-])(?:{_KINDS})"),
    re.compile(r"(Bearer )[^\s\"',;]{8,}"),
    re.compile(r"(://)[^\s/\"]+(?=@)"),
    re.compile(r"([?&;][\w-]*(?:token|key|secret|password|signature|sig)=)[^\s&\"'<>]+", re.IGNORECASE),
)
_FLAG = re.compile(r"--[\w-]*(?:key|token|secret|password)", re.IGNORECASE)
_NAMED = (
    re.compile(rf"({_NAME}[\"']?\s*[:=]\s*[\"']?)[^\s\"',;}}\])]{{4,}}", re.IGNORECASE),
    re.compile(rf"((?<![\w-]){_FLAG.pattern}[ =])[^\s\"'-][^\s\"']*", re.IGNORECASE),
)


def printable(text: str) -> str:
    """Return ``text`` with every control character written out, as in ``\\x1b``."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_printable(text: str) -> str:
    """Return JSON text with the same characters escaped as JSON does it."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_secrets(text: str, *, named: bool = True) -> str:
    """Return ``text`` with its secrets replaced; without ``named``, values that are only named as one stay."""
    for value in _values(tuple(os.environ.items())):
        text = text.replace(value, HIDDEN)
    for form in (*_FORMS, *_NAMED) if named else _FORMS:
        text = form.sub(rf"\1{HIDDEN}", text)
    return text


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return the arguments of a program with the secrets replaced, those after ``--api-key`` and the like too."""
    flags = ["", *command]
    return [
        HIDDEN if _FLAG.fullmatch(flag) else without_secrets(argument)
        for flag, argument in zip(flags, command, strict=False)
    ]


@lru_cache(maxsize=1)
def _values(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    found = {value for name, value in environment if SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST}
    return tuple(sorted(found, key=len, reverse=True))


class SafeFormatter(logging.Formatter):
    """Formats records, tracebacks included, without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))
