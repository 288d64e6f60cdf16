"""Data-sheet estimates: numbers that can be checked on paper."""

import json
from pathlib import Path

import pytest

from trimtab_engine.core.step_time import StepFeatures
from trimtab_tuner.errors import InputError
from trimtab_tuner.simulate.cost import load_step_model
from trimtab_tuner.simulate.presets import DEVICES, NAMES, SHAPES, kv_blocks, preset, roofline


def seconds(name: str, tokens: int, sequences: int = 0, context: int = 0, attention: float = 0.0) -> float:
    return preset(name).model.predict(StepFeatures(tokens, sequences, context, attention))


def test_there_is_one_preset_for_each_device_and_model() -> None:
    assert len(NAMES) == 9
    for name in NAMES:
        known = preset(name)
        assert min(known.model.coefficients) >= 0
        assert known.num_blocks * known.block_size >= known.max_model_len
        assert all(known.sources)


@pytest.mark.parametrize(
    ("shape", "billions"), [("mistral-7b", 7.24), ("llama-3-8b", 8.03), ("yi-34b", 34.39)]
)
def test_dimensions_give_the_published_number_of_parameters(shape: str, billions: float) -> None:
    known = SHAPES[shape]
    assert (known.layer_weights + 2 * known.head_weights) / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_decode_step_reads_the_weights_and_a_large_step_computes() -> None:
    # Mistral-7B: 7.11e9 parameters to read in 2 bytes at 0.85 · 2.039 TB/s are 8.2 ms, and 2 ms to launch.
    assert seconds("a100-80gb/mistral-7b", 1) == pytest.approx(0.0102, rel=0.01)
    # 4,096 tokens of 13.96 GFLOP at 0.65 · 312 TFLOP/s are 282 ms.
    assert seconds("a100-80gb/mistral-7b", 4096) == pytest.approx(0.284, rel=0.01)


def test_kv_and_attention_cost_what_the_dimensions_say() -> None:
    alone = seconds("a100-80gb/mistral-7b", 1)
    # 128 KiB of KV a token; 524,288 FLOPs a pair at half the peak.
    assert seconds("a100-80gb/mistral-7b", 1, context=100_000) - alone == pytest.approx(7.56e-3, rel=0.01)
    assert seconds("a100-80gb/mistral-7b", 1, attention=1e6) - alone == pytest.approx(3.36e-3, rel=0.01)


def test_the_line_between_knots_stays_within_a_third_above_the_roofline() -> None:
    model = preset("a100-80gb/mistral-7b").model
    read_s, token_s = 0.0082052, 13.96e9 / (0.65 * 312e12)
    for tokens in range(1, 5000, 7):
        exact = 2e-3 + max(read_s, token_s * tokens)
        assert 0.995 < model.predict(StepFeatures(tokens, 0, 0, 0.0)) / exact < 1.33


def test_two_devices_halve_the_work_and_pay_for_talking() -> None:
    one, two = (roofline(DEVICES["a100-80gb"], SHAPES["yi-34b"], n) for n in (1, 2))
    decode, prefill = StepFeatures(1, 1, 0, 0.0), StepFeatures(4096, 1, 0, 0.0)
    assert one.predict(decode) / 2 < two.predict(decode) < one.predict(decode)
    assert one.predict(prefill) / 2 < two.predict(prefill) < one.predict(prefill)
    assert two.coefficients[-1] == one.coefficients[-1] / 2


def test_a_faster_device_is_never_slower() -> None:
    for tokens in (1, 256, 4096):
        assert seconds("h200/llama-3-8b", tokens) <= seconds("h100/llama-3-8b", tokens)
        assert seconds("h100/llama-3-8b", tokens) < seconds("a100-80gb/llama-3-8b", tokens)


def test_memory_holds_weights_activations_and_then_kv() -> None:
    # 72 GB usable - 2 GB - 14.48 GB of weights, over 2 MiB a block of 16 tokens.
    assert kv_blocks(DEVICES["a100-80gb"], SHAPES["mistral-7b"]) == pytest.approx(
        (72e9 - 2e9 - 14.48e9) / 2**21, rel=0.001
    )


def test_copying_a_block_to_cpu_memory_takes_what_the_link_says() -> None:
    # 2 MiB over 0.8 · 32 GB/s; two devices carry half of 3.75 MiB each over Gen5.
    assert preset("a100-80gb/mistral-7b").swap_block_s == pytest.approx(2**21 / 25.6e9)
    assert preset("h100/yi-34b-tp2").swap_block_s == pytest.approx(2 * 60 * 8 * 128 * 2 * 16 / 2 / 51.2e9)


def test_an_unknown_preset_says_which_there_are() -> None:
    with pytest.raises(InputError, match="h200/yi-34b-tp2"):
        preset("tpu/gemma")


def test_a_model_file_is_read_alone_and_as_the_engine_answers(tmp_path: Path) -> None:
    model = preset(NAMES[0]).model
    plain, answered = tmp_path / "a.json", tmp_path / "b.json"
    plain.write_text(json.dumps(model.to_json()))
    answered.write_text(json.dumps({"model": model.to_json(), "score": {"num_steps": 3}}))
    assert load_step_model(str(plain)).model == load_step_model(str(answered)).model == model
    assert (load_step_model(str(plain)).num_steps, load_step_model(str(answered)).num_steps) == (None, 3)


@pytest.mark.parametrize("text", ["", "[]", '{"model": null}', '{"format": 1, "coefficients": {}}'])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.json"):
        load_step_model(str(path))
