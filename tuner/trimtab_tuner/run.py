"""One tuning run: measure the incumbent, say what binds it, try candidates as leases, confirm the best, promote or keep.

Called by `commands.run`. Exploring accepts nothing: it ranks. The best candidate is then measured again and compared with the
incumbent on requests that played no part in choosing it, by one sequential test, so that trying many configs does not make
luck look like progress. Whatever ends the run, the incumbent is back in force unless a candidate was confirmed and
`apply` was asked for. "Inconclusive" keeps the incumbent.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import guardrails, space, steptime
from trimtab_tuner import score as scores
from trimtab_tuner.audit import Audit
from trimtab_tuner.decide import Comparison, Throughput, compare, throughput
from trimtab_tuner.diagnosis import Diagnosis, diagnose
from trimtab_tuner.evaluate import Evaluator, Measurement
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.reading import Block, Reading
from trimtab_tuner.space import Knob
from trimtab_tuner.steptime import StepTime
from trimtab_tuner.study import Proposal, Study, Values
from trimtab_tuner.target import Promotion, Readback, TargetRefused
from trimtab_tuner.trial import Decision, Role, Trial

MAX_REFUSALS = 10
MAX_LOST_PAIRS = (
    3  # of live traffic: pairs that say nothing (an engine restarted, say) before a confirmation gives up
)
Outcome = Literal["Applied", "Recommended", "Kept", "Unknown", "Paused"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`max_trials` counts every replay of a candidate or the incumbent that the run starts with, the confirmation included."""

    max_trials: int = 5
    confirm_rounds: int = 1  # further rounds (two trials each) while inconclusive
    pairs: int = 8  # live traffic: slices of incumbent and candidate, in random order, to confirm with
    apply: bool = False
    time_limit_s: float | None = None
    seed: int = 0
    count_refused: bool = False  # whether a candidate that the service refuses counts as a trial


@dataclass(frozen=True, slots=True)
class Known:
    """A candidate that an earlier worker of the same run tried. `objective` None: it failed, and says nothing."""

    config: LiveConfig
    objective: float | None  # as `score.Score.objective`
    complete: bool  # measured to its end, so it may be confirmed


@dataclass(frozen=True, slots=True)
class _Best:
    """The candidate that is to be confirmed."""

    config: LiveConfig
    score: scores.Score


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `after`: the confirmed candidate, or the incumbent when it was kept."""

    outcome: Outcome
    reason: str
    before: LiveConfig
    after: LiveConfig
    trials: tuple[Trial, ...]
    diagnosis: Diagnosis | None
    step_time: StepTime | None
    comparison: Comparison | None
    generation: int | None  # of the promoted config
    throughput: Throughput | None = None  # what the confirmed candidate costs, where a limit is set

    def to_json(self) -> dict[str, object]:
        """The run's part of the result document; `result_document` adds provenance."""
        rows = [trial.to_json() for trial in self.trials]
        kept = self.outcome not in ("Applied", "Recommended")
        confirming = [row for row in rows if row["role"] == "confirm"]
        # The incumbent as it was measured beside the candidate, where it was: on other requests than at first.
        incumbent = [row for row in rows if row["role"] == "incumbent"][:1]
        incumbent += [row for row in confirming if row["config"] == self.before.to_json() and not kept]
        before = incumbent[-1] if incumbent else None
        confirmed = [row for row in confirming if row["config"] == self.after.to_json()]
        return {
            "trials": rows,
            "before": before,
            "after": before if kept else (confirmed[-1] if confirmed else None),
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "step_time": dataclasses.asdict(self.step_time) if self.step_time else None,
            "incumbent": {"before": self.before.to_json(), "after": self.after.to_json()},
            "verdict": {
                "outcome": self.outcome,
                "reason": self.reason,
                "generation": self.generation,
                "comparison": self.comparison.to_json() if self.comparison else None,
                "throughput": self.throughput.to_json() if self.throughput else None,
            },
        }


