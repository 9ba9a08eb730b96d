"""SGLang's native HTTP protocol, which the embedded server speaks too."""

import re
from typing import TYPE_CHECKING, Any
from areal_lite.api.image_span import plain_images
from areal_lite.config.generation import CONSTRAINTS, GenerationHyperparameters
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.errors import ConfigError
from areal_lite.servers.dialects import dialect
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ControlCall, ErrorReply, GenerationCall, ServerInfo
from areal_lite.servers.weights.published_weights import WeightBucket, WeightFolder

if TYPE_CHECKING:
    from areal_lite.servers.weights.broadcaster import BroadcastGroup

_LAST_TO_TOKENIZE_AGAIN = (0, 5, 12)  # the last SGLang that tokenizes the text of a prompt with images again


class SGLang:
    """SGLang's log-probs are log-softmax of logits / temperature, after penalties, ``logit_bias`` and the mask of a
    grammar, before top-p, top-k and min-p; the embedded server's are before all of these.

    SGLang's streams repeat all earlier tokens in every event, which is expensive for answers of many thousand tokens:
    start it with ``--incremental-streaming-output``. Both forms are understood.
    """

    generate_path = "/generate"
    health_path = "/health"
    info_paths: tuple[str, ...] = ("/server_info", "/model_info")  # they describe the server; later facts win
    adapter_key = "lora_path"  # field of a request that names its adapter
    resume = ControlCall("/continue_generation")
    begin_broadcast = ControlCall("/begin_weight_update")  # opens an update; SGLang requires it, and refuses a second
    abandon_broadcast: ControlCall | None = ControlCall("/end_weight_update")
    """Closes an update that broke off; the embedded server refuses to load a part of the weights."""

    def __init__(self, *, embedded: bool = False) -> None:
        """Speak to SGLang, or to the embedded server, which understands two more fields and loads weights later. It
        needs no options for adapters, and has one for all its requests."""
        self.adapter_variables: dict[str, str] = {}  # environment variables with which a server loads adapters
        self.keeps_adapter = not embedded
        """A request keeps its adapter until it ends, also if it stays on the server over an update."""
        self.continues_constraints = embedded
        """A schema, regex or grammar holds for a continued answer as a whole. If not, it starts anew."""
        self.receives_while_generating = embedded
        """A server takes broadcast weights while it generates, and need pause only to load them."""

    def generate_body(self, call: GenerationCall) -> dict[str, Any]:
        sampling = _sampling_params(call.gconfig)
        sampling["max_new_tokens"] = call.max_new_tokens
        if call.min_new_tokens:
            sampling["min_new_tokens"] = call.min_new_tokens
        if call.seed is not None:
            sampling["sampling_seed"] = call.seed
        body = {
            "rid": call.rid,
            "input_ids": call.input_ids,
            "sampling_params": dialect.with_extra(sampling, call.gconfig.extra),
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
            if call.images:
                body |= {"images": plain_images(call.images), "image_files": dict(call.pngs)}
        elif call.images:
            body |= {"input_ids": _collapsed(call), "image_data": call.data_urls()}
        return body

    def score_body(self, input_ids: list[int], start: int) -> dict[str, Any]:
        """Return the body of a request for the log-probs of given tokens after place ``start``."""
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}

    def parse_scores(self, reply: Any, input_ids: list[int], start: int) -> list[float]:
        """Return the log-prob of each of ``input_ids`` after place ``start``, by the reply to ``score_body``."""
        with dialect.reading(reply, "the log-probs of the prompt"):
            pairs = [(pair[1], pair[0]) for pair in reply["meta_info"]["input_token_logprobs"]]
        return dialect.checked_scores(pairs, input_ids[start:])

    def image_wire(self, info: ServerInfo) -> tuple[str, str | None]:
        """Return how a server takes images, and what may go wrong with that; None if nothing."""
        if self.continues_constraints:  # the embedded server
            return "ids, spans and PNG files", None
        release = tuple(map(int, re.findall(r"\d+", info.release or "")[:3]))
        wire = f"one placeholder each, which SGLang {info.release or 'of an unknown version'} expands"
        if release > _LAST_TO_TOKENIZE_AGAIN:
            return f"{wire} among our ids", None
        return f"{wire} in a text that it tokenizes again", "sampled tokens may become others: use 0.5.13 or later"

    def images_call(self, call: GenerationCall) -> ControlCall | None:
        """Return None: images are in the generation's own body."""
        return None

    def with_features(self, body: dict[str, Any], call: GenerationCall, reply: Any) -> dict[str, Any]:
        return body

    def parse(self, reply: Any, received: int = 0, *, top_logprobs: int = 0) -> Chunk | None:
        """Return the tokens of a ``/generate`` reply, or those that an event adds to the ``received`` of its stream.
        SGLang's lists hold all tokens so far or only the new ones. Raises BadResponse, or ErrorReply for an error."""
        with dialect.reading(reply, "the fields of /generate"):
            meta = reply["meta_info"]
            reason = meta["finish_reason"]
            finish = None if reason is None else reason["type"]
            if finish == "abort" and reason.get("status_code"):
                raise ErrorReply(int(reason["status_code"]), str(reason.get("message")))
            pairs = meta.get("output_token_logprobs") or []
            total = meta.get("completion_tokens", received + len(pairs))  # a call aborted in the queue has none
            new = total - received
            if not 0 <= new <= len(pairs) or (not received and new != len(pairs)):
                raise BadResponse(f"{len(pairs)} log-probs for {new} new tokens")
            logprobs, ids = map(list, [*zip(*pairs, strict=False)][:2]) if pairs else ([], [])
            del logprobs[: len(pairs) - new]
            if (listed := reply.get("output_ids")) is not None:  # either may have more of the earlier tokens
                longer, shorter = (listed, ids) if len(listed) > len(ids) else (ids, listed)
                same = longer[len(longer) - len(shorter) :] == shorter
                if not same or len(shorter) < new or len(longer) - new > received:
                    raise BadResponse(f"{len(listed)} output_ids that differ from the ids with log-probs")
                ids = longer
            repeated, tokens = ids[: len(ids) - new], ids[len(ids) - new :]
            versions: list[int] | None = None
            if spans := meta.get("weight_versions"):
                versions = dialect.spans_to_versions(spans, total)
            elif (label := meta.get("weight_version")) is not None:
                versions = [dialect.version_number(label)] * new
            top = None
            if top_logprobs:
                rows = meta.get("output_top_logprobs") or []
                top = [[(token, logprob) for logprob, token, *_ in row] for row in rows[max(0, len(rows) - new) :]]
        dialect.check_tokens(tokens, logprobs, top, finish)
        return Chunk(tokens, logprobs, versions, finish, top or [], repeated, meta.get("id"), meta.get("prompt_tokens"))

    def parse_info(self, reply: dict[str, Any]) -> ServerInfo:
        """Return what the server reports; ``/model_info`` has the path and version of the last update."""
        # SGLang refuses prompts of max_req_input_len tokens (6 below the context length), also those that only
        # became so long because an aborted answer is continued.
        windows = [dialect.reported(reply, name, int) for name in ("context_length", "max_req_input_len")]
        return ServerInfo(
            min((window for window in windows if window is not None), default=None),
            dialect.reported(reply, "vocab_size", int),
            dialect.reported(reply, "model_path", str),
            dialect.version_or_none(reply.get("weight_version")),
            dialect.reported(reply, "is_paused", bool),
            dialect.reported(reply, "device", str),
            dialect.reported(reply, "tp_size", int),
            release=dialect.reported(reply, "version", str),
        )

    def abort(self, rid: str) -> ControlCall:
        """Abort one request; SGLang takes ``rid`` as a prefix, so ids must all have one length."""
        return ControlCall("/abort_request", {"rid": rid})

    def pause(self, *, keep: bool = False) -> ControlCall:
        """Abort what runs and return its tokens; with ``keep`` it stays, and goes on with the new weights."""
        return ControlCall("/pause_generation", {"mode": "retract" if keep else "abort"})

    def load_folder(self, weights: WeightFolder) -> list[ControlCall]:
        """Load from disk and drop the prefix cache, which holds the old weights' states."""
        body = {"model_path": weights.path, "weight_version": str(weights.version), "flush_cache": True}
        return [ControlCall("/update_weights_from_disk", body)]

    def join_group(self, group: "BroadcastGroup") -> ControlCall:
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

    def receive(self, bucket: WeightBucket, group: str, version: int | None) -> ControlCall:
        """Receive a bucket and load it; the last one, which has the version, also drops the prefix cache."""
        label = {} if version is None else {"weight_version": str(version)}
        body = {**bucket.description(), "group_name": group, "flush_cache": version is not None, **label}
        return ControlCall("/update_weights_from_distributed", body)

    def end_broadcast(self, version: int) -> list[ControlCall]:
        """Close the update; the embedded server loads the weights here."""
        return [ControlCall("/end_weight_update")]

    def adapter_flags(self, shape: AdapterShape) -> dict[str, Any]:
        """Return SGLang's options; its default of eight adapters in a batch stays."""
        if self.continues_constraints:  # the embedded server
            return {}
        return {"enable-lora": True, "max-lora-rank": shape.rank, "lora-target-modules": list(shape.layers)}

    def load_adapter(self, name: str, weights: WeightFolder) -> list[ControlCall]:
        """Load the adapters, then name the version; prefix caches are per adapter."""
        body, label = {"lora_name": name, "lora_path": weights.path}, str(weights.version)
        if self.continues_constraints:  # the embedded server labels the tokens of an adapter
            return [ControlCall("/load_lora_adapter", body | {"weight_version": label})]
        label_call = ControlCall("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        return [ControlCall("/load_lora_adapter", body), label_call]

    def unload_adapter(self, name: str) -> ControlCall:
        """Unload an adapter; SGLang waits for its requests."""
        return ControlCall("/unload_lora_adapter", {"lora_name": name})


def _sampling_params(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    sampling = dialect.shared_sampling(gconfig)
    if not gconfig.greedy:
        if gconfig.top_p < 1:
            sampling["top_p"] = gconfig.top_p
        if gconfig.top_k is not None:
            sampling["top_k"] = gconfig.top_k
        if gconfig.min_p:
            sampling["min_p"] = gconfig.min_p
    return sampling | {name: value for name in CONSTRAINTS if (value := getattr(gconfig, name)) is not None}


def _collapsed(call: GenerationCall) -> list[int]:
    """Return the ids with one placeholder per image, which SGLang expands; prompt_tokens says whether as we did."""
    ids: list[int] = []
    start = 0
    for span in call.images:
        ids += call.input_ids[start : span.offset + 1]
        start = span.end
    ids += call.input_ids[start:]
    placeholder = call.input_ids[call.images[0].offset]
    if ids.count(placeholder) != len(call.images):
        raise ConfigError(
            f"the prompt has the placeholder token {placeholder} outside of its images, where the model sampled it: "
            "SGLang would take it for an image: ban it with gconfig.logit_bias, or use the embedded server or vLLM"
        )
    return ids
