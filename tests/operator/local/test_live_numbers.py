"""The service's live state: rising generations, leases, and what each replica should have in force."""

import pytest

from trimtab_operator.local.live import Document, GenerationConflict, ServiceLive

START = Document(7, "Spec", {"budget": 512})


def test_the_same_wish_is_no_new_generation() -> None:
    live = ServiceLive(START)
    assert live.want({"budget": 512}, "Spec") is False
    assert live.highest == 7
    assert live.want({"budget": 512}, "Recommendation") is True
    assert live.incumbent == Document(8, "Recommendation", {"budget": 512})


def test_numbers_given_to_candidates_are_never_given_again() -> None:
    live = ServiceLive(START)
    assert live.offer(None, "Recommendation", {"budget": 64}, 5, now=0).document.generation == 8
    live.end_candidate()
    live.want({"budget": 128}, "Spec")
    assert live.incumbent == Document(9, "Spec", {"budget": 128})


def test_new_incumbent_ends_the_candidate() -> None:
    live = ServiceLive(START)
    live.offer(None, "Recommendation", {"budget": 64}, 5, now=0)
    live.want({"budget": 128}, "Spec")
    assert live.candidate is None


def test_candidate_is_renewed_under_its_number_and_ends_when_it_is_not() -> None:
    live = ServiceLive(START)
    number = live.offer(None, "Recommendation", {"budget": 64}, 5, now=0).document.generation
    assert live.offer(number, "Recommendation", {"budget": 64}, 5, now=3).until_s == 8
    assert live.expire(7.9) is False
    assert live.expire(8.0) is True
    assert live.desired("a") == START


@pytest.mark.parametrize(
    ("generation", "budget", "now", "wants"),
    [
        (7, 64, 0, "has seen 8"),
        (3, 64, 0, "has seen 8"),
        (2**62, 64, 0, "rise by at most"),
        (8, 65, 0, "other content"),
        (8, 64, 99, "lease under that number has ended"),
    ],
    ids=["incumbents", "old", "far above", "content", "ended"],
)
def test_number_that_is_not_new_is_refused(generation: int, budget: int, now: float, wants: str) -> None:
    live = ServiceLive(START)
    live.offer(None, "Recommendation", {"budget": 64}, 5, now=0)
    with pytest.raises(GenerationConflict, match=wants):
        live.offer(generation, "Recommendation", {"budget": budget}, 5, now=now)
    assert live.incumbent == START
    assert live.highest == 8


def test_number_of_ones_own_choice_is_taken_when_it_is_higher() -> None:
    live = ServiceLive(START)
    assert live.offer(40, "Recommendation", {"budget": 64}, 5, now=0).document.generation == 40
    assert live.highest == 40


def test_only_targets_try_the_candidate() -> None:
    live = ServiceLive(START)
    candidate = live.offer(None, "Recommendation", {"budget": 64}, 5, now=0, targets=frozenset({"a"}))
    assert live.desired("a") == candidate.document
    assert live.desired("b") == START


def test_renumbering_goes_above_what_engines_have_seen() -> None:
    live = ServiceLive(START)
    live.highest = 12
    live.renumber()
    assert live.incumbent == Document(13, "Spec", {"budget": 512})
