"""Names of models on the Hugging Face Hub: one that cannot be had is an error within two seconds.

huggingface_hub retries for 23 s to get a file that its cache lacks. This asks once.
"""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path

from areal_lite.errors import ConfigError

TIMEOUT_S = 1.5
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_hub_name(path: str) -> bool:
    """Return whether ``path`` is no folder or file and may be a name on the hub."""
    return not Path(path).expanduser().exists() and bool(_NAME.fullmatch(path))


@functools.cache
def check_hub_name(name: str, *, key: str = "model_path") -> None:
    """Check that the hub or its cache has a model; ``key`` is the config key, for errors; raises ConfigError."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=TIMEOUT_S)
            answers.append(None)
        except EntryNotFoundError:  # the model is there; loading it says what it lacks
            answers.append(None)
        except Exception as error:  # judged below
            answers.append(error)

    # A thread, because resolving the hub's address knows no timeout.
    asking = threading.Thread(target=ask, name="areal-lite-hub", daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    error = answers[0] if answers else TimeoutError(f"no answer in {TIMEOUT_S:g} s")
    if error is None or (isinstance(error, HfHubHTTPError) and error.response.status_code in (429, 500, 502, 503, 504)):
        return  # the download tries these again
    reason = str(error).strip().partition("\n")[0][:200]
    raise ConfigError(
        f"{key} {name!r} is neither a directory nor in the cache of the Hugging Face Hub, and {constants.ENDPOINT} "
        f"does not give it ({type(error).__name__}: {reason}): check the name and the network, or give a directory "
        "with config.json and weights"
    ) from error
