"""One set of defaults and bounds in three places: the CRD, the operator's dataclasses, the engine's own types."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

import pytest

from support.crd_fields import every_field, leaves, spec_schema
from support.services import run_resource, service
from trimtab_engine.config import DTYPES, EngineConfig
from trimtab_engine.core import live as engine_live
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.server.options import ServerOptions
from trimtab_operator import names, schema
from trimtab_operator.api import RunSpec
from trimtab_operator.api import service as api
from trimtab_operator.api.run import Workload
from trimtab_operator.plan.live import spec_config
from trimtab_operator.quantities import parse_duration

FIELDS = leaves(names.SERVICE_KIND)
CEILINGS = Ceilings(1_048_576, 1_048_576)


def test_a_defaulted_service_equals_the_dataclasses_own_defaults() -> None:
    assert service().spec == api.ServiceSpec(model=api.Model("file:///models/tiny"))


def test_defaults_inside_optional_objects_equal_the_dataclasses_too() -> None:
    built = service(
        **{
            "tuning.parameters": [{"name": "maxNumSeqs", "min": 1, "max": 8}],
            "tuning.nightly": {"schedule": "@daily"},
            "model.cache": {},
        }
    )
    assert built.spec.tuning.nightly == api.Nightly("@daily")
    assert built.spec.model is not None
    assert built.spec.model.cache == api.ModelCache()


def test_live_defaults_equal_the_engines() -> None:
    assert LiveConfig.from_json(spec_config(service().spec), Ceilings()) == LiveConfig()


def test_static_defaults_equal_the_engines() -> None:
    ours, theirs = service().spec, EngineConfig(model="x")
    assert (ours.engine.ceilings.max_num_batched_tokens, ours.engine.ceilings.max_num_seqs) == (
        theirs.ceilings.max_num_batched_tokens,
        theirs.ceilings.max_num_seqs,
    )
    assert ours.engine.dtype == theirs.dtype
    assert ours.engine.kv_block_size == theirs.block_size
    assert ours.engine.enable_prefix_caching == theirs.enable_prefix_caching
    assert ours.engine.max_queued_requests == ServerOptions("x").max_queued_requests
    assert ours.rollout.drain_timeout_s == ServerOptions("x").drain_timeout_s
    assert (
        f"Absent means {theirs.gpu_memory_utilization}"
        in FIELDS["engine.gpuMemoryUtilization"]["description"]
    )


def test_choices_equal_the_engines() -> None:
    assert tuple(FIELDS["engine.schedulingPolicy"]["enum"]) == engine_live.POLICIES == api.POLICIES
    assert tuple(FIELDS["tuning.parameters[].choices"]["items"]["enum"]) == engine_live.POLICIES
    assert tuple(FIELDS["engine.dtype"]["enum"]) == DTYPES
    for size in FIELDS["engine.kvBlockSize"]["enum"]:
        EngineConfig(model="x", block_size=size)
    with pytest.raises(ConfigError):
        EngineConfig(model="x", block_size=256)


def test_number_of_classes_equals_the_engines() -> None:
    classes = dict(every_field(spec_schema(names.SERVICE_KIND)))["slo.classes"]
    assert classes["maxItems"] == engine_live.MAX_CLASSES


LIVE_PATHS = {
    "engine.maxNumBatchedTokens": "max_num_batched_tokens",
    "engine.maxNumSeqs": "max_num_seqs",
    "engine.longPrefillTokenThreshold": "long_prefill_token_threshold",
}


@pytest.mark.parametrize("path", LIVE_PATHS)
def test_live_bounds_are_where_the_engine_begins_to_refuse(path: str) -> None:
    key = LIVE_PATHS[path]
    low, high = FIELDS[path]["minimum"], FIELDS[path]["maximum"]

    def engine_takes(value: int) -> bool:
        raw = {**LiveConfig().to_json(), "max_num_seqs": 1, "max_num_batched_tokens": 1_048_576, key: value}
        try:
            LiveConfig.from_json(raw, CEILINGS)
        except ConfigError:
            return False
        return True

    assert [engine_takes(v) for v in (low - 1, low, high, high + 1)] == [False, True, True, False]


@pytest.mark.parametrize("key", ["max_num_batched_tokens", "max_num_seqs"])
def test_ceiling_bounds_are_where_the_engine_begins_to_refuse(key: str) -> None:
    field = FIELDS[
        {"max_num_seqs": "engine.ceilings.maxNumSeqs"}.get(key, "engine.ceilings.maxNumBatchedTokens")
    ]

    def engine_takes(value: int) -> bool:
        try:
            EngineConfig(model="x", ceilings=Ceilings(**{key: value}))
        except ConfigError:
            return False
        return True

    low, high = field["minimum"], field["maximum"]
    assert [engine_takes(v) for v in (low - 1, low, high, high + 1)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("path", "argument", "step"),
    [
        ("engine.gpuMemoryUtilization", "gpu_memory_utilization", 0.01),
        ("engine.maxModelLen", "max_model_len", 1),
    ],
)
def test_static_lower_bounds_are_the_engines(path: str, argument: str, step: float) -> None:
    low = FIELDS[path]["minimum"]
    EngineConfig(model="x", **{argument: low})
    with pytest.raises(ConfigError):
        EngineConfig(model="x", **{argument: low - step})


def engine_takes_slo(ttft_s: float, objective: float) -> bool:
    slo = {
        "default_class": "d",
        "classes": [{"name": "d", "ttft_s": ttft_s, "itl_s": 1, "objective": objective}],
    }
    try:
        LiveConfig.from_json({**LiveConfig().to_json(), "slo": slo}, CEILINGS)
    except ConfigError:
        return False
    return True


def test_slo_bounds_are_where_the_engine_begins_to_refuse() -> None:
    ttft = next(f for f in fields(api.Slo) if f.name == "ttft_s").metadata
    low, high = ttft["low"], ttft["high"]
    assert [engine_takes_slo(v, 99) for v in (low * 0.99, low, high, high * 1.01)] == [
        False,
        True,
        True,
        False,
    ]
    least, most = FIELDS["slo.objective"]["minimum"], FIELDS["slo.objective"]["maximum"]
    assert [engine_takes_slo(1, v) for v in (least - 1, least, most, 100)] == [False, True, True, False]


def test_priority_aging_bounds_are_where_the_engine_begins_to_refuse() -> None:
    aging = next(f for f in fields(api.Engine) if f.name == "priority_aging_s").metadata
    base = LiveConfig().to_json()
    for value, right in ((aging["low"], True), (aging["high"], True), (aging["high"] + 1, False)):
        raw = {**base, "priority_aging_s": value}
        if right:
            LiveConfig.from_json(raw, CEILINGS)
        else:
            with pytest.raises(ConfigError):
                LiveConfig.from_json(raw, CEILINGS)


def test_a_defaulted_run_equals_the_dataclasses_own_defaults() -> None:
    assert schema.parse_run(run_resource()).spec == RunSpec("chat")


RUN_FIELDS = {f"run.{path}": field for path, field in leaves(names.RUN_KIND).items()}
DURATIONS = {
    path: field
    for path, field in {**FIELDS, **RUN_FIELDS}.items()
    if "(ms|s|m|h)" in field.get("pattern", "")
}
OWNERS: dict[str, type] = {
    "run": RunSpec,
    "run.workload": Workload,
    "engine": api.Engine,
    "slo": api.Slo,
    "slo.classes[]": api.SloClass,
    "tuning.nightly": api.Nightly,
    "tuning.limits.notDuring[]": api.QuietTime,
    "rollout": api.Rollout,
    "": api.ServiceSpec,
}


@pytest.mark.parametrize("path", DURATIONS)
def test_duration_range_and_default_in_words_equal_the_dataclass(path: str) -> None:
    owner, _, wire = path.rpartition(".")
    field = next(f for f in fields(OWNERS[owner]) if f.metadata.get("wire") == wire)
    said = re.search(r"range (\S+) (?:\([^)]*\) )?to (\w+)", DURATIONS[path]["description"])
    assert said, path
    assert (parse_duration(said[1]), parse_duration(said[2])) == (
        field.metadata["low"],
        field.metadata["high"],
    )
    default = DURATIONS[path].get("default")
    if default is not None:
        assert parse_duration(default) == field.default
    else:
        assert field.default in (None, MISSING)
