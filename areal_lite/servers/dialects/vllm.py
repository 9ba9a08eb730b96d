"""vLLM's token protocol (``/inference/v1/generate``, servers started with ``--enable-scale-out``).

vLLM's log-probs ignore temperature by default. Start it with ``--logprobs-mode processed_logprobs`` if the
temperature is not 1, or trainer and engine disagree. Its log-probs come after the mask of a grammar in both modes, and
after penalties and ``logit_bias`` in the processed mode.
"""

from typing import TYPE_CHECKING, Any
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.servers.dialects import dialect
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ControlCall, GenerationCall, ServerInfo, TopLogprobs
from areal_lite.servers.weights.published_weights import WeightBucket, WeightFolder

if TYPE_CHECKING:
    from areal_lite.servers.weights.broadcaster import BroadcastGroup

_MOST_LOGPROBS = 20  # vLLM's own limit, unless it is started with another
_FINISH = {"repetition": "stop"}
_ID_PREFIX = "generate-tokens-"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of ``--max-lora-rank``


def _on_workers(method: str, **arguments: Any) -> ControlCall:
    return ControlCall("/collective_rpc", {"method": method, "kwargs": arguments})


class VLLM:
    """Weight updates use the methods of the worker extension; docs/servers.md shows how to start it."""

    generate_path = "/inference/v1/generate"
    health_path = "/health"
    info_paths: tuple[str, ...] = ("/v1/models", "/weight_info", "/is_paused", "/get_world_size")
    receives_while_generating = True
    adapter_variables: dict[str, str] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    adapter_key = "model"  # an adapter is a model of its own
    keeps_adapter = True
    continues_constraints = False
    resume = ControlCall("/resume")
    begin_broadcast = _on_workers("forget_received_weights")
    abandon_broadcast = None  # an update that broke off has changed nothing

    def generate_body(self, call: GenerationCall) -> dict[str, Any]:
        """Return the JSON body of one generation; vLLM silently ignores unknown fields, so names must be exact."""
        gconfig, top_logprobs = call.gconfig, call.top_logprobs
        sampling = dialect.shared_sampling(gconfig) | {
            "max_tokens": call.max_new_tokens,
            "min_tokens": call.min_new_tokens,
            "top_p": gconfig.top_p,
            "top_k": gconfig.top_k or -1,
            # One more than asked for: where the sampled token is not among the best, vLLM puts it in place of the last.
            "logprobs": top_logprobs + (0 < top_logprobs < _MOST_LOGPROBS),
        }
        if gconfig.min_p:
            sampling["min_p"] = gconfig.min_p
        if gconfig.ignore_eos:
            sampling.pop("stop_token_ids", None)  # vLLM would stop at them; SGLang does not
        for name, key in (("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")):
            if (text := getattr(gconfig, name)) is not None:
                sampling["structured_outputs"] = {key: text}
        if call.seed is not None:
            sampling["seed"] = call.seed
        return {
            "request_id": call.rid,
            "token_ids": call.input_ids,
            "sampling_params": dialect.with_extra(sampling, gconfig.extra),
            "stream": call.stream,
        }

    def score_body(self, input_ids: list[int], start: int) -> dict[str, Any]:
        """Return the body of a request for the log-probs of given tokens; vLLM gives all, and samples one more."""
        return {"token_ids": input_ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}}

    def parse_scores(self, reply: Any, input_ids: list[int], start: int) -> list[float]:
        """Return the log-prob of each of ``input_ids`` after place ``start``, by the reply to ``score_body``."""
        with dialect.reading(reply, "the log-probs of the prompt"):
            given = zip(input_ids, reply["prompt_logprobs"], strict=True)
            pairs = [(token, None if of is None else of[str(token)]["logprob"]) for token, of in given]
        return dialect.checked_scores(pairs, input_ids)[start:]

    def image_wire(self, info: ServerInfo) -> tuple[str, str | None]:
        """Return how a server takes images, and what may go wrong with that; None if nothing."""
        return "ids, and features of its route /v1/chat/completions/render", None

    def images_call(self, call: GenerationCall) -> ControlCall | None:
        """Return what asks vLLM for the features of the images, which it makes from messages alone; None without."""
        if not call.images:
            return None
        content = [{"type": "image_url", "image_url": {"url": url}} for url in call.data_urls()]
        return ControlCall("/v1/chat/completions/render", {"messages": [{"role": "user", "content": content}]})

    def with_features(self, body: dict[str, Any], call: GenerationCall, reply: Any) -> dict[str, Any]:
        """Return ``body`` with the features of ``images_call``'s reply, their places moved to those in our ids. Raises
        BadResponse if vLLM made other images of ours: their number, lengths or order differ."""
        with dialect.reading(reply, "features of images of the render route"):
            features = reply["features"]
            lengths = [place["length"] for place in features["mm_placeholders"]["image"]]
            starts = [place["offset"] for place in features["mm_placeholders"]["image"]]
            hashes, data = features["mm_hashes"]["image"], (features.get("kwargs_data") or {}).get("image", starts)
            others = [len(hashes), len(data)]
        ours = [span.length for span in call.images]
        if lengths != ours or starts != sorted(starts) or others != [len(ours)] * 2:
            raise BadResponse(
                f"images of {lengths} tokens at {starts}, not of {ours}: the server must process images as the model's "
                "preprocessor_config.json says"
            )
        places = [{"offset": span.offset, "length": span.length} for span in call.images]
        return body | {"features": features | {"mm_placeholders": {"image": places}}}

    def parse(self, reply: Any, received: int = 0, *, top_logprobs: int = 0) -> Chunk | None:
        """Return the tokens of a reply, or of an event after ``received`` ones; one without choices reports the usage.
        Raises BadResponse, or ErrorReply for an error."""
        with dialect.reading(reply, "the fields of /inference/v1/generate"):
            if not reply["choices"]:
                return None
            choice = reply["choices"][0]
            tokens = list(choice["token_ids"] or [])
            content = (choice["logprobs"] or {}).get("content", [])
            logprobs = [entry["logprob"] for entry in content]
            spans = choice.get("weight_versions")
            versions = dialect.spans_to_versions(spans, received + len(tokens)) if spans else None
            finish = _FINISH.get(choice["finish_reason"], choice["finish_reason"])
            top = _top_logprobs(content, top_logprobs) if top_logprobs else None
            rid = None if (told := reply.get("request_id")) is None else told.removeprefix(_ID_PREFIX)
            prompt_tokens = (reply.get("usage") or {}).get("prompt_tokens")
        dialect.check_tokens(tokens, logprobs, top, finish)
        return Chunk(tokens, logprobs, versions, finish, top or [], [], rid, prompt_tokens, reply.get("model"))

    def parse_info(self, reply: dict[str, Any]) -> ServerInfo:
        models = reply.get("data")
        model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        return ServerInfo(
            context_length=dialect.reported(model, "max_model_len", int),
            model=dialect.reported(model, "root", str),
            version=dialect.version_or_none(reply.get("weight_version")),
            paused=dialect.reported(reply, "is_paused", bool),
            num_ranks=dialect.reported(reply, "world_size", int),
            name=dialect.reported(model, "id", str),
        )

    def abort(self, rid: str) -> ControlCall:
        """Abort one request by the id that vLLM made from its ``rid``."""
        return ControlCall("/abort_requests", {"request_ids": [_ID_PREFIX + rid]})

    def pause(self, *, keep: bool = False) -> ControlCall:
        return ControlCall("/pause?mode=keep" if keep else "/pause?mode=abort")

    def load_folder(self, weights: WeightFolder) -> list[ControlCall]:
        return [_on_workers("load_checkpoint_dir", weights_path=weights.path), *_name_version(weights.version)]

    def join_group(self, group: "BroadcastGroup") -> ControlCall:
        """Join on every worker; vLLM's own transfer engines need GPUs and a flag at its start."""
        return _on_workers(
            "join_weight_group",
            name=group.name,
            master_address=group.master_address,
            master_port=group.master_port,
            size=group.size,
            backend=group.backend,
        )

    def receive(self, bucket: WeightBucket, group: str, version: int | None) -> ControlCall:
        """Begin to receive a bucket in a thread of each worker."""
        return _on_workers("receive_weights", name=group, **bucket.description())

    def end_broadcast(self, version: int) -> list[ControlCall]:
        return [_on_workers("load_received_weights"), *_name_version(version)]

    def adapter_flags(self, shape: AdapterShape) -> dict[str, Any]:
        """Return vLLM's options. Answers that stay on the server in updates keep their adapters: up to ``max-loras``
        run together, and one beyond ``max-cpu-loras`` is reread from its folder, which ends vLLM if that is gone."""
        rank = next((rank for rank in _RANKS if rank >= shape.rank), shape.rank)
        return {"enable-lora": True, "max-lora-rank": rank, "max-loras": 4, "max-cpu-loras": 16}

    def load_adapter(self, name: str, weights: WeightFolder) -> list[ControlCall]:
        return [
            ControlCall("/v1/load_lora_adapter", {"lora_name": name, "lora_path": weights.path}),
            ControlCall("/update_weight_version", {"new_version": str(weights.version)}),
        ]

    def unload_adapter(self, name: str) -> ControlCall:
        """Unload an adapter; its running requests finish."""
        return ControlCall("/v1/unload_lora_adapter", {"lora_name": name})


def _name_version(version: int) -> list[ControlCall]:
    return [ControlCall("/update_weight_version", {"new_version": str(version)}), ControlCall("/reset_prefix_cache")]


def _top_logprobs(content: list[Any], count: int) -> TopLogprobs:
    """Return the ``count`` best of each token, of those and the sampled token."""
    best = (sorted(entry["top_logprobs"], key=lambda one: one["rank"])[:count] for entry in content)
    return [[(one["token_id"], one["logprob"]) for one in top] for top in best]
