"""The compiled kernels: kept in the user's cache, loaded by llvmlite alone.

The file holds a line of JSON (key, size, checksum) and the object code. Its key is made of the kernels' sources, the
compiler's versions and the processor, so that a change of any of them compiles anew. What is loaded is executed:
a folder that others may write to, or a file that is not exactly what was written, is not used.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.files.fetch import cache_root
from paceline.runner.native.checks import is_checking
from paceline.runner.native.isa import Isa, host_isa
from paceline.runner.native.layout import ALLOW, ENTRIES, LIBC, LIBM, PROBES, symbol_of

FORMAT = 2
COMPILE_S = 300.0
PART = ".part"
_SIZE = 8  # bytes of an object's size

_Entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class KernelsUnavailable(ConfigError):
    """The kernels cannot be compiled or loaded here; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The loaded kernels."""

    key: str
    isa: Isa
    _enter: Any
    _probe: Any
    _place: Any
    _engine: Any  # owns the memory of the code
    _allow: Any = None  # of the checking form

    @property
    def is_checked(self) -> bool:
        """Whether addresses are looked up in the table that `allow` names (see `checks`)."""
        return self._allow is not None

    def allow(self, table: int) -> None:
        """From here on every load and store must lie in a range of the table; 0: anywhere."""
        if self._allow is not None:
            self._allow(table)

    def enter(self, thread: int, parameters: int) -> None:
        """Compute as one thread of a step, without the interpreter's lock; thread 0 returns with the step's end."""
        _call(self._enter, thread, parameters)

    def place(self, tokens: NDArray[np.int64]) -> None:
        """Copy keys and values of tokens (`kernels.place`). Runs beside no step."""
        self.allow(0)
        _call(self._place, tokens.ctypes.data, 0)

    def probe(self, kernel: str, arguments: NDArray[np.int64], times: int = 1) -> None:
        """Call one kernel alone (`kernels.probe`)."""
        self.allow(0)
        column = np.concatenate([[times], arguments]).astype(np.int64)
        _call(self._probe, PROBES.index(kernel), column.ctypes.data)


def _call(function: Any, one: int, other: int) -> None:
    returned = (ctypes.c_int64 * 2)()  # where compiled functions put a value and an error; there are none
    at = ctypes.addressof(returned)
    function(at, at + 8, one, other)


def kernels_key(isa: Isa) -> str:
    """What the compiled code depends on, as one word."""
    return _key(isa, is_checking())


@cache
def _key(isa: Isa, is_checked: bool) -> str:
    folder = Path(__file__).parent
    form = "checked " if is_checked else ""
    target = f"{form}{isa.name} {isa.lanes} {isa.cpu} {isa.features} {platform.machine()}"
    parts = [f"{FORMAT} {target} {version('numba')} {version('llvmlite')}".encode()]
    parts += [path.read_bytes() for path in sorted(folder.glob("kernels/*.py"))]
    parts += [(folder / name).read_bytes() for name in ("layout.py", "compile.py")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def host_code(say: Callable[[str], None]) -> Code:
    """The kernels for this processor, kept in the user's cache."""
    return load_code(host_isa(), cache_root() / "kernels", say)


def has_host_code() -> bool:
    """Whether a start need not compile them."""
    isa = host_isa()
    return _read(_file(isa, cache_root() / "kernels"), kernels_key(isa)) is not None


def load_code(isa: Isa, folder: Path, say: Callable[[str], None]) -> Code:
    """The kernels for a processor, compiled first where they are not kept yet. Raises KernelsUnavailable."""
    key = kernels_key(isa)
    path = _file(isa, folder)
    objection = _make_folder(folder)
    code = None if objection else _read(path, key)
    if code is None and not objection and not os.access(folder, os.W_OK):
        objection = f"{folder} cannot be written to"
    if code is None and not objection:
        try:
            with _alone(folder / "kernels.lock"):
                code = _read(path, key)  # another start may have made them meanwhile
                if code is None:
                    code = _compiled(isa, say)
                    _write(path, key, code)
        except OSError as error:
            objection = f"{folder}: {error.strerror}"
    if objection:
        say(f"kernels are compiled for this start only: {objection}")
    return _linked(_compiled(isa, say) if code is None else code, isa, key)


