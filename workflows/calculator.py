"""An agent with a calculator tool. Uses the plain OpenAI SDK only."""

from __future__ import annotations
import ast
import json
import math
import operator
import random
import re
from typing import Any
from openai import AsyncOpenAI

SYSTEM = "Use the calculator for every calculation. End with the result, as a number and nothing else."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression with + - * / // % ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 12"}},
            "required": ["expression"],
        },
    },
}


class CalculatorAgent:
    """Reward 1 if the last number of the final answer equals ``data["answer"]``.

    Args:
        max_rounds: Maximum model calls per episode. The reward is 0 if the last one still calls the tool.
    """

    def __init__(self, max_rounds: int = 4) -> None:
        self.max_rounds = max_rounds

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": data["question"]},
        ]
        tools: Any = [CALCULATOR]
        for _ in range(self.max_rounds):
            completion = await client.chat.completions.create(model="default", messages=messages, tools=tools)
            answer = completion.choices[0].message
            if not answer.tool_calls:
                return is_right(answer.content or "", data["answer"])
            messages.append(answer)
            for call in answer.tool_calls:
                result = use_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


def is_right(text: str, answer: str | float) -> float:
    """Return 1.0 if the last number of ``text`` equals ``answer``, else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(bool(numbers) and math.isclose(float(numbers[-1]), float(answer), rel_tol=1e-6))


def use_tool(name: str, arguments: str) -> str:
    """Return the tool result. The model's mistakes become error texts in the conversation, not exceptions."""
    if name != "calculator":
        return f"error: unknown tool {name!r}"
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except (
        ValueError,
        TypeError,
        KeyError,
        ArithmeticError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        return f"error: {error}"[:200]


BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LARGEST = 10**100


def evaluate(expression: str) -> int | float:
    """Evaluate an arithmetic expression; anything else is refused.

    Raises:
        ValueError: If it is not arithmetic, too long, or the result is too large.
        ArithmeticError: On division by zero.
    """
    if not isinstance(expression, str) or len(expression) > 200:
        raise ValueError("the expression must be a text of at most 200 characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(b) > 100:
                raise ValueError("the exponent is too large: at most 100")
            result = BINARY[type(op)](a, b)
        case _:
            raise ValueError(f"only numbers, + - * / // % ** and parentheses, not {ast.unparse(node)!r}")
    if isinstance(result, complex) or not abs(result) <= LARGEST:
        raise ValueError("the result is too large or not a real number")
    return result


def rows(size: int = 1000, seed: int = 1) -> list[dict[str, str]]:
    """Return ``size`` rows of ``question`` and ``answer``: two operations on numbers up to 99."""
    rng = random.Random(seed)
    result = []
    for _ in range(size):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        expression = f"({a} {rng.choice('+-')} {b}) * {c}"
        result.append({"question": f"What is {expression}?", "answer": str(evaluate(expression))})
    return result
