"""Rules: what an op does to the dims of its tensors, in einops' notation.

    mm       "m k, k n -> m n"        k is contracted: sharding it gives Partial("sum")
    add      "..., ... -> ..."        built per call: broadcast dims get no factor
    view     "b (h d) -> b h d"       a product of factors, major first
    split    "b (q + k + v) -> b q, b k, b v"     a sum of factors: all parts shard together
    softmax  "b k! -> b k!"           k must be whole on each rank
    sum      "b k -> b 1"             1 is a dim of size 1

From a rule alone follow all choices on one axis (`strategies`), and axis by axis all choices on
any mesh. A *factor sharding* is a choice for one factor, (blocks, unit), as in Shard; it maps to
a Shard of every dim that contains the factor (`Rule.apply`) and back (`Rule.match`).

Invariants: each factor has one size; a factor occurs at most once in a dim; a contracted factor
occurs in operands only. A rule names no mesh and no axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dtensor.errors import PlanningError
from dtensor.sharding.call import Localizer, Meta
from dtensor.sharding.placements import (
    REPLICATE,
    Partial,
    Placement,
    ReduceOp,
    Shard,
    block_sizes,
    index_sets,
    simplest,
)

Product = tuple[str, ...]
Dim = tuple[Product, ...]  # a sum of products of factors; ((),) is a dim of size 1
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class FactorSharding:
    """How one factor is cut over an axis: ``blocks`` and ``unit`` as in Shard."""

    blocks: tuple[int, ...]  # sizes, adding up to the factor's
    unit: int = 1


Assignment = Mapping[str, FactorSharding]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on one axis: a placement for each operand and each result."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    label: str

    @property
    def shards_work(self) -> bool:
        """Whether each rank does only its part of the work."""
        return any(isinstance(p, Shard) for p in (*self.operands, *self.results))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``operands`` and ``results`` list each tensor's dims; see the module docstring.

    linear: the sets of operands in which the op is jointly linear (all of a set may be pending
        sums together, the others replicated, and the results are pending sums).
    whole: factors that may not be split.
    reduce: how the parts of a contracted factor combine.
    localize: rewrites the call for one rank where the local form differs from the global one.
    flops: floating-point operations of the global call, 0 where memory traffic dominates.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...]
    linear: tuple[frozenset[int], ...] = ()
    whole: frozenset[str] = frozenset()
    reduce: ReduceOp = "sum"
    localize: Localizer | None = None
    flops: int = 0

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    def __str__(self) -> str:
        def dims_text(dims: Dims) -> str:
            return " ".join(self._dim_text(dim) for dim in dims)

        left = ", ".join(map(dims_text, self.operands))
        return f"{left} -> {', '.join(map(dims_text, self.results))}"

    def _dim_text(self, dim: Dim) -> str:
        parts = [" ".join(f + "!" * (f in self.whole) for f in product) for product in dim]
        if len(dim) != 1:
            return f"({' + '.join(parts)})"
        return (f"({parts[0]})" if len(dim[0]) > 1 else parts[0]) or "1"

    # -- between factor shardings and placements --------------------------------------------

    def apply(self, assignment: Assignment, num: int) -> Strategy | None:
        """The strategy that shards the assigned factors over an axis of ``num`` ranks.

        None where the factors cannot be sharded together: one is whole, only some parts of a sum
        are assigned, or two factors of one dim are.
        """
        if any(f in self.whole for f in assignment):
            return None
        placed: list[Placement] = []
        for dims in self.operands:
            found = self._place(dims, assignment, num)
            if found is None:
                return None
            placed.append(found)
        results: list[Placement] = []
        for dims in self.results:
            found = self._place(dims, assignment, num)
            if found is None:
                return None
            results.append(found)
        if all(p == REPLICATE for p in placed):
            if all(p == REPLICATE for p in results):
                return None
        elif any(p == REPLICATE for p in results):
            results = [Partial(self.reduce) if p == REPLICATE else p for p in results]
        return Strategy(tuple(placed), tuple(results), "+".join(sorted(assignment)))

    def _place(self, dims: Dims, assignment: Assignment, num: int) -> Placement | None:
        """The placement of a tensor of these dims, or None where it has no Shard form."""
        found: Placement = REPLICATE
        for index, dim in enumerate(dims):
            shard = self._place_dim(index, dim, assignment)
            if shard == REPLICATE:
                continue
            if shard is None or found != REPLICATE:
                return None
            found = simplest(shard, tuple(self.dim_size(d) for d in dims), num)
        return found

    def _place_dim(self, index: int, dim: Dim, assignment: Assignment) -> Placement | None:
        touched = [[f for f in product if f in assignment] for product in dim]
        if not any(touched):
            return REPLICATE
        blocks: list[int] = []
        units: set[int] = set()
        for product, factors in zip(dim, touched, strict=True):
            if len(factors) != 1:
                return None
            position = product.index(factors[0])
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            sharding = assignment[factors[0]]
            blocks.extend([size * after for size in sharding.blocks] * before)
            units.add(sharding.unit * after)
        unit = math.gcd(*units)
        if len(units) > 1 and any(u != unit for u in units):
            return None
        if min(blocks) < 1:
            return None
        return Shard(index, tuple(blocks), unit)

    def dim_size(self, dim: Dim) -> int:
        return sum(math.prod(self.size[f] for f in product) for product in dim)

    def match(self, dims: Dims, shard: Shard, num: int) -> Assignment | None:
        """The factor shardings of which ``shard`` of a tensor with these dims is the image.

        None where the placement does not line up with the factors of its dim.
        """
        dim = dims[shard.dim]
        total = self.dim_size(dim)
        wanted = index_sets(shard, total, num)
        blocks = list(block_sizes(shard.blocks, total))
        parts = self._group(dim, blocks)
        if parts is None:
            return None
        assignment: dict[str, FactorSharding] = {}
        for product, part in zip(dim, parts, strict=True):
            choices = list(self._factor_shardings(product, part, shard.unit))
            if len(dim) == 1:
                for factor, sharding in choices:
                    if self._image(dims, shard.dim, {factor: sharding}, num) == wanted:
                        return {factor: sharding}
                return None
            if not choices:
                return None
            factor, sharding = choices[0]
            assignment[factor] = sharding
        return assignment if self._image(dims, shard.dim, assignment, num) == wanted else None

    def _image(self, dims: Dims, index: int, assignment: Assignment, num: int) -> object:
        placed = self._place_dim(index, dims[index], assignment)
        if not isinstance(placed, Shard):
            return None
        try:
            return index_sets(placed, self.dim_size(dims[index]), num)
        except PlanningError:
            return None

    def _group(self, dim: Dim, blocks: list[int]) -> list[list[int]] | None:
        """The blocks that fall on each part of a sum, or None where one crosses a boundary."""
        if len(dim) == 1:
            return [blocks]
        parts: list[list[int]] = []
        rest = list(blocks)
        for product in dim:
            room = math.prod(self.size[f] for f in product)
            part: list[int] = []
            while room > 0 and rest:
                part.append(rest.pop(0))
                room -= part[-1]
            if room:
                return None
            parts.append(part)
        return None if rest else parts

    def _factor_shardings(
        self, product: Product, blocks: list[int], unit: int
    ) -> Iterator[tuple[str, FactorSharding]]:
        """Candidates, major factor first: those whose image may be these blocks and unit."""
        for position, factor in enumerate(product):
            size = self.size[factor]
            before = math.prod(self.size[f] for f in product[:position])
            after = math.prod(self.size[f] for f in product[position + 1 :])
            if size == 1 or len(blocks) % before:
                continue
            pattern = blocks[: len(blocks) // before]
            if pattern * before != blocks or any(b % after for b in pattern):
                continue
            unit_here = unit // after if unit % after == 0 else 1
            if any(b // after % unit_here for b in pattern):
                continue
            yield factor, FactorSharding(tuple(b // after for b in pattern), unit_here)

    # -- the choices on one axis ---------------------------------------------------------------

    def fixed_strategies(self) -> tuple[Strategy, ...]:
        """Replicate, and a pending sum through each jointly linear set of operands."""
        everything = Strategy(
            (REPLICATE,) * len(self.operands), (REPLICATE,) * len(self.results), "replicate"
        )
        pending = tuple(
            Strategy(
                tuple(
                    Partial("sum") if i in group else REPLICATE for i in range(len(self.operands))
                ),
                (Partial("sum"),) * len(self.results),
                f"linear{sorted(group)}",
            )
            for group in self.linear
        )
        return (everything, *pending)

    def factors(self) -> tuple[str, ...]:
        """The factors that may be split, in order of first appearance."""
        seen: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                for product in dim:
                    seen.update(dict.fromkeys(product))
        return tuple(f for f in seen if f not in self.whole and self.size[f] > 1)

    def strategies(self, num: int) -> tuple[Strategy, ...]:
        """All choices with each factor cut in one block: what brute force compares against."""
        found: dict[Strategy, None] = dict.fromkeys(self.fixed_strategies())
        partners = self.partners()
        for factor in self.factors():
            group = partners.get(factor, frozenset({factor}))
            assignment = {f: FactorSharding((self.size[f],)) for f in group}
            strategy = self.apply(assignment, num)
            if strategy is not None:
                found[strategy] = None
        return tuple(found)

    def partners(self) -> dict[str, frozenset[str]]:
        """Factors that stand in one sum and can only be split together (majors of each part)."""
        result: dict[str, frozenset[str]] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                if len(dim) > 1:
                    group = frozenset(
                        next((f for f in product if self.size[f] > 1), product[0])
                        for product in dim
                        if product
                    )
                    for factor in group:
                        result[factor] = result.get(factor, frozenset()) | group
        return result


# -- the notation --------------------------------------------------------------------------------

_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*!?|1|\.\.\.)")


def parse_rule(
    pattern: str,
    operands: Sequence[Meta],
    results: Sequence[Meta | None],
    *,
    linear: Sequence[Sequence[int]] = (),
    reduce: ReduceOp = "sum",
    localize: Localizer | None = None,
    sizes: Mapping[str, int] | None = None,
    flops: int | None = None,
) -> Rule:
    """The rule that ``pattern`` denotes for tensors of these shapes.

    ``...`` stands for as many leading dims as a tensor has beyond those named, aligned from the
    right between tensors; there a dim of size 1 against a larger one is broadcast and gets no
    factor. ``sizes`` states factors that shapes alone do not determine. ``flops=None`` counts 0.
    Errors (a malformed pattern, sizes that disagree) are the rule author's: PlanningError.
    """
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise PlanningError(f"the rule {pattern!r} has no '->'")
    terms = [_tokens(text) for text in (*left.split(","), *right.split(","))]
    metas: list[Meta | None] = [*operands, *results]
    if not operands and not left.strip():  # with an operand, "" is a scalar
        terms = terms[1:]
    if len(terms) != len(metas):
        raise PlanningError(
            f"the rule {pattern!r} is for {len(terms)} tensors, the call has {len(metas)}"
        )
    ellipsis = _ellipsis_sizes(terms, metas, pattern)
    known: dict[str, int] = dict(sizes or {})
    whole: set[str] = set()
    all_dims: list[Dims] = []
    for tokens, meta in zip(terms, metas, strict=True):
        if meta is None:
            all_dims.append(())
            continue
        all_dims.append(_dims(tokens, meta, ellipsis, known, whole))
    _solve(
        [
            item
            for dims, meta in zip(all_dims, metas, strict=True)
            if meta is not None
            for item in zip(dims, meta.shape, strict=True)
        ],
        known,
        pattern,
    )
    rule = Rule(
        operands=tuple(all_dims[: len(operands)]),
        results=tuple(all_dims[len(operands) :]),
        sizes=tuple(sorted(known.items())),
        linear=tuple(frozenset(group) for group in linear),
        whole=frozenset(whole),
        reduce=reduce,
        localize=localize,
        flops=flops or 0,
    )
    for dims, meta in zip(all_dims, metas, strict=True):
        if meta is not None and tuple(rule.dim_size(d) for d in dims) != meta.shape:
            raise PlanningError(f"the rule {pattern!r} does not fit a tensor {meta}")
    return rule


def _tokens(text: str) -> list[str]:
    tokens = [m.group(0) for m in _TOKEN.finditer(text)]
    if re.sub(r"\s+", "", _TOKEN.sub("", text)):
        raise PlanningError(f"{text!r} is not a list of dims")
    return tokens


def _ellipsis_sizes(
    terms: Sequence[list[str]], metas: Sequence[Meta | None], pattern: str
) -> tuple[int, ...]:
    """The broadcast sizes that ``...`` stands for, from the right-aligned tensors."""
    longest: list[int] = []
    for tokens, meta in zip(terms, metas, strict=True):
        if meta is None:
            continue
        extra = len(meta.shape) - (len(tokens) - ("..." in tokens))
        if extra < 0 or (extra and "..." not in tokens):
            raise PlanningError(f"the rule {pattern!r} does not fit a tensor {meta}")
        if "..." in tokens:
            start = tokens.index("...")
            sizes = list(meta.shape[start : start + extra])
            padded = [1] * (len(longest) - len(sizes)) + sizes
            longest = [1] * (len(sizes) - len(longest)) + longest
            longest = [b if a == 1 else a for a, b in zip(longest, padded, strict=True)]
    return tuple(longest)


def _dims(
    tokens: list[str], meta: Meta, ellipsis: tuple[int, ...], known: dict[str, int], whole: set[str]
) -> Dims:
    dims: list[Dim] = []
    extra = len(meta.shape) - (len(tokens) - 1)
    for token in tokens:
        if token == "...":
            for i in range(extra):
                index = len(ellipsis) - extra + i
                size = meta.shape[len(dims)]
                name = f"e{index}"
                known[name] = ellipsis[index]
                dims.append(((name,),) if size == ellipsis[index] else ((),))
        elif token.startswith("("):
            dims.append(
                tuple(
                    tuple(_name(f, whole) for f in part.split() if f != "1")
                    for part in token[1:-1].split("+")
                )
            )
        else:
            dims.append(((),) if token == "1" else ((_name(token, whole),),))
    return tuple(dims)


def _name(token: str, whole: set[str]) -> str:
    name = token.removesuffix("!")
    if token.endswith("!"):
        whole.add(name)
    return name


def _solve(dims: Sequence[tuple[Dim, int]], known: dict[str, int], pattern: str) -> None:
    """Fill in the sizes of factors, one unknown of a dim at a time, while that leads on."""
    waiting = list(dims)
    while waiting:
        open_dims: list[tuple[Dim, int]] = []
        for dim, size in waiting:
            unknown = {f: None for product in dim for f in product if f not in known}
            if len(unknown) > 1:
                open_dims.append((dim, size))
            for factor in unknown if len(unknown) == 1 else ():
                known[factor] = _solved(dim, size, factor, known)
        if len(open_dims) == len(waiting):
            unknown = [f for product in open_dims[0][0] for f in product if f not in known]
            raise PlanningError(f"the rule {pattern!r} leaves the sizes of {unknown} open")
        waiting = open_dims


def _solved(dim: Dim, size: int, factor: str, known: Mapping[str, int]) -> int:
    """The size of the one unknown factor of a dim."""
    rest, scale = 0, 1
    for product in dim:
        part = math.prod(known[f] for f in product if f in known)
        if factor in product:
            scale = part
        else:
            rest += part
    return (size - rest) // scale if scale else 0
