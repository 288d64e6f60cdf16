"""Picks one token per row of logits, by the sampling parameters of the row's request.

Called by the runner after the forward pass. Randomness is a function of (seed, output position) and nothing else: one
uniform number from Philox per token, then the inverse of the cumulative distribution. So neither batch mates nor
preemption nor policy change what a seeded request says. Knows nothing of blocks or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.core.step import TokenLogprobs

CANDIDATES = 1024  # best tokens looked at before a whole sort; covers nearly every top-k and top-p


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What sampling needs to know of one request at this step."""

    sampling: SamplingParams
    token_ids: list[int]  # prompt and outputs so far; read, never kept
    num_prompt_tokens: int
    seed: int

    @property
    def position(self) -> int:
        """Index of the output token to be drawn."""
        return len(self.token_ids) - self.num_prompt_tokens

    @classmethod
    def of(cls, request: Request, engine_seed: int) -> SampleRow:
        """The row of a request. One without a seed gets a fixed one from its id, so that a retry says the same."""
        seed = request.sampling.seed
        if seed is None:
            digest = blake2b(f"{engine_seed}:{request.id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, seed)


class Samples(NamedTuple):
    """Entry j belongs to logits row j."""

    token_ids: list[int]  # 0 where the row failed
    logprobs: list[TokenLogprobs | None]  # [] when no row asked for them
    failed: dict[int, str]  # row j → reason


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from Philox 4x64 (Salmon et al. 2011): key = seed, counter = output position."""
    bits = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: list[SampleRow], eos_token_ids: frozenset[int]) -> Samples:
    """logits (len(rows), vocab) float32 on any device → one token per row. The logits are not changed.

    A row whose best logit is not a finite number fails alone.
    """
    best, tokens = logits.max(dim=-1)  # NaN wins a max, so one look finds it
    touched = [j for j, row in enumerate(rows) if _is_changed(row.sampling, row.position)]
    drawn = [j for j, row in enumerate(rows) if not row.sampling.greedy]
    if touched or drawn:
        tokens = tokens.clone()
        # Gathered rows are a copy, so that log-probabilities below see the raw logits.
        chosen = sorted({*touched, *drawn})
        index = torch.tensor(chosen, device=logits.device)
        processed = logits.index_select(0, index)
        where = {j: k for k, j in enumerate(chosen)}
        for j in touched:
            _change(processed[where[j]], rows[j], eos_token_ids)
        if touched:
            tokens[index] = processed.argmax(dim=-1)
        if drawn:
            at = torch.tensor([where[j] for j in drawn], device=logits.device)
            tokens[torch.tensor(drawn, device=logits.device)] = _draw(
                processed.index_select(0, at), [rows[j] for j in drawn]
            )
    # One copy from the device for both.
    pairs = torch.stack((tokens.double(), best.double())).tolist()
    failed = {
        j: f"logits are not finite (best is {value})"
        for j, value in enumerate(pairs[1])
        if not abs(value) < float("inf")
    }
    token_ids = [0 if j in failed else int(token) for j, token in enumerate(pairs[0])]
    return Samples(token_ids, _logprobs(logits, rows, token_ids, failed), failed)


def token_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Log-probability, rank and the counts[i] best of each row; logits (n, vocab) are raw.

    Rank is 1 + the number of tokens with a higher logit, so ties share the better rank.
    """
    picked = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logits.gather(1, picked)
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    ranks = (logits > chosen).sum(dim=-1) + 1
    top_values, top_ids = logits.topk(min(max(counts), logits.shape[-1]), dim=-1)
    top_values = top_values - normaliser
    columns = zip(
        (chosen - normaliser)[:, 0].tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_values.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
        for logprob, rank, ids, values, count in columns
    ]


def _logprobs(
    logits: torch.Tensor, rows: list[SampleRow], token_ids: list[int], failed: dict[int, str]
) -> list[TokenLogprobs | None]:
    counts = {
        j: row.sampling.num_logprobs
        for j, row in enumerate(rows)
        if row.sampling.num_logprobs is not None and j not in failed
    }
    if not counts:
        return []
    asked = list(counts)
    entries = token_logprobs(
        logits[torch.tensor(asked, device=logits.device)],
        [token_ids[j] for j in asked],
        list(counts.values()),
    )
    found = dict(zip(asked, entries, strict=True))
    return [found.get(j) for j in range(len(rows))]


# --- changes to logits before a token is picked ---


def _is_changed(sampling: SamplingParams, position: int) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or position < sampling.min_tokens
    )