class Service(Protocol):
    """What a run itself asks of the service; candidates are the evaluator's business. Every `target.ServiceTarget` is one."""

    async def read(self) -> Readback:
        """What is in force now."""

    async def promote(self, config: LiveConfig) -> Promotion:
        """Make `config` the incumbent, or the recommendation."""


class View(Protocol):
    """Whoever shows a run to a person."""

    def begin(self, what: str, trial: int, of: int) -> Callable[[float], None]:
        """A measurement begins; returns what to call with the fraction done."""

    def end(self, trial: Trial) -> None:
        """A measurement ended."""

    def note(self, label: str, text: str) -> None:
        """One line about the run."""


class TuningRun:
    """Holds one run together; `execute` once."""

    def __init__(
        self,
        *,
        target: Service,
        evaluator: Evaluator,
        make_study: Callable[[Sequence[Knob]], Study],
        make_space: Callable[[LiveConfig], tuple[Knob, ...]],
        limits: Limits,
        options: RunOptions,
        audit: Audit,
        view: View,
        paused: Callable[[], Awaitable[str | None]],
        keep: Callable[[Trial], None] = lambda _: None,
        begins: Callable[[Role, LiveConfig | None], None] = lambda role, config: None,
        earlier: Sequence[Known] = (),
        waited_s: Callable[[], float] = lambda: 0.0,
        now: Callable[[], float] = time.monotonic,
        confirmer: Evaluator | None = None,
        doubt: Callable[[LiveConfig], Awaitable[str | None]] | None = None,
        caveat: str = "",
    ) -> None:
        """`keep` stores the raw samples of a trial; `begins` hears of a measurement before anything is changed for it; `earlier`
        counts as tried; `waited_s` is how long candidates have had to wait so far, which says nothing of how long the next
        measurement takes; `now` is a clock in seconds.

        `confirmer` measures in place of `evaluator` once the best candidate is known, on requests of its own: where measuring a
        config again would only repeat what is known. `doubt` is asked of a confirmed candidate: why it is not taken all
        the same, or None. `caveat` is said with every verdict.
        """
        self._begins = begins
        self._waited_s = waited_s
        self._earlier = earlier
        self._keep = keep
        self._target = target
        self._evaluator = evaluator
        self._confirmer = evaluator if confirmer is None else confirmer
        self._doubt = doubt
        self._caveat = caveat
        self._make_study = make_study
        self._make_space = make_space
        self._limits = limits
        self._options = options
        self._audit = audit
        self._view = view
        self._paused = paused
        self._now = now
        self._rng = random.Random(options.seed)
        self._trials: list[Trial] = []
        self._began = now()
        self._longest_s = 0.0
        self._spent = 0  # trials that count: windows of a cool-down do not
        self._windows_since_rollback: int | None = None
        self._before: LiveConfig | None = None
        self._last_resort: int | None = None  # the one budget that may exceed the step-time limit
        self._diagnosis: Diagnosis | None = None
        self._step_time: StepTime | None = None
        self._throughput: Throughput | None = None
        self._unmeasured = ""  # why the last candidate that could not be measured was not

    async def execute(self) -> RunResult:
        """The whole run. Raises ServerError when the service cannot be reached; the incumbent is in force then too."""
        readback = await self._target.read()
        before = readback.incumbent.config
        self._before = before
        self._audit.write(
            "begin",
            incumbent=readback.incumbent.generation,
            config=before.to_json(),
            limits=self._limits.to_json(),
            options=dataclasses.asdict(self._options),
        )
        if why := await self._paused():
            return self._finish("Paused", why, before, before)
        baseline = await self._measure("incumbent", None, None)
        if not isinstance(baseline.reading, Reading) or baseline.status != "measured":
            return self._finish("Unknown", baseline.reason, before, before)
        self._explain(baseline.reading, before)
        if baseline.reading.violated == 0:
            return self._finish("Kept", "no request violates a target: nothing to gain", before, before)
        if (
            self._diagnosis is not None
            and self._diagnosis.state == "overloaded"
            and not self._evaluator.same_requests
        ):
            return self._finish(
                "Kept", f"overloaded, tuning is frozen: {self._diagnosis.because}", before, before
            )
        knobs = self._make_space(before)
        study = self._make_study(knobs)
        if study.resumed:
            self._view.note("resumed", f"{study.resumed} configs are known from before")
        best = await self._explore(study, knobs, baseline, before)
        if isinstance(best, str):
            return self._finish("Paused", best, before, before)
        if best is None:
            outcome, reason = self._without_winner()
            return self._finish(outcome, reason, before, before)
        return await self._confirm(best, baseline, before)

    def _without_winner(self) -> tuple[Outcome, str]:
        """What a search says that found nothing better. Without a single measured candidate it knows nothing."""
        tried = [trial for trial in self._trials if trial.role == "explore"]
        measured = any(trial.score is not None for trial in tried)
        if self._unmeasured and not measured and all(known.objective is None for known in self._earlier):
            return "Unknown", f"no candidate could be measured; of the last one: {self._unmeasured}"
        return (
            "Kept",
            "no trial violated less than the incumbent" if tried else "there was no candidate to try",
        )

    def _explain(self, reading: Reading, config: LiveConfig) -> None:
        self._diagnosis = diagnose(reading, config)
        self._step_time = steptime.estimate(reading)
        self._view.note("diagnosis", f"{self._diagnosis.state}: {self._diagnosis.because}")
        self._audit.write("diagnosis", **self._diagnosis.to_json())
        if self._step_time is not None:
            self._audit.write("step_time", **dataclasses.asdict(self._step_time))

    # Exploring

    async def _explore(
        self, study: Study, knobs: Sequence[Knob], baseline: Measurement, before: LiveConfig
    ) -> _Best | str | None:
        """The best candidate that violated less than the incumbent, or None; a text when exploring was forbidden at once."""
        assert isinstance(baseline.reading, Reading), "checked by the caller"
        start = space.values_of(before, knobs)
        usual = scores.score(baseline.reading, before.slo)
        study.tell_start(start, usual)
        best = self._recall(study, knobs, before, usual)
        self._enqueue_first(study, knobs, before)
        refused: str | None = None
        cut: Proposal | None = None
        refusals = 0
        self._spent = 1 + len(self._earlier)  # the incumbent's, and those
        # One trial is kept back for the confirmation.
        confirming = 1 if self._evaluator.same_requests else 2 * self._options.pairs
        while self._spent < self._options.max_trials - 1 and self._time_for(1 + confirming):
            refused = await self._may_explore(baseline.reading, before)
            if refused is not None:
                if self._windows_since_rollback is None or not refused.startswith("cooling down"):
                    break
                baseline = await self._measure("incumbent", None, None)  # a window of the cool-down
                if not isinstance(baseline.reading, Reading):
                    break
                continue
            proposal = cut or study.ask(lambda values: self._forbidden(values, before))
            cut = None
            if proposal is None:
                self._audit.write("space used up", measured=study.measured)
                break
            config = space.apply(before, proposal.values)
            try:
                measurement = await self._measure("explore", config, baseline)
            except TargetRefused as refusal:
                # Bounds that only the other side knows. Nothing was changed or measured, and the study learns where they are.
                study.tell(proposal, scores.broken("refused"))
                self._audit.write("refused", config=config.to_json(), reason=str(refusal))
                self._view.note("refused", f"{space.describe(config, before)}: {refusal}")
                refusals, self._unmeasured = refusals + 1, str(refusal)
                self._spent += self._options.count_refused
                if refusals >= MAX_REFUSALS:
                    break
                continue
            trial = self._trials[-1]
            if self._cut_short(measurement):
                cut, self._unmeasured = proposal, trial.reason
                continue
            self._spent += 1
            if trial.score is None:
                study.fail(proposal, trial.reason)
                self._unmeasured = trial.reason
                continue
            study.tell(proposal, trial.score)
            if trial.decision == "improves" and self._better(trial.score, best):
                best = _Best(config, trial.score)
                if isinstance(measurement.reading, Reading) and measurement.reading.violated == 0:
                    break  # nothing is left to gain
        if refused is not None and not any(t.role == "explore" for t in self._trials):
            return refused
        return best

    def _cut_short(self, measurement: Measurement) -> bool:
        """Whether it only ended because tuning was held: that says nothing of the candidate, which is tried again. How often, the time
        limit alone bounds, so without one it counts as any other that says nothing."""
        return measurement.halted and self._options.time_limit_s is not None

    def _recall(
        self, study: Study, knobs: Sequence[Knob], before: LiveConfig, usual: scores.Score
    ) -> _Best | None:
        """Tells the study what earlier workers of this run found → the best of it."""
        best: _Best | None = None
        for known in self._earlier:
            values = space.values_of(known.config, knobs)
            here = all(values[knob.name] in knob.choices for knob in knobs)
            # What is no knob stands as it stands now: a person may have changed it since, and a status may hold anything.
            here = here and dataclasses.replace(before, **values) == known.config  # type: ignore[arg-type]
            if known.objective is None or not here or known.config == before:
                continue
            found = scores.Score(known.objective, {})
            study.tell_start(values, found)
            if known.complete and found.objective < usual.objective and self._better(found, best):
                best = _Best(known.config, found)
        return best

    @staticmethod
    def _better(score: scores.Score, best: _Best | None) -> bool:
        if best is None:
            return True
        return (not score.feasible, score.objective) < (not best.score.feasible, best.score.objective)

    async def _may_explore(self, reading: Reading, before: LiveConfig) -> str | None:
        why = guardrails.may_explore(
            pause=await self._paused(),
            budget_left=guardrails.error_budget_left(reading, before.slo),
            windows_since_rollback=self._windows_since_rollback,
            limits=self._limits,
        )
        if why:
            self._audit.write("not explored", reason=why)
            self._view.note("guardrail", why)
        return why

    def _enqueue_first(self, study: Study, knobs: Sequence[Knob], before: LiveConfig) -> None:
        budget = next((k for k in knobs if k.name == "max_num_batched_tokens"), None)
        if self._step_time is None or budget is None:
            return
        limit_s = guardrails.step_time_limit_s(before.slo, self._limits)
        grid = [choice for choice in budget.choices if isinstance(choice, int)]
        points = steptime.first_points(self._step_time, limit_s=limit_s, grid=grid)
        if not points and grid[0] < before.max_num_batched_tokens:
            # No budget keeps the limit. The smallest one still stalls less than what runs now, and nothing else does better.
            self._last_resort = grid[0]
            points = (grid[0],)
            self._view.note(
                "step time",
                f"by the estimate even {grid[0]} tokens take {self._step_time.at(grid[0]):.3f} s, over {limit_s:.3f} s: "
                "only that budget is tried",
            )
        start = space.nearest(before, knobs)
        study.enqueue([{**start, budget.name: point} for point in points], origin="step time")
        self._audit.write("first points", points=list(points), limit_s=limit_s, last_resort=self._last_resort)

    def _forbidden(self, values: Values, before: LiveConfig) -> dict[str, float]:
        config = space.apply(before, values)
        found: dict[str, float] = {}
        ratio = self._step_ratio(config)
        if ratio is not None and ratio > 1 and config.max_num_batched_tokens != self._last_resort:
            found["step_time"] = ratio - 1
        if config.max_num_batched_tokens < config.max_num_seqs:
            found["budget_below_sequences"] = float(config.max_num_seqs - config.max_num_batched_tokens)
        return found

    def _step_ratio(self, config: LiveConfig) -> float | None:
        if self._step_time is None:
            return None
        limit = guardrails.step_time_limit_s(config.slo, self._limits)
        return self._step_time.at(config.max_num_batched_tokens) / limit

    # Confirming

    async def _confirm(self, best: _Best, baseline: Measurement, before: LiveConfig) -> RunResult:
        config = best.config
        # Whether what the incumbent did to the same requests is known.
        again = self._confirmer is self._evaluator and self._evaluator.same_requests
        incumbent: list[Block] = list(baseline.blocks) if again else []
        candidate: list[Block] = []
        comparison: Comparison | None = None
        rounds = self._options.confirm_rounds if self._evaluator.same_requests else self._options.pairs
        done = lost = cut = 0
        while done < rounds or self._too_few(comparison):
            fresh = done > 0 or not again
            if done + lost + cut > 0 and not self._time_for(2 if fresh else 1):
                break
            arms: list[LiveConfig | None] = [None, config] if fresh else [config]
            # Which comes first is drawn: then swapping the arms of a pair is as likely as not, whatever the traffic does.
            self._rng.shuffle(arms)
            found: dict[bool, Sequence[Block]] = {}
            for arm in arms:
                if why := await self._paused():
                    return self._finish("Paused", why, before, before, comparison)
                try:
                    measured = await self._measure("confirm", arm, baseline)
                except TargetRefused as refusal:
                    why = f"the candidate was refused: {refusal}"
                    return self._finish("Paused", why, before, before, comparison)
                if measured.status == "stopped":
                    return self._finish(
                        "Kept", f"the candidate was stopped: {measured.reason}", before, before
                    )
                if measured.status == "unknown":
                    break
                found[arm is None] = self._blocks(measured)
            if self._cut_short(measured):
                cut += 1
                continue
            if measured.status == "unknown":
                # A pair of live traffic that says nothing is left out as a whole; a replay is too dear for a second try.
                lost += 1
                if self._evaluator.same_requests or lost > MAX_LOST_PAIRS:
                    return self._finish("Unknown", measured.reason, before, before)
                continue
            incumbent.extend(found.get(True, ()))
            candidate.extend(found[False])
            done += 1
            comparison = compare(
                incumbent,
                candidate,
                min_requests=self._limits.min_requests,
                alpha=self._limits.alpha,
                same_requests=self._evaluator.same_requests,
                seed=self._options.seed,
            )
            self._trials[-1].comparison = comparison.to_json()
            last = next(t for t in reversed(self._trials) if t.config == config)
            last.decision, last.reason = comparison.verdict, comparison.reason
            self._view.note("compared", f"{comparison.verdict}: {comparison.reason}")
            self._audit.write("compared", round=done - 1, config=config.to_json(), **comparison.to_json())
            if comparison.verdict != "inconclusive":
                break
        if comparison is None:
            return self._finish("Unknown", "no time was left to confirm", before, before)
        if comparison.verdict != "better":
            return self._finish(
                "Kept", f"{comparison.verdict}: {comparison.reason}", before, before, comparison
            )
        if (why := self._costs_too_much(incumbent, candidate)) is not None:
            return self._finish("Kept", f"{comparison.reason}, but {why}", before, before, comparison)
        if self._doubt is not None and (why := await self._doubt(config)):
            return self._finish("Kept", f"{comparison.reason}, but {why}", before, before, comparison)
        if not self._options.apply:
            return self._finish("Recommended", comparison.reason, before, config, comparison)
        promotion = await self._target.promote(config)
        outcome: Outcome = "Applied" if promotion.in_force else "Recommended"
        return self._finish(outcome, comparison.reason, before, config, comparison, promotion.generation)

    def _costs_too_much(self, incumbent: Sequence[Block], candidate: Sequence[Block]) -> str | None:
        """How a confirmed candidate's throughput breaks the limit, or None."""
        if self._limits.max_throughput_loss is None:
            return None
        self._throughput = found = self._pace(incumbent, candidate, self._limits.max_throughput_loss)
        self._view.note("throughput", found.reason)
        self._audit.write("throughput", **found.to_json())
        return None if found.verdict == "kept" else found.reason

    def _pace(self, incumbent: Sequence[Block], candidate: Sequence[Block], limit: float) -> Throughput:
        return throughput(
            incumbent, candidate, limit=limit, alpha=self._limits.alpha, seed=self._options.seed
        )

    def _too_few(self, comparison: Comparison | None) -> bool:
        """Whether pairs of live traffic go on beyond their number because requests are rare; only under a time limit."""
        if comparison is None or self._evaluator.same_requests or self._options.time_limit_s is None:
            return False
        return min(comparison.n_incumbent, comparison.n_candidate) < self._limits.min_requests

    def _blocks(self, measured: Measurement) -> Sequence[Block]:
        if self._evaluator.same_requests:
            return measured.blocks
        assert isinstance(measured.reading, Reading), "only measured windows get here"
        # A slice of live traffic is one block. Tokens by engine: fewer of them may try a candidate than run the incumbent.
        reading = measured.reading
        return [
            Block(reading.violated, reading.n, reading.generation_tokens / reading.targets, reading.wall_s)
        ]

    # Measuring

    async def _measure(
        self, role: Role, config: LiveConfig | None, baseline: Measurement | None
    ) -> Measurement:
        number = len(self._trials)
        began = self._now() - self._waited_s()
        label = "incumbent" if config is None else space.describe(config, self._before)
        self._begins(role, config)
        on_progress = self._view.begin(label, number + 1, max(self._options.max_trials, number + 1))
        evaluator = self._confirmer if role == "confirm" else self._evaluator
        measurement = await evaluator.evaluate(config, baseline=baseline, on_progress=on_progress)
        self._longest_s = max(self._longest_s, self._now() - self._waited_s() - began)
        trial = self._judge(number, role, config, measurement, baseline)
        self._trials.append(trial)
        if measurement.status == "stopped":
            self._windows_since_rollback = 0
        elif self._windows_since_rollback is not None:
            self._windows_since_rollback += 1
        self._audit.write("measured", **trial.to_json())
        self._keep(trial)
        self._view.end(trial)
        return measurement

    def _judge(
        self,
        number: int,
        role: Role,
        config: LiveConfig | None,
        measurement: Measurement,
        baseline: Measurement | None,
    ) -> Trial:
        decision: Decision = "incumbent"
        reason = measurement.reason
        score: scores.Score | None = None
        if measurement.status == "unknown":
            decision = "unknown"
        elif measurement.status == "stopped":
            decision, score = "stopped", scores.broken("stopped")
        elif isinstance(measurement.reading, Reading):
            score = scores.score(
                measurement.reading,
                measurement.config.slo,
                step_time_ratio=self._step_ratio(measurement.config) if config is not None else None,
            )
            if config is not None and baseline is not None and isinstance(baseline.reading, Reading):
                usual = scores.score(baseline.reading, measurement.config.slo)
                decision = "improves" if score.objective < usual.objective else "no better"
                if role == "confirm":
                    decision = "measured"  # until the comparison says what it means
                elif (costs := self._lost_pace(baseline, measurement)) is not None:
                    decision, reason = "no better", costs.reason
                    score = score.with_constraint("throughput", (costs.loss or 0.0) - costs.limit)
        return Trial(number, role, measurement, score, decision, reason)

    def _lost_pace(self, baseline: Measurement, measurement: Measurement) -> Throughput | None:
        """What a trial costs, when that is too much already: it would not be confirmed, so another may be the best."""
        limit = self._limits.max_throughput_loss
        if limit is None or not self._evaluator.same_requests:
            return None
        found = self._pace(baseline.blocks, measurement.blocks, limit)
        return found if found.verdict == "lost" else None

    def _time_for(self, measurements: int) -> bool:
        limit = self._options.time_limit_s
        return limit is None or self._now() - self._began + measurements * self._longest_s <= limit

    def _finish(
        self,
        outcome: Outcome,
        reason: str,
        before: LiveConfig,
        after: LiveConfig,
        comparison: Comparison | None = None,
        generation: int | None = None,
    ) -> RunResult:
        reason = f"{reason}; {self._caveat}" if self._caveat else reason
        self._audit.write(
            "end", outcome=outcome, reason=reason, config=after.to_json(), generation=generation
        )
        self._view.note("verdict", f"{outcome}: {space.describe(after, before)} · {reason}")
        return RunResult(
            outcome,
            reason,
            before,
            after,
            tuple(self._trials),
            self._diagnosis,
            self._step_time,
            comparison,
            generation,
            self._throughput,
        )


def result_document(result: RunResult, meta: Mapping[str, object]) -> dict[str, object]:
    """The whole result as stored and reported: the run, and where it comes from."""
    return {"schema": "trimtab.tuning/1", "meta": dict(meta), **result.to_json()}
