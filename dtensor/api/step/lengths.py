"""Calls that differ in lengths alone: when one export for all of them is tried, and when trusted.

    step(tokens)   # [8 512]: captured
    step(tokens)   # [8 768]: its Python runs once more, with a symbol for 512 and 768
    step(tokens)   # [8 640]: the graph of that export with 640 in it; no Python of the user's runs

A program here is a function with arguments that are alike but for sizes of dims of plain tensors.
Its first capture is kept. The next call whose sizes differ, none of them 0 or 1, has
`export_for_lengths` run once; sizes that are equal in both calls share a symbol. Where another dim
differs later (a shorter last batch), or sizes differ that were equal before, it is tried a second
time with all of them, and no more.

An export is trusted where the graph that it gives for the first call equals the one that was
captured of it, down to each node's line and strides (`difference`). Whatever fails, is refused or
has changed since (what the program read, a branch on a length) is captured as without it, and no
error is raised here that a capture would not raise. The third such capture warns, once a program.

Not here: what is refused (frontend/capture/lengths.py); which plans are kept (plan_cache.py).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from dtensor.frontend.capture.call_as_module import leaf_names
from dtensor.frontend.graph import Const, Graph
from dtensor.frontend.source import caller_level
from dtensor.private_torch import pytree

if TYPE_CHECKING:
    from dtensor.frontend.capture.lengths import ForLengths
    from dtensor.frontend.guards.executed_code import ExecutedCode

Dim = tuple[int, int]
"""The number of a leaf of the call, and a dim of it."""
Sizes = Mapping[Dim, int]
"""Of all dims of the plain tensors."""

MOST_CAPTURES = 3
"""Of a program for other lengths than its first, until a warning says so."""
MOST_TRIES = 2
MOST_PROGRAMS = 4
"""Whose first captures are kept: those that were captured last."""


class Call(Protocol):
    """The part of `BoundCall` (bound_call.py) that this file needs."""

    @property
    def leaves(self) -> tuple[Any, ...]: ...
    def on_meta(self, *, keep_strides: bool = False) -> Call: ...
    def capture_inputs(
        self,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], nn.Module | None]: ...


@dataclass(slots=True, kw_only=True)
class _Program:
    """``call`` and ``graph``: of what was captured first, of whose tensors there are the layouts;
    ``tried``: the sizes of the calls that an export was made of; ``refused``: why none is made any
    more; ``reason``: why the latest call was captured; ``captured``, ``seconds``: of each capture
    for other lengths; ``numbers``: which symbol of the export each dim has."""

    call: Call
    sizes: Sizes
    graph: Graph
    found: ForLengths | None = None
    numbers: Mapping[Dim, int] = field(default_factory=dict)
    tried: tuple[Sizes, ...] = ()
    num_tries: int = 0
    refused: str | None = None
    reason: str = ""
    captured: list[Sizes] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def covers(self, dims: frozenset[Dim], sizes: Sizes) -> bool:
        """Whether the export has symbols for all these dims, and one alone where sizes differ."""
        pairs = {(number, sizes[dim]) for dim, number in self.numbers.items()}
        return dims <= self.numbers.keys() and len(pairs) == len(set(self.numbers.values()))


class Lengths:
    """The programs of one function."""

    def __init__(self, grads: Literal["none", "loss", "tangents"]) -> None:
        self._grads: Literal["none", "loss", "tangents"] = grads
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()

    def graph(self, call: Call, key: Any) -> Graph | None:
        """The graph of a call, or None: capture it. ``key``: of the call, and what its plan
        depends on besides."""
        program = self._programs.get(_without_sizes(call, key))
        if program is None:
            return None
        try:
            return self._graph(program, call)
        except Exception as error:  # a capture raises it again, if it is the program's
            program.reason = str(error).partition("\n")[0]
            return None

    def _graph(self, program: _Program, call: Call) -> Graph:
        from dtensor.frontend.capture.lengths import NotForLengths  # loads torch's compiler

        sizes = _sizes(call)
        dims = _differing(program.sizes, sizes)
        if any(one[dim] < 2 for one in (program.sizes, sizes) for dim in dims):
            raise NotForLengths("a length is 0 or 1")
        if program.found is not None and program.covers(dims, sizes):
            return program.found.graph(*call.capture_inputs())
        if program.refused is not None or program.num_tries == MOST_TRIES or not dims:
            raise NotForLengths(program.refused or program.reason)
        reads = program.graph.reads
        if reads is None or (changed := reads.difference()) is not None:
            raise NotForLengths("nothing was read" if reads is None else changed)
        return self._try(program, call, sizes, reads.ran)

    def _try(self, program: _Program, call: Call, sizes: Sizes, ran: ExecutedCode | None) -> Graph:
        """Makes an export, for these sizes and those that were tried before. ``ran``: the code
        that the first capture ran."""
        from dtensor.frontend.capture.lengths import NotForLengths, export_for_lengths

        program.num_tries += 1
        tried = (*program.tried, sizes)
        dims = frozenset(dim for one in tried for dim in _differing(program.sizes, one))
        values = {d: tuple(one[d] for one in (program.sizes, *tried)) for d in sorted(dims)}
        of_values = {value: i for i, value in enumerate(dict.fromkeys(values.values()))}
        numbers = {dim: of_values[value] for dim, value in values.items()}
        fn, args, kwargs, main = call.capture_inputs()
        leaves = pytree.tree_leaves((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        wanted = {(places.index(leaf), dim): n for (leaf, dim), n in numbers.items()}
        try:
            found = export_for_lengths(
                fn, args, kwargs, grads=self._grads, main=main, dims=wanted, ran=ran
            )
            before = program.call.capture_inputs()
            if not found.is_as_captured(program.graph, *before):  # else so is all made of it
                other = difference(program.graph, found.graph(*before))
                if other is not None:
                    raise NotForLengths(f"it gives another graph for the first lengths: {other}")
            graph = found.graph(fn, args, kwargs, main)
        except Exception as error:
            program.refused = str(error).partition("\n")[0]
            raise
        program.found, program.numbers, program.tried = found, numbers, tried
        return graph

    def was_captured(self, call: Call, key: Any, graph: Graph, seconds: float) -> None:
        """A call was captured, and planned, which took so long."""
        kind = _without_sizes(call, key)
        sizes = _sizes(call)
        if kind is None or not sizes:
            return
        program = self._programs.get(kind)
        if program is None or not _is_of_use(program, sizes):
            self._programs[kind] = _Program(
                call=call.on_meta(keep_strides=True), sizes=sizes, graph=graph
            )
            self._programs.move_to_end(kind)
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
            return
        self._programs.move_to_end(kind)
        if not _differing(program.sizes, sizes):  # its plan was forgotten
            return
        program.captured.append(sizes)
        program.seconds.append(seconds)
        if len(program.seconds) == MOST_CAPTURES:
            _warn(program, call)


def _is_of_use(program: _Program, sizes: Sizes) -> bool:
    """Whether what is kept of a program is of use for later calls: not where all of them differ
    from it, as in what the program reads now."""
    if program.refused is not None:
        return True
    if any(program.sizes[dim] < 2 for dim in _differing(program.sizes, sizes)):
        return False
    reads = program.graph.reads if program.found is None else program.found.reads
    return reads is not None and reads.difference() is None


def _warn(program: _Program, call: Call) -> None:
    fn, args, kwargs, _ = call.capture_inputs()
    names = leaf_names(fn, args, kwargs)
    dims = sorted({dim for one in program.captured for dim in _differing(program.sizes, one)})
    found = [f"{names[leaf]} (dim {dim})" for leaf, dim in dims]
    warnings.warn(
        f"The length of {', '.join(found)} changes from call to call. The program was captured for "
        f"{len(program.captured)} lengths besides its first, {sum(program.seconds):.1f} s in all: "
        f"one graph is not right for all of them, as {program.reason}.\n"
        f"fix: pad {names[dims[0][0]]} to a few lengths; or use lengths in shapes, slices and "
        f"whole-number arithmetic alone, and let what the program reads besides stay as it is",
        stacklevel=caller_level(),
    )


# -- sizes -----------------------------------------------------------------------------------------


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor


def _without_sizes(call: Call, key: Any) -> Hashable | None:
    """A call's key, but for sizes of its plain tensors; None where other tensors are among them
    that are no DTensors, which a program may tell apart."""
    (tree, keys, *around), others = key
    found: list[Any] = list(keys)
    for i, leaf in enumerate(call.leaves):
        if _is_plain(leaf):
            shape, *rest = found[i]
            found[i] = (len(shape), *rest)
            if leaf.is_conj() or leaf.is_neg() or leaf.layout is not torch.strided:
                return None
    _, args, kwargs, _ = call.capture_inputs()
    if any(
        isinstance(x, torch.Tensor) and not _is_plain(x) for x in pytree.tree_leaves((args, kwargs))
    ):
        return None
    return (tree, tuple(found), *around, others)


def _sizes(call: Call) -> Sizes:
    plain = ((i, leaf) for i, leaf in enumerate(call.leaves) if _is_plain(leaf))
    return {(i, dim): size for i, leaf in plain for dim, size in enumerate(leaf.shape)}


def _differing(before: Sizes, now: Sizes) -> frozenset[Dim]:
    return frozenset(dim for dim, size in now.items() if before[dim] != size)


# -- whether two graphs are the same ---------------------------------------------------------------

_OF_NODES = ("phase", "source", "module", "calls", "checkpoint")


def difference(a: Graph, b: Graph) -> str | None:
    """Where two graphs differ, in all that a plan depends on; None: nowhere."""
    if (texts := (str(a), str(b)))[0] != texts[1]:
        lines = zip(*(text.splitlines() for text in texts), strict=False)
        return next((f"{x!r}, not {y!r}" for x, y in lines if x != y), "it ends elsewhere")
    outside = [
        (repr(g.out_tree.spec), repr(g.out_tree.leaves), g.out_tree.is_tensor) for g in (a, b)
    ]
    if outside[0] != outside[1] or a.outputs != b.outputs or a.recognised != b.recognised:
        return "what it returns"
    for x, y in zip(a.inputs, b.inputs, strict=True):
        if isinstance(x, Const) and isinstance(y, Const):
            if not _same_constants(x.value, y.value):
                return f"the constant {x.name}"
        elif x != y:
            return f"the input {x}"
    links: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    for x, y in zip(a.fx.nodes, b.fx.nodes, strict=True):
        if _of_node(x, links[0]) != _of_node(y, links[1]):
            return f"what is known of {x.name}"
    return None


def _of_node(node: torch.fx.Node, links: dict[Any, int]) -> tuple[Any, ...]:
    from dtensor.frontend.capture.to_graph import layout_of

    val = node.meta.get("val")
    seq = node.meta.get("seq")  # of which only counts which are the same
    link = None if seq is None else links.setdefault(seq, len(links))
    return (node.op, layout_of(val), link, *(node.meta.get(key) for key in _OF_NODES))


def _same_constants(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
