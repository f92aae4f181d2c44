"""Export a program once for many lengths: with symbolic dims, which later calls replace by sizes.

    export = export_for_lengths(fn, args, kwargs, grads="loss", main=model, dims={(0, 1): 0})
    export.graph(fn, args, kwargs, model)    # the graph that `capture` returns for this call

Each later call evaluates the export's guards and copies its graph with sizes in place of symbols.
All later stages of capture see only this static graph.

Invariants: a failed export leaves the user's objects unchanged. `NotForLengths` is raised if the
program has side effects or turns a length into anything but another int or a condition (float,
text, hash, type); such a program is captured for each length. api/step/lengths.py chooses `dims`.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import operator
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx, nn

from dtensor.frontend.call_lock import CALL_LOCK, is_capturing
from dtensor.frontend.capture.autocast import surrounding
from dtensor.frontend.capture.call_as_module import (
    CallAsModule,
    FlatCall,
    Grads,
    fake_state,
    flat_call,
    refuse_hooks,
)
from dtensor.frontend.capture.capture import export_call, graph_of, in_capture
from dtensor.frontend.capture.layers import attribute_of, fingerprint
from dtensor.frontend.capture.patches import load_compiler
from dtensor.frontend.capture.thread_patches import if_capturing, patch_attributes
from dtensor.frontend.graph import Const, Graph, OutTree
from dtensor.frontend.guards.executed_code import ExecutedCode
from dtensor.frontend.guards.guards import Guards, custom_ops
from dtensor.frontend.guards.raw_access import raw_attributes
from dtensor.frontend.guards.side_effects import StateBefore, undo
from dtensor.frontend.guards.walk import walk
from dtensor.frontend.source import source_here
from dtensor.gc_pause import collector_paused
from dtensor.private_torch import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    export_trace,
    symbol_source,
)

Dims = Mapping[tuple[int, int], int]
"""Maps (index of a tensor argument, dim) to the index of a length; equal lengths share an index."""

_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ASSERTS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


class NotForLengths(Exception):
    """The program depends on a length in a way that no guard can check."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExportForLengths:
    """An exported forward graph with symbols for lengths.

    symbols: each symbol with the place of its value: (argument, "size" or "stride", dim).
    layouts: the properties of each argument that are the same for all lengths (`_layout`).
    guards: conditions on the symbols. reads: guards on all that the program's Python read.
    constants: the tensors that the program closed over, in the order of ``reads.caught``.
    """

    module: fx.GraphModule
    symbols: tuple[tuple[sympy.Symbol, tuple[int, str, int]], ...]
    dims: Dims
    layouts: tuple[Hashable, ...]
    guards: tuple[Any, ...]
    out_tree: OutTree
    reads: Guards
    constants: tuple[torch.Tensor, ...]
    grads: Grads

    def graph(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        main: nn.Module | None,
    ) -> Graph:
        """Return the graph of a call with other lengths.

        Raises NotForLengths if a guard does not hold, or if a value that the program read changed.
        """
        with CALL_LOCK, collector_paused():
            with self._static_capture(flat_call(fn, args, kwargs, main)) as static:
                graph = graph_of(*static)
            constants = [(c.name, c.value) for c in graph.inputs if isinstance(c, Const)]
            return replace(graph, reads=self.reads.of(constants, custom_ops(graph.fx)))

    def is_as_captured(
        self,
        graph: Graph,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        main: nn.Module | None,
    ) -> bool:
        """Return whether this export gives the same graph as ``graph``, which `capture` returned
        for the call. May return False although they are equal. Raises like `graph`."""
        trees = [
            (repr(t.spec), repr(t.leaves), t.is_tensor) for t in (self.out_tree, graph.out_tree)
        ]
        call = flat_call(fn, args, kwargs, main)
        with CALL_LOCK, collector_paused(), self._static_capture(call) as (_, forward, _, _):
            return trees[0] == trees[1] and fingerprint(forward) == graph.exported

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise NotForLengths unless the export is valid for these arguments."""
        layouts = tuple(_layout(x, i, self.dims) for i, x in enumerate(tensors))
        if layouts != self.layouts:
            raise NotForLengths("an argument has another shape or other strides")
        values: dict[sympy.Symbol, int] = {}
        for symbol, (index, kind, dim) in self.symbols:
            x = tensors[index]
            size = x.shape[dim] if kind == "size" else x.stride()[dim]
            if size < 2:
                raise NotForLengths("a length is 0 or 1")
            if values.setdefault(symbol, size) != size:
                raise NotForLengths("two lengths were equal in the export")
        substitution = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        if any(guard.xreplace(substitution) != sympy.true for guard in self.guards):
            raise NotForLengths("it branches on a length")

    def _current_constants(self) -> dict[int, torch.Tensor]:
        """Return the current value of each constant, by id of the constant in the module."""
        current: dict[int, torch.Tensor] = {}
        for value, caught in zip(self.constants, self.reads.caught, strict=True):
            tensor = value if caught.place is None else caught.tensor.detach()
            layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in (value, tensor)]
            if layouts[0] != layouts[1]:
                raise NotForLengths(
                    "a tensor that it closed over has another shape or other strides"
                )
            current[id(value)] = tensor
        return current

    @contextmanager
    def _static_capture(
        self, call: FlatCall
    ) -> Iterator[tuple[CallAsModule, fx.GraphModule, tuple[torch.Tensor, ...], FakeTensorMode]]:
        """Enter a capture of the call; yield the arguments of `graph_of`, with the static forward
        graph. Raises like `graph`."""
        if (changed := self.reads.difference()) is not None:
            raise NotForLengths(changed)
        constants = self._current_constants()
        self._check(call.tensors)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        root = CallAsModule(call, self.grads, StateBefore(walk(())), surrounding())
        root.notes.out_tree = self.out_tree
        with in_capture(), fake_state(call, self.grads, mode) as tensors:
            forward = _StaticCopy(root, mode, constants).copy(self.module, tensors)
            yield root, forward, tensors, mode


def _layout(x: torch.Tensor, index: int, dims: Dims) -> Hashable:
    """Return the properties of an argument that must be the same for all lengths. None stands for a
    size or stride that may differ."""
    if all(i != index for i, _ in dims):
        return tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.is_conj(), x.is_neg()
    shape = tuple(None if (index, dim) in dims else size for dim, size in enumerate(x.shape))
    strides = None if x.is_contiguous() else tuple(s if s < 2 else None for s in x.stride())
    return shape, strides, x.dtype, x.requires_grad, x.is_conj(), x.is_neg()


def export_for_lengths(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    grads: Grads,
    main: nn.Module | None,
    dims: Dims,
    ran: ExecutedCode | None = None,
) -> ExportForLengths:
    """Run the Python of a call with symbols for ``dims``, and return the export. ``ran``: the code
    that an earlier capture executed. `type` is watched only in its files.

    Raises NotForLengths, or any exception of the program.
    """
    with CALL_LOCK, collector_paused():
        return _export(flat_call(fn, args, kwargs, main), grads, dims, ran)


def _export(
    call: FlatCall, grads: Grads, dims: Dims, executed: ExecutedCode | None
) -> ExportForLengths:
    refuse_hooks(call, grads)
    load_compiler()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    before = StateBefore(walk(call.roots))
    root = CallAsModule(call, grads, before, surrounding())
    symbols = _Symbols(dims)
    recorder = _UseRecorder(executed)
    moved: list[str] = []
    try:
        with in_capture() as functions, fake_state(call, grads, mode) as tensors:
            with symbols.patch_export(), recorder:
                forward = export_call(root, tensors)
            if functions:
                raise NotForLengths("it applies a custom autograd Function")
    except BaseException as error:
        undo(root.notes.changes)
        if recorder.uses and isinstance(error, Exception):
            raise NotForLengths(recorder.uses[0]) from error
        raise
    finally:
        if (writes := root.notes.writes) is not None:
            before.clear_grown_caches(writes)
            moved = before.moved(writes)
            before.put_back(writes)
    if root.notes.changes or moved:
        undo(root.notes.changes)
        raise NotForLengths("it has side effects")
    if recorder.uses:
        raise NotForLengths(recorder.uses[0])
    ran = root.recorder.codes()
    if ran is not None:  # sympy ran only for the symbols
        codes = {i: c for i, c in ran.codes.items() if not c.co_filename.startswith(_SYMPY_FOLDERS)}
        ran = ExecutedCode(codes, ran.calls)
    if ran is None or (function := recorder.unwatched_type_check(ran)):
        raise NotForLengths(
            f"{function} asks for a type" if ran else "its Python code was not recorded"
        )
    if any(isinstance(leaf, _SYMBOLIC) for leaf in root.notes.out_tree.leaves):
        raise NotForLengths("it returns a length")
    guards = symbols.guards()
    constants = tuple({id(x): x for x in _constants_of(forward, root)}.values())
    return ExportForLengths(
        module=forward,
        symbols=tuple(symbols.places),
        dims=dims,
        layouts=tuple(_layout(x, i, dims) for i, x in enumerate(call.tensors)),
        guards=guards,
        out_tree=root.notes.out_tree,
        reads=Guards(
            call.roots,
            ran,
            [(str(i), x) for i, x in enumerate(constants)],
            values=root.notes.values,
        ),
        constants=constants,
        grads=grads,
    )


def _constants_of(exported: nn.Module, root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of an exported module that the modules of the call do not hold."""
    state = {id(x) for x in (*root.parameters(), *root.buffers())}
    for module in exported.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            is_state = isinstance(value, (FakeTensor, nn.Parameter))
            if isinstance(value, torch.Tensor) and not is_state and id(value) not in state:
                yield value


