"""The engine process: load, then messages in and steps out until told to stop."""

from __future__ import annotations

import faulthandler
import logging
import signal
from functools import partial
from time import monotonic, perf_counter

import torch

from proa.core.errors import CheckpointError, ConfigError, KernelFaultError, MemoryShortageError, UnsupportedError
from proa.core.logging import configure
from proa.engine.build import LoadedModel, Loader, Report, build_engine
from proa.engine.config import EngineConfig
from proa.engine.engine import Engine
from proa.engine.process import parent_is_gone, tie_to_parent
from proa.engine.step_failure import lacking_memory
from proa.ipc.messages import (
    Abort,
    ExpertsRecorded,
    Fatal,
    FlushCache,
    Flushed,
    Generate,
    Loading,
    Ready,
    RecordExperts,
    Shutdown,
    StepOutput,
    ToEngine,
)
from proa.ipc.transport import EngineAddresses, EngineEndpoint

__all__ = ["EXIT_FAULT", "EXIT_OK", "EXIT_USER", "run_engine"]

logger = logging.getLogger("proa.engine")

EXIT_OK = 0
EXIT_FAULT = 1
# The model or a flag is to blame: starting again would not help.
EXIT_USER = 3

_HEARTBEAT_S = 1.0
# How soon a sequence whose grammar has been compiled is noticed.
_COMPILING_S = 0.001
# How often messages are looked for inside a step: a decode step asks after each of its many short layers.
_POLL_S = 0.02


# What the user has to mend while the engine starts; once it serves, none of these is theirs.
_TO_BE_MENDED = (CheckpointError, UnsupportedError, ConfigError, KernelFaultError)


class _ShutdownError(BaseException):
    """Shutdown arrived, or the parent is gone. No Exception, which the engine takes for a forward that failed."""


def run_engine(config: EngineConfig, load: Loader) -> int:
    """Run the engine process until Shutdown or a fault; return its exit code. Faults are reported as Fatal first."""
    configure(config.log_level, process="engine")
    parent_pid = tie_to_parent(config.parent_pid)
    # Stacks of all threads on standard error, even of one that holds the interpreter: at a crash and when asked for.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The native thread pool does the work; torch's own threads would fight for the same cores.
    torch.set_num_threads(1)
    endpoint = EngineEndpoint(EngineAddresses(config.to_engine, config.from_engine))
    process = _Process(config, endpoint, parent_pid)
    try:
        process.run(load)
    except _ShutdownError:
        logger.info("shutting down")
        return EXIT_OK
    except Exception as error:
        if not process.is_ready and (fault := _to_be_mended(error)) is not None:
            endpoint.send(fault)  # the API process says it, once
            return EXIT_USER
        logger.exception("the engine cannot go on")
        endpoint.send(Fatal(f"{type(error).__name__}: {error}"))
        return EXIT_FAULT
    else:
        return EXIT_OK
    finally:
        endpoint.close()


def _to_be_mended(error: Exception) -> Fatal | None:
    """What the user has to mend, None where it is no fault of theirs."""
    if isinstance(error, _TO_BE_MENDED):
        return Fatal(str(error), user=True, is_shortage=isinstance(error, MemoryShortageError))
    if (where := lacking_memory(error)) is not None:
        text = f"[{where}] expected as much as was free before loading, got none left. Fix: end what else takes it"
        return Fatal(text, user=True, is_shortage=True)
    return None


class _Process:
    def __init__(self, config: EngineConfig, endpoint: EngineEndpoint, parent_pid: int) -> None:
        self._config = config
        self._endpoint = endpoint
        self._parent_pid = parent_pid
        # What arrived while the model was loading.
        self._early: list[ToEngine] = []
        self._last_poll = self._last_sent = monotonic()
        self.is_ready = False

    def run(self, load: Loader) -> None:
        """Return never: Shutdown and faults are exceptions."""
        started = perf_counter()
        loaded = load(self._config, self._loading_report())
        engine = build_engine(self._config, loaded)
        self.is_ready = True
        self._endpoint.send(_ready(loaded.config or self._config, loaded, perf_counter() - started))
        for name, value in loaded.info.items():
            logger.info("%-20s %s", name, value)
        logger.info("ready after %.1f s", perf_counter() - started)
        for message in self._early:
            self._handle(engine, message)
        poll = partial(self._poll, engine)
        while True:
            if not engine.has_work:
                self._wait(engine)
            for message in self._endpoint.receive():
                self._handle(engine, message)
            if engine.has_work:
                self._send(engine.step(poll))

    def _poll(self, engine: Engine) -> None:
        """Between layers: the step of a large model takes seconds, and who aborts is not made to wait for its end.

        A heartbeat now and then says that layers are finished: silence is a layer that is not.
        """
        now = monotonic()
        if now - self._last_poll < _POLL_S:
            return
        self._last_poll = now
        for message in self._endpoint.receive():
            self._handle(engine, message)
        if engine.has_outputs or now - self._last_sent >= _HEARTBEAT_S:
            self._send(engine.take_outputs())

    def _send(self, output: StepOutput) -> None:
        self._last_sent = monotonic()
        self._endpoint.send(output)

    def _wait(self, engine: Engine) -> None:
        """Sleep until there is a message or a compiled grammar, with a heartbeat every second.

        Checks the KV blocks once it is quiet.
        """
        checked = False
        quiet_since = monotonic()
        while not self._endpoint.poll(_COMPILING_S if engine.is_compiling else _HEARTBEAT_S):
            engine.admit()
            if engine.has_work:
                return
            if engine.is_compiling and monotonic() - quiet_since < _HEARTBEAT_S:
                continue
            quiet_since = monotonic()
            if parent_is_gone(self._parent_pid):
                raise _ShutdownError
            if not checked:
                engine.check_integrity()
                checked = True
            self._send(StepOutput([], engine.stats()))

    def _handle(self, engine: Engine, message: ToEngine) -> None:
        match message:
            case Generate():
                engine.submit(message)
            case Abort(rid=rid):
                engine.abort(rid)
            case FlushCache(id=flush_id):
                self._endpoint.send(Flushed(flush_id, engine.flush()))
            case RecordExperts(id=record_id, action=action):
                self._endpoint.send(ExpertsRecorded(record_id, engine.record_experts(action)))
            case Shutdown():
                raise _ShutdownError

    def _loading_report(self) -> Report:
        last = monotonic()

        def report(bytes_done: int, bytes_total: int) -> None:
            nonlocal last
            for message in self._endpoint.receive():
                if isinstance(message, Shutdown):
                    raise _ShutdownError
                self._early.append(message)
            if parent_is_gone(self._parent_pid):
                raise _ShutdownError
            if monotonic() - last > 0.05 or bytes_done == bytes_total:
                last = monotonic()
                self._endpoint.send(Loading(bytes_done, bytes_total))

        return report


def _ready(config: EngineConfig, loaded: LoadedModel, load_seconds: float) -> Ready:
    return Ready(
        max_model_len=loaded.plan.max_model_len,
        kv_tokens_total=loaded.plan.num_tokens,
        max_running_requests=config.requests,
        vocab_size=loaded.model.vocab_size,
        load_seconds=load_seconds,
        weight_bytes=loaded.model.weight_bytes,
        read_gb_s=loaded.read_gb_s,
        info=loaded.info,
    )
