"""What a Simulator run makes of what engines tell: the server that is simulated, and whose step times count."""

from __future__ import annotations

from typing import Any

import pytest

from support.simulations import step_time
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.cluster.records import Told
from trimtab_tuner.cluster.simulated import counted, server, step_model
from trimtab_tuner.errors import InputError, ServerError
from trimtab_tuner.metrics.exposition import parse


def told(
    name: str,
    *,
    steps: int | None = 100,
    base: float = 0.01,
    score: dict[str, Any] | None = None,
    **info: Any,
) -> Told:
    facts = {"num_blocks": 500, "block_size": 16, "max_model_len": 2048, **info}
    model = None if steps is None else step_time(base).to_json()
    about = {"num_steps": steps, "error_median": 0.02, "error_p95": 0.08} if score is None else score
    return Told(Pod(name, name, "", ""), (), 16, model, facts, about)


def test_the_model_that_saw_most_steps_counts_and_says_how_good_it_is() -> None:
    model = step_model([told("a", steps=None), told("b", steps=50), told("c", steps=4000, base=0.02)])
    assert model is not None
    assert model.model == step_time(0.02)
    assert model.describe() == "step times of engine c (median error 2.0%, p95 8.0%, over 4,000 steps)"
    assert step_model([told("a", steps=None)]) is None
    with pytest.raises(InputError, match="b: step-model"):
        step_model([Told(Pod("b", "b", "", ""), (), 16, {"format": 9}, {})])


def test_the_smallest_pool_is_simulated_with_the_flags_that_engines_tell() -> None:
    flags: dict[str, Any] = {
        "enable_prefix_caching": False,
        "prefill_first": True,
        "shed_late": True,
        "fair_tenants": True,
        "num_swap_blocks": 7,
        "swap_block_s": 0.5,
    }
    found = server("chat", LiveConfig(), [told("a"), told("b", num_blocks=300, **flags)])
    assert (found.name, found.num_blocks, found.block_size, found.max_model_len) == ("chat", 300, 16, 2048)
    assert {name: getattr(found, name) for name in flags} == flags
    # An engine of the version before tells none of them.
    assert server("chat", LiveConfig(), [told("a")]).enable_prefix_caching
    with pytest.raises(ServerError, match="num_blocks"):
        server("chat", LiveConfig(), [told("a", num_blocks="many")])


def test_engines_counts_are_those_of_the_generation_in_force() -> None:
    def engine(generation: int, late: int) -> str:
        counts = [
            ("ttft", "met", 4, 7), ("ttft", "violated", 4, late), ("itl", "violated", 4, 2), ("ttft", "violated", 3, 90),
        ]  # fmt: skip
        rows = [
            f'trimtab_slo_requests_total{{slo_class="default",slo="{slo}",outcome="{outcome}",generation="{g}"}} {n}'
            for slo, outcome, g, n in counts
        ]
        return "\n".join([f"trimtab_live_config_generation {generation}", *rows]) + "\n"

    assert counted([parse(engine(4, 3)), parse(engine(4, 1))]) == (8, 18)
    assert counted([parse(engine(5, 3))]) == (0, 0)
    assert counted([]) == (0, 0)
