"""Tests that the simulator detects missing synchronisation: each wait, event, record, connection
and copy of the device code is removed in turn, and small programs run without it.

    python -m tests.testing.gpus.mutations                # a table; rc 1 where one is not found
    python -m tests.testing.gpus.mutations worker.py      # of these files alone
    python -m tests.testing.gpus.mutations --write      # into benchmarks/results/simulated_gpus.md

A mutation is found by a race, an early free, a wrong number or a deadlock under some seed. For a
mutation that is not found, `IMPLIED` names the rule of CUDA, NCCL or this code that implies the
same order. The transport runs `exchanges.py`; all other code runs `small_programs.py`, where
unchanged function objects receive the changed code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from dtensor.daft.ray.transports import exchange, nccl
from dtensor.daft.run import engine, first_uses, graphs, timestamps, transport, worker
from dtensor.daft.undo import snapshots
from dtensor.runtime.checkpoint import records, saving
from dtensor.runtime.lower import step_end
from dtensor.testing.gpus import simulated_gpus
from tests.testing.gpus.exchanges import all_exchanges, run_ranks, transport_of
from tests.testing.gpus.matrix import difference, without_kernels
from tests.testing.gpus.page import PAGE, Table
from tests.testing.gpus.small_programs import NUM_GPUS, PROGRAMS

STATEMENTS = {
    "wait", "wait_event", "wait_stream", "record", "record_stream", "synchronize", "_connect",
    "zero_", "use_once", "copy_all", "foreach_copy_", "query",
}  # fmt: skip
COPIES = {
    "clone",
    "contiguous",
    "copied",
    "_clone",
    "_copy_value",
    "copy_to",
    "private_copy",
    "cpu",
}
WIRE: Mapping[str, ModuleType] = {"nccl.py": nccl, "exchange.py": exchange}
OTHERS: Mapping[str, tuple[ModuleType, tuple[str, ...]]] = {
    "transport.py": (transport, ("by hand", "training")),
    "worker.py": (worker, ("by hand", "one process", "training", "undone")),
    "engine.py": (engine, ("first use", "undone")),
    "graphs.py": (graphs, ("graphs",)),
    "first_uses.py": (first_uses, ("first step of GPipe", "training")),
    "timestamps.py": (timestamps, ("timed",)),
    "snapshots.py": (snapshots, ("undone late",)),
    "saving.py": (saving, ("checkpoint",)),
    "records.py": (records, ("checkpoint",)),
    "step_end.py": (step_end, ("turning", "one process")),
}
"""With the programs that use them."""
MODULES: Mapping[str, ModuleType] = {
    **WIRE,
    **{file: module for file, (module, _) in OTHERS.items()},
}
CASTS = {"nccl.py"}
"""Where casts are removed, too."""
TEXTS = {"step_end.py"}
"""What writes code, in which it clones."""

_OF_TASKS = "messages of unknown length are CPU tensors, between tasks, over gloo"
_AGAIN = "the next change copies what it writes anew, and nothing restores this record again"
_OWN = "what a rank saves is a contiguous copy on the CPU (saving.py, private_copy)"
IMPLIED: Mapping[tuple[str, str], str] = {
    ("nccl.py", "stream.wait_stream(torch.cuda.current_stream(self._device))"): (
        "the side stream first waits for a group, which began behind the current stream "
        "(ProcessGroupNCCL.cpp, syncStream)"
    ),
    ("nccl.py", "work.wait()"): (
        "nobody reads what connects, and torch keeps it until its message has ended "
        "(ProcessGroupNCCL.hpp of 2.13, lines 1426-1432)"
    ),
    ("exchange.py", "v.contiguous()"): (
        "reshape copies where it cannot be a view (torch.Tensor.reshape), and what goes is made "
        "contiguous by as_bytes"
    ),
    ("exchange.py:_start_variable_recv", "work.wait()"): _OF_TASKS,
    (
        "worker.py",
        "value.detach().to(device, copy=True, memory_format=torch.contiguous_format)",
    ): "it goes to another device, to which `to` copies (documentation of torch.Tensor.to)",
    (
        "saving.py",
        "tensor.detach().to('cpu', copy=True, memory_format=torch.contiguous_format)",
    ): "it goes to another device, to which `to` copies (documentation of torch.Tensor.to)",
    ("records.py", "self.tensor.detach().resolve_conj().resolve_neg().cpu()"): _OWN,
    ("records.py", "self.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()"): _OWN,
    ("snapshots.py", "_copy_value(record.others[key])"): _AGAIN,
    ("snapshots.py", "saved.clone()"): _AGAIN,
    ("engine.py", "torch.stack(values).cpu()"): (
        "the counts of a sized exchange are then copied by `tolist`, one vector at a time"
    ),
    (
        "engine.py",
        "torch.cuda.current_stream(device).query()",
    ): "it asks whether CUDA's context is lost, which no simulated GPU does",
}
"""Mutations, by file and text, that nothing can find, and why."""


@dataclass(frozen=True, slots=True)
class Mutation:
    file: str
    line: int
    function: str
    text: str
    source: str
    """The module's, without it."""

    @property
    def cell(self) -> str:
        return f"{self.file}:{self.line} `{self.text}`"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


