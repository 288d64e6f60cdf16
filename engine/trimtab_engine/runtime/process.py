"""The engine process from its first line to its exit code: load the model, say Ready, run the loop.

Started by `worker`. Whatever goes wrong while loading reaches the HTTP process as one `Fatal` with a reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

from trimtab_engine.config import EngineConfig
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.engine_state import EngineState
from trimtab_engine.errors import ConfigError, ModelLoadError
from trimtab_engine.framing import EngineChannel, PeerGone
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.messages import Applied, Fatal, Init, Loading, Ready, ToEngine
from trimtab_engine.model_files import hub_reference
from trimtab_engine.runtime.loop import FLUSH_S, EngineLoop
from trimtab_engine.step_record import Header, StepRecorder

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(fd: int) -> int:
    """Serve the peer on socket `fd` until it ends us; the exit code."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a supervisor may signal every process; the HTTP process drains and then stops us.
        signal.signal(number, signal.SIG_IGN)
    channel = EngineChannel(socket.socket(fileno=fd))
    try:
        init, backlog = _first_message(channel)
        return _serve(channel, init, backlog)
    except PeerGone:
        logger.error("the HTTP process is gone; the engine ends")
        return 1
    except ModelLoadError as error:
        return _fatal(channel, "model_load", str(error))
    except ConfigError as error:
        return _fatal(channel, "config", str(error))
    except Exception as error:  # the outermost frame: the reason must reach the other process
        logger.exception("the engine failed")
        return _fatal(channel, "internal", f"{type(error).__name__}: {error}")


def _serve(channel: EngineChannel, init: Init, backlog: list[ToEngine]) -> int:
    config = EngineConfig.from_json(dict(init.engine))
    live = LiveConfig.from_json(init.live, config.ceilings)
    config = _at_hand(config, channel)
    channel.send(Loading("import", 0.0))
    # Here, not at the top: importing torch takes seconds, and until it is done nobody would hear from us.
    try:
        from trimtab_engine.runtime.runner import Runner
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"{error}; the engine needs the extra: pip install 'trimtab[engine]'") from error

    runner = Runner(config, lambda stage, fraction: channel.send(Loading(stage, fraction)))
    info = runner.info
    header = Header(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        prefill_first=config.prefill_first,
        shed_late=config.shed_late,
        fair_tenants=config.fair_tenants,
        num_swap_blocks=info.num_swap_blocks,
        swap_block_s=info.swap_block_s,
        eos_token_ids=sorted(info.eos_token_ids),
        seed=config.seed,
        ceilings={
            "max_num_batched_tokens": config.ceilings.max_num_batched_tokens,
            "max_num_seqs": config.ceilings.max_num_seqs,
        },
        live=live.to_json(),
        generation=init.generation,
        source=init.source,
    )
    scheduler = Scheduler(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        live=live,
        generation=init.generation,
        enable_prefix_caching=config.enable_prefix_caching,
        prefill_first=config.prefill_first,
        shed_late=config.shed_late,
        fair_tenants=config.fair_tenants,
        num_swap_blocks=info.num_swap_blocks,
        swap_block_s=info.swap_block_s,
        eos_token_ids=info.eos_token_ids,
        seed=config.seed,
    )
    incumbent = Versioned(init.generation, init.source, live)
    state = EngineState(
        scheduler, LiveState(incumbent, config.ceilings, init.boot_error), time.time() - time.monotonic()
    )
    with contextlib.ExitStack() as stack:
        recorder = None
        if config.record_steps is not None:
            recorder = stack.enter_context(_recorder(Path(config.record_steps), header))
        channel.send(
            Ready(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                device=info.device,
                dtype=info.dtype,
                load_s=info.load_s,
                kv_bytes=info.kv_bytes,
                model_path=config.model,
                enable_prefix_caching=config.enable_prefix_caching,
                prefill_first=config.prefill_first,
                shed_late=config.shed_late,
                fair_tenants=config.fair_tenants,
                num_swap_blocks=info.num_swap_blocks,
                swap_block_s=info.swap_block_s,
            )
        )
        channel.send(Applied(None, state.readback()))
        # Weights and code live as long as the process: the collector need not walk them in the middle of a step.
        gc.collect()
        gc.freeze()
        saved = None if config.step_model is None else StepTimeModel.from_json(config.step_model)
        return EngineLoop(channel, state, runner, recorder, step_model=saved).run(backlog)


def _at_hand(config: EngineConfig, channel: EngineChannel) -> EngineConfig:
    """The configuration with a model that lies on this machine."""
    reference = hub_reference(config.model)
    if reference is None:
        return config
    channel.send(Loading("download", 0.0))
    try:
        from trimtab_engine.hub.download import HubOptions, fetch
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"{error}; the engine needs the extra: pip install 'trimtab[engine]'") from error

    options = HubOptions(
        revision=config.revision,
        endpoint=config.hub_endpoint,
        ca_file=None if config.hub_ca_file is None else Path(config.hub_ca_file),
        patience_s=config.hub_patience_s,
        limit_bytes=config.hub_limit_bytes,
    )

    def progress(fraction: float, total_bytes: int, waiting_for: str | None) -> None:
        channel.send(Loading("download", fraction, total_bytes, waiting_for))

    path = fetch(reference, options, progress)
    return replace(config, model=str(path), revision=None)


def _recorder(path: Path, header: Header) -> StepRecorder:
    try:
        return StepRecorder(path, header)
    except OSError as error:
        raise ConfigError(
            "--record-steps", str(path), f"a file that can be written ({error.strerror})"
        ) from error


def _first_message(channel: EngineChannel) -> tuple[Init, list[ToEngine]]:
    first, *rest = channel.receive(None)
    assert isinstance(first, Init), f"the first message is Init, not {type(first).__name__}"
    return first, rest


def _fatal(channel: EngineChannel, kind: str, reason: str) -> int:
    channel.send(Fatal(kind, reason))
    channel.flush(FLUSH_S)
    return 1


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the HTTP process dies, whatever this process does then (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("no parent-death signal", extra={"errno": os.strerror(ctypes.get_errno())})
