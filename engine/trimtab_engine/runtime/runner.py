"""Executes steps: one forward pass and one round of sampling per `Step`.

Owned by the engine loop (`runtime.loop`), which passes steps from the scheduler and takes results back. Holds weights
and KV; decides nothing about requests and never changes one. A simulated executor has the same `run`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab_engine.config import EngineConfig
from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.core.step import Step, StepResult, TokenLogprobs
from trimtab_engine.errors import ConfigError
from trimtab_engine.kernels.reference import INVARIANT_ROWS
from trimtab_engine.model.decoder import Decoder
from trimtab_engine.model.gguf import ensure_converted
from trimtab_engine.model.layers import linear
from trimtab_engine.model.spec import ModelSpec, spec_from_config
from trimtab_engine.model.weights import DecoderWeights, checkpoint_dtype, load_weights
from trimtab_engine.runtime import kv_cache
from trimtab_engine.runtime.batch import Batch, build_batch
from trimtab_engine.runtime.sampler import SampleRow, sample, token_logprobs
from trimtab_engine.runtime.swap_pool import SwapPool

Progress = Callable[[str, float], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROMPT_LOGITS_ROWS = 256  # of a prompt at once, when its log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What was loaded and how much fits; goes to the HTTP process as `messages.Ready`."""

    num_blocks: int  # usable; ids 1 … num_blocks
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: str
    dtype: str
    load_s: float
    kv_bytes: int
    num_swap_blocks: int = 0  # in CPU memory; places 0 … num_swap_blocks - 1
    swap_block_s: float = 0.0  # to copy one of them


