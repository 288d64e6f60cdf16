"""Rows of a step under construction."""

from support.core_builders import make_request
from trimtab_engine.core.step_builder import StepBuilder


def test_a_withdrawn_prompt_row_gives_its_tokens_back_and_leaves_the_others_aligned() -> None:
    builder = StepBuilder(budget=20)
    first, second, third = make_request(9), make_request(5), make_request(6)
    for request, chunk in ((first, 9), (second, 5), (third, 6)):
        builder.add_prefill(request, 0, chunk)
    builder.withdraw(second)
    assert (builder.budget, second.num_in_flight) == (5, 0)
    step = builder.build(step_id=3, generation=2, budget=20, now=1.5)
    assert (step.requests, step.context, step.chunk) == ([first, third], [0, 0], [9, 6])
    assert (step.samples, step.num_tokens, step.num_decodes) == ([0, 1], 15, 0)


def test_a_withdrawn_decode_row_gives_its_token_back() -> None:
    builder = StepBuilder(budget=4)
    decodes = [make_request(3), make_request(4)]
    for request in decodes:
        builder.decodes.append(request)
        builder.decode_context.append(request.num_tokens - 1)
        request.num_in_flight = 1
        builder.budget -= 1
    builder.withdraw(decodes[0])
    assert (builder.budget, decodes[0].num_in_flight) == (3, 0)
    step = builder.build(step_id=0, generation=1, budget=4, now=0.0)
    assert (step.requests, step.context, step.chunk, step.samples) == ([decodes[1]], [3], [1], [0])


def test_withdrawing_a_request_without_a_row_does_nothing() -> None:
    builder = StepBuilder(budget=4)
    builder.withdraw(make_request(3))
    assert builder.budget == 4
    assert builder.is_empty


def test_decode_rows_come_first_whatever_the_order_in_which_rows_were_added() -> None:
    builder = StepBuilder(budget=9)
    prompt, decode = make_request(5), make_request(4)
    builder.add_prefill(prompt, 0, 3)
    builder.decodes.append(decode)
    builder.decode_context.append(3)
    step = builder.build(step_id=0, generation=1, budget=9, now=0.0)
    assert (step.requests, step.samples, step.num_decodes) == ([decode, prompt], [0], 1)
