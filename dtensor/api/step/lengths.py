"""Use one export with symbolic sizes for calls that differ only in the sizes of tensors.

    step(tokens)   # [8 512]: captured
    step(tokens)   # [8 768]: exported with a symbol in the place of 512 and 768
    step(tokens)   # [8 640]: the exported graph with 640 in it; no Python of the user runs

The second size triggers an export (frontend/capture/lengths.py); dims that had equal sizes in both
calls share a symbol. A later call that varies other dims, or breaks such an equality, triggers a
second export, the last. An export is used only if its graph for the first call equals the captured
graph, down to the line and strides of each node (`difference`). In any other case the call is
captured as if this file did not exist; the third such capture of a program warns.
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
    from dtensor.frontend.capture.lengths import ExportForLengths
    from dtensor.frontend.guards.executed_code import ExecutedCode

Dim = tuple[int, int]
"""The index of a leaf of the call, and a dim of that tensor."""
Sizes = Mapping[Dim, int]
"""The sizes of all dims of the plain tensors of a call."""

MAX_CAPTURES = 3
"""The number of captures for other lengths after which a program warns."""
MAX_EXPORTS = 2
MAX_PROGRAMS = 4
"""The number of programs whose first captures are kept: those captured last."""


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
    """Calls of a function that are equal except for the sizes of plain tensors.

    call, sizes, graph: of the first capture; the tensors of ``call`` have no data. export: the
    export in use, or None. symbols: dim -> the number of its symbol in the export. exported_sizes:
    the sizes of the calls that the export was made for. refusal: why no export is made any more, or
    None. reason: why the latest call was captured. captured_sizes, seconds: of each capture for
    other lengths.
    """

    call: Call
    sizes: Sizes
    graph: Graph
    export: ExportForLengths | None = None
    symbols: Mapping[Dim, int] = field(default_factory=dict)
    exported_sizes: tuple[Sizes, ...] = ()
    num_exports: int = 0
    refusal: str | None = None
    reason: str = ""
    captured_sizes: list[Sizes] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def covers(self, dims: frozenset[Dim], sizes: Sizes) -> bool:
        """Return whether the export has symbols for all these dims, and dims that share a symbol
        have the same size."""
        pairs = {(symbol, sizes[dim]) for dim, symbol in self.symbols.items()}
        return dims <= self.symbols.keys() and len(pairs) == len(set(self.symbols.values()))


class Lengths:
    """The captured programs of one function, and their exports."""

    def __init__(self, grads: Literal["none", "loss", "tangents"]) -> None:
        self._grads: Literal["none", "loss", "tangents"] = grads
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()

    def graph(self, call: Call, key: Any) -> Graph | None:
        """Return the graph of the call from an export, or None if the call must be captured.
        ``key``: the key of the call's plan in `PlanCache`."""
        if not self._programs:
            return None
        program = self._programs.get(_without_sizes(call, key))
        if program is None:
            return None
        try:
            return self._exported_graph(program, call)
        except Exception as error:  # an error of the user's program recurs in the capture
            program.reason = str(error).partition("\n")[0]
            return None

    def _exported_graph(self, program: _Program, call: Call) -> Graph:
        """Return the call's graph from the present export, or from a new one. Raises NotForLengths
        if no export can serve the call."""
        from dtensor.frontend.capture.lengths import NotForLengths  # loads torch's compiler

        sizes = _sizes(call)
        dims = _differing(program.sizes, sizes)
        if any(size[dim] < 2 for size in (program.sizes, sizes) for dim in dims):
            raise NotForLengths("a length is 0 or 1")
        if program.export is not None and program.covers(dims, sizes):
            return program.export.graph(*call.capture_inputs())
        if program.refusal is not None or program.num_exports == MAX_EXPORTS or not dims:
            raise NotForLengths(program.refusal or program.reason)
        reads = program.graph.reads
        if reads is None or (changed := reads.difference()) is not None:
            raise NotForLengths("nothing was read" if reads is None else changed)
        return self._export(program, call, sizes, reads.ran)

    def _export(
        self, program: _Program, call: Call, sizes: Sizes, code: ExecutedCode | None
    ) -> Graph:
        """Make an export for ``sizes`` and the sizes of the previous export, and return its graph
        for ``sizes``. Raises if the export is refused. ``code``: the code that the first capture
        ran."""
        from dtensor.frontend.capture.lengths import NotForLengths, export_for_lengths

        program.num_exports += 1
        exported = (*program.exported_sizes, sizes)
        dims = frozenset(dim for other in exported for dim in _differing(program.sizes, other))
        # dims that have the same size in every call share a symbol
        values = {d: tuple(s[d] for s in (program.sizes, *exported)) for d in sorted(dims)}
        symbol_of = {value: i for i, value in enumerate(dict.fromkeys(values.values()))}
        symbols = {dim: symbol_of[value] for dim, value in values.items()}
        fn, args, kwargs, main = call.capture_inputs()
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        symbol_by_dim = {(tensors.index(leaf), dim): n for (leaf, dim), n in symbols.items()}
        try:
            export = export_for_lengths(
                fn, args, kwargs, grads=self._grads, main=main, dims=symbol_by_dim, ran=code
            )
            before = program.call.capture_inputs()
            if not export.is_as_captured(program.graph, *before):  # the fast check
                other = difference(program.graph, export.graph(*before))
                if other is not None:
                    raise NotForLengths(f"it gives another graph for the first lengths: {other}")
            graph = export.graph(fn, args, kwargs, main)
        except Exception as error:
            program.refusal = str(error).partition("\n")[0]
            raise
        program.export, program.symbols, program.exported_sizes = export, symbols, exported
        return graph

    def was_captured(self, call: Call, key: Any, graph: Graph, seconds: float) -> None:
        """Record that the call was captured and planned, and the seconds of both. Warns if the
        program is captured for many lengths."""
        program_key = _without_sizes(call, key)
        sizes = _sizes(call)
        if program_key is None or not sizes:
            return
        program = self._programs.get(program_key)
        if program is None or not _is_useful(program, sizes):
            self._programs[program_key] = _Program(
                call=call.on_meta(keep_strides=True), sizes=sizes, graph=graph
            )
            self._programs.move_to_end(program_key)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
            return
        self._programs.move_to_end(program_key)
        if not _differing(program.sizes, sizes):  # the plan was evicted
            return
        program.captured_sizes.append(sizes)
        program.seconds.append(seconds)
        if len(program.seconds) == MAX_CAPTURES:
            _warn_of_captures(program, call)


