"""Compiled kernels in the user's cache: kept once, never used when they are not exactly what was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from paceline.runner.native import code as code_module
from paceline.runner.native.code import Code, KernelsUnavailable, kernels_key, load_code
from paceline.runner.native.isa import Isa, host_isa
from tests.kernels import CACHE, host_code
from tests.waiting import wait_until

PROJECT = Path(__file__).parents[2]


def object_code() -> bytes:
    """What compiling gives, without compiling it again."""
    key = host_code().key
    (path,) = CACHE.glob(f"kernels-*-{key}.bin")
    return path.read_bytes().partition(b"\n")[2]


@dataclass
class Compiler:
    """Stands for the compiler."""

    times: int = 0
    takes_s: float = 0.0
    said: list[str] = field(default_factory=list)

    def compile(self, isa: Isa, say: Callable[[str], None]) -> bytes:
        self.times += 1
        time.sleep(self.takes_s)
        return object_code()

    def load(self, folder: Path) -> Code:
        return load_code(host_isa(), folder, self.said.append)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    host_code()  # with the real one, if nothing has done it yet
    monkeypatch.setattr(code_module, "_compiled", made.compile)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def kept(folder: Path) -> Path:
    (path,) = folder.glob("*.bin")
    return path


def works(code: Code) -> bool:
    values, out = np.zeros(16, np.float32), np.zeros(16, np.float32)
    code.probe("exp", np.array([16, values.ctypes.data, out.ctypes.data]))
    return bool((out == 1).all())


def test_compiled_once_and_read_from_then_on(compiler: Compiler, folder: Path) -> None:
    assert works(compiler.load(folder)) and works(compiler.load(folder))
    assert compiler.times == 1 and compiler.said == []
    assert folder.stat().st_mode & 0o777 == 0o700 and kept(folder).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [kept(folder).name, "kernels.lock"]


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def name_another_key(path: Path) -> None:
    head, _, code = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(head), "key": "0" * 32}).encode() + b"\n" + code)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a changed byte": change_a_byte,
    "half a file": cut,
    "an empty file": lambda path: path.write_bytes(b""),
    "not a kernel file": lambda path: path.write_bytes(b"\x7fELF" * 1000),
    "of another key": name_another_key,
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(compiler: Compiler, folder: Path, damage: str) -> None:
    compiler.load(folder)
    good = kept(folder).read_bytes()
    DAMAGES[damage](kept(folder))
    assert works(compiler.load(folder))
    assert compiler.times == 2 and compiler.said == []
    assert kept(folder).read_bytes() == good and works(compiler.load(folder)) and compiler.times == 2


def test_a_file_that_cannot_be_replaced_is_no_obstacle(compiler: Compiler, folder: Path) -> None:
    compiler.load(folder)
    path = kept(folder)
    path.unlink()
    path.mkdir()
    assert works(compiler.load(folder))
    assert compiler.times == 2 and "compiled for this start only" in compiler.said[0]


def test_a_file_of_another_user_is_not_used(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.load(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert works(compiler.load(folder))
    assert compiler.times == 2
    assert compiler.said == [f"kernels are compiled for this start only: {folder} belongs to another user"]


def test_a_change_of_the_sources_is_another_file(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.load(folder)
    monkeypatch.setattr(code_module, "FORMAT", -1)
    code_module._key.cache_clear()
    try:
        assert compiler.load(folder).key != host_code().key
    finally:
        code_module._key.cache_clear()
    assert compiler.times == 2 and len(list(folder.glob("*.bin"))) == 2


@pytest.mark.parametrize("trouble", ["read-only", "writable by others", "a file", "no lock", "full"])
def test_a_cache_that_cannot_be_used_is_said_and_is_no_obstacle(
    compiler: Compiler, folder: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "a file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
    if trouble == "read-only":  # for the administrator too, who may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    elif trouble == "writable by others":
        folder.chmod(0o777)
    elif trouble == "no lock":
        (folder / "kernels.lock").mkdir()
    elif trouble == "full":

        def fail(number: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
    assert works(compiler.load(folder))
    assert compiler.times == 1
    assert len(compiler.said) == 1 and compiler.said[0].startswith(
        "kernels are compiled for this start only: "
    )
    assert not folder.is_dir() or not list(folder.glob("*.bin"))


def test_what_is_kept_is_read_where_nothing_can_be_written(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only and whose image was made with `paceline warm`."""
    compiler.load(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert works(compiler.load(folder)) and compiler.times == 1 and compiler.said == []


def test_starts_at_once_compile_once(compiler: Compiler, folder: Path) -> None:
    compiler.takes_s = 0.2
    found: list[bool] = []
    starts = [threading.Thread(target=lambda: found.append(works(compiler.load(folder)))) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert found == [True] * 4 and compiler.times == 1


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from paceline.runner.native import code
    from paceline.runner.native.isa import host_isa

    code._compiled = lambda isa, say: Path(sys.argv[2]).read_bytes()
    os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
    code.load_code(host_isa(), Path(sys.argv[1]), print)
"""


def test_a_start_that_is_killed_leaves_no_half_file(compiler: Compiler, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(object_code())
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(tmp_path / "code")]
    done = subprocess.run(command, cwd=PROJECT, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not list(folder.glob("*.bin")) and list(folder.glob("*.part"))
    assert works(compiler.load(folder)) and compiler.times == 1
    assert kept(folder).read_bytes().endswith(object_code()) and not list(folder.glob("*.part"))


FAR = """
    import ctypes, mmap, sys
    from pathlib import Path
    from paceline.runner.native.code import load_code
    from paceline.runner.native.isa import host_isa

    c = ctypes.CDLL(None)
    c.mmap.restype = ctypes.c_void_p
    c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    take = lambda size: c.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    hole, left = int(sys.argv[2]), 2**30
    found = take(hole)
    wall = take(2**33)  # the kernel maps downwards: what is no hole above it lies 8 GiB away
    while left >= mmap.PAGESIZE:
        at = take(left)
        if at < wall:
            c.munmap(at, left)
            left //= 2
    c.munmap(found, hole)
    load_code(host_isa(), Path(sys.argv[1]), print)
"""


@pytest.mark.parametrize("hole", [8_192, 131_072])
def test_memory_in_pieces_is_no_obstacle(compiler: Compiler, folder: Path, hole: int) -> None:
    """Only some of the code fits where the first of it lies. LLVM ended the process, since it was too far apart."""
    compiler.load(folder)
    command = [sys.executable, "-c", textwrap.dedent(FAR), str(folder), str(hole)]
    done = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


def test_a_compiler_that_fails_is_a_sentence(folder: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"the CPU kernels could not be compiled \(1\): KeyError"):
        load_code(replace(host_isa(), name="nonsense"), folder, lambda sentence: None)


def test_a_compiler_that_is_ended_is_a_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LLVM ends its process, without a word."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -ABRT $$\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(KernelsUnavailable, match=r"could not be compiled \(-6\): no message"):
        load_code(host_isa(), folder, lambda sentence: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(KernelsUnavailable, match="No such file"):
        load_code(host_isa(), folder, lambda sentence: None)
    assert not list(folder.glob("*.bin"))


def test_a_compiler_that_takes_too_long_is_a_sentence_that_says_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(code_module, "COMPILE_S", 0.1)
    with pytest.raises(KernelsUnavailable, match=r"not compiled within 0.1 s; run paceline warm"):
        load_code(host_isa(), folder, lambda sentence: None)


ALONE = """
    import sys, time
    from pathlib import Path
    from paceline.runner.native import compile

    def compile_group(names, isa, machine, *, listing):
        if names == compile.GROUPS[0]:
            time.sleep(5.0)
        Path(sys.argv[1] + ".began").touch()
        return b""

    compile.import_kernels, compile.compile_group = (lambda isa: None), compile_group
    compile.main("plain", "x86_64", sys.argv[1])
"""


def test_a_compiler_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    """Those that compile the other groups end with their group. They keep the pipe open for as long as they are."""
    command = [sys.executable, "-c", textwrap.dedent(ALONE), str(tmp_path / "kernels.o")]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as compiling:
        try:
            wait_until(lambda: list(tmp_path.glob("*.began")))
        finally:
            compiling.kill()
        assert compiling.communicate(timeout=30)[0] == b""


def test_keys_differ_by_processor() -> None:
    isa = host_isa()
    assert kernels_key(isa) == host_code().key
    assert kernels_key(replace(isa, features=isa.features + ",+x")) != host_code().key
