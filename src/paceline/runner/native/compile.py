"""Kernels into one object file. Runs in a child process: LLVM ends its process when it cannot go on.

    python -m paceline.runner.native.compile ISA MACHINE FILE [object|assembly]

numba turns each Python function into LLVM's language, and nothing more: what it would optimise, link and translate on
the way is left out. LLVM then makes the code of the whole once, for a target machine that is set and not guessed.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from paceline.runner.native.checks import is_checking
from paceline.runner.native.isa import BY_NAME, Isa
from paceline.runner.native.layout import ALLOW, LIBC, SYMBOLS


def module_texts(isa: Isa) -> tuple[list[str], tuple[str, ...]]:
    """Every kernel in LLVM's language, and the names of the entries. numba is imported here and nowhere else."""
    os.environ |= {"PACELINE_KERNEL_ISA": isa.name, "NUMBA_OPT": "0"}
    # While it looks for types, numba makes thousands of errors that nobody reads: without colours.
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"
    from numba.core import cgutils, codegen, cpu, types

    texts: list[str] = []

    def keep(self: Any, module: Any) -> None:
        texts.append(cgutils.normalize_ir_text(str(module)))

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
    from paceline.runner.native.kernels import checks
    from paceline.runner.native.kernels.probe import probe
    from paceline.runner.native.kernels.step import enter

    names = []
    if is_checking():
        texts.append(checks.TEXT)
    for entry in (enter, probe):
        entry.compile((types.int64, types.int64))
        [compiled] = entry.overloads.values()
        names.append(compiled.fndesc.llvm_func_name)
    return texts, tuple(names)


def emit(
    texts: list[str], entries: tuple[str, ...], isa: Isa, machine: str, *, listing: bool = False
) -> bytes:
    """Object code for a processor, or its assembly."""
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
    for function in whole.functions:
        if function.name in entries:
            function.name = SYMBOLS[entries.index(function.name)]
        elif not function.is_declaration and function.name != ALLOW:
            function.linkage = llvm.Linkage.internal
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    for function in whole.functions:
        if function.is_declaration and not function.name.startswith("llvm.") and function.name not in LIBC:
            raise RuntimeError(f"the kernels call {function.name}, which nothing offers when they are loaded")
    if isa.tune:  # from here on: the passes above would unroll every loop for a small processor
        text = re.sub(r"(?m)^(define .*?)(\s*{)?$", rf'\1 "tune-cpu"="{isa.tune}"\2', str(whole))
        whole = llvm.parse_assembly(text)
    found: bytes = target.emit_assembly(whole).encode() if listing else target.emit_object(whole)
    return found


def main(name: str, machine: str, path: str, form: str = "object") -> None:
    isa = BY_NAME[name]
    Path(path).write_bytes(emit(*module_texts(isa), isa, machine, listing=form == "assembly"))


if __name__ == "__main__":
    main(*sys.argv[1:])
