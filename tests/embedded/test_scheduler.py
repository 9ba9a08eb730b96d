"""Steps of the scheduler: who takes part, and what a request gets from a step that it shares."""

from __future__ import annotations
import random
import shutil
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.model_runner import ModelRunner, load_model
from areal_lite.embedded.sampling_params import SamplingParams
from areal_lite.embedded.scheduler import BatchLimits, Scheduler
from tests.embedded.serving import load, logprobs_of, worst

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
FLOAT32, PADS, COMPILED = ("float32", False), ("bfloat16", False), ("bfloat16", True)


def scheduler_of(tiny: Path, kind: tuple[str, bool], **settings: Any) -> tuple[Scheduler, list[list[int]]]:
    """Return a scheduler without a thread, and how many tokens each slot of each pass had."""
    dtype, compiled = kind
    runner = ModelRunner(
        load_model(tiny, dtype=getattr(torch, dtype), device="cpu"), slots=12, context_length=96, compiled=compiled
    )
    passes: list[list[int]] = []
    forward = runner.forward

    def recorded(slots: list[int], tokens: list[list[int]], past: list[int], images: list[None]) -> torch.Tensor:
        assert len(slots) == len(set(slots)) == len(tokens) == len(past)
        passes.append([len(ids) for ids in tokens])
        return forward(slots, tokens, past, images)

    runner.forward = recorded  # type: ignore[method-assign]
    sizes = {"max_running_requests": 8, "max_total_tokens": 900, "max_prefill_tokens": 64}
    scheduler = Scheduler(
        runner,
        eos_ids=frozenset(),
        decode=lambda ids, skip: "",
        limits=BatchLimits(**sizes | settings),
        weight_version="0",
        keep_prefixes=True,
    )
    return scheduler, passes


def request(prompt: list[int], *, tokens: int = 9, **settings: Any) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
    return GenerationRequest(rid=str(prompt), prompt=prompt, params=params, seed=len(prompt), **settings)


def end(scheduler: Scheduler, requests: list[GenerationRequest]) -> None:
    """Have the requests, and all before them, end."""
    scheduler.waiting += requests
    while scheduler.can_step:
        scheduler.step()


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("kind", [FLOAT32, PADS, COMPILED])
def test_running_requests_wait_for_prompts_only_where_passes_are_padded(tiny: Path, kind: tuple[str, bool]) -> None:
    scheduler, passes = scheduler_of(tiny, kind)
    first, longer, twin, short = request([5, 6, 7]), request([9] * 14), request([9] * 14), request([8])
    scheduler.waiting.append(first)
    for _ in range(2):
        scheduler.step()
    scheduler.waiting += [longer, twin, short]
    scheduler.step()
    scheduler.step()
    assert passes == [[3], [1], *([[1, 14, 1], [1] * 4] if kind is COMPILED else [[14, 1], [1] * 4])]
    assert [len(one.output_ids) for one in (first, longer, twin, short)] == [4 if kind is COMPILED else 3, 2, 2, 2]


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("kind", [PADS, COMPILED])
def test_prompts_with_and_without_a_copied_prefix_share_a_pass_without_padding(
    tiny: Path, kind: tuple[str, bool]
) -> None:
    scheduler, passes = scheduler_of(tiny, kind)
    scheduler.waiting.append(request([5] * 20))
    scheduler.step()
    scheduler.waiting += [request([5] * 20 + [6, 7]), request([8, 9])]
    scheduler.step()
    scheduler.step()
    assert passes == ([[20], [1, 2, 2], [1, 1, 1]] if kind is COMPILED else [[20], [2], [2]])


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("max_prefill_tokens", [1, 24, 500])
def test_prompts_of_a_step_fit_into_the_limit_without_padding(tiny: Path, max_prefill_tokens: int) -> None:
    scheduler, passes = scheduler_of(tiny, COMPILED, max_prefill_tokens=max_prefill_tokens)
    scheduler.waiting += [request([i] * length) for i, length in enumerate((20, 2, 2, 30, 1, 1), 3)]
    while scheduler.waiting:
        scheduler.step()
    prompts = [[length for length in lengths if length > 1] for lengths in passes]
    assert (
        prompts
        == {1: [[20], [2], [2], [30], [], []], 24: [[20, 2, 2], [30], []], 500: [[20, 2, 2, 30]]}[max_prefill_tokens]
    )


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("kind", [FLOAT32, COMPILED])
def test_log_probs_are_those_of_a_plain_forward_whatever_shares_the_steps(tiny: Path, kind: tuple[str, bool]) -> None:
    """Prompts repeat, share prefixes with running and finished ones, arrive at any time and need all slots."""
    draw = random.Random(1)
    stems = [[draw.randrange(3, 259) for _ in range(length)] for length in (3, 20, 45)]
    prompts = [draw.choice(stems) + [draw.randrange(3, 259)] * draw.randrange(3) for _ in range(60)]
    requests = [request(prompt, tokens=draw.randrange(1, 12)) for prompt in prompts]
    scheduler, passes = scheduler_of(tiny, kind)
    coming = list(requests)
    while coming or scheduler.running or scheduler.waiting:
        for _ in range(min(len(coming), draw.randrange(4))):
            scheduler.waiting.append(coming.pop())
        if scheduler.can_step:
            scheduler.step()
    mixed = [lengths for lengths in passes if lengths[0] == 1 and max(lengths) > 1]
    assert len(mixed) > 5 if kind is COMPILED else passes
    assert sum(one.cached_tokens > 0 for one in requests) > 20
    model, errors = load(tiny), []
    for one in requests:
        assert one.finish_reason == {"type": "length", "length": one.params.max_new_tokens}
        expected = logprobs_of(model, one.prompt, one.output_ids)
        errors += [own - other for own, other in zip(one.output_logprobs, expected, strict=True)]
    assert np.sqrt(np.mean(np.square(errors))) < (1e-5 if kind is FLOAT32 else 0.02)


