"""Compiles the kernels ahead of time for an absent GPU and inspects the machine code.

    for launch in launches(lambda: norms.rms_norm(x, weight, ...)):     # x on the meta device
        compiled = compile_for(launch, "sm_90")
        compiled.registers, compiled.spilled_bytes, compiled.vector_loads

A launcher is called with meta tensors, and its launches are recorded instead of made. The
compiled code is therefore what a GPU would run, with arguments specialised as Triton does
(divisible by 16, equal to 1). `CALLS` have aligned and odd sizes, and more than 2**31 elements.
`LEAST` is the minimum number of 16-byte loads of each kernel for 16-bit tensors.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dtensor.kernels import cross_entropy, dropout, gates, norms, rope
from dtensor.kernels import launches as rules

TARGETS: Mapping[str, Any] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MOST_REGISTERS = 128

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel and the arguments of its launch."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.function.__name__.lstrip("_")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """``vector_loads``: loads of 16 bytes; ``loads``: all loads of global memory."""

    registers: int
    spilled_bytes: int
    vector_loads: int
    loads: int


@contextmanager
def _caught() -> Iterator[list[Launch]]:
    found: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        arguments = dict(zip(names, args))
        arguments |= {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        found.append(Launch(function=self, grid=grid, arguments=arguments, options=options))

    original = JITFunction.run
    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def launches(call: Callable[[], object], target: str = "sm_90") -> list[Launch]:
    """Return the launches that a call would make."""
    before, rules.WARP = rules.WARP, TARGETS[target].warp_size
    try:
        with _caught() as found:
            call()
    finally:
        rules.WARP = before
    return found


def compile_for(launch: Launch, target: str) -> Compiled:
    made = _compiled(launch, target)
    return _amd(made) if target.startswith("gfx") else _nvidia(made)


def code_for(launch: Launch, target: str) -> str:
    """Return the PTX instructions, without comments about the source."""
    body = _compiled(launch, target).asm["ptx"].partition("\t.file\t")[0]
    return re.sub(r"//.*|\.loc\s.*", "", body)


def ir_for(launch: Launch, target: str) -> str:
    """Return Triton's IR."""
    return _compiled(launch, target).asm["ttir"]


def _compiled(launch: Launch, target: str) -> Any:
    function = launch.function
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(function.params):
        value = launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type(value)
        aligned = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if specialised and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(launch.options))


def check(kind: str, name: str, launch: Launch, target: str) -> Compiled:
    """Return the compiled kernel. Raises AssertionError if it spills, needs too many registers,
    or loads piecemeal."""
    made = compile_for(launch, target)
    where = f"{name} ({kind}) on {target}: {made}"
    assert made.spilled_bytes == 0, where
    assert made.registers <= MOST_REGISTERS, where
    least = LEAST[name] if kind != "odd" or name in ODD_BY_VECTORS else 0
    assert made.vector_loads >= least, f"{where}; at least {least} vector loads"
    return made


def _type(value: Any) -> str:
    match value:
        case Tensor():
            return "*" + _TYPES[value.dtype]
        case bool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        case float():
            return "fp32"
        case _:
            raise TypeError(f"an argument of {value!r}")


