"""`trimtab-engine`: parses the command line into configuration and starts the server. The only module that does.

Wrong values end with exit code 2 and one line that names the flag, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from trimtab_engine import logs
from trimtab_engine.config import DEVICES, DTYPES, EngineConfig
from trimtab_engine.core.live import POLICIES, Ceilings, LiveConfig
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.errors import ConfigError, TrimtabError
from trimtab_engine.live_state import Versioned
from trimtab_engine.model_files import hub_reference, locate
from trimtab_engine.server.live import read_live_file
from trimtab_engine.server.options import ServerOptions

_DESCRIPTION = """\
Serve a language model over the OpenAI API, with two knobs that can be turned while it runs:
the token budget of a step (--max-num-batched-tokens) and the scheduling policy.
"""

_EPILOG = """\
examples:
  trimtab-engine serve ./SmolLM2-135M-Instruct
  trimtab-engine serve model.gguf --max-num-batched-tokens 256 --slo-itl 0.06
  trimtab-engine serve hf://Qwen/Qwen3-0.6B
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "model", "prompt": "Once upon a time", "max_tokens": 16}'

turn a knob while it runs (the whole config; in force after the current step):
  curl -s http://127.0.0.1:8001/admin/live-config > live.json
  python -c 'import json; c = json.load(open("live.json"))["incumbent"]["config"]
  c["max_num_batched_tokens"] = 128; json.dump({"config": c}, open("new.json", "w"))'
  curl -X PUT http://127.0.0.1:8001/admin/live-config -d @new.json

Add "lease_s": 60 beside "config" to try a value: the engine goes back by itself unless the push is repeated.

Stop it: the first SIGTERM or Ctrl-C finishes what runs (see --drain-timeout), the second stops at once.

Exit codes: 0 drained, 1 the engine could not go on, 2 wrong configuration.
"""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SCALES = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}


class _HelpFormatter(argparse.HelpFormatter):
    """Paragraphs filled, those with indented lines (examples) as they are written; room for our long flags."""

    def __init__(self, prog: str) -> None:
        width = min(118, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=40 if width > 100 else 30, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in f"\n{p}" else textwrap.fill(p, width) for p in parts)


def size_bytes(text: str) -> int:
    """`512Mi`, `4Gi`, `1.5G` or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; allowed: bytes, or a number with Ki, Mi, Gi, K, M, G"
        )
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def duration_s(text: str) -> float:
    """`0.8`, `800ms`, `1s` or `2m`, as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; allowed: seconds, or a number with ms, s or m"
        )
    return float(match[1]) * _SCALES[match[2] or ""]


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups. Defaults of None mean: decided from other values."""
    parser = argparse.ArgumentParser(
        prog="trimtab-engine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trimtab-engine {version('trimtab')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="load a model and serve it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s MODEL [options]",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder (safetensors), a .gguf file, package://module/file.gguf, or hf://organisation/name",
    )
    _add_serving(serve)
    _add_hub(serve)
    _add_engine(serve)
    _add_live(serve)
    _add_operation(serve)
    return parser