def _file(isa: Isa, folder: Path) -> Path:
    return folder / f"kernels-{isa.name}-{kernels_key(isa)}.bin"


def _make_folder(folder: Path) -> str:
    """Why the cache cannot be used, or nothing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return f"{folder} belongs to another user"
        if found.st_mode & 0o022:
            return f"others may write to {folder} (chmod 700 {folder})"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time. The lock goes with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, key: str) -> bytes | None:
    """The kept code; None when there is none, or it is not what was written."""
    try:
        found = path.stat()
        data = path.read_bytes()
    except OSError:
        return None
    head, _, code = data.partition(b"\n")
    with suppress(ValueError):
        about = json.loads(head)
        same = about == _about(key, code)
        if same and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return code
    return None


def _write(path: Path, key: str, code: bytes) -> None:
    """Beside its place first: no start ever sees half a file. One at a time: other parts are of starts that died."""
    for left in path.parent.glob(f"*{PART}"):
        left.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PART, delete=False) as file:
        file.write(json.dumps(_about(key, code)).encode() + b"\n" + code)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def _about(key: str, code: bytes) -> dict[str, object]:
    return {"key": key, "size": len(code), "sha256": hashlib.sha256(code).hexdigest()}


def _compiled(isa: Isa, say: Callable[[str], None]) -> bytes:
    """Compile in a child process: an instruction that LLVM does not know ends it, and not this one."""
    say("compiling CPU kernels, once")
    module = "paceline.runner.native.compile"
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-kernels-") as folder:
            path = Path(folder) / "kernels.o"
            command = [sys.executable, "-m", module, isa.name, platform.machine(), str(path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMPILE_S)
            if not done.returncode:
                return path.read_bytes()
    except subprocess.TimeoutExpired as error:
        what_to_do = "run paceline warm when the machine is less busy, then start again"
        raise KernelsUnavailable(
            f"the CPU kernels were not compiled within {COMPILE_S:g} s; {what_to_do}"
        ) from error
    except OSError as error:
        raise KernelsUnavailable(f"the CPU kernels could not be compiled: {error}") from error
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise KernelsUnavailable(f"the CPU kernels could not be compiled ({done.returncode}): {last}")


def joined(parts: list[bytes]) -> bytes:
    """Objects that were compiled beside each other as one, each behind its size."""
    return b"".join(len(part).to_bytes(_SIZE, "little") + part for part in parts)


def _parts(code: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(code):
        end = at + _SIZE + int.from_bytes(code[at : at + _SIZE], "little")
        yield code[at + _SIZE : end]
        at = end


def _linked(code: bytes, isa: Isa, key: str) -> Code:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in (*LIBC, *LIBM):
        llvm.add_symbol(name, _address(name))
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    # llvmlite's own memory keeps the sections of an object together. LLVM's puts each where it finds room: in a large
    # process they may be further from each other than an instruction reaches, and then LLVM ends the process.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target, use_lmm=True)
    for part in _parts(code):
        engine.add_object_file(llvm.ObjectFileRef.from_data(part))
    engine.finalize_object()
    entries = [engine.get_function_address(symbol_of(name)) for name in ENTRIES]
    if not all(entries):
        raise KernelsUnavailable("the compiled CPU kernels have no entry")
    enter, probe, place = (_Entry(at) for at in entries)
    allow = engine.get_function_address(symbol_of(ALLOW))
    return Code(
        key,
        isa,
        enter,
        probe,
        place,
        engine,
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(allow) if allow else None,
    )


def _address(name: str) -> int:
    """Where a function of the C library stands; that of mathematics is a separate file on most systems."""
    for library in (None, "libm.so.6"):
        with suppress(OSError, AttributeError):
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
    raise KernelsUnavailable(f"the C library of this system has no {name}")
