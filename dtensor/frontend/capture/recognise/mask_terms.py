"""Decompose an attention mask into limits on positions and comparisons of token values.

    (j <= i) & (j > i - 4)                          ->  is_causal, window=[3, 0]
    (j <= i) & is_token[:, None, None, :]           ->  is_causal, comparisons=["key"]
    documents[:, :, None] == documents[:, None, :]  ->  comparisons=["eq"]
    where(mask, 0, lowest number)                   ->  the terms of the mask

i and j are the positions of queries and keys, which are constants of the program. A key is visible
if all terms let it be visible. Comparisons of constants become limits, or vanish.

Invariants: comparisons of two tokens are analysed without a value of size queries x keys. A mask
that is changed in place is not decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dtensor.frontend.capture.recognise.constants import Constants, NotConstant, Writes
from dtensor.frontend.capture.recognise.matching import NoMatch, dtype, is_op, is_tensor, shape
from dtensor.frontend.graph import Writer, bound

aten: Any = torch.ops.aten

_ANDS = (
    aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor
)  # fmt: skip
_ORS = (aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)
_SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
_COMPARISONS = {getattr(aten, name).Tensor: name for name in _SWAPPED}
_LIMITS = {getattr(aten, name).Scalar: name for name in _SWAPPED}
_WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CASTS = (
    aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.alias.default,
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.slice.Tensor,
)  # fmt: skip
"""Ops whose result is their operand if the dtypes and shapes are the same."""
_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
)  # fmt: skip
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of `dt.attention` with the effect of a mask.

    ``sees_itself``: whether each query sees the key of its own position.
    """

    is_causal: bool = False
    window: tuple[int, ...] = ()
    query_values: tuple[fx.Node, ...] = ()
    key_values: tuple[fx.Node, ...] = ()
    comparisons: tuple[str, ...] = ()
    sees_itself: bool = True

    def options(self) -> dict[str, Any]:
        """Return the keyword options of `dt.attention` that differ from their defaults."""
        names = ("window", "query_values", "key_values", "comparisons")
        return {name: list(getattr(self, name)) for name in names if getattr(self, name)}


@dataclass(frozen=True, slots=True)
class _Value:
    """A value with the role of each dim: "b" batch, "h" heads, "t" queries, "s" keys, "" for a dim
    of size 1. ``is_hidden``: True means that the key is hidden."""

    node: fx.Node
    roles: tuple[str, ...]
    is_hidden: bool = False

    def __post_init__(self) -> None:
        roles = self.roles[len(self.roles) - len(shape(self.node)) :]
        sized = (role if n != 1 else "" for role, n in zip(roles, shape(self.node), strict=True))
        object.__setattr__(self, "roles", tuple(sized))

    def operand(self, node: fx.Node, *, is_inverted: bool = False) -> _Value:
        """Return an operand of the elementwise op or expand that made this value. The dims of the
        operand are the last dims of the result."""
        return _Value(node, self.roles, self.is_hidden != is_inverted)


@dataclass(frozen=True, slots=True)
class _Token:
    """A value of each token: ``value``, which is ``source + offset``."""

    value: _Value
    source: _Value
    offset: int


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A key is visible if `query op key`; if the query is None, if the key's bool is True."""

    op: str
    query: _Token | None
    key: _Token

    @property
    def is_reflexive(self) -> bool:
        """Whether each query sees the key of its own position."""
        q, k = self.query, self.key
        is_same = q is not None and (q.source.node, q.offset) == (k.source.node, k.offset)
        is_float = dtype(k.value.node).is_floating_point  # NaN does not equal itself
        return is_same and self.op in ("eq", "le", "ge") and not is_float


_Band = tuple[int, int]
"""Keys from `query - before` to `query + after` are visible; -1 is no limit."""