def mutations() -> Iterator[Mutation]:
    for file, module in MODULES.items():
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        drop = _without_clone if file in TEXTS else _without_cast if file in CASTS else _dropped
        sites = [node for node in ast.walk(ast.parse(source)) if drop(node) is not None]
        for number, site in enumerate(sites):
            tree = ast.parse(source)
            remover = _Remover(number, drop)
            tree = ast.fix_missing_locations(remover.visit(tree))
            line = getattr(site, "lineno", 0)
            text = ast.unparse(site).splitlines()[0]
            yield Mutation(file, line, _around(ast.parse(source), line), text, ast.unparse(tree))


def _around(tree: ast.AST, line: int) -> str:
    """Return the function or method that contains the line."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    methods = [f for f in around if f.args.args and f.args.args[0].arg == "self"]
    return (methods or around)[-1].name if around else ""


def _called(node: ast.AST) -> str:
    func = node.func if isinstance(node, ast.Call) else None
    return getattr(func, "attr", getattr(func, "id", ""))


def _dropped(node: ast.AST) -> ast.AST | None:
    """Return the code that replaces the node."""
    if isinstance(node, ast.Expr) and _called(node.value) in STATEMENTS:
        return ast.Pass()
    if isinstance(node, ast.Call) and _called(node) in COPIES:
        return (
            node.args[0] if isinstance(node.func, ast.Name) else getattr(node.func, "value", None)
        )
    if isinstance(node, ast.Call) and _called(node) == "map":
        return node.args[1] if getattr(node.args[0], "id", "") in COPIES else None
    copies = isinstance(node, ast.Call) and any(k.arg == "copy" for k in node.keywords)
    if copies and _called(node) == "to":  # the copy still goes to the device
        kept = [k for k in node.keywords if k.arg != "copy"]
        return ast.Call(node.func, node.args, kept)
    return None


def _without_cast(node: ast.AST) -> ast.AST | None:
    """Remove a cast, or what `_dropped` removes."""
    func = node.func if isinstance(node, ast.Call) and not node.keywords else None
    is_cast = isinstance(func, ast.Attribute) and func.attr == "to"
    return func.value if is_cast else _dropped(node)


def _without_clone(node: ast.AST) -> ast.AST | None:
    """Remove a clone from code that is given as text."""
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
    if not any(isinstance(part, str) and ".clone()" in part for part in parts):
        return None
    return ast.JoinedStr(
        [
            ast.Constant(part.replace(".clone()", "")) if isinstance(part, str) else value
            for part, value in zip(parts, node.values, strict=True)
        ]
    )


class _Remover(ast.NodeTransformer):
    """Removes the site with this number, in the order of `ast.walk`."""

    def __init__(self, number: int, drop: Callable[[ast.AST], ast.AST | None]) -> None:
        self._number, self._drop = number, drop
        self._site: ast.AST | None = None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Module):
            sites = [each for each in ast.walk(node) if self._drop(each) is not None]
            self._site = sites[self._number]
        if node is self._site:
            return self._drop(node)
        return self.generic_visit(node)


def found(mutation: Mutation, seeds: range) -> str | None:
    """Return how, and under which seed, the mutation is found."""
    if mutation.file in WIRE:
        return _by_exchanges(mutation, seeds)
    return _by_programs(mutation, seeds)


@cache
def _expected(program: str) -> Mapping[str, Any]:
    return PROGRAMS[program]("cpu")


def _by_programs(mutation: Mutation, seeds: range) -> str | None:
    _, used = OTHERS[mutation.file]
    wanted = {name: _expected(name) for name in used}
    with without_kernels(), mutated(mutation):
        for seed in seeds:
            for name in used:
                body = PROGRAMS[name]
                try:
                    with simulated_gpus(NUM_GPUS, seed, early=(0.0, 0.5)[seed % 2]) as gpus:
                        given = body("cuda")
                        report = gpus.report()
                    off = difference(given, wanted[name])
                except Exception as error:
                    return f"seed {seed}, {name}: {type(error).__name__}"
                if report.races:
                    return f"seed {seed}, {name}: {len(report.races)} races"
                if report.early_frees:
                    return f"seed {seed}, {name}: {len(report.early_frees)} early frees"
                if off > 1e-5:
                    return f"seed {seed}, {name}: off by {off:.1e}"
    return None


@contextmanager
def mutated(mutation: Mutation) -> Generator[None]:
    """Give the functions of the module the mutated code inside the block."""
    module = MODULES[mutation.file]
    new = {code.co_qualname: code for code in _codes(compile(mutation.source, "m", "exec"))}
    old: dict[Any, CodeType] = {}
    for function in _functions(module):
        code = new.get(function.__qualname__)
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            old[function] = function.__code__
            function.__code__ = code.replace(co_filename=function.__code__.co_filename)
    try:
        yield
    finally:
        for function, code in old.items():
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _functions(module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for each in vars(value).values() if isinstance(value, type) else [value]:
            plain = inspect.unwrap(getattr(each, "fget", None) or getattr(each, "__func__", each))
            if isinstance(plain, FunctionType):
                yield plain


def _by_exchanges(mutation: Mutation, seeds: range) -> str | None:
    module = ModuleType(MODULES[mutation.file].__name__)
    sys_module = sys.modules[module.__name__]
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(mutation.source, mutation.file, "exec"), vars(module))
    finally:
        sys.modules[module.__name__] = sys_module
    wire: Any = getattr(module, "NcclWire", nccl.NcclWire)
    made: Any = getattr(module, "ExchangeTransport", exchange.ExchangeTransport)
    both = (False,) if mutation.file == "exchange.py" else (True, False)
    if mutation.file == "exchange.py":
        vars(module)["SMALL_ALL_REDUCE"] = 0
    for seed, is_native in product(seeds, both):
        make = partial(transport_of, is_native=is_native, wire=wire, transport=made)
        try:
            report = run_ranks(3, seed, all_exchanges, early=(0.0, 0.5)[seed % 2], make=make)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}"
        if report.races:
            return f"seed {seed}: {len(report.races)} races"
        if report.early_frees:
            return f"seed {seed}: {len(report.early_frees)} early frees"
    return None


def implied(mutation: Mutation) -> str | None:
    for where in (mutation.file, f"{mutation.file}:{mutation.function}"):
        if (reason := IMPLIED.get((where, mutation.text))) is not None:
            return reason
    return None


HEAD = ("without", "found by, or why it is kept")


def main(given: list[str], say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="of MODULES")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help=f"the table in {PAGE.name}")
    options = parser.parse_args(given)
    seeds, lost, table = range(options.seeds), 0, Table("mutations", HEAD)
    for file in ("nccl.py", "transport.py"):
        text = Path(str(MODULES[file].__file__)).read_text()
        if by := found(Mutation(file, 0, "", "", text), range(1)):
            say(f"programs fail as they are: {by}")
            return 1
    every = list(mutations())
    for mutation in every:
        if options.files and mutation.file not in options.files:
            continue
        by = found(mutation, seeds)
        reason = implied(mutation)
        lost += by is None and reason is None
        seen = by or (f"kept: {reason}" if reason else "NOT FOUND")
        say(f"{mutation!s:<70}  {seen}")
        sys.stdout.flush()
        table.put(mutation.cell, seen)
        if options.write:
            table.keep([each.cell for each in every])
            table.write()
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
