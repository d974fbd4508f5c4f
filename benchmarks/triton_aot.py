"""Compiles the Triton kernels ahead of time, without a GPU, and says what each costs on each architecture.

Registers and stack come from the `cuobjdump` in Triton's own wheel; a stack means that registers were spilled.

    PYTHONPATH=. python benchmarks/triton_aot.py                      # every shape, sm_80, sm_90 and sm_100
    PYTHONPATH=. python benchmarks/triton_aot.py --only attention --arch 86,90 --json costs.json
    PYTHONPATH=. python benchmarks/triton_aot.py --few                # the shapes that the tests compile
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import publish, say

os.environ.pop("TRITON_INTERPRET", None)  # @triton.jit reads it when it decorates

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmx.kernels.cuda import attention, norm, rope
from llmx.report import Report

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DEFINITIONS = {
    "results.cases": "op and shape -> its kernel, and by architecture what one program (a thread block) costs",
    "registers": "of a thread",
    "stack": "bytes of a thread; more than none means spilled registers",
    "shared": "bytes of a program",
    "product": "the instruction that multiplies matrices; none: the kernel does not",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
POINTERS = {"segments": "*i32", "owners": "*i32", "slots": "*i64", "table": "*i64", "prefix": "*i64", "base": "*i64"}
POINTERS |= {"paths": "*i64", "partial": "*fp32", "state": "*fp32", "weight": "*fp32", "cos": "*fp32", "sin": "*fp32"}
POINTERS |= {"scales": "*fp32", "sinks": "*fp32"}
FLOATS = {"eps", "factor", "ceiling"}
TENSORS = {"x", "residual", "out", "total", "q", "qkv"}  # of the activations' type
POOLS = {"keys", "values"}
TESTED = ((1, ""), (1, ", codes"), (0, ", low"), (0, ", tree"))
FEW = {1: "decode", 8: "8 tokens", 16: "16 tokens", 0: "many"}


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    cut: Callable[[int], dict[str, Any]]  # constants and options, by the compute capability's major number
    kind: str = "bf16"
    pool: str = "bf16"
    few: bool = False  # one of those that the tests compile

    def compile(self, arch: int) -> Any:
        signature, aligned, cut = {}, {}, self.cut(arch // 10)
        for place, parameter in enumerate(self.kernel.params):
            kind = "constexpr" if parameter.name in cut else self._type(parameter.name)
            signature[parameter.name] = kind
            if kind[0] == "*" or (kind == "i32" and not parameter.do_not_specialize):
                aligned[(place,)] = [["tt.divisibility", 16]]  # what a launch would find
        constants = {key: value for key, value in cut.items() if key not in OPTIONS}
        options = {"enable_fp_fusion": True} | {key: value for key, value in cut.items() if key in OPTIONS}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

    def _type(self, name: str) -> str:
        if name in TENSORS or name in POOLS:
            return f"*{self.pool if name in POOLS else self.kind}"
        return POINTERS.get(name, "fp32" if name in FLOATS else "i32")


def same(cut: dict[str, Any], **more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda major: cut | more


def norms() -> Iterator[Case]:
    for cols in (128, 576, 4096, 8192, 20480):
        cut = norm.shape(cols)
        yield Case(f"rms_norm {cols}", norm.norm_kernel, same(cut, ADD=False))
        yield Case(f"add_rms_norm {cols}", norm.norm_kernel, same(cut, ADD=True), few=cols in (4096, 20480))
    yield Case("add_rms_norm 4096 f32", norm.norm_kernel, same(norm.shape(4096), ADD=True), "fp32")


def ropes() -> Iterator[Case]:
    for dim, half, heads in ((64, 32, 9), (128, 64, 32), (256, 128, 8), (80, 16, 32), (128, 0, 32)):
        name = f"rope_and_write {dim}, {2 * half} turned"
        cut = rope.shape(dim, half, heads)
        yield Case(name, rope.rope_kernel, same(cut, CODES=False))
        yield Case(name + ", int8 cache", rope.rope_kernel, same(cut, CODES=True), pool="i8", few=half == 64)


def attend(few: int, group: int, dim: int, kind: str, flags: dict[str, bool]) -> Callable[[int], dict[str, Any]]:
    wide = kind == "fp32"
    fixed = flags | {"GROUP": group, "SIZE": 16, "SPLIT": few > 0, "WIDE": wide}
    of = {"tree": flags["TREE"], "codes": flags["CODES"]}
    return lambda major: attention.shape(few, group, dim, wide, **of, major=major) | fixed


def attentions() -> Iterator[Case]:
    plain = dict.fromkeys(("LOW", "TREE", "CAP", "CODES", "SINKS"), False)
    changes = [{"LOW": True}, {"CAP": True}, {"TREE": True}, {"CODES": True}, dict.fromkeys(plain, True)]
    variants = [plain | change for change in changes]
    shapes = [(dim, group, "bf16", plain) for dim, group in ((64, 3), (80, 1), (128, 4), (128, 8), (192, 16), (256, 2))]
    shapes += [(128, 4, "bf16", flags) for flags in variants]
    shapes += [(64, 3, "fp32", plain), (128, 4, "fp32", plain), (128, 4, "fp32", variants[-1]), (256, 2, "fp32", plain)]
    for dim, group, kind, flags in shapes:
        said = "".join(f", {flag.lower()}" for flag, on in flags.items() if on)
        for few in FEW:
            name = f"attention {FEW[few]}, {dim} x {group}{said}, {kind.replace('fp', 'f')}"
            tested = (dim, group) == (128, 4) and (few, said) in (TESTED if kind == "bf16" else TESTED[:1])
            pool = "i8" if flags["CODES"] else kind
            yield Case(name, attention.attention_kernel, attend(few, group, dim, kind, flags), kind, pool, tested)
    for dim in (64, 80, 128, 256):
        cut = same({"DIM": dim, "D": triton.next_power_of_2(dim), "SINKS": True, "num_warps": 1})
        yield Case(f"merge {dim}", attention.merge_kernel, cut, few=dim == 128)


def cost(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {word: re.search(rf"\b{word}:(\d+)", usage) for word in ("REG", "STACK")}
    if not all(found.values()):
        raise SystemExit(f"cuobjdump says something else than it used to:\n{usage}")
    registers, stack = (int(match[1]) for match in found.values() if match)
    product = re.search(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])
    return {
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "product": product[1] if product else None,
    }


def lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    width = max(map(len, found))
    archs = next(iter(found.values()))["costs"]
    yield "registers / stack / shared KiB".ljust(width) + "".join(arch.rjust(20) for arch in archs)
    for name, case in found.items():
        cells = (f"{c['registers']} / {c['stack']} / {c['shared'] / 1024:.0f}" for c in case["costs"].values())
        yield name.ljust(width) + "".join(cell.rjust(20) for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="80,90,100", help="compute capabilities, such as 90 for sm_90")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--few", action="store_true", help="only the cases that the tests compile")
    parser.add_argument("--json", type=Path, default=None)
    flags = parser.parse_args()
    archs = [int(arch) for arch in flags.arch.split(",")]
    chosen = [case for make in (norms, ropes, attentions) for case in make()]
    chosen = [case for case in chosen if flags.only in case.name and (case.few or not flags.few)]
    if not chosen:
        parser.error(f"no case has {flags.only!r} in its name")
    found, began = {}, time.perf_counter()
    for case in chosen:
        costs = {f"sm_{arch}": cost(case.compile(arch)) for arch in archs}
        found[case.name] = {"kernel": case.kernel.__name__, "costs": costs}
    for line in lines(found):
        say(line)
    say(f"{len(chosen) * len(archs)} compiled in {time.perf_counter() - began:.0f} s")
    publish(Report("triton_aot", {"cases": found}, definitions=DEFINITIONS), flags.json, ("torch", "triton"))


if __name__ == "__main__":
    main()
