"""The notation of rules: from a pattern and a call's shapes to a Rule.

    parse_rule("b (h d) -> b h d", (Meta((2, 12), f32),), (Meta((2, 3, 4), f32),))

    pattern := tensors "->" tensors          tensors := dims ("," dims)*
    dims    := dim*                          dim     := factor | "1" | "..." | "(" sum ")"
    sum     := factor* ("+" factor*)*        factor  := name "!"?

`!` says that the factor must be whole; `...` stands for leading dims, aligned from the right; `~f`
among a result's dims says that it is the same whatever part of f a rank holds (a convolution's
bias gradient, with its input channels split). What the pattern means is in rule.py. Nothing here
knows an op.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from dtensor.errors import PlanningError
from dtensor.numerics import ReduceOp
from dtensor.sharding.ops.call import Localizer, Meta
from dtensor.sharding.rules.rule import Dim, Dims, Rule

_TOKEN = re.compile(r"\(([^()]*)\)|(~?[A-Za-z_]\w*!?|1|\.\.\.)")


def parse_rule(
    pattern: str,
    operands: Sequence[Meta],
    results: Sequence[Meta | None],
    *,
    linear: Sequence[Sequence[int]] = (),
    addends: Sequence[int] = (),
    reduce: ReduceOp = "sum",
    localize: Localizer | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule that ``pattern`` denotes for tensors of these shapes.

    ``...`` stands for as many leading dims as a tensor has beyond those named, aligned from the
    right between tensors; there a dim of size 1 against a larger one is broadcast and gets no
    factor. ``sizes`` states factors that shapes alone do not determine.
    Errors (a malformed pattern, sizes that disagree) are the rule author's: PlanningError.
    """
    left, right = pattern_terms(pattern)
    if not operands and left == [[]]:  # with an operand, "" is a scalar
        left = []
    terms = [*left, *right]
    metas: list[Meta | None] = [*operands, *results]
    if len(terms) != len(metas):
        raise PlanningError(
            f"the rule {pattern!r} is for {len(terms)} tensors, the call has {len(metas)}"
        )
    same = {
        (i, token[1:])
        for i, tokens in enumerate(terms[len(operands) :])
        for token in tokens
        if token.startswith("~")
    }
    terms = [[token for token in tokens if not token.startswith("~")] for tokens in terms]
    ellipsis = _ellipsis_sizes(terms, metas, pattern)
    known: dict[str, int] = dict(sizes or {})
    whole: set[str] = set()
    all_dims: list[Dims] = []
    for tokens, meta in zip(terms, metas, strict=True):
        all_dims.append(() if meta is None else _dims(tokens, meta, ellipsis, known, whole))
    sized = [
        item
        for dims, meta in zip(all_dims, metas, strict=True)
        if meta is not None
        for item in zip(dims, meta.shape, strict=True)
    ]
    _solve(sized, known, pattern)
    rule = Rule(
        operands=tuple(all_dims[: len(operands)]),
        results=tuple(all_dims[len(operands) :]),
        sizes=tuple(sorted(known.items())),
        linear=tuple(frozenset(group) for group in linear),
        addends=frozenset(addends),
        same=frozenset(same),
        whole=frozenset(whole),
        reduce=reduce,
        localize=localize,
    )
    for dims, meta in zip(all_dims, metas, strict=True):
        if meta is not None and tuple(rule.dim_size(d) for d in dims) != meta.shape:
            raise PlanningError(f"the rule {pattern!r} does not fit a tensor {meta}")
    return rule


def pattern_terms(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """The tokens of each operand's and of each result's dims; PlanningError if malformed."""
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise PlanningError(f"the rule {pattern!r} has no '->'")
    return [_tokens(t) for t in left.split(",")], [_tokens(t) for t in right.split(",")]


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
