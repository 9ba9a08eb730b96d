"""A model being trained, with its optimizer: losses of micro-batches in, one update out.

Guarantees that a non-finite update is never applied, and that one out-of-memory error does not end the run.
"""

import ctypes
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from areal_lite.config.trainer_config import LearnerConfig, OptimizerConfig
from areal_lite.errors import TrainingError
from areal_lite.models.out_of_memory import is_out_of_memory
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sharding import shard
from areal_lite.models.policy_model import resolve_dtype
from areal_lite.trainer.machine_metrics import resident_gb

logger = logging.getLogger(__name__)
MAX_SKIPPED_UPDATES = 3  # consecutive non-finite updates after which the run stops
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # options of glibc's mallopt
T = TypeVar("T")
OnSkip = Callable[[dict[str, Any]], None]  # gets step, loss, gradient norm and origin (task ids) of a skipped update


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW with a group per mesh of ranks; norms and biases (one-dimensional) have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in alike if (p.ndim >= 2) == decays], "weight_decay": config.weight_decay * decays}
        for decays in (True, False)
        for alike in by_mesh(parameters)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        fused=True,
    )


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters, in their order, in one list for each mesh of ranks that shards some of them."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients, however sharded, in place to a norm of at most ``max_norm``; return the norm before."""
    gradients = [[parameter.grad for parameter in alike if parameter.grad is not None] for alike in by_mesh(parameters)]
    norms = [torch.nn.utils.get_total_norm(alike) for alike in gradients]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
    for alike in gradients:
        torch._foreach_mul_(alike, scale)
    return float(norm)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as in transformers' schedules with warm-up."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if config.lr_schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


class Update(NamedTuple):
    loss: float
    grad_norm: float  # before clipping
    applied: bool


class Learner:
    """Owns the optimizer of ``module``; ``optimizer`` is often ``config`` itself."""

    def __init__(
        self,
        module: nn.Module,
        config: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        max_inference_tokens: int | None = None,
        on_skip: OnSkip | None = None,
    ) -> None:
        self.module = shard(module)
        self.optimizer = make_optimizer(self.module, optimizer)
        self.steps_done = 0
        self.skipped_in_a_row = 0
        self.max_tokens = config.max_tokens_per_microbatch  # most tokens of one forward pass with its backward pass
        self.max_inference_tokens = max_inference_tokens or self.max_tokens  # most tokens of one forward pass alone
        self.ranks = Ranks.current()
        self._on_skip = on_skip
        self._config = config
        self._rates = optimizer
        self._total_steps = total_steps
        self._device = next(module.parameters()).device
        self.dtype = resolve_dtype(config.dtype, self._device)
        self._bound_memory = _KeptMemory().bound if self._device.type == "cpu" else bool
        total, trained = (sum(p.numel() for p in ps) for ps in (module.parameters(), self._trained()))
        self.passes = 2 + trained / total  # of both passes, in those of a forward pass; frozen weights get no gradient
        self._flops = 0.0

    @property
    def learning_rate(self) -> float:
        return learning_rate(self._rates, self.steps_done, self._total_steps)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @contextmanager
    def computing(self, packed: Any) -> Iterator[None]:
        """Autocast a forward pass of ``packed``; count its operations, and with gradients the backward pass's."""
        scorer: Any = self.module
        passes = self.passes if torch.is_grad_enabled() else 1
        self._flops += scorer.flops(packed) / (self.ranks.sp * self.ranks.tp) * passes
        with self.autocast():
            yield

    def take_flops(self) -> float:
        """Return the operations counted since the last call."""
        flops, self._flops = self._flops, 0.0
        return flops

    def within_memory(self, compute: Callable[[int], T], *, inference: bool = False) -> T:
        """Return ``compute(max_tokens)``; retry with half the tokens, once per run, if memory runs out. Several ranks
        do not, because they would wait for each other. ``inference``: forward passes alone have their own cap."""
        while True:
            tokens = self.max_inference_tokens if inference else self.max_tokens
            try:
                return compute(tokens)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.max_tokens < self._config.max_tokens_per_microbatch or tokens == 1 or self.ranks.size > 1:
                    raise TrainingError(
                        f"step {self.steps_done}: out of memory with micro-batches of {tokens} tokens: lower "
                        f"trainer.{'max_inference_length_per_device' if inference else 'max_tokens_per_microbatch'}, "
                        "or set trainer.gradient_checkpointing: true"
                    ) from error
            self.max_tokens = max(1, self.max_tokens // 2)
            self.max_inference_tokens = max(1, self.max_inference_tokens // 2)
            logger.warning(
                "step %d: out of memory; micro-batches have %d tokens from here on", self.steps_done, tokens // 2
            )
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def update(
        self,
        cut: Callable[[int], Iterable[T]],
        loss_of: Callable[[T], Tensor],
        *,
        clock: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> Update:
        """Accumulate the gradients of micro-batches and apply them if they are finite. ``cut`` returns micro-batches of
        at most so many tokens, as many on every rank; ``loss_of`` a micro-batch's part of the loss of all ranks."""

        def accumulate(max_tokens: int) -> Tensor:
            self.optimizer.zero_grad()
            total = torch.zeros((), device=self._device)
            for microbatch in cut(max_tokens):
                loss = loss_of(microbatch)
                with clock("backward"):
                    # Sharded gradients are averaged over dp and sp ranks. The loss is a sum over dp ranks; each sp rank
                    # computes all of it, but its gradient only through the tokens that it reads.
                    (loss * self.ranks.shards).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            return total

        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        loss = self.ranks.sum_(self.within_memory(accumulate)).item()
        with clock("optimizer"):
            return self._apply(loss)

    def _apply(self, loss: float) -> Update:
        parameters = self._trained()
        for parameter in parameters:
            if parameter.grad is None:  # not part of the loss; AdamW would skip it
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = clip_gradients(parameters, self._rates.max_grad_norm)
        if applied := math.isfinite(loss) and math.isfinite(grad_norm):
            self.optimizer.step()
            increment_version(parameters)  # a fused optimizer does not, and rounded copies are read from the version
        self._bound_memory()
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        return Update(loss, grad_norm, applied)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def check(self, update: Update, **origin: Any) -> None:
        """Report a skipped update with its ``origin``, and stop the run after too many in a row."""
        if update.applied:
            return
        logger.warning("step %d: skipped a non-finite update: %s", self.steps_done, update)
        if self._on_skip is not None:
            self._on_skip({"step": self.steps_done, **update._asdict(), **origin})
        if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise TrainingError(
                f"step {self.steps_done}: loss {update.loss} and gradient norm {update.grad_norm}, the "
                f"{self.skipped_in_a_row}rd non-finite update in a row; none of them was applied. Lower "
                "trainer.learning_rate or trainer.max_grad_norm, or inspect the batch"
            )


class _KeptMemory:
    """Has the C library keep what a step frees: to clear the pages of large blocks again takes a tenth of a step. Small
    blocks take places of large ones there, so all that is free goes back whenever the process has grown by a tenth."""

    def __init__(self) -> None:
        self._library, self._base_gb = ctypes.CDLL(None), 0.0
        set_option = getattr(self._library, "mallopt", max)  # of glibc; another C library frees as it likes
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)

    def bound(self) -> None:
        resident = resident_gb()
        self._base_gb = self._base_gb or resident
        if resident > 1.1 * self._base_gb:
            getattr(self._library, "malloc_trim", bool)(0)
            self._base_gb = 0.0  # the next update shows what it needs
