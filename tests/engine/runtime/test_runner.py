"""The runner: ragged batches, poisoned memory, broken rows, prompt log-probabilities, sizes at start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.steps import GREEDY, make_request, make_step
from support.tiny_models import tiny_model
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.live import Ceilings
from trimtab_engine.core.request import SamplingParams
from trimtab_engine.errors import ConfigError, ModelLoadError
from trimtab_engine.runtime.runner import Runner

RunnerOf = Callable[[bool], Runner]
MODES = pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
LOGPROBS = SamplingParams(temperature=0.0, num_logprobs=5)


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def poison(runner: Runner) -> None:
    runner._kv.fill_(float("nan"))


@MODES
def test_a_ragged_batch_says_what_each_row_says_alone(runner_of: RunnerOf, invariant: bool) -> None:
    runner = runner_of(invariant)
    # (tokens, already computed): decodes of unlike lengths, a chunk in the middle, whole prompts, one token alone.
    shapes = [(70, 69), (9, 8), (17, 16), (65, 64), (40, 13), (33, 0), (8, 0), (1, 0)]
    requests = []
    first_block = 1
    for seed, (length, _) in enumerate(shapes):
        blocks = -(-length // 8)
        requests.append(
            make_request(
                f"r{seed}", tokens_of(seed, length), [*range(first_block, first_block + blocks)], LOGPROBS
            )
        )
        first_block += blocks
    poison(runner)
    for request, (_, context) in zip(requests, shapes, strict=True):
        if context:
            runner.run(make_step((request, 0, context)))
    rows = [
        (request, context, request.num_tokens - context)
        for request, (_, context) in zip(requests, shapes, strict=True)
    ]
    together = runner.run(make_step(*rows))
    assert together.failed == {}
    for index, alone_row in enumerate(rows):
        alone = runner.run(make_step(alone_row))
        assert together.token_ids[index] == alone.token_ids[0], index
        want, got = alone.logprobs[0], together.logprobs[index]
        assert want is not None
        assert got is not None
        if invariant:
            assert got == want
        else:
            assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert [token for token, _ in got.top] == [token for token, _ in want.top]


def test_garbage_past_the_end_of_a_block_table_is_never_followed(runner_of: RunnerOf) -> None:
    runner = runner_of(False)
    long, short = tokens_of(1, 60), tokens_of(2, 10)
    poison(runner)
    first = make_request("long", long, list(range(1, 9)))
    second = make_request("short", short, [9, 10, 64, 63, 62])  # holds more blocks than it has tokens for
    alone = runner.run(make_step((second, 0, 10))).token_ids
    runner.run(make_step((first, 0, 59)))
    both = runner.run(make_step((first, 59, 1), (second, 0, 10)))
    assert both.token_ids[1:] == alone
    assert both.failed == {}


def test_a_broken_row_fails_alone(runner_of: RunnerOf) -> None:
    runner = runner_of(False)
    poison(runner)
    good = make_request("good", tokens_of(3, 20), [1, 2, 3])
    bad = make_request("bad", tokens_of(4, 20), [4, 5, 6])
    want = runner.run(make_step((good, 0, 20))).token_ids[0]
    # The cache of `bad` was never written: its context is NaN, as after a numerical accident.
    result = runner.run(make_step((bad, 19, 1), (good, 19, 1)))
    assert list(result.failed) == [0]
    assert result.token_ids[1] == want


@pytest.mark.parametrize("cuts", [[40], [16, 1, 23]])
def test_prompt_logprobs_are_those_of_transformers_and_join_over_chunks(
    runner_of: RunnerOf, cuts: list[int]
) -> None:
    runner = runner_of(False)
    tokens = tokens_of(5, 40)
    with torch.no_grad():
        want = torch.log_softmax(tiny_model("llama", eos_token_id=None)(torch.tensor([tokens])).logits[0], -1)
    request = make_request("p", tokens, list(range(1, 7)), replace(GREEDY, prompt_logprobs=3))
    entries, context = [], 0
    for chunk in cuts:
        entries += runner.run(make_step((request, context, chunk))).prompt_logprobs[0]
        context += chunk
    assert len(entries) == 40
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row = want[position - 1]
        assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
        assert entry.rank == int((row > row[tokens[position]]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
    request.token_ids.append(7)  # recomputed after a preemption: what was sent is not sent again
    assert runner.run(make_step((request, 0, 41))).prompt_logprobs == {}


def test_rows_that_do_not_reach_the_end_yield_no_token(runner_of: RunnerOf) -> None:
    runner = runner_of(False)
    request = make_request("a", tokens_of(6, 20), [1, 2, 3], LOGPROBS)
    result = runner.run(make_step((request, 0, 10)))
    assert (result.token_ids, result.logprobs, result.failed) == ([], [], {})


def test_info_says_what_fits(llama_folder: Path) -> None:
    block = 16 * 2 * 3 * 2 * 8 * 4
    progress: list[tuple[str, float]] = []
    runner = Runner(
        EngineConfig(model=str(llama_folder), device="cpu", kv_cache_bytes=11 * block + 5),
        lambda stage, fraction: progress.append((stage, fraction)),
    )
    info = runner.info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (10, 16, 160)
    assert (info.vocab_size, info.eos_token_ids, info.device, info.dtype) == (
        256,
        frozenset(),
        "cpu",
        "float32",
    )
    assert info.kv_bytes == 11 * block
    assert [stage for stage, _ in progress][-2:] == ["warm", "warm"]
    assert {stage for stage, _ in progress} == {"load", "warm"}


@pytest.mark.parametrize(
    ("max_model_len", "blocks", "says"),
    [(161, 10, "at most 160"), (513, 100, "at most 512"), (None, 0, "kv_cache_bytes")],
    ids=["more than the pool holds", "more than the model has", "no block at all"],
)
def test_a_length_that_cannot_fit_is_refused_with_the_largest_that_fits(
    llama_folder: Path, max_model_len: int | None, blocks: int, says: str
) -> None:
    config = EngineConfig(
        model=str(llama_folder),
        device="cpu",
        max_model_len=max_model_len,
        kv_cache_bytes=(blocks + 1) * 16 * 2 * 3 * 2 * 8 * 4,
        ceilings=Ceilings(64, 8),
    )
    with pytest.raises(ConfigError, match=says):
        Runner(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_device_is_refused(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device: 'cuda'"):
        Runner(EngineConfig(model=str(llama_folder), device="cuda"))


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ModelLoadError, match="/nowhere/model does not exist"):
        Runner(EngineConfig(model="/nowhere/model"))


def test_bfloat16_runs_and_stays_near_float32(llama_folder: Path, runner_of: RunnerOf) -> None:
    runner = Runner(
        EngineConfig(model=str(llama_folder), device="cpu", dtype="bfloat16", kv_cache_bytes=1 << 20)
    )
    assert runner.info.dtype == "bfloat16"
    request = make_request("a", tokens_of(7, 50), list(range(1, 8)), LOGPROBS)
    (low,) = runner.run(make_step((request, 0, 50))).logprobs
    (full,) = runner_of(False).run(make_step((request, 0, 50))).logprobs
    assert low is not None
    assert full is not None
    assert abs(low.logprob - full.logprob) < 1.0


def test_batch_invariance_is_refused_where_products_depend_on_the_batch(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With padding to one row only, a lone row takes the library's vector product, whose sums differ.
    monkeypatch.setattr("trimtab_engine.runtime.runner.INVARIANT_ROWS", 1)
    with pytest.raises(ConfigError, match="batch_invariant: True is not allowed") as error:
        Runner(
            EngineConfig(model=str(llama_folder), device="cpu", batch_invariant=True, kv_cache_bytes=1 << 20)
        )
    assert "rows than for 256" in str(error.value)
