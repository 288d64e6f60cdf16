"""The plain torch path on a CUDA device: the same attention, the same logits, the same samples as on the CPU."""

from pathlib import Path

import pytest
import torch

from support.attention_cases import HEADS, SHAPES, make_case
from support.generation import Engine
from support.tiny_models import FAMILIES, save_tiny_model
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.request import SamplingParams
from trimtab_engine.kernels.reference import paged_attention, write_kv
from trimtab_engine.runtime.runner import Runner
from trimtab_engine.runtime.sampler import SampleRow, sample

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_attention_is_what_the_formula_says(
    shapes: str, heads: tuple[int, int, int], dtype: torch.dtype, limit: float, cuda: torch.device
) -> None:
    case = make_case(SHAPES[shapes], heads, device=cuda, dtype=dtype)
    write_kv(case.key, case.value, case.kv_cache, case.batch)
    got = paged_attention(case.query, case.kv_cache, case.batch, case.scale)
    difference = (got.double().cpu() - case.want).abs()
    assert difference.max() < limit, f"max {difference.max():.2e}, mean {difference.mean():.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_seeded_outputs_are_those_of_the_cpu(
    family: str, tmp_path: Path, cuda: torch.device
) -> None:
    folder = save_tiny_model(tmp_path / "model", family, eos_token_id=None)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 120)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=1.5, seed=5, max_tokens=20),
        SamplingParams(temperature=1.0, seed=6, top_p=0.9, max_tokens=20),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]
    said = {}
    for device in ("cpu", "cuda"):
        config = EngineConfig(model=str(folder), device=device, dtype="float32", kv_cache_bytes=4 << 20)
        engine = Engine(Runner(config), budget=40)
        said[device] = [result.token_ids for result in engine.generate(prompts, params)]
    assert said["cuda"] == said["cpu"]


def test_samples_do_not_depend_on_the_device(cuda: torch.device) -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(1)) * 3
    kinds = [
        SamplingParams(),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=0.0),
    ]
    rows = [SampleRow(kinds[j % 4], [1, 2, 3], 1, seed=j) for j in range(8)]
    on_cpu = sample(logits, rows, frozenset())
    assert sample(logits.to(cuda), rows, frozenset()).token_ids == on_cpu.token_ids


def test_the_pool_takes_the_share_of_memory_that_was_asked_for(tmp_path: Path, cuda: torch.device) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    _, total = torch.cuda.mem_get_info(cuda)
    share = 0.2
    info = Runner(EngineConfig(model=str(folder), device="cuda", gpu_memory_utilization=share)).info
    assert 0.05 * total < info.kv_bytes < share * total
    assert info.device.startswith("cuda")
