"""Where the engine's process starts: `python -m paceline.process.engine_main`.

Its end of the socket is its standard input, its configuration the first frame on it. It loads the model, says that it
is ready or why not, and serves until it gets a stop, or until the other side is gone. Interrupts meant for the whole
program are left to the HTTP process, which stops this one in its own time.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelShare, SharedMemory
from paceline.config.server import ProcessConfig
from paceline.core.blend_quality import Blending, notices_of
from paceline.engine.conductor import Conductor, Needs, Seat
from paceline.errors import ConfigError, PacelineError
from paceline.factory import LoadedModel, LoadProgress, load_model
from paceline.kv.slabs import Owner, SlabMarket
from paceline.models.spec import model_work
from paceline.process import frames
from paceline.process.channel import Channel, ChannelClosed
from paceline.process.client import EngineInfo
from paceline.process.engine_service import EngineService, LogQueue, set_up_logs
from paceline.process.fingerprint import fingerprint_of
from paceline.process.kv_events import KVEventPublisher

FIRST_FRAME_S = 30.0
_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger("paceline")


def main() -> int:
    """Returns the exit code of the process."""
    prepare_process()
    _die_with_parent()
    logs = set_up_logs()
    channel = Channel(_take_socket(), ProcessConfig().max_frame_bytes)
    try:
        configure = _first_frame(channel)
        return 0 if configure is None else _serve(channel, configure, logs)
    except ChannelClosed:
        return 0
    finally:
        logs.spill()


def _serve(channel: Channel, configure: frames.Configure, logs: LogQueue) -> int:
    try:
        with loading_beats(channel, configure.heartbeat_s, logs) as note:
            models, infos, service = make_service(configure, note, logs)
    except PacelineError as error:
        return _say_failure(channel, str(error), error.exit_code)
    except Exception as error:
        _logger.exception("the model could not be loaded")
        logs.send(channel)
        return _say_failure(channel, f"{type(error).__name__}: {error}", 70)
    gc.collect()
    gc.freeze()  # what loading made stays: no collection need ever look at it again
    for number, info in enumerate(infos):
        send_whole(channel, frames.Ready(info), number)
    code = service.run(channel)
    if service.publisher is not None:
        service.publisher.close()
    close_all(models)
    return code


def make_service(
    configure: frames.Configure, note: LoadProgress, logs: LogQueue
) -> tuple[list[LoadedModel], list[EngineInfo], EngineService]:
    """Load everything that is to be served."""
    models, infos, market = _load(configure, note)
    conductor = _conductor(configure, models, infos, market)
    publisher = _publisher(configure, models)
    return models, infos, EngineService(models, conductor, market, configure, logs, publisher)


def close_all(models: Sequence[LoadedModel]) -> None:
    for loaded in models:
        with suppress(Exception):  # every request has been answered; what is left is the rest of a log
            loaded.engine.close()


def _load(
    configure: frames.Configure, note: LoadProgress
) -> tuple[list[LoadedModel], list[EngineInfo], SlabMarket | None]:
    """All models, one after the other, and what shares their memory out."""
    entries = [(configure.model, configure.given, configure.share)]
    entries += [(each.model, each.given, each.share) for each in configure.further]
    if configure.further and any(model.tensor_parallel_size > 1 for model, _, _ in entries):
        raise ConfigError("--tensor-parallel-size does not go with several models yet: leave one of them out")
    models, infos = [], []
    memory = share_memory(entries, configure.memory_bytes)
    for (model, given, share), shared in zip(entries, memory, strict=True):
        started_s = time.monotonic()
        name = share.name or Path(model.model or "").name
        tell = partial(_note_named, note, name) if configure.further else note
        try:
            loaded = load_model(model, given, relatives=(os.getppid(),), on_progress=tell, shared=shared)
        except PacelineError as error:
            if configure.further:  # which of them
                error.args = (f"{name}: {error}", *error.args[1:])
            raise
        loaded.pulse.on_lost = _end_at_once
        models.append(loaded)
        info = _info(loaded, time.monotonic() - started_s)
        blending = _blending(model, loaded, partial(tell, "measuring what blending keeps"))
        more = notices_of(blending, is_wanted=model.context_reuse == "blend")
        infos.append(replace(info, blending=blending, notices=(*info.notices, *more)))
    return models, infos, slab_market(models, _shares(configure), memory)


def _publisher(configure: frames.Configure, models: Sequence[LoadedModel]) -> KVEventPublisher | None:
    """Raises ConfigError."""
    if configure.kv_events is None:
        return None
    if len(models) > 1:
        raise ConfigError("--kv-events is for one model: routers outside could not tell several apart")
    return KVEventPublisher(configure.kv_events, models[0].config.kv.block_size)


def _end_at_once(reason: str) -> None:
    """A rank is lost. A step that waits for it cannot be interrupted, and no other can be computed: the supervisor
    starts a new engine."""
    sys.stderr.write(f"paceline: {reason}; the engine ends, no step can be computed without it\n")
    sys.stderr.flush()
    os._exit(70)


def _shares(configure: frames.Configure) -> list[ModelShare]:
    return [configure.share, *(each.share for each in configure.further)]


def _conductor(
    configure: frames.Configure,
    models: Sequence[LoadedModel],
    infos: Sequence[EngineInfo],
    market: SlabMarket | None,
) -> Conductor:
    """The models' shares. Raises ConfigError where they cannot take turns in the memory there is."""
    memory = configure.memory_bytes
    needs = [Needs(awake=info.weight_bytes + info.kv_bytes, kept=info.weight_bytes) for info in infos]
    if market is not None:  # in slabs; weights of a sleeper are on the host
        slab_bytes = market.slab_bytes
        memory = (market.num_slabs - 1) * slab_bytes
        needs = [Needs(awake=(len(each.home) + each.floor) * slab_bytes) for each in market.owners]
    seats = [
        Seat(
            config=share,
            needs=need,
            wakes_s=[0.0, 0.0, info.load_s],
        )
        for share, info, need in zip(_shares(configure), infos, needs, strict=True)
    ]
    conductor = Conductor(seats, memory, time.monotonic())
    conductor.begin()
    return conductor