@torch.inference_mode()
def test_requests_keep_the_order_of_their_arrival(tiny: Path) -> None:
    """Also those that a step skips, because their passes have another form, and those that lose their KV."""
    scheduler, _ = scheduler_of(tiny, FLOAT32)
    scheduler.waiting.append(request([5] * 20))
    scheduler.step()
    fresh, sharing = request([8, 9]), [request([5] * 20 + [tail]) for tail in (6, 7, 8)]
    scheduler.waiting += [fresh, *sharing]
    scheduler.step()
    assert [*scheduler.waiting] == sharing
    running = [*scheduler.running]
    assert running[-1] is fresh and len(running) == 2
    scheduler.retract()
    assert [*scheduler.waiting] == [*running, *sharing]


@torch.inference_mode()
def test_the_latest_finished_requests_keep_their_kv(tiny: Path) -> None:
    scheduler, _ = scheduler_of(tiny, FLOAT32)  # with room for four
    for number in range(10, 17):
        end(scheduler, [request([number] * 20)])
    later = [request([number] * 20 + [5]) for number in range(10, 17)]
    end(scheduler, later)
    assert [one.cached_tokens for one in later] == [0] * 3 + [20] * 4


@torch.inference_mode()
@pytest.mark.parametrize("ended", [False, True])
def test_no_prompt_reads_the_kv_of_earlier_weights(tiny: Path, ended: bool) -> None:
    """Two requests go on with it after a pause in place; others share their prompts, beside them or when they ended."""
    scheduler, _ = scheduler_of(tiny, FLOAT32)
    stems = [[number] * 20 for number in (5, 9)]
    scheduler.waiting += [request(stem) for stem in stems]
    scheduler.step()
    for weight in (changed := load(tiny)).parameters():
        weight.mul_(1.2)
    weights = dict(changed.state_dict())
    scheduler.pause("in_place")
    scheduler.change_weights(lambda: scheduler.runner.load_tensors(weights.items(), weights), "1", abort_all=False)
    scheduler.resume()
    if ended:
        end(scheduler, [])
    later = [request([*stem, 6]) for stem in stems]
    end(scheduler, later)
    for one in later:
        assert one.cached_tokens == 0
        assert worst(one.output_logprobs, logprobs_of(changed, one.prompt, one.output_ids)) < 1e-4
