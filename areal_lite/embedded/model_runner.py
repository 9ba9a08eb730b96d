"""Load the model, run forward passes over a batch of slots, and update weights in place.

Guarantees that next-token logits equal those of a plain forward pass over the whole sequence, to float tolerance; a
model that fails this check is rejected at the start. The scheduler decides which request uses which slot.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, DynamicCache
from areal_lite.data.vision.image_processor import ImageProcessor
from areal_lite.embedded.checked_weights import Adapter
from areal_lite.embedded.decoder.image_prompt import ImagePrompt
from areal_lite.embedded.decoder.lean_decoder import LeanDecoder
from areal_lite.embedded.decoder.lean_decoder_kernels import LayerOperations, lean_decoder_operations
from areal_lite.embedded.decoder.slot_cache import SlotCache
from areal_lite.errors import ConfigError
from areal_lite.models.attention_windows import (
    FULL,
    layer_kinds,
    mask_argument,
    short_windows,
    unsupported_layers,
    window_of,
)
from areal_lite.models.decoder_family import family_of
from areal_lite.models.kernels.exact_attention import MIN_ROWS, read_exactly, whole_rows
from areal_lite.models.out_of_memory import is_out_of_memory
from areal_lite.models.vision_model import auto_class_of, image_features, text_decoder

_SCORED_ROWS = 256  # tokens whose logits are float32 at a time
_KEPT_TOKENS = 2**15  # tokens of images whose embeddings are kept


class ModelRunner:
    """A causal LM with a slot cache. With ``exact`` a token alone in its batch gets the trainer's bits; ``compiled``
    compiles operations where that speeds up decoding. A model that reads images has an ``image_processor``."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context_length: int,
        exact: bool = False,
        compiled: bool = True,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.context_length = context_length
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.slots = slots
        self.image_processor = image_processor
        self._features: dict[str, Tensor] = {}  # embeddings of the latest images, by sha256, the latest last
        reader = text_decoder(model)
        self._min_width = MIN_ROWS if exact and read_exactly(model) else 0
        capacity = context_length + self._min_width  # padding must not overwrite the last token
        self.cache = SlotCache(model.config, slots=slots, capacity=capacity, device=self.device)
        self._lean: LeanDecoder | None = None
        if family_of(reader or model) is not None:
            operations = lean_decoder_operations(model) if compiled else LayerOperations(model)
            self._lean = LeanDecoder(model, self.cache, operations)
        self._last: Tensor | None = None
        # The ids before those that were scored last, and their KV. The cache of a window cannot be cut back.
        self._scored: tuple[list[int], DynamicCache | None] = ([], None)
        self._keeps_scored = {*layer_kinds(model.config)} == {FULL} and image_processor is None and not exact
        self._adapted: list[RemovableHandle] = []
        head: nn.Module = model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_last_positions)

    @property
    def _decoder(self) -> LeanDecoder | None:
        """The lean decoder, where it can replace the model's own forward."""
        return None if self._adapted or self._min_width else self._lean

    @property
    def pads(self) -> bool:
        """True if the slots of a pass need equally many tokens, so that prompts are best computed apart."""
        return self._decoder is None or self._decoder.pads

    def _keep_last_positions(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # A hook and not ``logits_to_keep``, which keeps the same positions of all slots; slots end at different ones.
        # The model still scales or caps its logits.
        if self._last is None:
            return inputs
        hidden = inputs[0]
        last = hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last][:, None]
        return (last.repeat(1, max(1, self._min_width), 1), *inputs[1:])

    @torch.inference_mode()
    def forward(
        self, slots: list[int], tokens: list[list[int]], past: list[int], images: Sequence[ImagePrompt | None] = ()
    ) -> Tensor:
        """Run ``tokens`` after ``past`` columns, store their KV, and return each slot's last logits ``[n, vocab]``.

        Args:
            slots: ``[n]``, all different.
            tokens: ``[n][<= q]`` ids, at least one per slot; if it ``pads``, a short list costs as much as the longest.
            past: ``[n]`` number of columns per slot that precede these tokens.
            images: ``[n]`` those of each slot's prompt; empty without any.
        """
        decoder = self._decoder
        if decoder is not None and not decoder.pads:
            return self._forward_rows(decoder, slots, tokens, past, images)
        lengths = [len(ids) for ids in tokens]
        width = whole_rows(max(lengths)) if self._min_width else max(lengths)
        plan = self.cache.plan
        plan.set(slots, past, width)
        input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens], device=self.device)
        last = torch.tensor(lengths, device=self.device) - 1
        positions = plan.columns.clamp(max=self.context_length - 1)
        starts = range(0, len(slots) * width, width)
        inputs, positions = self._with_images(input_ids, positions, starts, tokens, past, images)
        if decoder is not None:
            rows = torch.arange(len(slots), device=self.device) * width + last
            return decoder.forward(inputs, positions, self.cache.masks(self.model.dtype), rows)
        self._last = last if width > 1 else None
        output = self.model(
            **{"input_ids" if inputs is input_ids else "inputs_embeds": inputs},
            attention_mask=None if plan.fresh else mask_argument(self.cache.masks(self.model.dtype)),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.inference_mode()
    def score(self, ids: list[int], start: int = 0) -> list[float]:
        """Return the log-prob of each of ``ids`` after place ``start``, at temperature 1; takes their logits at once.
        What is before ``start`` is computed once for calls in a row, as of a group's members."""
        past = self._past_of(ids[:start]) if start and self._keeps_scored else None
        begin = start if past is not None else 0
        self._last = None
        inputs = torch.tensor([ids[begin:]], device=self.device)
        output = self.model(input_ids=inputs, past_key_values=past, use_cache=past is not None)
        if past is not None:
            past.crop(start - len(ids))
            self._scored = (ids[:start], past)
        logits, chosen_ids = output.logits[0, start - begin : -1], inputs[0, start - begin + 1 :]
        parts = zip(torch.split(logits, _SCORED_ROWS), torch.split(chosen_ids, _SCORED_ROWS), strict=True)
        scores = [rows.float().log_softmax(-1).gather(1, chosen[:, None]) for rows, chosen in parts]
        return torch.cat(scores)[:, 0].tolist() if len(ids) > start + 1 else []

    def _past_of(self, ids: list[int]) -> DynamicCache:
        """Return the KV of ``ids``, that of the call before if it had the same; a call that fails leaves none."""
        (kept_ids, kept), self._scored = self._scored, ([], None)
        if kept is None or kept_ids != ids:
            self._last = torch.zeros(1, dtype=torch.long, device=self.device)  # one row of logits, for nobody
            kept = DynamicCache(config=self.model.config)
            self.model(input_ids=torch.tensor([ids], device=self.device), past_key_values=kept, use_cache=True)
        return kept

    def _forward_rows(self, decoder: LeanDecoder, slots: list[int], *batch: Any) -> Tensor:
        """Run a pass with each token in a row of its own; ``batch`` is tokens, past and images."""
        tokens, past, images = batch
        lengths = torch.tensor([len(ids) for ids in tokens])
        columns = [first + i for first, ids in zip(past, tokens, strict=True) for i in range(len(ids))]
        plan = self.cache.plan
        plan.set(torch.tensor(slots).repeat_interleave(lengths).tolist(), columns, 1)
        rows = torch.tensor([token for ids in tokens for token in ids])[:, None]
        last = lengths.cumsum(0) - 1
        inputs, positions = self._with_images(rows, plan.columns, last + 1 - lengths, tokens, past, images)
        return decoder.forward(inputs, positions, {}, last)

    def _with_images(self, ids: Tensor, positions: Tensor, *batch: Any) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[n, q, width]`` with those of images, and positions, on three axes if the model has them;
        without images, the inputs. ``batch`` has each slot's first token among all, tokens, past and images."""
        if not any(batch[-1]):
            return ids, positions
        embeddings: Tensor = self.model.get_input_embeddings()(ids)
        flat, axes = embeddings.flatten(0, 1), positions.flatten().repeat(3, 1)
        starts, *others = batch
        for first, tokens, past, prompt in zip(map(int, starts), *others, strict=True):
            if prompt is None:
                continue
            end = past + len(tokens)
            if (placed := prompt.positions(past, len(tokens))) is not None:
                axes[:, first : first + len(tokens)] = placed.to(axes.device)
            for span in prompt.images:
                start, stop = max(span.offset, past), min(span.end, end)
                if start < stop:
                    features = self._features_of(span.sha256, prompt)[start - span.offset : stop - span.offset]
                    flat[first + start - past : first + stop - past] = features
        has_axes = any(prompt is not None and prompt.axes is not None for prompt in batch[-1])
        return embeddings, axes.view(3, *positions.shape) if has_axes else positions

    def _features_of(self, sha256: str, prompt: ImagePrompt) -> Tensor:
        if (features := self._features.pop(sha256, None)) is None:
            assert self.image_processor is not None
            features = image_features(self.model, [self.image_processor.pixels(prompt.pngs[sha256])])[0]
        self._features[sha256] = features = features.to(self.model.dtype)
        while len(self._features) > 1 and sum(map(len, self._features.values())) > _KEPT_TOKENS:
            del self._features[next(iter(self._features))]
        return features

    @torch.inference_mode()
    def check_against_plain_forward(self) -> None:
        """Raise ConfigError unless prefill, extension and decoding with slots give the logits of one plain pass."""
        plan, window = self.cache.plan, self.cache.plan.window
        try:
            with short_windows(self.model, 3):  # or so few tokens would not cross their border
                plan.window = window_of(self.model.config) or window
                difference = self._difference_to_plain_forward()
        except Exception as error:  # a model may raise anything on an unsupported cache
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the model ({type(self.model).__name__}) does not run with the embedded server's slot cache "
                f"({type(error).__name__}: {error}). Serve it with SGLang or vLLM instead."
            ) from error
        finally:
            plan.window = window
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.2
        if not difference <= tolerance:
            raise ConfigError(
                f"the model ({type(self.model).__name__}) moves {difference:.3g} of the probability mass with the "
                f"embedded server's slot cache, more than {tolerance}: it does not use standard attention and KV "
                "caching. Serve it with SGLang or vLLM instead."
            )

    def _difference_to_plain_forward(self) -> float:
        """Return the total variation distance between a plain pass and prefill + extension + decoding."""
        length = min(9, self.context_length)
        ids = [(7 * i + 3) % self.vocab_size for i in range(length)]
        self._last = None
        plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1].float()
        self.forward([1, 0], [ids[: length - 4], ids[:1]], [0, 0])
        self.forward([1, 0], [ids[length - 4 : length - 1], ids[1:2]], [length - 4, 1])
        slotted = self.forward([0, 1], [ids[2:3], ids[-1:]], [2, length - 1])[1].float()
        return float((plain.softmax(-1) - slotted.softmax(-1)).abs().sum()) / 2

    def weight_shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return the shape of each weight by name, and a map from second to first names of tied weights."""
        state, names = self.model.state_dict(), dict[int, str]()
        firsts = {name: names.setdefault(tensor.data_ptr(), name) for name, tensor in state.items()}
        tied = {name: first for name, first in firsts.items() if first != name}
        return {name: tuple(tensor.shape) for name, tensor in state.items()}, tied

    @torch.inference_mode()
    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], names: Collection[str]) -> None:
        """Copy ``tensors``, which have these ``names``, into the weights in place; check them first."""
        self._features.clear()
        if self._lean is not None:
            self._lean.weights_changed()
        self._scored = ([], None)
        state = self.model.state_dict()
        _, tied = self.weight_shapes()
        for name, tensor in tensors:
            if tied.get(name) not in names:
                state[name].copy_(tensor)

    def adapt(self, adapter: Adapter | None) -> None:
        """Put an adapter on the weights in place of the one before; None removes it."""
        self._scored = ([], None)
        for handle in self._adapted:
            handle.remove()
        self._adapted = adapter.attach(self.model) if adapter is not None else []


def load_model(model_path: Path, *, dtype: torch.dtype, device: str) -> Any:
    """Load a causal LM for inference; ConfigError, before reading weights, if attention is neither full nor sliding."""
    config = AutoConfig.from_pretrained(str(model_path))  # nosec B615 # a folder
    if unsupported := unsupported_layers(config):
        raise ConfigError(
            f"{model_path} is a {config.model_type} model with {unsupported}: the embedded server computes full "
            "attention and sliding windows. Serve it with SGLang or vLLM instead."
        )
    model: Any = auto_class_of(str(model_path)).from_pretrained(str(model_path), dtype=dtype, use_safetensors=True)  # nosec B615 # a folder
    return model.to(device).eval().requires_grad_(False)