class MaskTerms:
    """The terms of the masks of one graph. They are kept, because layers share masks."""

    def __init__(self, graph: fx.Graph, constants: Constants) -> None:
        self._graph: fx.Graph = graph
        self._constants: Constants = constants
        self.writes: Writes = constants.writes
        self._results: dict[tuple[fx.Node, int, int], Terms | NoMatch] = {}

    def of(self, mask: fx.Node, queries: int, keys: int) -> Terms:
        """Return the terms of a mask for a number of queries and keys. Raises NoMatch with the
        reason if it has none."""
        key = mask, queries, keys
        if key not in self._results:
            try:
                self._results[key] = self._terms(*key)
            except NoMatch as reason:
                self._results[key] = reason
        result = self._results[key]
        if isinstance(result, NoMatch):
            raise result
        return result

    def _terms(self, mask: fx.Node, queries: int, keys: int) -> Terms:
        if 0 in (*shape(mask), queries, keys):
            raise NoMatch("its mask has no elements")
        root = _Value(mask, ("b", "h", "t", "s"))
        try:
            parts = [part for leaf in self._leaves(root) for part in self._parts(leaf)]
        except NoMatch:
            band = self._constant_band(root)
            if band is None:
                raise
            parts = [band]
        bands, comparisons = self._without_constants(parts)
        before = min((b for b, _ in bands if -1 < b < queries - 1), default=-1)
        after = min((a for _, a in bands if -1 < a < keys - 1), default=-1)
        window = () if before < 0 and after <= 0 else (before, after)
        if queries != keys and (window or comparisons):
            raise NoMatch("its queries and keys have different lengths")
        call = Writer(self._graph, mask, reads_node=True)
        return Terms(
            after == 0,
            window,
            tuple(_tokens(call, c.query, c.op) for c in comparisons if c.query is not None),
            tuple(_tokens(call, c.key, c.op) for c in comparisons),
            tuple(c.op for c in comparisons),
            all(c.is_reflexive for c in comparisons),
        )

    # -- a conjunction -----------------------------------------------------------------------------

    def _leaves(self, value: _Value) -> Iterator[_Value]:
        """Yield values that all must be visible for a key to be visible: bools, and constants that
        are added."""
        self._check_unchanged(value.node)
        node, source = value.node, _before_view(value)
        if source is not None:
            operands = [source]
        elif dtype(node).is_floating_point:
            operands = self._hiding(value)
        elif dtype(node) != torch.bool:
            raise NoMatch("its mask has numbers")
        elif is_op(node, *_NOTS):
            operands = [value.operand(node.all_input_nodes[0], is_inverted=True)]
        elif is_op(node, *(_ORS if value.is_hidden else _ANDS)) and all(map(is_tensor, node.args)):
            operands = [value.operand(x) for x in node.args if is_tensor(x)]
        else:
            operands = []
        if not operands:
            yield value
        for operand in operands:
            yield from self._leaves(operand)

    def _hiding(self, value: _Value) -> list[_Value]:
        """Return the operands of a float mask that add 0 for visible keys, and -inf or the lowest
        number of the dtype for hidden keys."""
        node = value.node
        args: Any = node.args
        lowest = {-math.inf, torch.finfo(dtype(node)).min}
        if is_op(node, aten.add.Tensor) and all(map(is_tensor, args)) and not node.kwargs:
            return [value.operand(x) for x in args]
        if is_op(node, *_FILLS) and self._is_filled(args[2], lowest):
            return [value.operand(args[0]), value.operand(args[1], is_inverted=True)]
        if is_op(node, *_WHERES):
            numbers = args[1:3]
            if self._is_filled(numbers[0], {0}) and self._is_filled(numbers[1], lowest):
                return [value.operand(args[0])]
            if self._is_filled(numbers[0], lowest) and self._is_filled(numbers[1], {0}):
                return [value.operand(args[0], is_inverted=True)]
        return []

    def _is_filled(self, x: Any, numbers: set[Any]) -> bool:
        """Return whether x is one of the numbers, or a constant with only such elements."""
        if not isinstance(x, fx.Node):
            return x in numbers
        value = self._constant(x)
        if value is None or value.numel() == 0:
            return False
        low, high = _first_rows(value, value.dim()).aminmax()
        return bool(low == high) and low.item() in numbers

    def _check_unchanged(self, node: fx.Node) -> None:
        if self.writes.is_changed(node):
            raise NoMatch("its mask is changed in place")

    # -- one part of it ----------------------------------------------------------------------------

    def _parts(self, value: _Value) -> Sequence[_Comparison | _Band]:
        """Return a leaf as a comparison or as bands."""
        if "h" in value.roles:
            raise NoMatch("its mask differs between heads")
        if comparison := self._comparison(value):
            return [comparison]
        if bands := self._bands_of_distance(value):
            return bands
        band = self._constant_band(value)
        if band is not None:
            return [band]
        if "t" in value.roles or "s" not in value.roles or dtype(value.node) != torch.bool:
            is_float = dtype(value.node).is_floating_point
            what = "adds numbers" if is_float else "is no conjunction of comparisons of tokens"
            raise NoMatch(f"its mask {what}")
        return [_Comparison("key", None, self._token(value))]

    def _comparison(self, value: _Value) -> _Comparison | None:
        """Return the comparison of a query's and a key's value that a part is, or None."""
        node = value.node
        name = _COMPARISONS.get(node.target, "")
        if not name or not all(map(is_tensor, node.args)):
            return None
        query, key = (value.operand(x) for x in node.args if is_tensor(x))
        if value.is_hidden:
            if any(dtype(x.node).is_floating_point for x in (query, key)):
                return None  # NaN is neither less nor not less
            name = _OPPOSITE[name]
        if "s" in query.roles:
            query, key, name = key, query, _SWAPPED[name]
        has_queries, has_keys = ({"t", "s"} & {*x.roles} for x in (query, key))
        if (has_queries, has_keys) != ({"t"}, {"s"}):
            return None
        return _Comparison(name, self._token(query), self._token(key))

    def _bands_of_distance(self, value: _Value) -> list[_Band]:
        """Return the bands of `i - j < 4`, `j - i < 4` or `(i - j).abs() < 4`, if constant."""
        name = _LIMITS.get(value.node.target, "")
        if not name:
            return []
        x, limit = value.node.args
        name = _OPPOSITE[name] if value.is_hidden else name
        is_absolute = is_op(x, aten.abs.default)
        difference = x.all_input_nodes[0] if is_absolute else x
        if not is_op(difference, aten.sub.Tensor) or len(difference.all_input_nodes) != 2:
            return []
        if difference.kwargs or type(limit) is not int or dtype(difference) not in _INTEGERS:
            return []
        if is_absolute and name not in ("lt", "le"):
            return []
        first, second = (value.operand(x) for x in difference.all_input_nodes)
        bands: list[_Band | None] = []
        for a, b in [(first, second), (second, first)][: 1 + is_absolute]:  # a - b op limit
            is_key = "s" in a.roles
            query, key = (b, a) if is_key else (a, b)
            row, keys = self._row(self._token(query), "t"), self._row(self._token(key), "s")
            row = None if row is None else row + (limit if is_key else -limit)
            bands.append(_band_of(_SWAPPED[name] if is_key else name, row, keys))
        return [band for band in bands if band is not None] if None not in bands else []

    def _token(self, value: _Value) -> _Token:
        """Trace a value to the one from which it was taken by views, sums with an int, and indices
        that count all elements."""
        source, offset = value, 0
        while True:
            self._check_unchanged(source.node)
            before, step = _before_view(source) or self._before_index(source), 0
            if before is None:
                before, step = _before_sum(source)
            if before is None:
                return _Token(value, source, offset)
            source, offset = before, offset + step

    def _before_index(self, value: _Value) -> _Value | None:
        """Return x for x[rows, columns] if each index is a constant that counts along one dim."""
        node = value.node
        if not is_op(node, aten.index.Tensor):
            return None
        x, indices = bound(node)["self"], bound(node)["indices"]
        if len(indices) != len(shape(x)):
            return None
        roles: list[str] = []
        for n, index in zip(shape(x), indices, strict=True):
            counts = None if index is None else self._constant(index)
            if counts is None or counts.dtype not in _INTEGERS:
                return None
            if not counts.flatten().long().equal(torch.arange(n)):
                return None
            sizes = zip(reversed(value.roles), reversed(counts.shape), strict=False)
            long = [role for role, m in sizes if m != 1] or [""]
            if len(long) > 1:
                return None
            roles += long
        return _Value(x, tuple(roles), value.is_hidden)

    # -- constants ---------------------------------------------------------------------------------

    def _constant(self, node: fx.Node) -> Tensor | None:
        try:
            return self._constants.value(node)
        except NotConstant:
            return None

    def _constant_band(self, value: _Value) -> _Band | None:
        """Return the band of visible keys; None for a value that is no constant or no band."""
        constant = self._constant(value.node)
        visible = None if constant is None else _visible_keys(constant)
        if visible is None or visible.numel() == 0:
            return None
        visible = ~visible if value.is_hidden else visible
        if bool(visible.all()):
            return -1, -1
        if value.roles[-2:] != ("t", "s"):
            return None
        first = visible.flatten(0, -3)[0] if visible.dim() > 2 else visible
        before, after = int(first[:, 0].sum()) - 1, int(first[0].sum()) - 1
        band = torch.ones(first.shape, dtype=torch.bool).tril(after).triu(-before)
        is_band = min(before, after) >= 0 and bool((visible == band).all())
        return (before, after) if is_band else None

    def _without_constants(
        self, parts: Sequence[_Comparison | _Band]
    ) -> tuple[list[_Band], list[_Comparison]]:
        """Return the bands, among them the comparisons of constants, and the other comparisons."""
        bands = [part for part in parts if not isinstance(part, _Comparison)]
        comparisons = [part for part in parts if isinstance(part, _Comparison)]
        counts = {x for c in comparisons if (x := self._positions_in_documents(c)) is not None}
        remaining: list[_Comparison] = []
        for c in comparisons:
            band = None
            if c.query is not None:
                nodes = {c.query.source.node, c.key.source.node}
                is_counted = len(nodes) == 1 and nodes <= counts
                query, key = self._row(c.query, "t", is_counted), self._row(c.key, "s", is_counted)
                band = _band_of(c.op, query, key)
            remaining.append(c) if band is None else bands.append(band)
        return bands, remaining

    def _row(self, token: _Token, role: str, is_counted: bool = False) -> Tensor | None:
        """Return the values of a constant integer token, if they are the same in all rows of the
        batch; for positions in documents, positions that count from 0."""
        source = token.source
        sizes = [n for r, n in zip(source.roles, shape(source.node), strict=True) if r == role]
        if dtype(source.node).is_floating_point or [r for r in source.roles if r][-1:] != [role]:
            return None
        if is_counted:
            return torch.arange(sizes[0]) + token.offset
        constant = self._constant(source.node)
        if constant is None:
            return None
        rows = constant.reshape(-1, sizes[0]).long()
        return rows[0] + token.offset if bool((rows == rows[0]).all()) else None

    def _positions_in_documents(self, comparison: _Comparison) -> fx.Node | None:
        """Return x if queries see only keys with the same cumsum(diff(x) != 1). Between tokens with
        the same sum x counts up by 1, so that x can be compared as positions of the sequence."""
        if not comparison.is_reflexive or comparison.op != "eq":
            return None
        documents = comparison.key.source
        starts: Any = documents.node.args[0] if is_op(documents.node, aten.cumsum.default) else None
        steps: Any = (
            starts.args[0] if is_op(starts, aten.ne.Scalar) and starts.args[1] == 1 else None
        )
        if not is_op(steps, aten.diff.default):
            return None
        x, *options = (bound(steps)[name] for name in ("self", "n", "dim", "prepend", "append"))
        last = len(shape(documents.node)) - 1
        dims = {bound(documents.node)["dim"] % (last + 1), options[1] % (last + 1)}
        if options[0] != 1 or options[3] is not None or dims != {last}:
            return None
        first = options[2]  # x[:, :1] - 1, so that the first token starts no document
        if not is_op(first, aten.sub.Tensor) or first.args[1:] != (1,) or first.kwargs:
            return None
        start = first.args[0]
        if not is_op(start, aten.slice.Tensor) or dtype(x) not in _INTEGERS:
            return None
        a = bound(start)
        a["dim"] %= last + 1
        if list(a.values()) != [x, last, 0, 1, 1]:
            return None
        return self._token(documents.operand(x)).source.node


