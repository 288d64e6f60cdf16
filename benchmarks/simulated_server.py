"""What the benchmarks on a simulated server share: a configuration, the server of a preset, and flags. Used by those alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.simulate.presets import Preset
from trimtab_tuner.simulate.simulate import Server, Simulation, live_slo, simulate
from trimtab_tuner.simulate.stop_rule import StopRule
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace

PRESET = "a100-80gb/mistral-7b"
MAX_NUM_SEQS = 256  # vLLM's default for its API server on this device


@dataclass(frozen=True)
class Setup:
    """One configuration."""

    name: str
    budget: int
    policy: str = "fcfs"
    prefill_first: bool = False

    def server(self, known: Preset, slo: Slo, *, cache: bool = False) -> Server:
        """The server of a preset, with targets `slo`. `cache`: prefix caching."""
        live = LiveConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=min(MAX_NUM_SEQS, self.budget),
            scheduling_policy=self.policy,
            slo=live_slo(slo),
        )
        return Server(
            known.name,
            live,
            known.num_blocks,
            max_model_len=known.max_model_len,
            prefill_first=self.prefill_first,
            enable_prefix_caching=cache,
        )


def run(setup: Setup, trace: Trace, known: Preset, slo: Slo, stop_rule: StopRule | None = None) -> Simulation:
    """Simulate requests that share no prefixes, where the cache could only find blocks of a request that was preempted.

    While nobody is, it changes nothing and costs a fifth of the time: it is left out, and the run done again if somebody was.
    """
    fresh = dataclasses.replace(stop_rule) if stop_rule is not None else None
    done = simulate(trace, known.model, setup.server(known, slo), slo=slo, stop_rule=stop_rule)
    if any(stats.preemptions_recompute or stats.preemptions_swap for stats in done.stats):
        cached = setup.server(known, slo, cache=True)
        done = simulate(trace, known.model, cached, slo=slo, stop_rule=fresh)
    return done


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--seeds` and `--preset`."""
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--preset", default=PRESET)


def caveat(preset: object, compared: str) -> str:
    """The first sentence of a table."""
    return f"Caveats first: {preset} is a data-sheet model of step times, not a device; the figures compare {compared}."


def count(seeds: object) -> int:
    """How many, of what a table's shape holds."""
    assert isinstance(seeds, Sequence)
    return len(seeds)
