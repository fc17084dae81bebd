"""Kernels into object code. Runs in a child process: LLVM ends its process when it cannot go on.

    python -m paceline.runner.native.compile ISA MACHINE FILE [object|assembly]

numba turns each Python function into LLVM's language, and nothing more: what it would optimise, link and translate on
the way is left out. LLVM then makes the code of a group of kernels at once, for a target machine that is set and not
guessed. The groups are compiled beside each other, the first one here and each other one in a process of its own.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from paceline.runner.native.checks import is_checking
from paceline.runner.native.code import joined
from paceline.runner.native.isa import BY_NAME, Isa
from paceline.runner.native.layout import LIBC, symbol_of

# Kernels that become one object, by name, with all they call that is in no group. The first takes longest.
GROUPS = (("enter", "probe"), ("panel", "panel_pair", "attend_rows", "attend_tile", "draw", "place"))
CHECKS = ("allow", "check", "pause")  # what the checking form has beside them


def import_kernels(isa: Isa) -> None:
    """Import numba, which is done here and nowhere else, and the kernels."""
    os.environ |= {"PACELINE_KERNEL_ISA": isa.name, "NUMBA_OPT": "0"}
    # While it looks for types, numba makes thousands of errors that are caught again: without colours.
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"
    from numba.core import cgutils, codegen, cpu, types

    def keep(self: Any, module: Any) -> None:
        self.texts = [*getattr(self, "texts", ()), cgutils.normalize_ir_text(str(module))]

    def finalize(self: Any) -> None:
        self._finalized = True

    def no_executable(self: Any, library: Any, fndesc: Any, env: Any) -> Any:
        return [].append  # a builtin, a separate one for each function; it is never called

    answers: dict[Any, Any] = {}
    find = types.Function.get_call_type

    def remembered(self: Any, context: Any, args: Any, kws: Any) -> Any:
        """The types of one call; numba asks anew for each of thousands of additions."""
        call = (self, tuple(args), tuple(kws.items()))
        if call not in answers:
            answers[call] = find(self, context, args, kws)
        return answers[call]

    types.Function.get_call_type = remembered
    codegen.CPUCodeLibrary.add_ir_module = keep
    codegen.CPUCodeLibrary.finalize = finalize
    cpu.CPUContext.get_executable = no_executable
    from paceline.runner.native.kernels import place, probe, step  # noqa: F401  (they name what is compiled)
    from paceline.runner.native.kernels.emit import APART

    assert set(APART) == {name for group in GROUPS for name in group}


def group_texts(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Some kernels and all they call in LLVM's language, and what their own functions are to be called, by name."""
    from numba.core import types

    from paceline.runner.native.kernels.emit import APART

    symbols: dict[str, str] = {}
    libraries: list[Any] = []
    for name in names:
        made = APART[name]
        made.compile((types.int64,) * made.py_func.__code__.co_argcount)
        [compiled] = made.overloads.values()
        symbols[compiled.fndesc.llvm_func_name] = symbol_of(name)
        found = [compiled.library]
        while found:
            library = found.pop()
            if library not in libraries:
                libraries.append(library)
                found += library._linking_libraries
    return [text for library in libraries for text in library.texts], symbols


def compile_group(names: Sequence[str], isa: Isa, machine: str, *, listing: bool) -> bytes:
    """After `import_kernels`."""
    texts, symbols = group_texts(names)
    if is_checking() and "enter" in names:
        from paceline.runner.native.kernels.checks import TEXT

        texts.append(TEXT)
    return emit(texts, symbols, isa, machine, listing=listing)


def emit(texts: list[str], symbols: dict[str, str], isa: Isa, machine: str, *, listing: bool) -> bytes:
    """Object code for a processor, or its assembly. `symbols`: new names of functions that others call."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = f"{machine}-unknown-linux-gnu"
    cpu = isa.cpu
    if isa.name == "plain" and machine == "x86_64":
        cpu = "x86-64-v2"  # numpy does not run on less
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=isa.features, opt=3, reloc="pic", codemodel="small"
    )
    whole = llvm.parse_assembly("")
    for text in texts:
        whole.link_in(llvm.parse_assembly(text))
    whole.triple, whole.data_layout = triple, str(target.target_data)
    for variable in whole.global_variables:
        variable.linkage = llvm.Linkage.internal
    ours = {symbol_of(name) for names in (*GROUPS, CHECKS) for name in names}
    for function in whole.functions:
        if function.name in symbols:
            function.name = symbols[function.name]
            assert function.name in ours, (
                "a group must not call kernels of its own as those of others are called"
            )
        elif not function.is_declaration and function.name not in ours:
            function.linkage = llvm.Linkage.internal
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    for function in whole.functions:
        name = function.name
        if not function.is_declaration or name.startswith("llvm."):
            continue
        if name not in {*LIBC, *ours}:
            raise RuntimeError(f"the kernels call {name}, which nothing offers when they are loaded")
        # Called at an address of 64 bits: it may lie anywhere. ARM gets there without help.
        if machine == "x86_64":
            function.add_function_attribute("nonlazybind")
    if isa.tune:  # from here on: the passes above would unroll every loop for a small processor
        text = re.sub(r"(?m)^(define .*?)(\s*{)?$", rf'\1 "tune-cpu"="{isa.tune}"\2', str(whole))
        whole = llvm.parse_assembly(text)
    found: bytes = target.emit_assembly(whole).encode() if listing else target.emit_object(whole)
    return found


def main(name: str, machine: str, path: str, form: str = "object") -> None:
    isa, listing = BY_NAME[name], form == "assembly"
    gc.disable()  # it would look through numba's objects again and again, and few of them can go
    import_kernels(isa)
    files = [Path(f"{path}.{number}") for number in range(len(GROUPS))]

    def work(number: int) -> None:
        files[number].write_bytes(compile_group(GROUPS[number], isa, machine, listing=listing))

    # No pool: its processes would wait for more work for ever if this one were killed.
    others = [get_context("fork").Process(target=work, args=(number,)) for number in range(1, len(GROUPS))]
    for other in others:
        other.start()
    work(0)
    for number, other in enumerate(others, 1):
        other.join()
        if other.exitcode:
            raise RuntimeError(f"the process for {', '.join(GROUPS[number])} ended with {other.exitcode}")
    parts = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    Path(path).write_bytes(b"\f".join(parts) if listing else joined(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