def _is_useful(program: _Program, sizes: Sizes) -> bool:
    """Return whether the record of a program still serves an export. It does not if the Python
    state that the program read has changed, or if a varying dim has size 0 or 1."""
    if program.refusal is not None:
        return True
    if any(program.sizes[dim] < 2 for dim in _differing(program.sizes, sizes)):
        return False
    reads = program.graph.reads if program.export is None else program.export.reads
    return reads is not None and reads.difference() is None


def _warn_of_captures(program: _Program, call: Call) -> None:
    """Warn that the program was captured for many lengths, with the reason and the varying dims."""
    fn, args, kwargs, _ = call.capture_inputs()
    names = leaf_names(fn, args, kwargs)
    captured = program.captured_sizes
    dims = sorted({dim for sizes in captured for dim in _differing(program.sizes, sizes)})
    varying = [f"{names[leaf]} (dim {dim})" for leaf, dim in dims]
    warnings.warn(
        f"The length of {', '.join(varying)} changes from call to call. The program was captured "
        f"for {len(captured)} lengths besides its first, {sum(program.seconds):.1f} s in all: "
        f"one graph is not right for all of them, as {program.reason}.\n"
        f"fix: pad {names[dims[0][0]]} to a few lengths; or use lengths in shapes, slices and "
        f"whole-number arithmetic alone, and let what the program reads besides stay as it is",
        stacklevel=caller_level(),
    )


# -- sizes -----------------------------------------------------------------------------------------


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor


def _without_sizes(call: Call, key: Any) -> Hashable | None:
    """Return the key without the sizes of plain tensors. Return None if the call has tensors that
    are neither plain nor DTensors (a subclass, a conjugate view): no export is tried then."""
    (tree, keys, *context), planning_key = key
    leaf_keys: list[Any] = list(keys)
    for i, leaf in enumerate(call.leaves):
        if _is_plain(leaf):
            shape, *metadata = leaf_keys[i]
            leaf_keys[i] = (len(shape), *metadata)
            if leaf.is_conj() or leaf.is_neg() or leaf.layout is not torch.strided:
                return None
    _, args, kwargs, _ = call.capture_inputs()
    if any(
        isinstance(x, torch.Tensor) and not _is_plain(x) for x in pytree.tree_leaves((args, kwargs))
    ):
        return None
    return (tree, tuple(leaf_keys), *context, planning_key)


def _sizes(call: Call) -> Sizes:
    plain = ((i, leaf) for i, leaf in enumerate(call.leaves) if _is_plain(leaf))
    return {(i, dim): size for i, leaf in plain for dim, size in enumerate(leaf.shape)}


def _differing(before: Sizes, now: Sizes) -> frozenset[Dim]:
    return frozenset(dim for dim, size in now.items() if before[dim] != size)


# -- whether two graphs are the same ---------------------------------------------------------------

_COMPARED_META = ("phase", "source", "module", "calls", "checkpoint")


def difference(a: Graph, b: Graph) -> str | None:
    """Return the first difference of two graphs in anything that a plan depends on, or None."""
    if (texts := (str(a), str(b)))[0] != texts[1]:
        lines = zip(*(text.splitlines() for text in texts), strict=False)
        return next((f"{x!r}, not {y!r}" for x, y in lines if x != y), "it ends elsewhere")
    results = [
        (repr(g.out_tree.spec), repr(g.out_tree.leaves), g.out_tree.is_tensor) for g in (a, b)
    ]
    if results[0] != results[1] or a.outputs != b.outputs or a.recognised != b.recognised:
        return "what it returns"
    for x, y in zip(a.inputs, b.inputs, strict=True):
        if isinstance(x, Const) and isinstance(y, Const):
            if not _same_constants(x.value, y.value):
                return f"the constant {x.name}"
        elif x != y:
            return f"the input {x}"
    numbers: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    for x, y in zip(a.fx.nodes, b.fx.nodes, strict=True):
        if _comparable(x, numbers[0]) != _comparable(y, numbers[1]):
            return f"what is known of {x.name}"
    return None


def _comparable(node: torch.fx.Node, numbers: dict[Any, int]) -> tuple[Any, ...]:
    """Return the properties of a node that equal graphs share. ``numbers``: the sequence numbers of
    the graph, renumbered in the order of its nodes, because only their equality matters."""
    from dtensor.frontend.capture.to_graph import layout_of

    val = node.meta.get("val")
    seq = node.meta.get("seq")
    number = None if seq is None else numbers.setdefault(seq, len(numbers))
    return (node.op, layout_of(val), number, *(node.meta.get(key) for key in _COMPARED_META))


def _same_constants(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
