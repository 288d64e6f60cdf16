"""When a token is the last one."""

import pytest

from support.core_builders import make_request
from trimtab_engine.core.request import FinishReason, Request
from trimtab_engine.core.stop_rules import finish_reason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def verdict(request: Request, token: int, max_model_len: int = 100) -> tuple[FinishReason, int | None] | None:
    request.token_ids.append(token)
    return finish_reason(request, token, frozenset({0}), max_model_len)


@pytest.mark.parametrize(
    ("request_", "token", "want"),
    [
        pytest.param(make_request(4, 9), 7, None, id="an ordinary token goes on"),
        pytest.param(
            make_request(4, 9, ignore_eos=False), 0, (STOP, None), id="EOS stops without a stop token"
        ),
        pytest.param(make_request(4, 9, ignore_eos=True), 0, None, id="ignored EOS goes on"),
        pytest.param(make_request(4, 9, stop_token_ids=(7,)), 7, (STOP, 7), id="a stop token is named"),
        pytest.param(
            make_request(4, 9, stop_token_ids=(7,), min_tokens=2), 7, None, id="min_tokens holds stop"
        ),
        pytest.param(make_request(4, 9, ignore_eos=False, min_tokens=2), 0, None, id="min_tokens holds EOS"),
        pytest.param(make_request(4, 1), 7, (LENGTH, None), id="max_tokens 1 ends with the first token"),
        pytest.param(
            make_request(4, 1, ignore_eos=False), 0, (STOP, None), id="EOS as the last token is a stop"
        ),
        pytest.param(make_request(99, None), 7, (LENGTH, None), id="model length ends it"),
        pytest.param(make_request(99, None, min_tokens=50), 7, (LENGTH, None), id="length beats min_tokens"),
        pytest.param(make_request(4, 1, min_tokens=50), 7, (LENGTH, None), id="max_tokens beats min_tokens"),
    ],
)
def test_verdicts(request_: Request, token: int, want: tuple[FinishReason, int | None] | None) -> None:
    assert verdict(request_, token) == want