def _band_of(op: str, query: Tensor | None, key: Tensor | None) -> _Band | None:
    """Return the band of keys that a comparison of constants lets be visible, or None."""
    if query is None or key is None:
        return None
    (q0, q1), (k0, k1) = query.aminmax(), key.aminmax()
    if (op not in ("eq", "ne") or (q0 == q1 and k0 == k1)) and all(
        bool(getattr(torch, op)(q, k)) for q in (q0, q1) for k in (k0, k1)
    ):
        return -1, -1
    if not all(x.equal(x[0] + torch.arange(len(x))) for x in (query, key)):
        return None
    shift = int(query[0] - key[0])  # the comparison is `position of the query + shift op position`
    after = {"ge": shift, "gt": shift - 1, "eq": shift}.get(op)
    before = {"le": -shift, "lt": -shift - 1, "eq": -shift}.get(op)
    limits = [limit for limit in (before, after) if limit is not None]
    if not limits or min(limits) < 0:
        return None
    return -1 if before is None else before, -1 if after is None else after


# -- values ----------------------------------------------------------------------------------------


def _before_view(value: _Value) -> _Value | None:
    """Return the operand of an op that only adds, removes or repeats dims, or does nothing."""
    node = value.node
    if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    if dtype(source) != dtype(node):
        return None
    if is_op(node, aten.expand.default):
        return value.operand(source)
    if is_op(node, *_CASTS) and shape(source) == shape(node):
        return value.operand(source)
    long = [n for n in shape(node) if n != 1]
    if not is_op(node, *_VIEWS) or [n for n in shape(source) if n != 1] != long:
        return None
    roles = iter([role for role, n in zip(value.roles, shape(node), strict=True) if n != 1])
    names = tuple(next(roles) if n != 1 else "" for n in shape(source))
    return _Value(source, names, value.is_hidden)


