"""AReaL's reward functions for mathematics, with the package math-verify (``pip install 'areal-lite[math]'``)."""

import functools
import logging
from importlib.util import find_spec
from typing import Any

if find_spec("math_verify") is None:  # at import: reward functions often turn exceptions into a reward of 0
    raise ModuleNotFoundError(
        "areal_lite.reward needs the package math-verify: pip install 'areal-lite[math]'", name="math_verify"
    )


class MathVerifyWorker:
    """Compares mathematical answers by value: ``1/2`` equals ``0.5``.

    Sets no time limit of its own: run it in a reward function of AsyncRewardWrapper, which does.

    Args:
        try_extract_without_anchor: Take any number or formula in a text, not only one after "the answer is".
        precision: Decimal places that floats are compared to.
    """

    def __init__(self, try_extract_without_anchor: bool = True, precision: int = 6) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns in every process that it sets no time limit
        expressions = ExprExtractionConfig(try_extract_without_anchor=try_extract_without_anchor)
        self._formats = (expressions, LatexExtractionConfig())
        self._precision = precision

    def verify(self, response: str, ground_truth: str) -> float:
        """Return 1.0 if both texts' last answers are equal, else 0.0; ValueError if ``ground_truth`` has none."""
        from math_verify import parse, verify

        truth, answer = (
            parse(text, extraction_config=self._formats, parsing_timeout=None) for text in (ground_truth, response)
        )
        if not truth:
            raise ValueError(f"no number or formula in the reference answer {ground_truth[:200]!r}")
        # Limits by signal work in the main thread only.
        return float(verify(truth, answer, float_rounding=self._precision, timeout_seconds=None))


@functools.cache
def get_math_verify_worker() -> MathVerifyWorker:
    return MathVerifyWorker()


def gsm8k_reward_fn(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **kwargs: Any
) -> float:
    """Return 1.0 if ``completions`` ends in the value of ``answer``, else 0.0; ValueError if ``answer`` has none."""
    return get_math_verify_worker().verify(str(completions), str(answer))
