"""SGLang's native HTTP protocol, which the embedded server speaks too."""

from __future__ import annotations

from typing import Any

from areal_lite.api.generation import GenerationHyperparameters
from areal_lite.infra.backends.dialect import (
    BadResponse,
    Chunk,
    ControlCall,
    ServerInfo,
    checked_chunk,
    spans_to_versions,
    version_number,
)


class SGLang:
    """Log-probs are log-softmax of logits / temperature, before top-p and top-k."""

    generate_path = "/generate"
    info_path = "/server_info"

    def generate_body(
        self,
        input_ids: list[int],
        gconfig: GenerationHyperparameters,
        *,
        rid: str,
        max_new_tokens: int,
        min_new_tokens: int,
        seed: int | None,
    ) -> dict[str, Any]:
        """Return the JSON body of one generation."""
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": gconfig.effective_temperature,
            "skip_special_tokens": gconfig.skip_special_tokens,
        }
        if gconfig.top_p < 1 and not gconfig.greedy:
            sampling["top_p"] = gconfig.top_p
        if gconfig.top_k is not None and not gconfig.greedy:
            sampling["top_k"] = gconfig.top_k
        if min_new_tokens:
            sampling["min_new_tokens"] = min_new_tokens
        if gconfig.stop:
            sampling["stop"] = gconfig.stop
        if gconfig.stop_token_ids:
            sampling["stop_token_ids"] = gconfig.stop_token_ids
        if gconfig.ignore_eos:
            sampling["ignore_eos"] = True
        if gconfig.frequency_penalty:
            sampling["frequency_penalty"] = gconfig.frequency_penalty
        if seed is not None:
            sampling["sampling_seed"] = seed
        return {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }

    def parse_generate(self, reply: Any) -> Chunk:
        """Return the tokens of a ``/generate`` reply; raises BadResponse."""
        try:
            meta = reply["meta_info"]
            finish = meta["finish_reason"]["type"]
            pairs = meta.get("output_token_logprobs") or []
            tokens = [pair[1] for pair in pairs]
            logprobs = [pair[0] for pair in pairs]
            ids = reply.get("output_ids")
            if ids is not None and ids != tokens:
                raise BadResponse(
                    f"{len(ids)} output_ids that differ from the {len(tokens)} ids with log-probs"
                )
            versions: list[int] | None = None
            if meta.get("weight_versions"):
                versions = spans_to_versions(meta["weight_versions"], len(tokens))
            elif meta.get("weight_version") is not None:
                versions = [version_number(meta["weight_version"])] * len(tokens)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadResponse(f"a reply without the fields of /generate ({error!r})") from None
        return checked_chunk(tokens, logprobs, versions, finish)

    def parse_info(self, reply: Any) -> ServerInfo:
        """Return the context length and vocabulary size if the server reports them."""
        if not isinstance(reply, dict):
            return ServerInfo()
        # SGLang refuses prompts of max_req_input_len tokens (6 below the context length), also those that only
        # became so long because an aborted answer is continued.
        windows = [reply.get("context_length"), reply.get("max_req_input_len")]
        vocab = reply.get("vocab_size")
        return ServerInfo(
            min((window for window in windows if isinstance(window, int)), default=None),
            vocab if isinstance(vocab, int) else None,
        )

    def abort(self, rid: str) -> ControlCall:
        """Abort one request; SGLang takes ``rid`` as a prefix, so ids must all have one length."""
        return ControlCall("/abort_request", {"rid": rid})

    def pause(self) -> ControlCall:
        """Abort what runs; the client keeps the partial tokens and continues them afterwards."""
        return ControlCall("/pause_generation", {"mode": "abort"})

    def update_weights(self, path: str, version: int) -> list[ControlCall]:
        """Load from disk and drop the prefix cache, which holds the old weights' states."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        return [ControlCall("/update_weights_from_disk", body)]

    def resume(self) -> ControlCall:
        """Resume generation."""
        return ControlCall("/continue_generation")

    def update_error(self, reply: Any) -> str | None:
        """Return SGLang's message if ``success`` is false."""
        if isinstance(reply, dict) and reply.get("success") is False:
            return str(reply.get("message"))
        return None
