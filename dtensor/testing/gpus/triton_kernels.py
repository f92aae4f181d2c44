"""Runs Triton kernels on simulated GPUs, in Triton's interpreter, queued like other kernels.

Kernels of `@triton.jit` are interpreted also if `TRITON_INTERPRET` was not set when they were
defined. `@triton.autotune` takes its first configuration. A kernel writes the arguments from which
its source computes the pointer of a `tl.store` or `tl.atomic_*`, also in a kernel that it calls.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dtensor.testing.gpus.host import first_use, here, line_here
from dtensor.testing.gpus.memory import Access
from dtensor.testing.gpus.tensors import SimTensor, without_modes
from dtensor.testing.gpus.world import Kernel


@contextmanager
def interpreted() -> Generator[None]:
    """A context in which launches of kernels with a `SimTensor` are interpreted and queued."""
    try:
        from triton.runtime import autotuner, interpreter, jit
    except ImportError:  # without Triton no kernel is launched
        yield
        return
    function: Any = jit.JITFunction
    executor: Any = interpreter.GridExecutor
    tuner: Any = autotuner.Autotuner
    make: Any = interpreter.InterpretedFunction
    original_run, original_launch, original_tune = function.run, executor.__call__, tuner.run

    @cache
    def interpreter_of(fn: Callable[..., Any]) -> Any:
        return make(fn)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        simulated = _has_sim_tensor(args, kwargs)
        run = interpreter_of(self.fn).run if simulated else original_run.__get__(self)
        return run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreter_of(self.fn)(*args, **kwargs)

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_sim_tensor(args, kwargs):
            return original_tune(self, *args, **kwargs)
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _has_sim_tensor(args, kwargs):
            original_launch(self, *args, **kwargs)
            return
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        _put(self.fn, arguments, lambda **elems: original_launch(self, **elems))

    with ExitStack() as patches:
        for owner, name, new in (
            (function, "run", run),
            (function, "__call__", call),
            (tuner, "run", tune),
            (executor, "__call__", launch),
        ):
            patches.enter_context(patch.object(owner, name, new))
        yield


def _put(fn: Any, arguments: Mapping[str, Any], run: Callable[..., Any]) -> None:
    """Queue the kernel on the current stream. ``run`` interprets it with CPU tensors."""
    import numpy as np  # the interpreter computes with numpy

    sims = {name: x for name, x in arguments.items() if isinstance(x, SimTensor)}
    line, gpu = line_here(), here().current
    if any(isinstance(x, Tensor) and not isinstance(x, SimTensor) for x in arguments.values()):
        raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?) ({line})")
    for name, x in sims.items():
        if x.gpu is not gpu:
            raise ValueError(
                f"{name} is on {x.gpu.device}, and Triton launches {fn.__name__} on the current "
                f"one, {gpu.device} ({line}).\nfix: torch.cuda.device({name}.device) around it"
            )
    elems = {name: x.elem if isinstance(x, SimTensor) else x for name, x in arguments.items()}

    def run_silently() -> None:  # on a GPU inf - inf is NaN without a warning
        with np.errstate(all="ignore"):
            run(**elems)

    what = f"Triton's {fn.__name__}"
    first_use(what, gpu.device)
    gpu.stream.put(Kernel(what, line, gpu.stream, without_modes(run_silently)))
    names = written_arguments(fn)
    writes = {id(x.block): x.block.used for name, x in sims.items() if name in names}
    reads = {id(x.block): x.block.used for x in sims.values() if id(x.block) not in writes}
    now = Access(what, line, f"{gpu.device}, {gpu.stream.name}")
    gpu.memory.access(gpu.stream, reads.values(), writes.values(), now)


def _has_sim_tensor(args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    return any(isinstance(x, SimTensor) for x in (*args, *kwargs.values()))


@cache
def written_arguments(fn: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments that a kernel function writes; all names if its source is
    not available."""
    parameters = list(inspect.signature(fn).parameters)
    original = inspect.unwrap(fn)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    except (OSError, SyntaxError):
        return frozenset(parameters)
    depends_on = {name: {name} for name in parameters}  # for each name, parameters in its value
    written: set[str] = set()

    def parameters_in(node: ast.AST) -> set[str]:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return set[str]().union(*(depends_on.get(name, set()) for name in names))

    def written_by(call: ast.Call) -> Iterable[ast.expr]:
        """Return the arguments through which a call writes."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "store" or name.startswith("atomic_"):
            return call.args[:1] or [k.value for k in call.keywords if k.arg == "pointer"]
        callee = getattr(original, "__globals__", {}).get(getattr(call.func, "id", ""))
        inner = getattr(callee, "fn", None)
        if inner is None:
            return []
        names, inner_written = list(inspect.signature(inner).parameters), written_arguments(inner)
        passed = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        return [value for name, value in passed if name in inner_written]

    for _ in range(2):  # twice, because a loop may use a name that it assigns further down
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=value):
                    assigned = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                case ast.AugAssign(target=ast.Name() as target, value=value):
                    assigned = [target]
                case ast.Call():
                    written |= set[str]().union(*map(parameters_in, written_by(node)))
                    continue
                case _:
                    continue
            for each in assigned:
                depends_on.setdefault(each.id, set()).update(parameters_in(value))
    return frozenset(written)
