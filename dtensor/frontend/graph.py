"""A captured program: one `torch.fx` graph of global ops, with a record of each input and output.

    def forward(self, x):             x                          f32[8,16]
        h = self.up(x)                up_weight                  f32[32,16]
        ...                           permute = permute(up_weight, [1, 0])  f32[16,32]  mlp.py:14
                                      h = mm(x, permute)         f32[8,32]              mlp.py:14

Every node has meta "val" (FakeTensor, or a tuple of them), "phase" ("forward" | "backward"),
"source" (`Source` of the user's line), "module" (path of the innermost module), "calls" (the module
calls around it, outermost first, "norm@1" for a second call), "checkpoint" (number of the
torch.utils.checkpoint call around it) and "seq" (autograd's number, which links a backward node to
its forward); source, checkpoint and seq may be None. Forward nodes come before backward nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from dtensor.frontend.guards.guards import Guards
from dtensor.numerics import dtype_name
from dtensor.private_torch import OpOverload, pytree
from dtensor.sharding.ops.call import Meta, OpCall, Operand
from dtensor.sharding.plan.dataflow import Recognised


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. ``name``: the first of its qualified names in the user's module."""

    name: str


@dataclass(frozen=True, slots=True)
class ModuleBuffer:
    name: str


@dataclass(frozen=True, slots=True)
class Arg:
    """A tensor argument: leaf `index` of `tree_leaves((args, kwargs))`, counting all leaves."""

    index: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A constant that the program creates or captures; `value` is on the CPU."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tangent:
    """The cotangent of `Result(output)`."""

    output: int


@dataclass(frozen=True, slots=True)
class Result:
    """Tensor number `index` of the user's outputs, counting only tensors."""

    index: int


@dataclass(frozen=True, slots=True)
class Grad:
    of: Param | ModuleBuffer | Arg


@dataclass(frozen=True, slots=True)
class Mutation:
    """The new value of the parameter or buffer `name`, or of the argument that is leaf `index`."""

    name: str
    index: int | None = None


Input = Param | ModuleBuffer | Arg | Const | Tangent
Output = Result | Grad | Mutation


