"""The Optuna study: repeatable by seed, resumable, never twice the same, away from what must not be measured."""

from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from support.study import make_config
from trimtab_engine.core.live import Ceilings
from trimtab_tuner import space
from trimtab_tuner.errors import InputError
from trimtab_tuner.score import Score, broken
from trimtab_tuner.space import Value
from trimtab_tuner.study import Study, Values

KNOBS = space.build(make_config(), Ceilings(8192, 256))
START: dict[str, Value] = {"max_num_batched_tokens": 2048, "scheduling_policy": "fcfs"}


def free(values: Values) -> dict[str, float]:
    return {}


def objective(values: Values) -> float:
    """A plateau with a cliff above 512 tokens; first tokens get late below 128."""
    budget = values["max_num_batched_tokens"]
    assert isinstance(budget, int)
    return 0.4 if budget > 512 else 0.2 if budget < 128 else 0.02


def search(
    study: Study, trials: int, forbidden: Callable[[Values], dict[str, float]] = free
) -> list[tuple[Value, ...]]:
    tried: list[tuple[Value, ...]] = []
    for _ in range(trials):
        proposal = study.ask(forbidden)
        if proposal is None:
            break
        tried.append(tuple(proposal.values.values()))
        study.tell(proposal, Score(objective(proposal.values), {"itl": objective(proposal.values) - 0.03}))
    return tried


def started(seed: int, storage: str | None = None) -> Study:
    study = Study(KNOBS, seed=seed, storage=storage)
    study.tell_start(START, Score(0.4, {"itl": 0.37}))
    return study


def test_a_seed_repeats_the_whole_search_and_another_seed_does_not() -> None:
    assert search(started(1), 9) == search(started(1), 9)
    assert search(started(1), 9) != search(started(2), 9)


def test_no_config_is_proposed_twice_and_the_start_never() -> None:
    tried = search(started(3), 100)
    space_size = len(KNOBS[0].choices) * len(KNOBS[1].choices)
    assert len(tried) == len(set(tried)) == space_size - 1
    assert tuple(START.values()) not in tried
    assert started(3).ask(lambda values: {"no": 1.0}) is None


def test_enqueued_points_come_first_in_order() -> None:
    study = started(4)
    points: list[Values] = [{**START, "max_num_batched_tokens": b} for b in (512, 256, 2048)]
    study.enqueue(points, origin="step time")
    assert [t[0] for t in search(study, 3)][:2] == [512, 256]


def test_forbidden_configs_are_told_with_their_violation_and_never_measured() -> None:
    def forbidden(values: Values) -> dict[str, float]:
        budget = values["max_num_batched_tokens"]
        assert isinstance(budget, int)
        return {"step_time": budget / 512 - 1} if budget > 512 else {}

    study = started(5)
    tried = search(study, 100, forbidden)
    assert tried
    assert all(isinstance(budget, int) and budget <= 512 for budget, _ in tried)
    told = [t for t in study._study.trials if t.constraints.get("step_time", 0) > 0]
    assert all(t.state == optuna.trial.TrialState.COMPLETE for t in told)


def test_the_search_learns_where_the_plateau_is() -> None:
    # Over seeds: the second half of the trials lies on the plateau more often than the grid's share of it.
    on_plateau, drawn = 0, 0
    for seed in range(12):
        late = search(started(seed), 10)[5:]
        on_plateau += sum(isinstance(b, int) and 128 <= b <= 512 for b, _ in late)
        drawn += len(late)
    share = sum(isinstance(b, int) and 128 <= b <= 512 for b in KNOBS[0].choices) / len(KNOBS[0].choices)
    assert on_plateau / drawn > share


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_killed_study_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    storage = str(tmp_path / "study.log") if kind == "journal" else f"sqlite:///{tmp_path}/study.db"
    first = started(6, storage)
    tried = search(first, 3)
    left = first.ask(free)  # a worker that dies with a trial in hand
    assert left is not None

    again = Study(KNOBS, seed=6, storage=storage)
    assert again.resumed == 4
    states = [t.state for t in again._study.trials]
    assert states.count(optuna.trial.TrialState.FAIL) == 1
    assert optuna.trial.TrialState.RUNNING not in states
    more = search(again, 4)
    assert not set(more) & set(tried)
    assert len(more) == 4


def test_a_stopped_config_is_not_asked_for_again_but_an_unknown_one_may_be() -> None:
    study = started(7)
    proposal = study.ask(free)
    assert proposal is not None
    study.tell(proposal, broken("stopped"))
    unknown = study.ask(free)
    assert unknown is not None
    study.fail(unknown, "no metrics")
    rest = search(study, 100)
    assert tuple(proposal.values.values()) not in rest
    assert tuple(unknown.values.values()) in rest


def test_a_storage_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--storage"):
        Study(KNOBS, seed=0, storage=str(tmp_path / "gone" / "study.log"))
