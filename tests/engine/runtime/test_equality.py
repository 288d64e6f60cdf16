"""What a model says does not depend on how the work was cut, shared, interrupted or batched.

The tiny model's margins are wide, so tokens are compared as they are; in batch-invariant mode log-probabilities are
compared too, bit for bit. Real scheduler, real runner.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from support.disturbance import Disturber
from support.generation import Engine, Generated
from support.tiny_models import tiny_model
from trimtab_engine.core.live import POLICIES, LiveConfig
from trimtab_engine.core.request import FinishReason, SamplingParams
from trimtab_engine.runtime.runner import Runner

RunnerOf = Callable[[bool], Runner]
MODES = pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
SHARED = torch.randint(3, 256, (24,), generator=torch.Generator().manual_seed(99)).tolist()


def prompts() -> list[list[int]]:
    """Lengths around the block size (8), some with a common beginning, one long."""
    lengths = [1, 7, 8, 9, 16, 31, 60, 150]
    generator = torch.Generator().manual_seed(4)
    plain = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in lengths]
    return plain + [SHARED + tail for tail in ([5], [6, 7], [], [8] * 20)]


def params(count: int) -> list[SamplingParams]:
    """Greedy and seeded ones by turns, of unlike lengths."""
    kinds = [
        SamplingParams(temperature=0.0, num_logprobs=2),
        SamplingParams(temperature=1.5, seed=7, num_logprobs=2),
        SamplingParams(temperature=2.0, seed=-3, top_p=0.9, num_logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, num_logprobs=2),
    ]
    return [replace(kinds[i % 4], max_tokens=12 + i) for i in range(count)]


def said(results: list[Generated]) -> list[list[int]]:
    return [result.token_ids for result in results]


def logprobs(results: list[Generated]) -> list[list[object]]:
    return [[event.logprobs for event in result.events] for result in results]


def one_at_a_time(runner: Runner) -> list[Generated]:
    engine = Engine(runner, enable_prefix_caching=False)
    results = []
    for prompt, one in zip(prompts(), params(len(prompts())), strict=True):
        results += engine.generate([prompt], one)
    return results


@pytest.fixture(scope="module")
def alone(runner_of: RunnerOf) -> dict[bool, list[Generated]]:
    return {invariant: one_at_a_time(runner_of(invariant)) for invariant in (False, True)}


WAYS: dict[str, dict[str, int | bool | str]] = {
    "all together": {},
    "a budget of one token": {"budget": 1},
    "a budget of three": {"budget": 3},
    "a budget of a block": {"budget": 8},
    "an odd budget": {"budget": 37},
    "two at a time": {"max_num_seqs": 2},
    "prompts before decodes": {"prefill_first": True},
    "no shared prefixes": {"enable_prefix_caching": False},
    "by priority": {"policy": "priority", "budget": 20},
    "memory for the longest alone": {"num_blocks": 22},
    "memory for the longest alone, in chunks": {"num_blocks": 22, "budget": 13},
    "preempted by swap": {"num_blocks": 22, "num_swap_blocks": 40, "enable_prefix_caching": False},
    "preempted by swap, in chunks": {"num_blocks": 22, "num_swap_blocks": 40, "budget": 13},
    "by deadlines": {"policy": "sla-aware", "num_blocks": 22, "num_swap_blocks": 40},
}


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_says_the_same(
    way: str, invariant: bool, runner_of: RunnerOf, alone: dict[bool, list[Generated]]
) -> None:
    runner = runner_of(invariant)
    runner._kv.fill_(float("nan"))
    runner._swap._memory.fill_(float("nan"))
    engine = Engine(runner, **WAYS[way])  # type: ignore[arg-type]
    results = engine.generate(prompts(), params(len(prompts())))
    assert said(results) == said(alone[invariant])
    assert all(result.finish_reason is FinishReason.LENGTH for result in results)
    if invariant:
        assert logprobs(results) == logprobs(alone[True])
    if WAYS[way].get("num_swap_blocks"):
        assert engine.scheduler.stats.preemptions_swap > 0
    if "num_blocks" in WAYS[way]:
        assert sum(result.num_preemptions for result in results) > 0, "memory was meant to be short"


@MODES
def test_a_disturbance_before_every_step_changes_nothing_that_is_said(
    invariant: bool, runner_of: RunnerOf, alone: dict[bool, list[Generated]]
) -> None:
    """Policy, budget and places change in every step, leases lapse in every step, and somebody loses its memory each time."""
    runner, random = runner_of(invariant), Random(11)
    engine = Engine(runner, num_blocks=40, num_swap_blocks=40, budget=64, max_num_seqs=8)
    disturber, steps = Disturber(engine.scheduler), 0

    def disturb(now: float) -> None:
        nonlocal steps
        steps += 1
        disturber.lapse(now)
        live = LiveConfig(
            max_num_batched_tokens=random.randrange(8, 80),
            max_num_seqs=random.randrange(1, 9),
            scheduling_policy=random.choice(POLICIES),
        )
        disturber.push(live, 0.005, now)
        if steps < 200 or steps % 4 == 0:  # for ever, nobody would get to an end
            disturber.throw_out(random.randrange(8), swap=steps % 2 == 0)

    results = engine.generate(prompts(), params(len(prompts())), before_step=disturb)
    assert said(results) == said(alone[invariant])
    if invariant:
        assert logprobs(results) == logprobs(alone[True])
    assert disturber.num_lapsed >= steps - 1 >= 50
    assert disturber.num_swapped >= 15
    assert disturber.num_recomputed >= 15


@MODES
def test_a_prefix_hit_says_what_a_miss_says(
    invariant: bool, runner_of: RunnerOf, alone: dict[bool, list[Generated]]
) -> None:
    engine = Engine(runner_of(invariant), budget=30)
    engine.generate(prompts(), params(len(prompts())))
    again = engine.generate(prompts(), params(len(prompts())))
    assert sum(result.num_cached for result in again) > 200
    assert said(again) == said(alone[invariant])
    if invariant:
        assert logprobs(again) == logprobs(alone[True])


def test_greedy_tokens_are_those_of_transformers_generate(
    runner_of: RunnerOf, alone: dict[bool, list[Generated]]
) -> None:
    model = tiny_model("llama", eos_token_id=None)
    for prompt, result in list(zip(prompts(), alone[False], strict=True))[::4]:
        ids = torch.tensor([prompt])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=len(result.token_ids),
            pad_token_id=0,
        )
        assert result.token_ids == want[0, len(prompt) :].tolist()
