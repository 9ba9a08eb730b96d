"""Command-line arguments that several tools share."""

import argparse


def positive_integer(text: str) -> int:
    """Return ``text`` as an integer of at least 1; argparse shows this function's name."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the flag without which nothing is imported that the config in a run's folder names."""
    parser.add_argument("--trust-config", action="store_true", help="run the code that RUN/config.yaml names")