# -- symbols ---------------------------------------------------------------------------------------


class _Symbols:
    """The symbols of one export: lengths, and strides of arguments that are not contiguous."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.shape_env: Any = None
        self.places: list[tuple[sympy.Symbol, tuple[int, str, int]]] = []

    @contextmanager
    def patch_export(self) -> Iterator[None]:
        """In this context, torch's export makes its fake arguments with our symbols."""
        trace = export_trace()
        original: Any = vars(trace)["make_fake_inputs"]

        def make(*args: Any, **kwargs: Any) -> Any:
            mode, fakes, *others = original(*args, **kwargs)
            self.shape_env = mode.shape_env
            return (mode, self._with_symbols(mode, fakes), *others)

        def no_guards(*_args: Any, **_kwargs: Any) -> None:
            pass  # `guards` returns all of them

        patches = (("make_fake_inputs", make), ("produce_guards_and_solve_constraints", no_guards))
        with patch_attributes([(trace, n, if_capturing(f, vars(trace)[n])) for n, f in patches]):
            yield

    def _with_symbols(self, mode: Any, fakes: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return the fake arguments with symbols for lengths, and record the symbols' places."""
        lengths: dict[int, Any] = {}
        arguments: list[Any] = []
        for index, fake in enumerate(fakes):
            if all(i != index for i, _ in self.dims):
                arguments.append(fake)
                continue
            shape: list[Any] = list(fake.shape)
            for dim, size in enumerate(fake.shape):
                if (length := self.dims.get((index, dim))) is not None:
                    if length not in lengths:
                        lengths[length] = self._symbol(f"length_{length}", size)
                    shape[dim] = lengths[length]
                    self.places.append((lengths[length].node.expr, (index, "size", dim)))
            strides: list[Any] = list(fake.stride())
            if fake.is_contiguous():
                for dim in reversed(range(len(shape) - 1)):
                    strides[dim] = strides[dim + 1] * shape[dim + 1]
            else:
                for dim, stride in enumerate(fake.stride()):
                    if stride > 1:
                        strides[dim] = self._symbol(f"stride_{index}_{dim}", stride)
                        self.places.append((strides[dim].node.expr, (index, "stride", dim)))
            with mode:
                new = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
            arguments.append(new.requires_grad_(fake.requires_grad))
        return tuple(arguments)

    def _symbol(self, name: str, hint: int) -> Any:
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = symbol_source(name)
        symbol = self.shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def guards(self) -> tuple[Any, ...]:
        """Return all conditions under which the export is valid.

        Raises NotForLengths if torch fixed a symbol or the conditions need other symbols.
        """
        env = self.shape_env
        symbols = {symbol for symbol, _ in self.places}
        if any(not x.free_symbols for x in env.replacements.values()):
            raise NotForLengths("it works for one length only")
        if env.deferred_runtime_asserts:
            raise NotForLengths("it has an assertion about data")
        conditions = tuple(guard.expr for guard in env.guards)
        if any(guard.free_symbols - symbols for guard in conditions):
            raise NotForLengths("its guards need other symbols")
        return conditions


# -- uses of a length ------------------------------------------------------------------------------

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOGGING = _TORCH + "_logging" + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_SYMPY = os.path.dirname(sympy.__file__) + os.sep
_MPMATH = os.path.join(os.path.dirname(os.path.dirname(sympy.__file__)), "mpmath") + os.sep
_SYMPY_FOLDERS = (_SYMPY, _MPMATH)
_LIBRARIES = (_TORCH, _OURS, *_SYMPY_FOLDERS, "<frozen", "<eval_with_key>")
_SKIPPED_FILES = ("abc.py", "functools.py", "capture/lengths.py", "capture/thread_patches.py")
"""Files whose frames are skipped: they act on behalf of their caller."""


def _called_by_user() -> bool:
    """Return whether the user's code is the caller, and not torch, dtensor or sympy."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_SKIPPED_FILES):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)


def _called_by_logger() -> bool:
    """Return whether torch's logging is on the stack: it formats symbols for TORCH_TRACE."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOGGING):
        frame = frame.f_back
    return frame is not None


class _UseRecorder:
    """A context that records in ``uses`` each use of a symbolic number that no guard can check."""

    def __init__(self, ran: ExecutedCode | None) -> None:
        self.uses: list[str] = []
        codes = [c for c in ran.codes.values() if _uses_type(c)] if ran is not None else []
        using = {code.co_filename for code in codes}
        files = {f for f in using if not _IS_TYPE.search("".join(linecache.getlines(f)))}
        modules = [(raw_attributes(m), m) for m in list(sys.modules.values())]
        self._modules = [
            m for space, m in modules if space.get("__file__") in files and "type" not in space
        ]
        self._files = {vars(module)["__file__"] for module in self._modules}

    def unwatched_type_check(self, ran: ExecutedCode) -> str | None:
        """Return the name of a user's function that calls `type` in a file that is not watched, or
        that matches on classes: both give another result for a symbol. None if there is none."""
        for code in ran.codes.values():
            is_unwatched = code.co_filename not in self._files and _uses_type(code)
            if is_unwatched or _matches_classes(code):
                return code.co_qualname
        return None

    def __enter__(self) -> None:
        from torch.fx.experimental.sym_node import SymNode

        changes: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, wrap: Callable[[str, Any], Any]) -> None:
            original = getattr(owner, name)
            changes.append((owner, name, if_capturing(wrap(name, original), original)))

        for cls in _SYMBOLIC:
            for name in ("__repr__", "__hash__"):
                patch(cls, name, self._wrap)
            for name in ("__format__", "__reduce_ex__"):
                changes.append((cls, name, self._wrap(name, getattr(cls, name))))
            changes.append((cls, "__getattr__", self._getattr()))
        for name in ("guard_int", "guard_float", "int_"):
            patch(SymNode, name, self._wrap_conversion)
        for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
            patch(torch.SymInt, name, self._wrap_comparison)
        for cls in (torch.SymInt, torch.SymFloat):
            for name in _ARITHMETIC:
                patch(cls, name, self._wrap_arithmetic)
        patch(torch.SymInt, "__round__", self._wrap)
        changes.append((builtins, "isinstance", self._wrap_isinstance(isinstance)))
        changes += [(module, "type", _recording_type(self)) for module in self._modules]
        self._changed = patch_attributes(changes)
        self._changed.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._changed.__exit__(*exc)

    def record(self, use: str) -> None:
        """Record a use, with the user's line."""
        line = source_here()
        self.uses.append(use if line is None else f"{use} ({line}: {line.text})")

    def _wrap(self, name: str, original: Any) -> Any:
        """Wrap the method ``name`` of a symbolic number: record each call."""

        def method(value: Any, *args: Any) -> Any:
            is_use = _called_by_user() if name == "__hash__" else not _called_by_logger()
            if is_capturing() and is_use:
                self.record(_USES[name])
            return original(value, *args)

        return method

    def _wrap_arithmetic(self, _name: str, original: Any) -> Any:
        """Wrap an arithmetic method: record a float result, which sympy may round differently."""

        def method(value: Any, *args: Any) -> Any:
            result = original(value, *args)
            if type(result) is torch.SymFloat and _called_by_user():
                self.record("a length becomes a float")
            return result

        return method

    def _wrap_comparison(self, _name: str, original: Any) -> Any:
        """Wrap a comparison: in the user's code it returns a bool, and torch adds a guard."""

        def method(value: Any, other: Any) -> Any:
            result = original(value, other)
            if not _called_by_user():
                return result
            if result is NotImplemented and not isinstance(other, _COMPARABLE_TYPES):
                self.record(f"a length is compared with a {type(other).__name__}")
            return bool(result) if type(result) is torch.SymBool else result

        return method

    def _wrap_conversion(self, _name: str, original: Any) -> Any:
        """Wrap a conversion to int, float or bool: record it if the number has symbols."""

        def method(node: Any, *args: Any) -> Any:
            if node.expr.free_symbols:
                self.record("a length is converted to a plain number")
            return original(node, *args)

        return method

    def _getattr(self) -> Any:
        """Return a `__getattr__` that records attributes that symbolic numbers do not have."""
        recorder = self

        def method(_value: Any, name: str) -> Any:
            is_use = not name.startswith("__torch") and is_capturing()  # torch's C++ asks for these
            if is_use and _called_by_user():
                recorder.record(f"a length is asked for its {name}")
            raise AttributeError(name)

        return method

    def _wrap_isinstance(self, original: Any) -> Any:
        """Wrap `isinstance`: record a call by the user's code on a symbolic number."""
        recorder, symbolic = self, frozenset(_SYMBOLIC)

        def is_instance(value: Any, kind: Any, /) -> bool:
            if type(value) in symbolic and is_capturing() and _called_by_user():
                recorder.record("a length is asked for its type")
            return original(value, kind)

        return is_instance


