"""Does the simulator see what our device code must not lack? Each wait, event, record, connection
and copy of it is dropped in turn, and the exchanges run without it.

    python -m tests.testing.gpus.mutations                # a table; rc 1 where one is not found

A mutation is found by a race, an early free, a wrong number or a run that cannot go on, under one
of the seeds. One that is not found has its reason in `IMPLIED`: the rule of CUDA's, of NCCL's or of
this code by which something else orders the same. None is taken away for that.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dtensor.daft.ray.transports import exchange, nccl
from dtensor.testing.gpus import SimulatedGpus
from tests.testing.gpus.exchanges import all_exchanges, run_ranks

STATEMENTS = {"wait", "wait_event", "wait_stream", "record", "record_stream", "_connect", "zero_"}
COPIES = {"clone", "contiguous", "copied"}
MODULES: Mapping[str, ModuleType] = {"nccl.py": nccl, "exchange.py": exchange}

_OF_TASKS = "messages of unknown length are CPU tensors, between tasks, over gloo"
IMPLIED: Mapping[tuple[str, str], str] = {
    ("nccl.py", "stream.wait_stream(torch.cuda.current_stream(self._device))"): (
        "the side stream first waits for a group, which began behind the current stream "
        "(ProcessGroupNCCL.cpp, syncStream)"
    ),
    ("nccl.py", "work.wait()"): (
        "nobody reads what connects, and NCCL has recorded its memory (ProcessGroupNCCL.cpp, "
        "pointToPoint)"
    ),
    ("exchange.py", "v.contiguous()"): (
        "reshape copies where it cannot be a view (torch.Tensor.reshape), and what goes is made "
        "contiguous by as_bytes"
    ),
    ("exchange.py:_start_variable_recv", "work.wait()"): _OF_TASKS,
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

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


def mutations() -> Iterator[Mutation]:
    for file, module in MODULES.items():
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        sites = [node for node in ast.walk(ast.parse(source)) if _dropped(node) is not None]
        for number, site in enumerate(sites):
            tree = ast.parse(source)
            remover = _Remover(number)
            tree = ast.fix_missing_locations(remover.visit(tree))
            line = getattr(site, "lineno", 0)
            text = ast.unparse(site).splitlines()[0]
            yield Mutation(file, line, _around(tree, line), text, ast.unparse(tree))


def _around(tree: ast.AST, line: int) -> str:
    """The function or method of that line."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    methods = [f for f in around if f.args.args and f.args.args[0].arg == "self"]
    return (methods or around)[-1].name if around else ""


def _called(node: ast.AST) -> str:
    func = node.func if isinstance(node, ast.Call) else None
    return getattr(func, "attr", getattr(func, "id", ""))


def _dropped(node: ast.AST) -> ast.AST | None:
    """What stands in its place."""
    if isinstance(node, ast.Expr) and _called(node.value) in STATEMENTS:
        return ast.Pass()
    if isinstance(node, ast.Call) and _called(node) in COPIES:
        return (
            node.args[0] if isinstance(node.func, ast.Name) else getattr(node.func, "value", None)
        )
    return None


class _Remover(ast.NodeTransformer):
    """Of the site with this number, in the order of `ast.walk`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._site: ast.AST | None = None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Module):
            sites = [each for each in ast.walk(node) if _dropped(each) is not None]
            self._site = sites[self._number]
        if node is self._site:
            return _dropped(node)
        return self.generic_visit(node)


def found(mutation: Mutation, seeds: range) -> str | None:
    """By what, and under which seed."""
    module = ModuleType(MODULES[mutation.file].__name__)
    sys_module = sys.modules[module.__name__]
    sys.modules[module.__name__] = module  # for its dataclasses
    try:
        exec(compile(mutation.source, mutation.file, "exec"), vars(module))
    finally:
        sys.modules[module.__name__] = sys_module
    wire: Any = getattr(module, "NcclWire", nccl.NcclWire)
    transport: Any = getattr(module, "ExchangeTransport", exchange.ExchangeTransport)
    if mutation.file == "exchange.py":
        vars(module)["SMALL_BYTES"] = 0

    def make(rank: int, size: int, gpus: SimulatedGpus) -> Any:
        own = wire((rank,), torch.device("cuda", 0), gpus.fabric.group)
        return transport(own, tuple(range(size)))

    for seed in seeds:
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


def main(given: list[str], say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    seeds = range(parser.parse_args(given).seeds)
    lost = 0
    if by := found(Mutation("nccl.py", 0, "", "", Path(str(nccl.__file__)).read_text()), seeds):
        say(f"the exchanges fail as they are: {by}")
        return 1
    for mutation in mutations():
        by = found(mutation, seeds)
        reason = implied(mutation)
        lost += by is None and reason is None
        kept = f"kept: {reason}" if reason else "NOT FOUND"
        say(f"{mutation!s:<70}  {by or kept}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
