"""Types of command-line arguments that several tools share."""


def positive_integer(text: str) -> int:
    """Return ``text`` as an integer of at least 1; argparse shows this function's name."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