def _nvidia(made: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert usage is not None, told
    loads = re.findall(r"\bld\.global[\w.:]*", made.asm["ptx"])
    wide = [load for load in loads if re.search(r"v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64", load)]
    return Compiled(
        registers=int(usage[1]),
        spilled_bytes=int(usage[2]),
        vector_loads=len(wide),
        loads=len(loads),
    )


def _amd(made: Any) -> Compiled:
    text = made.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found is not None, key
        return int(found[1])

    loads = re.findall(r"\b(?:global|buffer)_load_\w+", text)
    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    return Compiled(
        registers=number("vgpr_count"),
        spilled_bytes=spilled + number("private_segment_fixed_size"),
        vector_loads=sum("dwordx4" in load or "b128" in load for load in loads),
        loads=len(loads),
    )


# -- what is compiled ------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_calls(rows: int, k: int) -> dict[str, Callable[[], object]]:
    x, weight, rstd = meta(rows, k), meta(k), meta(rows, 1, dtype=torch.float32)
    args = (1e-6, 0.0, torch.bfloat16, torch.bfloat16)
    return {
        "rms_norm": lambda: norms.rms_norm(x, weight, *args),
        "add_rms_norm": lambda: norms.add_rms_norm(x, x, weight, *args),
        "rms_norm_backward": lambda: norms.rms_norm_backward(x, x, rstd, weight, 0.0),
        "add_layer_norm": lambda: norms.add_layer_norm(x, x, weight, weight, 1e-5),
    }


def _gates(rows: int, k: int) -> dict[str, Callable[[], object]]:
    x, halves = meta(rows, k), meta(rows, 2 * k).chunk(2, -1)
    wide, bias = meta(rows, k, dtype=torch.float32), meta(k, dtype=torch.float32)
    return {
        "gated silu": lambda: gates.gated(x, x, "silu"),
        "gated gelu, halves": lambda: gates.gated(*halves, "gelu"),
        "gated_backward silu": lambda: gates.gated_backward(x, x, x, "silu"),
        "gated_backward gelu_tanh": lambda: gates.gated_backward(x, x, x, "gelu_tanh"),
        "bias_gelu": lambda: gates.bias_gelu(wide, bias, "gelu_tanh"),
        "bias_gelu_backward": lambda: gates.bias_gelu_backward(wide, wide, bias, "gelu"),
    }


def _ropes(d: int, rows: int = 4) -> dict[str, Callable[[], object]]:
    x, cos = meta(rows, 2048, 32, d).transpose(1, 2), meta(2048, d)
    grad = meta(rows, 32, 2048, d)
    return {
        "rope": lambda: rope.rope(x, cos, cos),
        "rope_backward": lambda: rope.rope_backward(grad, cos, cos, torch.bfloat16),
    }


def _cross_entropies(rows: int, v: int, stride: int) -> dict[str, Callable[[], object]]:
    x, target = meta(rows, stride)[:, :v], meta(rows, dtype=torch.int64)
    stats, grad = meta(rows, 3, dtype=torch.float32), meta(rows, dtype=torch.float32)
    vocab = (v, 2 * v)
    return {
        "ce_stats": lambda: cross_entropy.ce_stats(x, target, -100, vocab),
        "ce_backward": lambda: cross_entropy.ce_backward(grad, x, stats, target, -100, vocab),
    }


def _dropouts(rows: int, k: int) -> dict[str, Callable[[], object]]:
    x, kept = meta(rows, k), meta(rows, k, dtype=torch.bool)
    at = {"at_seed": 2**40 + 1, "at_step": 3, "op": 2}
    return {
        "dropout": lambda: dropout.dropout(x, 0.1, **at),
        "dropout_add": lambda: dropout.dropout_add(x, x, 0.1, **at),
        "dropout_backward": lambda: dropout.dropout_backward(x, kept, 0.1),
    }


CALLS: Mapping[str, Mapping[str, Callable[[], object]]] = {
    "aligned": {
        **norm_calls(8192, 4096),
        **_gates(8192, 11008),
        **_ropes(128),
        **_cross_entropies(8192, 128256, 128256),
        **_dropouts(8192, 4096),
    },
    "wide": norm_calls(4096, 16384),
    "large": {  # more than 2**31 elements
        **norm_calls(2**19 + 1, 4096),
        **_gates(2**18, 11008),
        **_ropes(128, 257),
        **_cross_entropies(2**15, 128256, 128256),
        **_dropouts(2**19 + 1, 4096),
    },
    "odd": {
        **norm_calls(8191, 4095),
        **_gates(8191, 11007),
        **_ropes(126),
        **_cross_entropies(8191, 25129, 25129),  # GPT-2's vocabulary over two ranks
        **_dropouts(8191, 4095),
    },
}
LEAST: Mapping[str, int] = {
    "rms_norm": 2,
    "add_rms_norm": 3,
    "rms_norm_backward": 3,
    "add_layer_norm": 4,
    "gated silu": 2,
    "gated gelu, halves": 2,
    "gated_backward silu": 3,
    "gated_backward gelu_tanh": 3,
    "bias_gelu": 2,
    "bias_gelu_backward": 3,
    "rope": 6,
    "rope_backward": 6,
    "ce_stats": 1,
    "ce_backward": 1,
    "dropout": 1,
    "dropout_add": 2,
    "dropout_backward": 1,
}
"""Loads of 16 bytes: one for each operand that is read whole, of rope for each half."""
ODD_BY_VECTORS = {
    *("gated silu", "gated_backward silu", "gated_backward gelu_tanh"),
    *("ce_stats", "ce_backward", "dropout_backward"),
}
"""Those that read odd lengths by vectors too, all but their edges."""


def rows(targets: Sequence[str], kinds: Sequence[str] = tuple(CALLS)) -> Iterator[list[str]]:
    """Yield rows of a table: the call, "aligned" or "odd", and for each target the registers and
    the vector loads of all loads. Each row is checked; sums of partial results (`sum_rows`)
    appear once."""
    known: set[str] = set()
    for kind in kinds:
        for name, call in CALLS[kind].items():
            found: dict[str, list[str]] = {}
            for target in targets:
                for launch in launches(call, target):
                    if launch.name != "sum_rows":
                        made = check(kind, name, launch, target)
                    elif f"{launch.name} {target}" in known:
                        continue
                    else:
                        known.add(f"{launch.name} {target}")
                        made = compile_for(launch, target)
                        assert made.spilled_bytes == 0 and made.registers <= MOST_REGISTERS
                    text = f"{made.registers}, {made.vector_loads} of {made.loads}"
                    title = name if launch.name != "sum_rows" else "sum of partial results"
                    found.setdefault(title, []).append(text)
            for title, cells in found.items():
                yield [title, kind, *cells]
