"""Command-line arguments that ``areal-lite serve`` and the process of the embedded server share."""

import argparse
from areal_lite.config.keys import describe_fields
from areal_lite.config.server_config import EmbeddedServerConfig


def add_model_arguments(parser: argparse.ArgumentParser, settings: type[EmbeddedServerConfig]) -> None:
    """Add the model to serve, and an option for each field of the config class ``settings``."""
    parser.add_argument(
        "model_path",
        metavar="MODEL",
        help="folder with config.json, tokenizer and safetensors weights, or a name on the Hugging Face Hub",
    )
    for field in describe_fields(settings):
        parser.add_argument(
            f"--{field.key.replace('_', '-')}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{field.meaning} ({field.type}; default {field.default})".replace("%", "%%"),
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Seed for requests without a seed of their own, in order of arrival (default 0)",
    )
    parser.add_argument("--weight-version", default="0", metavar="NAME", help="Name of the first weights; default 0")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="Make the bits of each answer depend on its request, the weights and num_threads only: requests run one "
        "by one and share no KV cache. Several times slower with many requests at once",
    )