def _note_named(note: LoadProgress, name: str, stage: str, done: int, total: int) -> None:
    note(f"{name}: {stage}", done, total)


@contextmanager
def loading_beats(channel: Channel, every_s: float, logs: LogQueue) -> Iterator[LoadProgress]:
    """Inside, a separate thread sends heartbeats with the progress that was last reported to the given function."""
    ended, beat = threading.Event(), frames.StillLoading()

    def note(stage: str, done: int, total: int) -> None:
        nonlocal beat
        beat = frames.StillLoading(stage, done, total)

    def send() -> None:
        while not ended.wait(every_s):
            try:
                if channel.is_free:
                    channel.send(frames.encode(beat))
                logs.send(channel)
            except ChannelClosed:  # the HTTP process is gone, and loading cannot be interrupted
                os._exit(0)

    thread = threading.Thread(target=send, name="paceline-loading", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


def prepare_process() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # stacks of all threads, even of one that hangs in native code
    # The memory of an engine is large and full of what people wrote: it is not for the disk, and writing it would
    # keep the process, and every client that waits for it, for many seconds.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _die_with_parent() -> None:
    """In its own time: the end of the socket tells, but a step that hangs would never look at it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _take_socket() -> socket.socket:
    """Standard input is the socket; nothing else may read from it or hand it on."""
    sock = socket.socket(fileno=os.dup(0))
    os.set_inheritable(sock.fileno(), False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return sock


def _first_frame(channel: Channel) -> frames.Configure | None:
    until_s = time.monotonic() + FIRST_FRAME_S
    while time.monotonic() < until_s:
        channel.wait(until_s - time.monotonic())
        for payload in channel.receive():
            message = frames.decode_to_engine(payload)
            return message if isinstance(message, frames.Configure) else None
    return None


def _say_failure(channel: Channel, message: str, exit_code: int) -> int:
    send_whole(channel, frames.LoadFailure(" ".join(message.split())[:1024], exit_code))
    return exit_code


def send_whole(channel: Channel, message: frames.FromEngine, model: int = 0) -> None:
    """Send one frame, whatever waits before it."""
    until_s = time.monotonic() + FIRST_FRAME_S
    while not channel.is_free and time.monotonic() < until_s:
        channel.wait(0.1)
    if channel.is_free:
        channel.send(frames.for_model(model, frames.encode(message)))
    while not channel.is_free and time.monotonic() < until_s:
        channel.wait(0.1)


def _info(loaded: LoadedModel, load_s: float) -> EngineInfo:
    config, spec = loaded.config, loaded.checkpoint.spec
    work = config.scheduler.encoder
    load = None if loaded.free is None else loaded.free.load
    busy = (load.sentence(),) if load is not None and load.is_busy else ()
    weight_bytes = sum(stored.num_bytes for stored in loaded.checkpoint.stored.values())
    kv_token_bytes = loaded.hardware.kv_bytes / (config.kv.num_blocks * config.kv.block_size)
    return EngineInfo(
        vocab_size=spec.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        block_size=config.kv.block_size,
        num_blocks=config.kv.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_prompt_tokens=config.scheduler.max_num_prompt_tokens,
        **asdict(loaded.hardware),
        weight_bytes=weight_bytes,
        load_s=load_s,
        notices=(*busy, *loaded.notices),
        learns_step_sizes=config.scheduler.learned_steps is not None,
        adapters=loaded.engine.adapters.infos(),
        makes_text=spec.encoder is None,
        picture_vectors=0 if work is None else work.num_pages * work.page_vectors,
        vectors=_vectors(loaded),
        fingerprint=fingerprint_of(loaded),
        work=model_work(spec, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes),
    )


def _blending(model: ModelConfig, loaded: LoadedModel, tell: Callable[[int, int], None]) -> Blending:
    from paceline.runner.blending import blending_of

    make_step = getattr(loaded.sleeper, "make_step", None)  # on a CPU
    spec, config = loaded.checkpoint.spec, loaded.config
    return blending_of(spec, model, config, make_step, loaded.tokenizer, on_prompt=tell)


def _vectors(loaded: LoadedModel) -> str:
    found, labels = loaded.embedding, loaded.checkpoint.spec.labels
    parts = [] if found is None or not found.width else [f"{found.width} numbers, {found.kind}"]
    parts += [f"scores of {len(labels)} label{'s' * (len(labels) > 1)}"] if labels else []
    return "; ".join(parts)


# Memory of several models in one process: what each of them is to know of it before it is loaded, and its owners then.
#
# Beside the factory, which makes one engine and knows no other.


def share_memory(
    models: Sequence[tuple[ModelConfig, Mapping[str, Any], ModelShare]], memory_bytes: int | None
) -> list[SharedMemory | None]:
    """What each of several models is to know of the memory they share; None: it has its own."""
    from paceline.runner.device import choose_device

    devices = {choose_device(model) for model, _, _ in models} if len(models) > 1 else set()
    if len(devices) > 1:
        raise ConfigError("models of one server take turns on one device: give all of them the same --device")
    if devices != {"cuda"}:
        for _, _, share in models:
            if share.kv_floor_bytes or share.kv_ceiling_bytes:
                raise ConfigError(
                    "kv_floor_bytes and kv_ceiling_bytes are for several models on a GPU, which share KV memory: "
                    "give kv_cache_memory_bytes"
                )
        return [None] * len(models)
    import torch

    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint
    from paceline.runner.gpu import build

    opened = []
    for model, given, _ in models:
        path = resolve(model.model, model.revision, model.download_dir)
        opened.append((model, given, open_checkpoint(path, load_format=model.load_format)))
    device = torch.device("cuda", torch.cuda.current_device())
    memory, kv_slabs = build.share_memory(opened, memory_bytes, device)
    total = sum(share.share for _, _, share in models)
    return [
        SharedMemory(
            num_slabs=memory.num_slabs,
            slab_bytes=memory.slab_bytes,
            kv_slabs=kv_slabs,
            part=share.share / total,
            floor_bytes=share.kv_floor_bytes,
            ceiling_bytes=share.kv_ceiling_bytes,
            device=memory,
        )
        for _, _, share in models
    ]


def slab_market(
    models: Sequence[LoadedModel], shares: Sequence[ModelShare], memory: Sequence[SharedMemory | None]
) -> SlabMarket | None:
    """Of models that share their memory; None: each has its own."""
    if memory[0] is None:
        return None
    owners = []
    for loaded, share in zip(models, shares, strict=True):
        kv = loaded.config.kv
        floor = kv.least_blocks // kv.slab_blocks
        owners.append(
            Owner(
                name=share.name,
                share=share.share,
                floor=floor,
                ceiling=kv.most_slabs,
                home=loaded.place.home,
                num_adapter_slabs=loaded.place.num_adapter_slabs,
            )
        )
    return SlabMarket(memory[0].num_slabs, owners, memory[0].slab_bytes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing that a library still has to say at the end may keep the process
