"""Actions drawn at random: of a seat that no model plays, and of ``areal-lite env-check``."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any
from areal_lite.environments.environment import ToolCall


def random_action(
    tools: Sequence[dict[str, Any]], first: str, latest: str, draw: random.Random
) -> str | list[ToolCall]:
    """Call any tool, or reply with a bracket or word of what was read last, or of the last line of what was read first.
    That line often says how to act."""
    if tools and draw.random() < 0.8:
        return [tool_call(draw.choice(tools), draw)]
    pools = [re.findall(r"\[[^\[\]]*\]", first + latest), re.findall(r"\w+", first.rpartition("\n")[2]), latest.split()]
    return str(draw.choice(draw.choice([pool for pool in pools if pool] or [["0"]])))


def tool_call(tool: dict[str, Any], draw: random.Random) -> ToolCall:
    """Return a call that fits the schema of a tool."""
    function = tool["function"]
    return ToolCall("call_0", function["name"], _drawn({"type": "object"} | function.get("parameters", {}), draw))


def _drawn(schema: Mapping[str, Any], draw: random.Random) -> Any:
    schema = {**schema, **next(iter(schema.get("anyOf") or schema.get("oneOf") or ()), {})}
    kind, low = schema.get("type"), int(schema.get("minimum", min(0, schema.get("maximum", 0))))
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _drawn(each, draw) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [_drawn(schema.get("items", {}), draw) for _ in range(schema.get("minItems", 1))]
    numbers = range(low, int(schema.get("maximum", low + 9)) + 1)
    usual: dict[str, Sequence[Any]] = {"integer": numbers, "number": numbers, "boolean": [False, True], "null": [None]}
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    return draw.choice(allowed or usual.get(str(kind), ["a", "b", "1"]))
