"""Triton's kernels on simulated GPUs: by Triton's interpreter, queued as any kernel.

Kernels of `@triton.jit` run in the interpreter of `triton.runtime` while GPUs are
simulated, whether or not `TRITON_INTERPRET` was set when they were defined. Of `@triton.autotune`
the first configuration is taken. The arguments that a kernel writes are those whose names reach the
pointer of a `tl.store` or `tl.atomic_*` in its text, or in that of a kernel that it calls.
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
from dtensor.testing.gpus.tensors import SimTensor, alone
from dtensor.testing.gpus.world import Kernel


@contextmanager
def interpreted() -> Generator[None]:
    """Within, launches of kernels with a `SimTensor` are interpreted and queued."""
    try:
        from triton.runtime import autotuner, interpreter, jit
    except ImportError:  # without Triton there are no kernels of it
        yield
        return
    function: Any = jit.JITFunction
    executor: Any = interpreter.GridExecutor
    tuner: Any = autotuner.Autotuner
    make: Any = interpreter.InterpretedFunction
    compiled, plain, tuned = function.run, executor.__call__, tuner.run

    @cache
    def interpreter_of(fn: Callable[..., Any]) -> Any:
        return make(fn)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        does = interpreter_of(self.fn).run if _sims(args, kwargs) else compiled.__get__(self)
        return does(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreter_of(self.fn)(*args, **kwargs)

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _sims(args, kwargs):
            return tuned(self, *args, **kwargs)
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _sims(args, kwargs):
            plain(self, *args, **kwargs)
            return
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        _put(self.fn, given, lambda **elems: plain(self, **elems))

    with ExitStack() as patches:
        for owner, name, new in (
            (function, "run", run),
            (function, "__call__", call),
            (tuner, "run", tune),
            (executor, "__call__", launch),
        ):
            patches.enter_context(patch.object(owner, name, new))
        yield


def _put(fn: Any, given: Mapping[str, Any], run: Callable[..., Any]) -> None:
    """Queue the kernel, whose arguments are ``given`` by name."""
    import numpy as np  # as the interpreter does

    sims = {name: x for name, x in given.items() if isinstance(x, SimTensor)}
    line, seen = line_here(), here().current
    if any(isinstance(x, Tensor) and not isinstance(x, SimTensor) for x in given.values()):
        raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?) ({line})")
    for name, x in sims.items():
        if x.seen is not seen:
            raise ValueError(
                f"{name} is on {x.seen.device}, and Triton launches {fn.__name__} on the current "
                f"one, {seen.device} ({line}).\nfix: torch.cuda.device({name}.device) around it"
            )
    elems = {name: x.elem if isinstance(x, SimTensor) else x for name, x in given.items()}

    def silent() -> None:  # on a GPU inf - inf is NaN, and no warning
        with np.errstate(all="ignore"):
            run(**elems)

    what = f"Triton's {fn.__name__}"
    first_use(what, seen.device)
    seen.stream.put(Kernel(what, line, seen.stream, alone(silent)))
    names = written_arguments(fn)
    writes = {id(x.block): x.block for name, x in sims.items() if name in names}
    reads = {id(x.block): x.block for x in sims.values() if id(x.block) not in writes}
    now = Access(what, line, f"{seen.device}, {seen.stream.name}")
    seen.memory.access(seen.stream, reads.values(), writes.values(), now)


def _sims(args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    return any(isinstance(x, SimTensor) for x in (*args, *kwargs.values()))


@cache
def written_arguments(fn: Callable[..., Any]) -> frozenset[str]:
    """Of a kernel's function. All of them, where its text is not known."""
    parameters = list(inspect.signature(fn).parameters)
    original = inspect.unwrap(fn)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    except (OSError, SyntaxError):
        return frozenset(parameters)
    reach = {name: {name} for name in parameters}  # which parameters each name depends on
    found: set[str] = set()

    def of(node: ast.AST) -> set[str]:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return set[str]().union(*(reach.get(name, set()) for name in names))

    def called(call: ast.Call) -> Iterable[ast.expr]:
        """The arguments through which a call writes."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "store" or name.startswith("atomic_"):
            return call.args[:1] or [k.value for k in call.keywords if k.arg == "pointer"]
        callee = getattr(original, "__globals__", {}).get(getattr(call.func, "id", ""))
        inner = getattr(callee, "fn", None)
        if inner is None:
            return []
        names, theirs = list(inspect.signature(inner).parameters), written_arguments(inner)
        passed = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        return [value for name, value in passed if name in theirs]

    for _ in range(2):  # twice: a loop may use what it assigns further down
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=value):
                    assigned = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                case ast.AugAssign(target=ast.Name() as target, value=value):
                    assigned = [target]
                case ast.Call():
                    found |= set[str]().union(*map(of, called(node)))
                    continue
                case _:
                    continue
            for each in assigned:
                reach.setdefault(each.id, set()).update(of(value))
    return frozenset(found)
