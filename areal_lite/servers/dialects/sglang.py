"""SGLang's native HTTP protocol, which the embedded server speaks too."""

from __future__ import annotations

from typing import Any

from areal_lite.config.generation import CONSTRAINTS, GenerationHyperparameters
from areal_lite.models.adapter_shape import AdapterShape
from areal_lite.servers.dialects.dialect import (
    BadResponse,
    Chunk,
    ControlCall,
    ErrorReply,
    GenerationCall,
    ServerInfo,
    StreamEvent,
    TopLogprobs,
    check_error_event,
    checked_chunk,
    checked_event,
    spans_to_versions,
    version_number,
    version_or_none,
    with_extra,
)
from areal_lite.servers.weights.published_weights import AdapterFolder, WeightBucket, WeightFolder, WeightGroup


class SGLang:
    """SGLang's log-probs are log-softmax of logits / temperature, before top-p, top-k and min-p.

    Penalties, ``logit_bias`` and the mask of a grammar act on SGLang's logits before its log-probs; the embedded server
    reports log-probs before them too.

    SGLang's streams repeat all earlier tokens in every event, which is expensive for answers of many thousand tokens:
    start it with ``--incremental-streaming-output``. Both forms are understood.
    """

    generate_path = "/generate"
    health_path = "/health"
    info_paths: tuple[str, ...] = ("/server_info", "/model_info")

    def __init__(self, *, embedded: bool = False) -> None:
        """Speak to SGLang, or to the embedded server, which understands two more fields and loads weights later.

        It needs no options for adapters, and has one for all its requests.
        """
        self.adapter_variables: dict[str, str] = {}
        self.keeps_adapter = not embedded
        self.continues_constraints = embedded
        self.receives_while_generating = embedded

    def generate_body(self, call: GenerationCall) -> dict[str, Any]:
        """Return the JSON body of one generation."""
        sampling = _sampling_params(call.gconfig)
        sampling["max_new_tokens"] = call.max_new_tokens
        if call.min_new_tokens:
            sampling["min_new_tokens"] = call.min_new_tokens
        if call.seed is not None:
            sampling["sampling_seed"] = call.seed
        body = {
            "rid": call.rid,
            "input_ids": call.input_ids,
            "sampling_params": with_extra(sampling, call.gconfig.extra) if call.gconfig.extra else sampling,
            "return_logprob": True,
            "stream": call.stream,
        }
        if call.top_logprobs:
            body["top_logprobs_num"] = call.top_logprobs
        if self.continues_constraints:  # the embedded server
            if call.num_continued:
                body["num_continued"] = call.num_continued
            if call.stream:
                body["incremental_streaming_output"] = True
        return body

    def parse_generate(self, reply: Any, *, top_logprobs: int = 0) -> Chunk:
        """Return the tokens of a ``/generate`` reply; raises BadResponse."""
        try:
            meta = reply["meta_info"]
            finish = meta["finish_reason"]["type"]
            pairs = meta.get("output_token_logprobs") or []
            tokens = [pair[1] for pair in pairs]
            logprobs = [pair[0] for pair in pairs]
            ids = reply.get("output_ids")
            if ids is not None and ids != tokens:
                raise BadResponse(f"{len(ids)} output_ids that differ from the {len(tokens)} ids with log-probs")
            versions: list[int] | None = None
            if meta.get("weight_versions"):
                versions = spans_to_versions(meta["weight_versions"], len(tokens))
            elif meta.get("weight_version") is not None:
                versions = [version_number(meta["weight_version"])] * len(tokens)
            top = _top_logprobs(meta.get("output_top_logprobs") or []) if top_logprobs else None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise BadResponse(f"a reply without the fields of /generate ({error!r})") from None
        return checked_chunk(tokens, logprobs, versions, finish, top)

    def parse_event(self, event: Any, received: int, *, top_logprobs: int = 0) -> StreamEvent | None:
        """Return the new tokens of an event, whose lists hold all tokens so far or only the new ones."""
        check_error_event(event)
        try:
            meta = event["meta_info"]
            finish = meta["finish_reason"]
            if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
                raise ErrorReply(int(finish["status_code"]), str(finish.get("message")))
            total = meta.get("completion_tokens", received)  # a call aborted in the queue has none
            pairs = meta.get("output_token_logprobs") or []
            new = total - received
            if not 0 <= new <= len(pairs):
                raise BadResponse(f"{len(pairs)} log-probs for {new} new tokens")
            pairs = pairs[len(pairs) - new :]
            tokens = [pair[1] for pair in pairs]
            ids = event.get("output_ids")
            if ids is not None and ids[len(ids) - new :] != tokens:
                raise BadResponse("output_ids that differ from the ids with log-probs")
            spans, label = meta.get("weight_versions"), meta.get("weight_version")
            top = None
            if top_logprobs:
                rows = meta.get("output_top_logprobs") or []
                top = _top_logprobs(rows[max(0, len(rows) - new) :])
            return checked_event(
                tokens,
                [pair[0] for pair in pairs],
                top,
                version=None if label is None else version_number(label),
                all_versions=spans_to_versions(spans, total) if spans else None,
                finish=None if finish is None else finish["type"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise BadResponse(f"an event without the fields of /generate ({error!r})") from None

    def parse_info(self, reply: Any) -> ServerInfo:
        """Return what the server reports; ``/model_info`` has the path and version of the last update."""
        if not isinstance(reply, dict):
            return ServerInfo()
        # SGLang refuses prompts of max_req_input_len tokens (6 below the context length), also those that only
        # became so long because an aborted answer is continued.
        windows = [reply.get("context_length"), reply.get("max_req_input_len")]
        vocab, model, paused = reply.get("vocab_size"), reply.get("model_path"), reply.get("is_paused")
        device, num_ranks = reply.get("device"), reply.get("tp_size")
        return ServerInfo(
            min((window for window in windows if isinstance(window, int)), default=None),
            vocab if isinstance(vocab, int) else None,
            model if isinstance(model, str) else None,
            version_or_none(reply.get("weight_version")),
            paused if isinstance(paused, bool) else None,
            device if isinstance(device, str) else None,
            num_ranks if isinstance(num_ranks, int) else None,
        )

    def abort(self, rid: str) -> ControlCall:
        """Abort one request; SGLang takes ``rid`` as a prefix, so ids must all have one length."""
        return ControlCall("/abort_request", {"rid": rid})

    def pause(self, *, keep: bool = False) -> ControlCall:
        """Abort what runs; the client keeps the partial tokens and continues them afterwards."""
        return ControlCall("/pause_generation", {"mode": "retract" if keep else "abort"})

    def load_folder(self, weights: WeightFolder) -> list[ControlCall]:
        """Load from disk and drop the prefix cache, which holds the old weights' states."""
        body = {"model_path": weights.path, "weight_version": str(weights.version), "flush_cache": True}
        return [ControlCall("/update_weights_from_disk", body)]

    def join_group(self, group: WeightGroup) -> ControlCall:
        """Join with rank 1 and, with tensor parallelism, the ranks after it."""
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        return ControlCall("/init_weights_update_group", body)

    def begin_broadcast(self) -> list[ControlCall]:
        """Open an update, which SGLang requires and refuses while one is open."""
        return [ControlCall("/begin_weight_update")]

    def receive(self, bucket: WeightBucket, group: str, version: int | None) -> ControlCall:
        """Receive a bucket and load it; the last also drops the prefix cache."""
        body = {**bucket.description(), "group_name": group, "flush_cache": version is not None}
        return ControlCall(
            "/update_weights_from_distributed",
            body if version is None else body | {"weight_version": str(version)},
        )

    def end_broadcast(self, version: int) -> list[ControlCall]:
        """Close the update; the embedded server loads the weights here."""
        return [ControlCall("/end_weight_update")]

    def abandon_broadcast(self) -> list[ControlCall]:
        """Close the update; the embedded server refuses to load a part of the weights."""
        return [ControlCall("/end_weight_update")]

    def adapter_flags(self, shape: AdapterShape) -> dict[str, Any]:
        """Return SGLang's options; its default of eight adapters in a batch stays."""
        if self.continues_constraints:  # the embedded server
            return {}
        return {"enable-lora": True, "max-lora-rank": shape.rank, "lora-target-modules": list(shape.layers)}

    def load_adapter(self, name: str, weights: AdapterFolder) -> list[ControlCall]:
        """Load the adapters, then name the version; prefix caches are per adapter."""
        body, label = {"lora_name": name, "lora_path": weights.path}, str(weights.version)
        if self.continues_constraints:  # the embedded server labels the tokens of an adapter
            return [ControlCall("/load_lora_adapter", body | {"weight_version": label})]
        label_call = ControlCall("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        return [ControlCall("/load_lora_adapter", body), label_call]

    def name_adapter(self, name: str) -> dict[str, Any]:
        """Return SGLang's field."""
        return {"lora_path": name}

    def unload_adapter(self, name: str) -> ControlCall:
        """Unload an adapter; SGLang waits for its requests."""
        return ControlCall("/unload_lora_adapter", {"lora_name": name})

    def resume(self) -> ControlCall:
        """Resume generation."""
        return ControlCall("/continue_generation")

    def update_error(self, reply: Any) -> str | None:
        """Return SGLang's message if ``success`` is false."""
        if isinstance(reply, dict) and reply.get("success") is False:
            return str(reply.get("message"))
        return None


def _sampling_params(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": gconfig.effective_temperature,
        "skip_special_tokens": gconfig.skip_special_tokens,
    }
    if not gconfig.greedy:
        if gconfig.top_p < 1:
            sampling["top_p"] = gconfig.top_p
        if gconfig.top_k is not None:
            sampling["top_k"] = gconfig.top_k
        if gconfig.min_p:
            sampling["min_p"] = gconfig.min_p
    for name in ("stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty"):
        if value := getattr(gconfig, name):
            sampling[name] = value
    if gconfig.repetition_penalty != 1:
        sampling["repetition_penalty"] = gconfig.repetition_penalty
    if gconfig.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in gconfig.logit_bias.items()}
    for name in CONSTRAINTS:
        if (value := getattr(gconfig, name)) is not None:
            sampling[name] = value
    return sampling


def _top_logprobs(rows: list[Any]) -> TopLogprobs:
    return [[(token, logprob) for logprob, token, *_ in row] for row in rows]
