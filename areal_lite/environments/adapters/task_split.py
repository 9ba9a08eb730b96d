"""Which task of a finite list a numbered row plays, so that none of the tasks trained on is held out."""

from areal_lite.environments.catalog import NUMBERS

FIRST_HELD_OUT = NUMBERS["eval_dataset"]["seed"]


def task_of(number: int, count: int) -> int:
    """Return the place of a row's task among ``count``: rows held out take the last tenth, others what is before, over
    and over. A single task is both."""
    held_out = -(-count // 10)
    if number >= FIRST_HELD_OUT:
        return count - 1 - (number - FIRST_HELD_OUT) % held_out
    return number % max(count - held_out, 1)