class Runner:
    """The model on its device. One instance per engine process, used by one thread."""

    info: RunnerInfo

    def __init__(self, config: EngineConfig, progress: Progress = lambda stage, fraction: None) -> None:
        """Load the model, allocate KV, run once to warm up.

        Raises ModelLoadError or ConfigError; `progress` gets (convert | load | warm, fraction).
        """
        started = time.monotonic()
        self._config = config
        self._device = _device(config.device)
        if self._device.type == "cpu":
            torch.set_num_threads(config.num_threads or _default_threads(config))
        files = ensure_converted(
            config.model,
            _cache_dir(config),
            lambda fraction: progress("convert", fraction),
            need_tokenizer=False,
        )
        spec = spec_from_config(files.config, str(files.path / "config.json"))
        dtype = self._dtype(files.path)
        weights = load_weights(
            files.path, spec, dtype, self._device, lambda fraction: progress("load", fraction)
        )
        available = kv_cache.pool_bytes(config, spec, dtype, self._device)
        num_blocks = kv_cache.num_blocks_for(available, spec, config.block_size, dtype)
        max_model_len = kv_cache.fitting_model_len(config.max_model_len, spec, num_blocks, config.block_size)
        self._kv = kv_cache.allocate(spec, num_blocks, config.block_size, dtype, self._device)
        self._swap = SwapPool(spec, config, dtype, self._device)
        self._decoder = Decoder(spec, weights, max_model_len, INVARIANT_ROWS if config.batch_invariant else 1)
        if config.batch_invariant:
            _check_invariance(weights, self._device)
        self._eos = files.eos_token_ids
        progress("warm", 0.0)
        self._warm(spec, num_blocks, max_model_len)
        progress("warm", 1.0)
        self.info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=files.eos_token_ids,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            load_s=time.monotonic() - started,
            kv_bytes=self._kv.nbytes,
            num_swap_blocks=self._swap.num_blocks,
            swap_block_s=self._swap.measure(self._kv),
        )

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """One forward pass over the step's rows; entry j of the result belongs to row step.samples[j].

        Prompt log-probabilities of a chunk are those of the tokens that its logits predict, cut to the prompt; a chunk
        that starts the prompt has None in front. So the lists of a request's chunks, joined, have one entry per prompt
        token.
        """
        self._swap.copy(self._kv, step.swap_out, step.swap_in)
        batch = build_batch(step, self._config.block_size, self._device, self._config.batch_invariant)
        hidden = self._decoder.forward(batch.token_ids, batch.positions, self._kv, batch.attention)
        result = StepResult(token_ids=[])
        if step.samples:
            last = torch.tensor([batch.starts[row + 1] - 1 for row in step.samples], device=self._device)
            logits = self._decoder.logits(hidden.index_select(0, last))
            rows = [SampleRow.of(step.requests[row], self._config.seed) for row in step.samples]
            samples = sample(logits, rows, self._eos)
            result.token_ids, result.logprobs = samples.token_ids, samples.logprobs
            result.failed = {step.samples[j]: reason for j, reason in samples.failed.items()}
        for row, request in enumerate(step.requests):
            # With outputs there already, this is a recomputation after preemption, and they were sent before.
            if request.sampling.prompt_logprobs is not None and not request.num_output_tokens:
                result.prompt_logprobs[row] = self._prompt_logprobs(step, row, batch, hidden)
        return result

    def _prompt_logprobs(
        self, step: Step, row: int, batch: Batch, hidden: torch.Tensor
    ) -> list[TokenLogprobs | None]:
        request, context = step.requests[row], step.context[row]
        count = request.sampling.prompt_logprobs or 0
        # Logits at position p speak of token p + 1.
        targets = request.token_ids[
            context + 1 : min(context + step.chunk[row] + 1, request.num_prompt_tokens)
        ]
        entries: list[TokenLogprobs | None] = [] if context else [None]
        start = batch.starts[row]
        for first in range(0, len(targets), _PROMPT_LOGITS_ROWS):
            part = targets[first : first + _PROMPT_LOGITS_ROWS]
            logits = self._decoder.logits(hidden[start + first : start + first + len(part)])
            entries += token_logprobs(logits, part, [count] * len(part))
        return entries

    def _dtype(self, folder: Path) -> torch.dtype:
        name = self._config.dtype
        if name != "auto":
            return _DTYPES[name]
        if self._device.type == "cpu":
            return torch.float32
        return checkpoint_dtype(folder)

    def _warm(self, spec: ModelSpec, num_blocks: int, max_model_len: int) -> None:
        """Run a small prompt and one decode, so that the first request does not pay for libraries' first calls."""
        block_size = self._config.block_size
        length = min(64, max_model_len - 1, num_blocks * block_size - 1)
        request = Request(
            id="warm-up",
            token_ids=[0] * (length + 1),
            num_prompt_tokens=length,
            sampling=SamplingParams(temperature=0.0),
            arrival_s=0.0,
            block_ids=list(range(1, length // block_size + 2)),
        )
        for context, chunk in ((0, length), (length, 1)):
            step = Step(0, 0, length, 0.0, [request], [context], [chunk], [0])
            self.run(step)


def _default_threads(config: EngineConfig) -> int:
    # Threads share a product by its number of rows, which changes its sums. Else one core is left to the HTTP process.
    return 1 if config.batch_invariant else max(1, len(os.sched_getaffinity(0)) - 1)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device", name, "cpu or auto: torch sees no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def _cache_dir(config: EngineConfig) -> Path | None:
    return Path(config.cache_dir).expanduser() if config.cache_dir is not None else None


def _check_invariance(weights: DecoderWeights, device: torch.device) -> None:
    """Raise ConfigError unless this machine's matrix products give a row the same bits whatever else is in the batch.

    No library promises it. On CUDA the choice of kernel follows the number of rows, so it does not hold there.
    """
    layer = weights.layers[0]
    generator = torch.Generator().manual_seed(0)
    for weight in (layer.qkv, layer.output, layer.gate_up, layer.down, weights.lm_head):
        x = torch.randn(256, weight.shape[1], generator=generator).to(device, weight.dtype)
        whole = linear(x, weight)
        for rows in (1, 2, INVARIANT_ROWS, INVARIANT_ROWS + 1, 31, 100):
            if not torch.equal(linear(x[:rows], weight, None, INVARIANT_ROWS), whole[:rows]):
                raise ConfigError(
                    "batch_invariant",
                    True,
                    f"false here: on {device} a product with {tuple(weight.shape)} gives other bits for {rows} "
                    "rows than for 256 (one thread, num_threads=1, is the likely cure on a CPU)",
                )