def _before_sum(value: _Value) -> tuple[_Value | None, int]:
    """Return x and 3 for x + 3; None and 0 for other ops."""
    node = value.node
    if not is_op(node, aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
        return None, 0
    x, number = node.args
    if not is_tensor(x) or type(number) is not int or {dtype(x), dtype(node)} - {*_INTEGERS}:
        return None, 0
    return value.operand(x), number if node.target is aten.add.Tensor else -number


def _tokens(call: Writer, token: _Token, op: str) -> fx.Node:
    """Return the value of a token as a node [b n] or [1 n]."""
    value = token.value if token.offset else token.source
    node, sizes = value.node, [n for n in shape(value.node) if n != 1]
    if [role for role in value.roles if role] not in (["b", "t"], ["t"], ["b", "s"], ["s"]):
        raise NoMatch("its mask compares values with the dims in another order than batch, tokens")
    if op == "key" and value.is_hidden:
        node = call(aten.logical_not.default, node)
    full = [1] * (2 - len(sizes)) + sizes
    return node if list(shape(value.node)) == full else call(aten.reshape.default, node, full)


def _first_rows(x: Tensor, num_dims: int) -> Tensor:
    """Return x with one row of each of its first dims in which it repeats the same row."""
    for dim in range(num_dims):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return x


def _visible_keys(mask: Tensor) -> Tensor | None:
    """Return which keys each query sees; None if the mask does more than hide keys."""
    mask = _first_rows(mask, mask.dim() - 2)
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    # The lowest number of a dtype has the effect of -inf if the query sees at least one key.
    hidden = (mask == -math.inf) | (mask == torch.finfo(mask.dtype).min)
    return visible if bool((visible | hidden).all()) and bool(visible.any(-1).all()) else None
