"""What a tuning run needs in order to need no engine: who measures, who confirms, and what is said of it. Made for `run.TuningRun`.

Called by `commands/search.py` and by `cluster/simulated.py`. Study, score, diagnosis, guardrails and the sequential test are those of
every run. Candidates are chosen on the earlier half of the requests and confirmed on the later one. A candidate must also be
better when every step takes as long as the step-time model's own interval allows: a gain that is smaller than the model's error
is none. What the verdict rests on is said with it: how much traffic, whose step times, and their error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_tuner.audit import Audit
from trimtab_tuner.evaluate import Evaluator, Measurement
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.reading import Reading, Unknown
from trimtab_tuner.target import Promotion, Readback, Versioned

from .cost import StepCost, StepModel
from .evaluator import SimulatedEvaluator, Traffic
from .simulate import Server

# Nobody is hurt by a bad trial. Requests are paired, so as few decide as in a replay.
LIMITS = Limits(max_factor=None, cooldown_windows=0, error_budget_left=0.0, min_requests=40)
NUM_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Standing:
    """A `run.Service` that is nowhere: a start config under ceilings."""

    config: LiveConfig
    ceilings: Ceilings

    async def read(self) -> Readback:
        """The start config as the incumbent."""
        now = Versioned(0, "Spec", self.config)
        return Readback(now, now, self.ceilings, {})

    async def promote(self, config: LiveConfig) -> Promotion:
        """Never asked: what was only simulated is not applied."""
        raise AssertionError("a simulated run ends in Recommended at most")


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """An evaluator that cannot measure, and says why: the run ends as Unknown."""

    incumbent: LiveConfig
    reason: str
    same_requests: bool = True

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """Unknown, always."""
        chosen = self.incumbent if config is None else config
        return Measurement("unknown", chosen, 0, 0.0, 0.0, Unknown(self.reason), (), self.reason)


class Simulator:
    """`chooser`, `confirmer`, `doubt` and `caveat` are what `run.TuningRun` takes; `facts` says what all trials share."""

    def __init__(
        self,
        incumbent: LiveConfig,
        traffic: Traffic,
        model: StepModel,
        server: Server,
        *,
        limits: Limits = LIMITS,
        num_blocks: int = NUM_BLOCKS,
        seed: int = 0,
        audit: Audit | None = None,
    ) -> None:
        """`server` is the incumbent's engine; its own live config does not count. `seed`: of drawn arrivals."""
        self._incumbent = incumbent
        self._traffic = traffic
        self._model = model
        self._server = dataclasses.replace(server, step_time=model.model)
        self._limits = limits
        self._num_blocks = num_blocks
        self._seed = seed
        self._audit = Audit() if audit is None else audit
        total = len(traffic.trace)
        self._half = total // 2
        self.chooser: Evaluator
        self.confirmer: Evaluator
        self.caveat = ""
        if total < 2 * limits.min_requests:
            reason = (
                f"{traffic.trace.source}: {total} requests, at least {2 * limits.min_requests} are needed: half of them to choose "
                "a candidate by, half to confirm it"
            )
            self.chooser = self.confirmer = Unmeasured(incumbent, reason)
            return
        self.chooser = self._evaluator(traffic.first(self._half), model.model, seed)
        self.confirmer = self._evaluator(traffic, model.model, seed + 1, self._half, again=traffic.drawn)
        self.caveat = (
            f"simulated, no engine ran it: chosen on {self._half} requests, confirmed on {total - self._half} later ones; "
            f"{model.describe()}; what is chance here is other traffic, not the simulator's error"
        )

    async def doubt(self, config: LiveConfig) -> str | None:
        """Why a confirmed candidate may be a mistake of the step-time model, or None."""
        upper = self._model.upper
        if upper is None:
            return None
        slow = self._evaluator(self._traffic, upper, self._seed + 1, self._half)
        usual, tried = [
            await slow.evaluate(arm, baseline=None, on_progress=lambda _: None) for arm in (None, config)
        ]
        assert isinstance(usual.reading, Reading), "the same requests were judged before"
        assert isinstance(tried.reading, Reading), "the same requests were judged before"
        a, b = usual.reading.violated, tried.reading.violated
        self._audit.write("slower steps", config=config.to_json(), violated_incumbent=a, violated_candidate=b)
        if tried.status == "measured" and b < a:
            return None
        said = tried.reason if tried.status == "stopped" else f"it misses {b} targets against {a}"
        largest = self._model.model.largest_tokens
        seen = "" if math.isinf(largest) else f" (it has seen no step of more than {largest:g} tokens)"
        return f"with steps as long as the step-time model's error allows{seen} {said}"

    def facts(self) -> dict[str, object]:
        """What every trial is measured with."""
        traffic, server = self._traffic, self._server
        return {
            "evaluator": "simulator",
            "seed": self._seed,
            "mode": str(traffic.mode),
            "trace": traffic.trace.source,
            "trace_hash": traffic.trace.hash,
            "trace_changes": list(traffic.trace.changes),
            "requests": len(traffic.trace),
            "span_s": round(traffic.trace.span_s, 3),
            "replicas": traffic.replicas,
            "routing": traffic.routing if traffic.placement is None else "as recorded",
            "server": server.name,
            "num_blocks": server.num_blocks,
            "block_size": server.block_size,
            "max_model_len": server.max_model_len,
            "step_time": self._model.to_json(),
        }

    def _evaluator(
        self, traffic: Traffic, cost: StepCost, seed: int, first_judged: int = 0, *, again: bool = False
    ) -> SimulatedEvaluator:
        return SimulatedEvaluator(
            self._incumbent,
            traffic,
            cost,
            self._server,
            limits=self._limits,
            first_judged=first_judged,
            num_blocks=self._num_blocks,
            seed=seed,
            seed_each_time=again,
        )
