"""The notation of rules: a parser from a pattern and a call's shapes to a `Rule` (rule.py).

    parse_rule("b (h d) -> b h d", (Meta((2, 12), f32),), (Meta((2, 3, 4), f32),))

    pattern := tensors "->" tensors          tensors := dims ("," dims)*
    dims    := dim*                  dim := factor | "1" | "..." | "(" sum ")" | "[" factor* "]"
    sum     := factor* ("+" factor*)*        factor  := name "!"?

``f!``: factor f may not be split. ``...``: leading dims, aligned from the right. ``~f`` among the
dims of a result: the result is the same whichever part of f a rank holds, for example the bias
gradient of a convolution whose input channels are split. ``[e t k]``: a ragged dim with the rows of
e experts, k for each of t tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from dtensor.errors import PlanningError
from dtensor.numerics import ReduceOp
from dtensor.sharding.ops.call import Localizer, Meta
from dtensor.sharding.rules.rule import Dim, Dims, Rule, sized_dim

_TOKEN = re.compile(r"\(([^()]*)\)|(\[[\w! ]+\]|~?[A-Za-z_]\w*!?|1|\.\.\.)")


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
    """Return the rule that ``pattern`` denotes for tensors of these shapes.

    ``...`` stands for the leading dims that the pattern does not name. They are aligned from the
    right between tensors. A dim of size 1 that is broadcast against a larger dim gets no factor.
    ``sizes``: the sizes of factors that the shapes do not determine.
    Raises PlanningError if the pattern is malformed or does not fit the shapes.
    """
    left, right = pattern_terms(pattern)
    if not operands and left == [[]]:  # "" denotes a scalar operand only if there are operands
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
    factor_sizes: dict[str, int] = dict(sizes or {})
    whole: set[str] = set()
    all_dims: list[Dims] = []
    for tokens, meta in zip(terms, metas, strict=True):
        all_dims.append(() if meta is None else _dims(tokens, meta, ellipsis, factor_sizes, whole))
    ragged = {token for tokens in terms for token in tokens if token.startswith("[")}
    experts = min(ragged)[1:-1].split()[0] if ragged else ""
    sized_dims = [
        (sized_dim(dim, experts), size)
        for dims, meta in zip(all_dims, metas, strict=True)
        if meta is not None
        for dim, size in zip(dims, meta.shape, strict=True)
    ]
    _solve_sizes(sized_dims, factor_sizes, pattern)
    rule = Rule(
        operands=tuple(all_dims[: len(operands)]),
        results=tuple(all_dims[len(operands) :]),
        sizes=tuple(sorted(factor_sizes.items())),
        linear=tuple(frozenset(group) for group in linear),
        addends=frozenset(addends),
        same=frozenset(same),
        whole=frozenset(whole),
        reduce=reduce,
        localize=localize,
        experts=experts,
    )
    for dims, meta in zip(all_dims, metas, strict=True):
        if meta is not None and tuple(rule.dim_size(d) for d in dims) != meta.shape:
            raise PlanningError(f"the rule {pattern!r} does not fit a tensor {meta}")
    return rule


def pattern_terms(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the tokens of each operand and of each result. Raises PlanningError if malformed."""
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise PlanningError(f"the rule {pattern!r} has no '->'")
    return [_tokens(t) for t in left.split(",")], [_tokens(t) for t in right.split(",")]


def _tokens(text: str) -> list[str]:
    """Return the dims of one tensor's term: ``b (h d)`` -> b, (h d). Raises PlanningError if the
    text has anything else."""
    tokens = [m.group(0) for m in _TOKEN.finditer(text)]
    if re.sub(r"\s+", "", _TOKEN.sub("", text)):
        raise PlanningError(f"{text!r} is not a list of dims")
    return tokens


def _ellipsis_sizes(
    terms: Sequence[list[str]], metas: Sequence[Meta | None], pattern: str
) -> tuple[int, ...]:
    """Return the sizes of the dims that ``...`` stands for, broadcast over all tensors."""
    longest: list[int] = []
    for tokens, meta in zip(terms, metas, strict=True):
        if meta is None:
            continue
        extra = len(meta.shape) - (len(tokens) - ("..." in tokens))
        if extra < 0 or (extra and "..." not in tokens):
            raise PlanningError(f"the rule {pattern!r} does not fit a tensor {meta}")
        if "..." in tokens:  # broadcast the sizes so far and the tensor's, aligned from the right
            start = tokens.index("...")
            sizes = list(meta.shape[start : start + extra])
            padded = [1] * (len(longest) - len(sizes)) + sizes
            longest = [1] * (len(sizes) - len(longest)) + longest
            longest = [b if a == 1 else a for a, b in zip(longest, padded, strict=True)]
    return tuple(longest)


def _dims(
    tokens: list[str],
    meta: Meta,
    ellipsis: tuple[int, ...],
    factor_sizes: dict[str, int],
    whole: set[str],
) -> Dims:
    """Return the dims of one tensor. The dims of ``...`` are factors e0, e1, ...; dims that are
    broadcast have none. Adds their sizes to ``factor_sizes``, and factors with ``!`` to
    ``whole``."""
    dims: list[Dim] = []
    extra = len(meta.shape) - (len(tokens) - 1)
    for token in tokens:
        if token == "...":
            for i in range(extra):
                index = len(ellipsis) - extra + i
                size = meta.shape[len(dims)]
                name = f"e{index}"
                factor_sizes[name] = ellipsis[index]
                dims.append(((name,),) if size == ellipsis[index] else ((),))
        elif token.startswith("["):
            dims.append((tuple(_factor_name(f, whole) for f in token[1:-1].split()),))
        elif token.startswith("("):
            dims.append(
                tuple(
                    tuple(_factor_name(f, whole) for f in part.split() if f != "1")
                    for part in token[1:-1].split("+")
                )
            )
        else:
            dims.append(((),) if token == "1" else ((_factor_name(token, whole),),))
    return tuple(dims)


def _factor_name(token: str, whole: set[str]) -> str:
    """Return the factor's name without ``!``. Adds it to ``whole`` if the token has ``!``."""
    name = token.removesuffix("!")
    if token.endswith("!"):
        whole.add(name)
    return name


def _solve_sizes(
    dims: Sequence[tuple[Dim, int]], factor_sizes: dict[str, int], pattern: str
) -> None:
    """Add the missing sizes of factors, repeatedly solving the dims that have one unknown factor.
    Raises PlanningError if some sizes cannot be determined so."""
    unsolved = list(dims)
    while unsolved:
        open_dims: list[tuple[Dim, int]] = []
        for dim, size in unsolved:
            unknown = {f: None for product in dim for f in product if f not in factor_sizes}
            if len(unknown) > 1:
                open_dims.append((dim, size))
            for factor in unknown if len(unknown) == 1 else ():
                factor_sizes[factor] = _solve_factor(dim, size, factor, factor_sizes)
        if len(open_dims) == len(unsolved):
            unknown = [f for product in open_dims[0][0] for f in product if f not in factor_sizes]
            raise PlanningError(f"the rule {pattern!r} leaves the sizes of {unknown} open")
        unsolved = open_dims


def _solve_factor(dim: Dim, size: int, factor: str, factor_sizes: Mapping[str, int]) -> int:
    """Return the size f of the one unknown factor of a dim: size = other products + scale * f."""
    other_products, scale = 0, 1
    for product in dim:
        part = math.prod(factor_sizes[f] for f in product if f in factor_sizes)
        if factor in product:
            scale = part
        else:
            other_products += part
    return (size - other_products) // scale if scale else 0
