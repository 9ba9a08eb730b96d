"""vLLM's token protocol (``/inference/v1/generate``, servers started with ``--enable-scale-out``).

vLLM's log-probs ignore temperature by default. Start it with ``--logprobs-mode processed_logprobs`` if the
temperature is not 1, or trainer and engine disagree.
"""

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
)


class VLLM:
    """Weight updates use the worker extension's ``load_checkpoint_dir``; docs/servers.md shows how to start it."""

    generate_path = "/inference/v1/generate"
    info_path = "/v1/models"

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
        """Return the JSON body of one generation; vLLM silently ignores unknown fields, so names must be exact."""
        sampling: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "min_tokens": min_new_tokens,
            "temperature": gconfig.effective_temperature,
            "top_p": gconfig.top_p,
            "top_k": gconfig.top_k or -1,
            "logprobs": 0,
            "ignore_eos": gconfig.ignore_eos,
            "skip_special_tokens": gconfig.skip_special_tokens,
            "frequency_penalty": gconfig.frequency_penalty,
        }
        if gconfig.stop:
            sampling["stop"] = gconfig.stop
        if gconfig.stop_token_ids:
            sampling["stop_token_ids"] = gconfig.stop_token_ids
        if seed is not None:
            sampling["seed"] = seed
        return {"request_id": rid, "token_ids": input_ids, "sampling_params": sampling, "stream": False}

    def parse_generate(self, reply: Any) -> Chunk:
        """Return the tokens of a reply; raises BadResponse."""
        try:
            choice = reply["choices"][0]
            tokens = list(choice["token_ids"])
            logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content", [])]
            spans = choice.get("weight_versions")
            versions = spans_to_versions(spans, len(tokens)) if spans else None
            finish = choice["finish_reason"]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadResponse(f"a reply without the fields of /inference/v1/generate ({error!r})") from None
        return checked_chunk(tokens, logprobs, versions, "stop" if finish == "repetition" else finish)

    def parse_info(self, reply: Any) -> ServerInfo:
        """Return the context length that ``/v1/models`` reports."""
        try:
            window = reply["data"][0]["max_model_len"]
        except (KeyError, TypeError, IndexError):
            return ServerInfo()
        return ServerInfo(context_length=window if isinstance(window, int) else None)

    def abort(self, rid: str) -> ControlCall:
        """Abort one request by the id that vLLM made from its ``rid``."""
        return ControlCall("/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]})

    def pause(self) -> ControlCall:
        """Abort what runs; the client keeps the partial tokens and continues them afterwards."""
        return ControlCall("/pause?mode=abort")

    def update_weights(self, path: str, version: int) -> list[ControlCall]:
        """Load from disk on every worker, name the version, drop the prefix cache."""
        return [
            ControlCall(
                "/collective_rpc", {"method": "load_checkpoint_dir", "kwargs": {"weights_path": path}}
            ),
            ControlCall("/update_weight_version", {"new_version": str(version)}),
            ControlCall("/reset_prefix_cache"),
        ]

    def resume(self) -> ControlCall:
        """Resume generation."""
        return ControlCall("/resume")

    def update_error(self, reply: Any) -> str | None:
        """Return the message of the first worker that failed."""
        for result in reply.get("results") or [] if isinstance(reply, dict) else []:
            if isinstance(result, dict) and result.get("success") is False:
                return str(result.get("message"))
        return None