@dataclass(frozen=True, slots=True)
class OutTree:
    """The structure of the user's outputs. `leaves`: the leaves of `spec`; None for a tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """Return the program's results in the structure that the user's function returned."""
        if len(tensors) != sum(self.is_tensor):
            raise ValueError(
                f"the program returns {sum(self.is_tensor)} tensors, but {len(tensors)} were given"
            )
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else leaf
            for leaf, is_tensor in zip(self.leaves, self.is_tensor, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Graph:
    """A captured program.

    Args:
        reads: guards of the state that it read besides its arguments; None if it was not captured
            from Python.
        recognised: the patterns that were replaced by one op each.
        exported: a hash of the exported forward graph, before any rewrite.
        autocast: the autocast modes that it used, each with the dtype: "cuda, bf16".
    """

    fx: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    out_tree: OutTree
    reads: Guards | None = None
    recognised: tuple[Recognised, ...] = ()
    exported: str = ""
    autocast: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.verify()

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(self.fx.find_nodes(op="placeholder"))

    @property
    def output_nodes(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are `outputs`, in the same order."""
        return tuple(self.fx.output_node().args[0])  # type: ignore[arg-type]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that call ops, in order."""
        return tuple(n for n in self.fx.nodes if n.op == "call_function")

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """Return the user's outputs, given a value for each `Result` in order of its index."""
        return self.out_tree.unflatten(tensors)

    def verify(self) -> None:
        """Raise AssertionError unless there is one input for each placeholder, one output for each
        returned value, unique names, all meta entries, and no forward node after a backward one."""
        self.fx.lint()
        assert len(self.placeholders) == len(self.inputs), "one input per placeholder"
        assert len(self.output_nodes) == len(self.outputs), "one output per returned value"
        assert len({n.name for n in self.fx.nodes}) == len(self.fx.nodes), "unique names"
        backward = False
        for node in self.fx.nodes:
            if node.op == "output":
                continue
            for key in ("val", "phase", "source", "module", "calls", "checkpoint", "seq"):
                assert key in node.meta, f"{node.name} has no meta {key!r}"
            assert node.op in ("placeholder", "call_function"), f"{node.name} is a {node.op}"
            if node.op == "call_function":
                backward = backward or node.meta["phase"] == "backward"
                assert backward == (node.meta["phase"] == "backward"), (
                    f"{node.name} is out of phase"
                )

    def __repr__(self) -> str:
        num = f"inputs: {len(self.inputs):,}, ops: {len(self.nodes):,}"
        return f"<graph, {num}, outputs: {len(self.outputs):,}>"

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for node, item in zip(self.placeholders, self.inputs, strict=True):
            rows.append((f"{node.name}: {type(item).__name__}", type_text(node.meta["val"]), ""))
        phase = ""
        for node in self.nodes:
            if node.meta["phase"] != phase:
                phase = node.meta["phase"]
                rows.append((f"\n{phase}", "", ""))
            source = node.meta["source"]
            rows.append(
                (
                    f"  {node.name} = {call_text(node)}",
                    type_text(node.meta["val"]),
                    "" if source is None else str(source),
                )
            )
        widths = [min(60, max((len(row[i]) for row in rows), default=0)) for i in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        returns = [
            f"  {_output_text(output)} = {node.name}"
            for output, node in zip(self.outputs, self.output_nodes, strict=True)
        ]
        return "\n".join([*lines, "", "return", *returns])


def _output_text(output: Output) -> str:
    match output:
        case Result(index):
            return f"result {index}"
        case Grad(of):
            return f"grad {of.name}"
        case Mutation(name, index):
            return f"{'buffer' if index is None else 'argument'} {name}"


# -- names of a module's tensors -------------------------------------------------------------------


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name. A tied parameter is under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the first name of the same tensor for each name of a parameter or buffer."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(module).items()}


# -- text ------------------------------------------------------------------------------------------


def type_text(value: Any) -> str:
    """Return "f32[8,16]" for a tensor, "f32[8], i64[]" for a tuple, the repr of other values."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(str(int(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return ", ".join(type_text(v) for v in value)
    return repr(value)


def value_text(value: Any) -> str:
    """Return an argument of a node as text: a node by its name, a dtype as "f32", or a repr."""
    match value:
        case fx.Node():
            return value.name
        case torch.dtype():
            return dtype_name(value)
        case list() | tuple():
            return f"[{', '.join(value_text(v) for v in value)}]"
        case torch.device():
            return str(value)
        case _:
            return repr(value)


def op_text(node: fx.Node) -> str:
    """Return the op's name: "mm" for aten.mm.default, "dt.attention", "getitem"."""
    target = node.target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def call_text(node: fx.Node) -> str:
    """Return a call as text: "mm(x, permute)"."""
    parts = [value_text(a) for a in node.args]
    parts += [f"{k}={value_text(v)}" for k, v in node.kwargs.items()]
    return f"{op_text(node)}({', '.join(parts)})"


# -- one node --------------------------------------------------------------------------------------


def bound(node: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by the names in the op's schema, with defaults."""
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    values = {a.name: a.default_value for a in node.target._schema.arguments}
    return {**values, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def op_call(node: fx.Node) -> tuple[OpCall, tuple[fx.Node, ...]]:
    """Return a node as an `OpCall`, and the nodes of its operands, one for each occurrence."""
    operands: list[fx.Node] = []

    def encode(value: object) -> object:
        if isinstance(value, fx.Node):
            operands.append(value)
            return Operand(len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(encode(v) for v in cast(Iterable[object], value))
        return value

    args = tuple(encode(a) for a in node.args)
    kwargs = tuple((k, encode(v)) for k, v in node.kwargs.items())
    val = node.meta["val"]
    multiple = isinstance(val, (tuple, list))
    call = OpCall(
        target=cast(Any, node.target),
        args=args,
        kwargs=kwargs,
        operands=tuple(meta_of(n.meta["val"]) for n in operands),
        results=tuple(None if v is None else meta_of(v) for v in val)
        if multiple
        else (meta_of(val),),
        multiple=multiple,
    )
    return call, tuple(operands)


def meta_of(value: torch.Tensor) -> Meta:
    return Meta(tuple(int(s) for s in value.shape), value.dtype)


USERS_META = ("stack_trace", "nn_module_stack", "custom")
"""Meta entries in which torch records a node's place in the user's program."""


class Writer:
    """Replaces a node by new calls, which get the node's line and module. They are inserted before
    the node, or with ``reads_node`` after it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, *, reads_node: bool = False) -> None:
        self.graph: fx.Graph = graph
        self.node: fx.Node = node
        self._place: fx.Node = node.next if reads_node else node
        while reads_node and self._place.op in ("placeholder", "get_attr"):
            self._place = self._place.next

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self._place):
            new = self.graph.call_function(target, args, kwargs)
        new.meta.update({k: self.node.meta[k] for k in USERS_META if k in self.node.meta})
        return new

    def cast(self, x: fx.Node, source: torch.dtype, target: torch.dtype) -> fx.Node:
        return x if source == target else self(torch.ops.aten.to.dtype, x, target)

    def replace(self, new: fx.Node) -> None:
        if "val" in self.node.meta:  # later rewrites of the same pass read it
            new.meta.setdefault("val", self.node.meta["val"])
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
