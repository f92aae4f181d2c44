"""The program that the planner places: inputs, ops in order, outputs; no placements yet.

    Dataflow(inputs=(Input("x", ...), Input("w1", ..., kind="parameter")),
             ops=(Op(name="h", call=mm, operands=("x", "w1"), results=("h",), ...),),
             outputs=(Output("h", "result", 0),))

The frontend makes it from a captured graph. Values are named; each name is defined once, before
its uses. Ops that return several tensors define several values.

Invariants are checked by `Dataflow.verify`. It knows no mesh and no torch.fx.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from dtensor.sharding.ops.call import Meta, OpCall
from dtensor.sharding.plan.recognised import Recognised

InputKind = Literal["parameter", "buffer", "argument", "constant", "tangent"]
OutputKind = Literal["result", "gradient", "mutation"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that the program starts from; ``label`` is the user's name for it."""

    name: str
    meta: Meta
    kind: InputKind
    label: str
    stages: tuple[int, ...] = (0,)
    constant: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """A composite op as simpler calls, each of one result. Values are numbered: the op's operands,
    then the results of the calls; ``results`` are the numbers of the op's own (None: not made)."""

    calls: tuple[OpCall, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: its call, the names of its operands and results, and where it came from."""

    name: str
    call: OpCall
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    phase: Phase = "forward"
    source: str = ""  # "mlp.py:14"
    source_text: str = ""
    module: str = ""
    calls: tuple[str, ...] = ()  # of modules around it, outermost first: "blocks.0", "norm@1"
    checkpoint: int | None = None  # the number of the torch.utils.checkpoint that runs it
    stage: int = 0
    # of a composite op: writes the call out, where it can; it follows from the call
    expand: Callable[[OpCall], Expansion | None] | None = field(
        default=None, compare=False, repr=False
    )
    over_batch: bool = False  # a composite op that takes statistics over the batch
    # links a backward op to its forward op; counted by the process, so not compared
    seq: int | None = field(default=None, compare=False)
    copy_of: str | None = None  # the op that this one repeats on another stage


@dataclass(frozen=True, slots=True)
class Output:
    """``of``: the index of a user result, the label of the input a gradient belongs to."""

    value: str
    kind: OutputKind
    of: int | str
    stage: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Dataflow:
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    num_stages: int = 1
    recognised: tuple[Recognised, ...] = ()  # in the order of the program, before its backward
    autocast: tuple[str, ...] = ()  # the lists of ops that its casts follow: "cuda, bf16"

    def __repr__(self) -> str:
        num = f"inputs: {len(self.inputs):,}, ops: {len(self.ops):,}"
        return f"<dataflow, {num}, outputs: {len(self.outputs):,}>"

    @cached_property
    def metas(self) -> dict[str, Meta]:
        """Value name to global shape and dtype."""
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
        """Value name to the (op, operand index) pairs that read it, in program order."""
        readers: dict[str, list[tuple[Op, int]]] = {}
        for op in self.ops:
            for index, name in enumerate(op.operands):
                readers.setdefault(name, []).append((op, index))
        return {name: tuple(uses) for name, uses in readers.items()}

    @cached_property
    def batch_values(self) -> frozenset[str]:
        """Every value that depends on an argument of the program."""
        return self.depending("argument", "tangent")

    def depending(self, *kinds: InputKind) -> frozenset[str]:
        """Every value that depends on an input of one of these kinds, those inputs included."""
        values = {item.name for item in self.inputs if item.kind in kinds}
        for op in self.ops:
            if not values.isdisjoint(op.operands):
                values.update(name for name in op.results if name is not None)
        return frozenset(values)

    def pruned(self, outputs: tuple[Output, ...]) -> Dataflow:
        """The program with these outputs alone, without what only others needed."""
        needed = {output.value for output in outputs}
        ops: list[Op] = []
        for op in reversed(self.ops):
            if any(name in needed for name in op.results):
                needed.update(op.operands)
                ops.append(op)
        return replace(self, ops=tuple(reversed(ops)), outputs=outputs)

    def verify(self) -> None:
        """AssertionError where a value is used before its definition or defined twice."""
        defined = [item.name for item in self.inputs]
        seen = set(defined)
        assert len(seen) == len(defined), "an input name occurs twice"
        for op in self.ops:
            assert len(op.operands) == len(op.call.operands), op.name
            for name in op.operands:
                assert name in seen, f"{op.name} reads {name} before it is defined"
            for name in op.results:
                assert name is None or name not in seen, f"{name} is defined twice"
                if name is not None:
                    seen.add(name)
        for output in self.outputs:
            assert output.value in seen, f"output {output.value} is not defined"


# -- repeated layers -------------------------------------------------------------------------------


def layer_group(op: Op, flow: Dataflow) -> Hashable:
    """Equal for the same op of repeated layers; the op's own name for what is not repeated.

    Layers make one choice, so that a model of any depth is solved at the size of one. Two ops are
    alike where their module paths differ in numbers alone and their calls are equal. A sum of
    gradients stands in no module; it is told by the modules whose gradients it adds.
    """
    inside = (without_numbers(op.module),)
    if inside == (op.module,):
        adds = op.phase == "backward" and not op.module
        inside = _operand_modules(op, flow) if adds else ()
        if not any("*" in path for path in inside):
            return op.name
    call = op.call
    return (inside, op.phase, op.source, call.name, call.operands, call.results, repr(call.args))


def _operand_modules(op: Op, flow: Dataflow) -> tuple[str, ...]:
    producers = (flow.producers.get(name) for name in op.operands)
    return tuple("" if p is None else without_numbers(p.module) for p in producers)


def without_numbers(path: str) -> str:
    """``blocks.*.norm1`` of ``blocks.3.norm1``: a layer's number goes, a number in a name stays."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
