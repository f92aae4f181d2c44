"""`Dataflow`: the planner's input, a program as inputs, ops and outputs, without placements.

    Dataflow(inputs=(Input("x", ...), Input("w1", ..., kind="parameter")),
             ops=(Op(name="h", call=mm, operands=("x", "w1"), results=("h",), ...),),
             outputs=(Output("h", "result", 0),))

The frontend makes it from a captured graph. A value has a name, which is defined once, before its
uses; an op that returns several tensors defines several values. `Dataflow.verify` checks this. A
Dataflow does not depend on a mesh or on torch.fx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from dtensor.sharding.ops.call import Meta, OpCall

InputKind = Literal["parameter", "buffer", "argument", "constant", "tangent", "delayed"]
OutputKind = Literal["result", "gradient", "mutation", "delayed"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of the program; ``label`` is the user's name for it."""

    name: str
    meta: Meta
    kind: InputKind
    label: str
    stages: tuple[int, ...] = (0,)
    constant: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """A composite op written as simpler calls of one result each.

    Values are numbered: first the op's operands, then the results of the calls in order.
    ``operands``: the numbers of the values that each call reads; ``results``: the numbers of the
    composite op's results (None for a result that it does not make).
    """

    calls: tuple[OpCall, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: its call, its operands and results by name, and its place in the user's code."""

    name: str
    call: OpCall
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    phase: Phase = "forward"
    source: str = ""  # "mlp.py:14"
    source_text: str = ""
    module: str = ""
    calls: tuple[str, ...] = ()  # enclosing module calls, outermost first: "blocks.0", "norm@1"
    checkpoint: int | None = None  # the number of the torch.utils.checkpoint around the op
    stage: int = 0
    # for a composite op: expands its call if possible; not compared, as it follows from the call
    expand: Callable[[OpCall], Expansion | None] | None = field(
        default=None, compare=False, repr=False
    )
    over_batch: bool = False  # whether it is a composite op that takes statistics over the batch
    # equal for a backward op and its forward op; a counter of the process, so not compared
    seq: int | None = field(default=None, compare=False)
    copy_of: str | None = None  # the name of the op that this op repeats on another stage


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the program. ``of``: the index of a result, or the label of the input that a
    gradient or mutation belongs to."""

    value: str
    kind: OutputKind
    of: int | str
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Recognised:
    """A pattern of the user's program that became one op, or stayed unchanged for a reason.

    ``what``: the kind of pattern, "attention"; ``op``: the op that replaced it, or ""; ``reason``:
    why it stayed unchanged, or ""; ``module``: the path of the user's module; ``source``: the
    user's line, "mlp.py:14". The recognisers are in frontend/capture/recognise.
    """

    what: str
    op: str
    reason: str
    module: str
    source: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Dataflow:
    """A program: its inputs, its ops in order, and its outputs."""

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    num_stages: int = 1
    recognised: tuple[Recognised, ...] = ()  # in the order of the forward
    autocast: tuple[str, ...] = ()  # device and dtype of each autocast: "cuda, bf16"

    def __repr__(self) -> str:
        num = f"inputs: {len(self.inputs):,}, ops: {len(self.ops):,}"
        return f"<dataflow, {num}, outputs: {len(self.outputs):,}>"

    @cached_property
    def metas(self) -> dict[str, Meta]:
        """The global shape and dtype of each value, by name."""
        metas = {item.name: item.meta for item in self.inputs}
        for op in self.ops:
            for name, meta in zip(op.results, op.call.results, strict=True):
                if name is not None and meta is not None:
                    metas[name] = meta
        return metas

    @cached_property
    def producers(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.results if name is not None}

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[Op, int], ...]]:
        """Value -> the (op, operand index) pairs that read it, in program order."""
        readers: dict[str, list[tuple[Op, int]]] = {}
        for op in self.ops:
            for index, name in enumerate(op.operands):
                readers.setdefault(name, []).append((op, index))
        return {name: tuple(uses) for name, uses in readers.items()}

    @cached_property
    def batch_values(self) -> frozenset[str]:
        """The values that depend on an argument of the program."""
        return self.depending("argument", "tangent")

    def depending(self, *kinds: InputKind) -> frozenset[str]:
        """Return the inputs of these kinds and all values that depend on them."""
        values = {item.name for item in self.inputs if item.kind in kinds}
        for op in self.ops:
            if not values.isdisjoint(op.operands):
                values.update(name for name in op.results if name is not None)
        return frozenset(values)

    def pruned(self, outputs: tuple[Output, ...]) -> Dataflow:
        """Return the program with only these outputs and the ops that they need."""
        needed = {output.value for output in outputs}
        ops: list[Op] = []
        for op in reversed(self.ops):
            if any(name in needed for name in op.results):
                needed.update(op.operands)
                ops.append(op)
        return replace(self, ops=tuple(reversed(ops)), outputs=outputs)

    def verify(self) -> None:
        """Raise AssertionError if a value is defined twice or used before its definition."""
        input_names = [item.name for item in self.inputs]
        defined = set(input_names)
        assert len(defined) == len(input_names), "an input name occurs twice"
        for op in self.ops:
            assert len(op.operands) == len(op.call.operands), op.name
            for name in op.operands:
                assert name in defined, f"{op.name} reads {name} before it is defined"
            for name in op.results:
                assert name is None or name not in defined, f"{name} is defined twice"
                if name is not None:
                    defined.add(name)
        for output in self.outputs:
            assert output.value in defined, f"output {output.value} is not defined"


# -- repeated layers -------------------------------------------------------------------------------


def layer_groups(flow: Dataflow) -> dict[str, Hashable]:
    """Return a key for each op by name. The key is equal for the same op of repeated layers; it is
    the op's name if the op is not in a repeated layer.

    The planner makes one choice for each group, so the problem size does not grow with the number
    of layers. Ops are in one group if their calls are equal, their module paths differ only in
    numbers, and each is the n-th such op of a call of its module. A call ends at an op outside the
    module. A sum of gradients belongs to no module; the modules whose gradients it adds count.
    """
    groups: dict[str, Hashable] = {}
    counts: Counter[Hashable] = Counter()
    calls: Counter[str] = Counter()  # by module path, how often it was entered
    last = ""  # the module of the op before
    for op in flow.ops:
        paths = (op.module,)
        if op.phase == "backward" and not op.module:
            paths = tuple(p.module if (p := flow.producers.get(v)) else "" for v in op.operands)
        elif op.module:
            calls.update(path for path in _prefixes(op.module) if not _is_in(last, path))
            last = op.module
        layer = tuple(map(without_numbers, paths))
        groups[op.name] = op.name
        if layer != paths:
            call = op.call
            metas = (call.operands, call.results)
            key = (layer, op.phase, op.source, call.name, *metas, repr(call.args))
            of_call = (paths, calls[op.module], key)
            groups[op.name] = (*key, counts[of_call])
            counts[of_call] += 1
    return groups


def _prefixes(path: str) -> list[str]:
    """Return the module path and the paths of the modules around it."""
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _is_in(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def without_numbers(path: str) -> str:
    """Replace layer numbers by stars: ``blocks.3.norm1`` becomes ``blocks.*.norm1``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
