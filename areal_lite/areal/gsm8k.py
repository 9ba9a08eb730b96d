"""AReaL's reward for GSM8K: is the answer's value the reference's?"""

from __future__ import annotations

from typing import Any

from areal_lite.areal.math_reward import get_math_verify_worker


def gsm8k_reward_fn(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **kwargs: Any
) -> float:
    """Return 1.0 if ``completions`` ends in the value of ``answer``, else 0.0.

    Raises:
        ValueError: If ``answer`` has no number or formula.
    """
    return get_math_verify_worker().verify(str(completions), str(answer))
