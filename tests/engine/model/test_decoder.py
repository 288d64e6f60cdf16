"""The decoder against transformers: the same logits for every family, however a prompt is cut."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.steps import make_request, make_step
from support.tiny_models import FAMILIES, tiny_model
from trimtab_engine.kernels.reference import AttentionBatch
from trimtab_engine.model.decoder import Decoder
from trimtab_engine.model.spec import ModelSpec, spec_from_config
from trimtab_engine.model.weights import load_weights
from trimtab_engine.model_files import resolve
from trimtab_engine.runtime.batch import build_batch
from trimtab_engine.runtime.kv_cache import allocate

CPU = torch.device("cpu")
CUTS = {
    "whole": [200],
    "one token, then tokens and chunks of all kinds": [1, 7, 16, 50, 100, 1, 1, 24],
    "token by token at the end": [180, *[1] * 20],
}


def load(folder: Path, *, invariant: bool = False) -> tuple[ModelSpec, Decoder]:
    spec = spec_from_config(resolve(str(folder), need_tokenizer=False).config)
    weights = load_weights(folder, spec, torch.float32, CPU)
    return spec, Decoder(spec, weights, 256, 8 if invariant else 1)


def logits_of_chunks(
    spec: ModelSpec, decoder: Decoder, tokens: list[int], cuts: list[int], *, invariant: bool = False
) -> torch.Tensor:
    kv = allocate(spec, 20, 16, torch.float32, CPU).fill_(float("nan"))
    request = make_request("a", tokens, list(range(20, 0, -1)))
    collected, context = [], 0
    with torch.inference_mode():
        for chunk in cuts:
            batch = build_batch(make_step((request, context, chunk)), 16, CPU, invariant)
            assert isinstance(batch.attention, AttentionBatch)
            collected.append(
                decoder.logits(decoder.forward(batch.token_ids, batch.positions, kv, batch.attention))
            )
            context += chunk
    return torch.cat(collected)


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, invariant: bool, tiny_folder: Callable[[str], Path]
) -> None:
    tokens = torch.randint(3, 256, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = tiny_model(family)(torch.tensor([tokens])).logits[0]
    spec, decoder = load(tiny_folder(family), invariant=invariant)
    for name, cuts in CUTS.items():
        got = logits_of_chunks(spec, decoder, tokens, cuts, invariant=invariant)
        difference = (got - want).abs()
        assert difference.max() < 2e-4, f"{name}: max {difference.max():.2e}, mean {difference.mean():.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_mode_gives_bitwise_equal_logits_however_a_prompt_is_cut(
    family: str, tiny_folder: Callable[[str], Path]
) -> None:
    tokens = torch.randint(3, 256, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    spec, decoder = load(tiny_folder(family), invariant=True)
    whole, *others = (logits_of_chunks(spec, decoder, tokens, cuts, invariant=True) for cuts in CUTS.values())
    for other in others:
        assert torch.equal(whole, other), f"{(whole != other).any(-1).sum()} rows differ"