def _add_serving(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("serving")
    group.add_argument("--host", default="127.0.0.1", help="address of the OpenAI API (%(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, help="its port; 0 takes a free one, see --port-file (%(default)s)"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="name in the API (last part of MODEL)")
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="JSON or YAML of name: key; reread on change (no keys: open)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        default=512,
        metavar="N",
        help="waiting requests before new ones get 503 (%(default)s)",
    )
    group.add_argument(
        "--trusted-class-header", metavar="HEADER", help="header that may name a request's SLO class (none)"
    )
    group.add_argument(
        "--trusted-tenant-header", metavar="HEADER", help="header that may name a request's tenant (none)"
    )


def _add_hub(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group(
        "hub (for hf:// models; the token is HF_TOKEN or your login, the cache HF_HOME)"
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit (main)")
    group.add_argument(
        "--hub-endpoint", metavar="URL", help="address of the hub (HF_ENDPOINT, or https://huggingface.co)"
    )
    group.add_argument(
        "--hub-ca-file",
        metavar="FILE",
        help="PEM of authorities that its certificate may come from, beside the system's; may be empty",
    )
    group.add_argument(
        "--hub-patience",
        type=duration_s,
        default=300.0,
        metavar="SECONDS",
        help="how long it may give nothing but errors (%(default)s)",
    )
    group.add_argument(
        "--hub-limit",
        type=size_bytes,
        metavar="SIZE",
        help="most that a download may take (the disk's space)",
    )


def _add_engine(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("engine (fixed at start)")
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to compute; auto takes cuda if there is one (%(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and KV; auto: float32 on cpu, the checkpoint's on cuda",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output (the model's own, cut to the KV pool)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=16,
        metavar="TOKENS",
        help="tokens per KV block: 8, 16, 32, 64 or 128 (%(default)s)",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=size_bytes,
        metavar="SIZE",
        help="KV pool, e.g. 512Mi (cpu: 1Gi; cuda: by --gpu-memory-utilization)",
    )
    group.add_argument(
        "--swap-memory",
        type=size_bytes,
        default=0,
        metavar="SIZE",
        help="CPU memory for KV of preempted requests, e.g. 4Gi; 0: they are computed again (%(default)s)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="FRACTION",
        help="share of GPU memory to use in all (%(default)s)",
    )
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="never reuse KV of equal prefixes",
    )
    group.add_argument(
        "--ceiling-max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="largest live value; sizes buffers (%(default)s)",
    )
    group.add_argument(
        "--ceiling-max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="largest live value; sizes buffers (%(default)s)",
    )
    group.add_argument(
        "--prefill-first",
        action="store_true",
        help="benchmark baseline: whole prompts before decodes, no chunking",
    )
    group.add_argument(
        "--shed-late",
        action="store_true",
        help="under sla-aware: 503 with Retry-After for what can no longer meet its TTFT target",
    )
    group.add_argument(
        "--fair-tenants",
        action="store_true",
        help="tenants take turns by the tokens they got; the policy orders each tenant's own requests",
    )
    group.add_argument(
        "--batch-invariant", action="store_true", help="bitwise equal outputs under any batching; slower"
    )
    group.add_argument(
        "--num-threads", type=int, metavar="N", help="CPU threads of the engine process (cores - 1)"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="draws seeds of requests that bring none (%(default)s)"
    )
    group.add_argument("--cache-dir", metavar="DIR", help="converted GGUF weights (~/.cache/trimtab/models)")


def _add_live(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group(
        "live config (start values; change them on the admin port while it runs)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="TOKENS", help="budget of one step (2048)"
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="requests that run at once (64)")
    group.add_argument(
        "--scheduling-policy",
        choices=POLICIES,
        default="fcfs",
        help="who goes first: by arrival, by priority with aging, or by what the targets leave to spare (%(default)s)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        help="most tokens of one prompt in a step; 0: off (%(default)s)",
    )
    group.add_argument(
        "--priority-aging",
        type=duration_s,
        default=30.0,
        metavar="SECONDS",
        help="waiting worth one priority level; 0: none (%(default)s)",
    )
    group.add_argument(
        "--slo-ttft",
        type=duration_s,
        default=1.0,
        metavar="SECONDS",
        help="target of the default class, e.g. 800ms (%(default)s)",
    )
    group.add_argument(
        "--slo-itl",
        type=duration_s,
        default=0.1,
        metavar="SECONDS",
        help="target of the default class, e.g. 60ms (%(default)s)",
    )
    group.add_argument(
        "--live-config",
        type=Path,
        metavar="FILE",
        help="live.json; taken at start instead of these flags if valid, then polled",
    )


def _add_operation(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("operation")
    group.add_argument(
        "--admin-host",
        default="127.0.0.1",
        help="address of the admin API; others than loopback need --admin-public-key (%(default)s)",
    )
    group.add_argument(
        "--admin-port", type=int, default=8001, help="its port; 0 takes a free one (%(default)s)"
    )
    group.add_argument(
        "--admin-public-key",
        type=Path,
        metavar="FILE",
        help="PEM with Ed25519 public keys; admin requests then need a signed token",
    )
    group.add_argument(
        "--admin-audience", metavar="ID", help="who this engine is in those tokens (required with a key)"
    )
    group.add_argument(
        "--drain-timeout",
        type=duration_s,
        default=60.0,
        metavar="SECONDS",
        help="how long running requests may take after SIGTERM (%(default)s)",
    )
    group.add_argument(
        "--leaving-time",
        type=duration_s,
        default=0.0,
        metavar="SECONDS",
        help="how long new ones are still served after SIGTERM, not ready (%(default)s)",
    )
    group.add_argument(
        "--stall-timeout",
        type=duration_s,
        default=120.0,
        metavar="SECONDS",
        help="work without a finished step before /health says no (%(default)s)",
    )
    group.add_argument(
        "--client-stall-timeout",
        type=duration_s,
        default=30.0,
        metavar="SECONDS",
        help="how long the reader of a stream may take nothing before its request ends (%(default)s)",
    )
    group.add_argument(
        "--port-file",
        type=Path,
        metavar="FILE",
        help='gets {"port", "admin_port", "pid"} once both ports are open',
    )
    group.add_argument(
        "--record-steps",
        metavar="FILE",
        help="write every step with its token ids, for replay without the model",
    )
    group.add_argument(
        "--step-model",
        dest="step_model_file",
        type=Path,
        metavar="FILE",
        help="step-time model to schedule by until enough own steps have run: what /admin/step-model answered",
    )
    group.add_argument("--log-format", choices=logs.FORMATS, default="text", help="of stderr (%(default)s)")


def configuration(
    arguments: argparse.Namespace,
) -> tuple[EngineConfig, ServerOptions, Versioned, str | None]:
    """Everything `server.main.run` needs; the last is why live.json was not taken. Raises ConfigError naming a flag."""
    ceilings = Ceilings(arguments.ceiling_max_num_batched_tokens, arguments.ceiling_max_num_seqs)
    same = {f.name for f in fields(EngineConfig)} & set(vars(arguments))
    try:
        config = EngineConfig(
            **{name: getattr(arguments, name) for name in same},
            ceilings=ceilings,
            kv_cache_bytes=arguments.kv_cache_memory,
            swap_bytes=arguments.swap_memory,
            step_model=_step_model(arguments.step_model_file),
            hub_patience_s=arguments.hub_patience,
            hub_limit_bytes=arguments.hub_limit,
        )
    except ConfigError as error:
        raise ConfigError(_flag(error.path), error.value, error.allowed) from error
    options = ServerOptions(
        served_model_name=arguments.served_model_name or _name_of(arguments.model),
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        port_file=arguments.port_file,
        live_config=arguments.live_config,
        max_queued_requests=arguments.max_queued_requests,
        shed_late=arguments.shed_late,
        drain_timeout_s=arguments.drain_timeout,
        leaving_time_s=arguments.leaving_time,
        stall_timeout_s=arguments.stall_timeout,
        client_stall_timeout_s=arguments.client_stall_timeout,
        api_keys=arguments.api_keys,
        admin_public_key=arguments.admin_public_key,
        admin_audience=arguments.admin_audience,
        trusted_class_header=arguments.trusted_class_header,
        trusted_tenant_header=arguments.trusted_tenant_header,
        log_format=arguments.log_format,
    )
    from_flags = Versioned(0, "Spec", _live_from_flags(arguments, ceilings))
    if options.live_config is None:
        return config, options, from_flags, None
    try:
        return config, options, read_live_file(options.live_config, ceilings), None
    except ConfigError as error:
        # A bad ConfigMap must not keep a service down: serve with the flags and say so in the read-back.
        return config, options, from_flags, str(error)


def _step_model(path: Path | None) -> dict[str, object] | None:
    """The JSON form of a saved step-time model, checked."""
    if path is None:
        return None
    try:
        return StepTimeModel.from_json(json.loads(path.read_text()), "step_model").to_json()
    except ConfigError as error:
        raise ConfigError("step_model", str(path), f"a step-time model; {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("step_model", str(path), f"a JSON file that can be read ({error})") from None


def _live_from_flags(arguments: argparse.Namespace, ceilings: Ceilings) -> LiveConfig:
    defaults = LiveConfig()
    budget, seqs = arguments.max_num_batched_tokens, arguments.max_num_seqs
    raw = {
        # A lowered ceiling lowers the default with it; a value somebody asked for is checked instead.
        "max_num_batched_tokens": min(defaults.max_num_batched_tokens, ceilings.max_num_batched_tokens)
        if budget is None
        else budget,
        "max_num_seqs": min(
            defaults.max_num_seqs,
            ceilings.max_num_seqs,
            ceilings.max_num_batched_tokens if budget is None else max(budget, 1),
        )
        if seqs is None
        else seqs,
        "scheduling_policy": arguments.scheduling_policy,
        "long_prefill_token_threshold": arguments.long_prefill_token_threshold,
        "priority_aging_s": arguments.priority_aging,
        "slo": {
            "default_class": "default",
            "classes": [
                {
                    "name": "default",
                    "ttft_s": arguments.slo_ttft,
                    "itl_s": arguments.slo_itl,
                    "objective": 99.0,
                }
            ],
        },
    }
    try:
        return LiveConfig.from_json(raw, ceilings)
    except ConfigError as error:
        raise ConfigError(_flag(error.path), error.value, error.allowed) from error


def _flag(path: str) -> str:
    """The flag behind a dotted path of a configuration error."""
    special = {
        "config.priority_aging_s": "--priority-aging",
        "config.slo.classes[0].ttft_s": "--slo-ttft",
        "config.slo.classes[0].itl_s": "--slo-itl",
        "kv_cache_bytes": "--kv-cache-memory",
        "swap_bytes": "--swap-memory",
        "hub_patience_s": "--hub-patience",
    }
    name = path.removeprefix("config.").replace("ceilings.", "ceiling_")
    return special.get(path, "--" + name.replace("_", "-"))


def _name_of(model: str) -> str:
    return Path(model.rstrip("/")).name.removesuffix(".gguf") or model


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    logs.configure(arguments.log_format)
    try:
        config, options, incumbent, boot_error = configuration(arguments)
        if hub_reference(config.model) is None:
            locate(config.model)  # a wrong path need not wait for a whole engine process to say so
        from trimtab_engine.server.main import (
            run,
        )  # the web stack: a second that wrong flags need not wait for

        return run(config, options, incumbent, boot_error)
    except ConfigError as error:
        print(f"trimtab-engine: {error}", file=sys.stderr)
        return 2
    except TrimtabError as error:
        print(f"trimtab-engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server has its own handlers; nothing runs yet
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