def _change(logits: torch.Tensor, row: SampleRow, eos_token_ids: frozenset[int]) -> None:
    """Apply penalties, bias and masks to one row (vocab,) in place."""
    sampling, vocab, device = row.sampling, logits.shape[0], logits.device
    if sampling.repetition_penalty != 1.0:
        # CTRL (Keskar et al. 2019, sec. 4.1), with the sign handled as everyone does: always towards less likely.
        seen = _ids(set(row.token_ids), vocab, device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        outputs = np.array(row.token_ids[row.num_prompt_tokens :], dtype=np.int64)
        said, counts = np.unique(outputs, return_counts=True)
        amounts = sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
        logits[torch.from_numpy(said).to(device)] -= torch.from_numpy(amounts.astype(np.float32)).to(device)
    if sampling.logit_bias:
        biased = torch.tensor([token for token, _ in sampling.logit_bias], device=device)
        amounts_t = torch.tensor([bias for _, bias in sampling.logit_bias], device=device)
        logits.index_add_(0, biased, amounts_t.to(logits.dtype))
    if row.position < sampling.min_tokens:
        # With ignore_eos an end token is a token like any other.
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
        logits[_ids(ends, vocab, device)] = float("-inf")


def _ids(tokens: Iterable[int], vocab: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted(t for t in tokens if 0 <= t < vocab), dtype=torch.int64, device=device)


# --- drawing ---


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """logits (n, vocab), after `_change` → tokens (n,). Order: temperature, min-p, top-k, top-p, as in vLLM."""
    device = logits.device
    params = [row.sampling for row in rows]
    points = torch.tensor(
        [uniform(row.seed, row.position) for row in rows], dtype=torch.float64, device=device
    )[:, None]
    temperature = torch.tensor([p.temperature for p in params], device=device)[:, None]
    # The largest logit is taken off first: a tiny temperature must not overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probabilities = torch.softmax(scaled, dim=-1)
    filtered = [k for k, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    whole = [k for k in range(len(rows)) if k not in set(filtered)]
    if whole:
        at = torch.tensor(whole, device=device)
        tokens[at] = _invert(probabilities[at], points[at])
    if filtered:
        at = torch.tensor(filtered, device=device)
        tokens[at] = _draw_filtered(probabilities[at], points[at], [params[k] for k in filtered])
    return tokens


def _draw_filtered(
    probabilities: torch.Tensor, points: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    vocab = probabilities.shape[-1]
    # The same number of candidates for every row whoever else is there, so that ties fall the same way.
    count = min(CANDIDATES, vocab)
    values, ids = probabilities.topk(count, dim=-1)
    tokens, covered = _draw_from_sorted(values, ids, points, params, complete=count == vocab)
    if count < vocab:
        for k in (~covered).nonzero()[:, 0].tolist():
            row_values, row_ids = probabilities[k : k + 1].sort(dim=-1, descending=True, stable=True)
            drawn, _ = _draw_from_sorted(
                row_values, row_ids, points[k : k + 1], params[k : k + 1], complete=True
            )
            tokens[k] = drawn[0]
    return tokens


def _draw_from_sorted(
    values: torch.Tensor,
    ids: torch.Tensor,
    points: torch.Tensor,
    params: list[SamplingParams],
    complete: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates (n, k), best first → tokens (n,) and whether the candidates held everything that may be drawn."""
    device, count = values.device, values.shape[-1]
    top_k = torch.tensor([p.top_k for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    ranks = torch.arange(count, device=device)
    kept = (values >= min_p * values[:, :1]) & ((top_k <= 0) | (ranks < top_k))
    mass = torch.where(kept, values, 0.0).double()
    # Either the candidates hold all that top-k and min-p keep, or neither is set and the total is that of a softmax.
    whole = torch.full_like(kept[:, :1], complete) | ((top_k > 0) & (top_k <= count)) | ~kept[:, -1:]
    total = torch.where(whole, mass.sum(dim=-1, keepdim=True), 1.0)
    cumulative = mass.cumsum(dim=-1)
    inside = kept & (cumulative - mass < top_p * total)  # the best one always is
    covered = (whole | ((top_k <= 0) & (min_p <= 0.0) & ~inside[:, -1:]))[:, 0]
    choice = _invert(torch.where(inside, mass, 0.0), points)
    return ids.gather(1, choice[:, None])[:, 0], covered


def _invert(mass: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative mass above points · total; mass (n, k), points (n, 1) float64 → (n,) int64."""
    cumulative = mass.double().cumsum(dim=-1)
    index = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)[:, 0]
    # Rounding may put the point on the total itself; the last entry that has mass is meant then.
    last = mass.shape[-1] - 1 - (mass > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)