_USES = {
    "__repr__": "a length is turned into text",
    "__format__": "a length is turned into text",
    "__hash__": "a length is hashed",
    "__reduce_ex__": "a length is copied",
    "__round__": "a length is rounded",
}
_COMPARABLE_TYPES = (torch.Tensor, str, type(None))
"""Types, besides plain numbers, with which a length may be compared. For an instance of another
class (an IntEnum), the comparison with a symbol would be wrong."""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_ARITHMETIC = tuple(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r"))


_IS_TYPE = re.compile(r"\bis (not )?type\b")
"""A pattern for `x is type`, which would be False for our replacement: such files get none."""


def _uses_type(code: CodeType) -> bool:
    """Return whether the code reads the name `type`, except in `type(self)`."""
    steps = list(dis.get_instructions(code))
    for step, next_step in zip(steps, [*steps[1:], None], strict=True):
        is_type = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type"
        if is_type and (next_step is None or next_step.argval != "self"):
            return True
    return False


def _matches_classes(code: CodeType) -> bool:
    return any(step.opname == "MATCH_CLASS" for step in dis.get_instructions(code))


def _recording_type(recorder: _UseRecorder) -> type:
    """Return a class that replaces `type` in a module of the user and behaves like it for all
    threads, but records calls on symbolic numbers."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Type:  # a metaclass of the user that inherits from Type
                return super().__call__(*args, **kwargs)
            if len(args) == 1:
                if type(args[0]) in _SYMBOLIC and is_capturing():
                    recorder.record("a length is asked for its type")
                return type(args[0])
            new_class = type(*args, **kwargs)
            if "__module__" not in args[2]:
                new_class.__module__ = sys._getframe(1).f_globals["__name__"]
            return new_class

        def __eq__(cls, other: object) -> bool:
            return other is type if cls is Type else super().__eq__(other)

        def __hash__(cls) -> int:
            return hash(type) if cls is Type else super().__hash__()

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type) if cls is Type else super().__instancecheck__(value)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, type) if cls is Type else super().__subclasscheck__(kind)

    class Type(type, metaclass=Kind):
        def __class_getitem__(cls, item: Any) -> Any:
            return type[item]

    return Type


# -- static copies ---------------------------------------------------------------------------------


class _StaticCopy:
    """Copies an exported graph with the sizes of given arguments in place of symbols."""

    def __init__(
        self, root: CallAsModule, mode: FakeTensorMode, constants: Mapping[int, torch.Tensor]
    ) -> None:
        self.root, self.mode, self.constants = root, mode, constants
        self.results: dict[Hashable, Any] = {}  # results by call: repeated layers run once

    def copy(self, original: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Return the copy for arguments of the sizes of ``tensors``."""
        copy = _module_like(original, self.root, self.constants)
        with self.mode, torch.no_grad():
            copy.graph, _ = self._copy_graph(original, copy, tuple(map(self._empty_like, tensors)))
        return copy

    def _empty_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    def _copy_graph(
        self, original: fx.GraphModule, copy: fx.GraphModule, values: tuple[Any, ...]
    ) -> tuple[fx.Graph, Any]:
        """Return the static copy of ``original.graph``, and the fake values of its outputs.

        ``copy``: the module that holds the new attributes; ``values``: of the placeholders.
        """
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}  # for each old node the new node, or a number
        vals: dict[fx.Node, Any] = {}
        copied: set[fx.Node] = set()
        remaining_values = iter(values)
        out: Any = None
        for old in original.graph.nodes:
            if old.op == "placeholder":
                value = next(remaining_values)
                if isinstance(value, (bool, int, float)):
                    env[old] = value
                    continue
                new = graph.placeholder(str(old.target))
                vals[new] = value
            elif old.op == "get_attr":
                new = graph.get_attr(str(old.target))
                attr = attribute_of(copy, new)
                vals[new] = attr
                if isinstance(attr, torch.Tensor):
                    is_state = isinstance(attr, (nn.Parameter, FakeTensor))
                    vals[new] = self._empty_like(attr) if is_state else self.mode.from_tensor(attr)
            elif old.op == "output":
                out = fx.map_arg(old.args[0], env.__getitem__)
                if any(not isinstance(x, fx.Node) for x in _flat(out)):
                    raise NotForLengths("a no_grad or autocast region returns a length")
                new = graph.output(out)
                new.meta = dict(old.meta)
                out = fx.map_arg(out, vals.__getitem__)
                continue
            else:
                new = self._copy_call(graph, old, copy, original, env, vals)
                if not isinstance(new, fx.Node) or new in copied:
                    env[old] = new
                    continue
            env[old] = new
            copied.add(new)
            new.meta = {k: v for k, v in old.meta.items() if k not in _VALUE_META}
            if "val" in old.meta:
                new.meta["val"] = vals[new]
        return graph, out

    def _copy_call(
        self,
        graph: fx.Graph,
        old: fx.Node,
        copy: fx.GraphModule,
        original: fx.GraphModule,
        env: dict[fx.Node, Any],
        vals: dict[fx.Node, Any],
    ) -> Any:
        """Copy one call; return the new node, or a number if the call computes with lengths."""
        target: Any = old.target
        mapped: Any = fx.map_arg((old.args, old.kwargs), env.__getitem__)
        args, kwargs = mapped

        def value(x: Any) -> Any:
            return vals[x] if isinstance(x, fx.Node) else x

        name = getattr(target, "__name__", str(target)).partition(".")[0]
        if isinstance(target, OpOverload) and name in _ASSERTS:
            if name == "_assert_scalar" and args[0] is not True:
                raise NotForLengths("an assertion does not hold")
            return None
        if isinstance(old.meta.get("val"), _SYMBOLIC):
            number = target(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
            if not isinstance(number, (bool, int, float)):
                raise NotForLengths(f"{target} does not return a number")
            return number
        if isinstance(target, HigherOrderOperator):
            return self._copy_region(graph, old, copy, original, args, vals)
        if target is torch.ops.aten.slice.Tensor and _is_full(vals[args[0]], *args[1:], **kwargs):
            if not _is_alone(old):
                return args[0]  # static indexing records no slice of a whole dim
            target, args = torch.ops.aten.alias.default, args[:1]
        new = graph.create_node("call_function", target, args, kwargs)
        vals[new] = self._run_op(target, args, kwargs, vals)
        return new

    def _copy_region(
        self,
        graph: fx.Graph,
        old: fx.Node,
        copy: fx.GraphModule,
        original: fx.GraphModule,
        args: Any,
        vals: dict[fx.Node, Any],
    ) -> fx.Node:
        """Copy a no_grad or autocast region, and make the graph inside it static, too."""
        positions = [i for i, x in enumerate(args) if isinstance(x, fx.Node) and x.op == "get_attr"]
        graphs = [i for i in positions if isinstance(vals[args[i]], fx.GraphModule)]
        if old.target.__name__ not in _REGIONS or len(graphs) != 1:  # type: ignore[union-attr]
            raise NotForLengths(f"it has {old.target}")
        first = graphs[0]
        child = vals[args[first]]
        inner = attribute_of(original, args[first])
        values = tuple(vals[x] if isinstance(x, fx.Node) else x for x in args[first + 1 :])
        child.graph, out = self._copy_graph(inner, child, values)
        nodes = tuple(x for x in args[first + 1 :] if isinstance(x, fx.Node))
        new = graph.create_node("call_function", old.target, (*args[: first + 1], *nodes), {})
        vals[new] = out
        return new

    def _run_op(self, target: Any, args: Any, kwargs: Any, vals: dict[fx.Node, Any]) -> Any:
        """Run an op on fake tensors; an equal call of an op without side effects runs once."""

        def value(x: fx.Node) -> Any:
            return vals[x]

        def run() -> Any:
            out = target(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
            return tuple(out) if isinstance(out, list) else out

        changes = isinstance(target, OpOverload) and target._schema.is_mutable
        if target is operator.getitem or changes:
            return run()
        from dtensor.frontend.capture.layers import args_key
        from dtensor.frontend.capture.to_graph import layout_of

        nodes: list[fx.Node] = []
        fx.map_arg((args, kwargs), lambda n: nodes.append(n))
        layouts = {n: layout_of(vals[n]) for n in nodes}
        key = (target, args_key(args, layouts), args_key(kwargs, layouts))
        if key not in self.results:
            self.results[key] = run()
        return self.results[key]


_INDEXING = (
    *(torch.ops.aten.slice.Tensor, torch.ops.aten.select.int, torch.ops.aten.unsqueeze.default),
    torch.ops.aten.index.Tensor,
)


def _is_alone(old: fx.Node) -> bool:
    """Return whether the op is the only one of its indexing expression (x[:n], not x[:n, None])."""
    trace = old.meta.get("stack_trace")
    neighbours = (n for n in (*old.all_input_nodes, *old.users) if n.target in _INDEXING)
    return all(n.meta.get("stack_trace") != trace for n in neighbours)


def _is_full(
    x: torch.Tensor, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> bool:
    return start in (0, None) and step == 1 and (end is None or end >= x.shape[dim])


_VALUE_META = ("val", "tensor_meta", "unbacked_bindings", "example_value")


def _flat(value: Any) -> list[Any]:
    return [y for x in value for y in _flat(x)] if isinstance(value, (list, tuple)) else [value]


def _module_like(
    original: fx.GraphModule, root: nn.Module, constants: Mapping[int, torch.Tensor]
) -> fx.GraphModule:
    """Return a module with an empty graph and the attributes of ``original`` in the same order: the
    root's parameters and buffers, and ``constants``."""
    copy = fx.GraphModule(nn.Module(), fx.Graph())
    _copy_attributes(copy, original, "", root, constants)
    return copy


def _copy_attributes(
    copy: nn.Module,
    original: nn.Module,
    path: str,
    root: nn.Module,
    constants: Mapping[int, torch.Tensor],
) -> None:
    for name in original._parameters:
        copy.register_parameter(name, root.get_parameter(f"{path}{name}"))
    for name in original._buffers:
        copy.register_buffer(name, root.get_buffer(f"{path}{name}"))
    for name, value in vars(original).items():
        if isinstance(value, torch.Tensor):
            object.__setattr__(copy, name, constants[id(value)])
    for name, child in original._modules.items():
        if isinstance(child, fx.GraphModule):
            copy.add_module(name, _module_like(child, root, constants))
        elif child is not None:
            inner = nn.Module()
            copy.add_module(name, inner)
            _copy_attributes(inner, child, f"{path}{name}.", root, constants)
