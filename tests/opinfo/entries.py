"""The part of PyTorch's OpInfo database that is run: entries, samples, placements of the inputs.

    with sizes(EVEN):
        for entry in entries():
            for sample in samples(entry, limit=8):
                for placement in placements(sample, even=True): ...

A sample is a function of tensor leaves; other arguments are closed over. Placements are those of
torch's `DTensorConverter`: the product of Replicate and Shard of each dim that is longer than 1 and
divides (UNEVEN: longer than 1); bool tensors and scalars are replicated. A product above the limit
is thinned: one tensor split, then all split along one dim, then evenly spaced others. The order is
fixed.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy
import torch
from torch.utils import _pytree as pytree

from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

DATABASE = "torch.testing._internal.common_methods_invocations"
MESH = Mesh(x=4)
EVEN = {"L": 24, "M": 12, "S": 4, "XS": 2}
UNEVEN = {"L": 23, "M": 11, "S": 5, "XS": 3}
SIZES = {"even": EVEN, "uneven": UNEVEN}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """``fn(*leaves)`` is the op's call, passed through what its OpInfo says makes it comparable
    (the sign of singular vectors); ``text``: shapes and other arguments."""

    fn: Callable[..., Any]
    leaves: tuple[torch.Tensor, ...]
    text: str

    def in_double(self) -> Sample:
        """The same sample in float64, where only wrong numbers differ."""
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        leaves = tuple(
            x.detach().to(wide.get(x.dtype, x.dtype)).requires_grad_(x.requires_grad)
            for x in self.leaves
        )
        return Sample(fn=self.fn, leaves=leaves, text=self.text)


@contextlib.contextmanager
def sizes(wanted: dict[str, int]) -> Iterator[None]:
    """Within the block, OpInfo's samples have these sizes, in each module that copied the size
    names."""
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name == DATABASE or name.startswith("torch.testing._internal.opinfo.")
    ]
    with contextlib.ExitStack() as stack:
        for module, key in itertools.product(modules, wanted):
            if isinstance(vars(module).get(key), int):
                stack.enter_context(mock.patch.object(module, key, wanted[key]))
        yield


def entries() -> list[OpInfo]:
    return list(importlib.import_module(DATABASE).op_db)  # not above: it takes seconds


def name_of(entry: OpInfo) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def drawn(entry: OpInfo, wanted: dict[str, int]) -> list[SampleInput]:
    """Return all samples of an entry in float32, with torch's own sizes if it cannot use these."""
    for chosen in (wanted, {}):
        seed()
        with sizes(chosen):
            try:
                grad = entry.supports_autograd
                return list(entry.sample_inputs("cpu", torch.float32, requires_grad=grad))
            except (RuntimeError, IndexError):
                if not chosen:
                    raise
    raise AssertionError("the second of two draws returns or raises")


def leaves_of(sample: SampleInput) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def supported(tensor: torch.Tensor) -> bool:
    """Whether DTensorConverter accepts the tensor: plain and strided."""
    x = tensor
    special = (x.is_sparse, x.is_sparse_csr, x.is_mkldnn, x.is_quantized, x.is_nested, x.is_neg())
    plain = x.layout == torch.strided and x.device.type == "cpu"
    return plain and not any((*special, x.is_conj()))


def samples(found: Sequence[SampleInput], entry: OpInfo, limit: int) -> list[Sample]:
    """Return at most ``limit`` samples, evenly spaced among those with tensors to split, else among
    all."""
    usable = [s for s in found if all(supported(x) for x in leaves_of(s))]
    splittable = [s for s in usable if any(max(x.shape, default=0) > 1 for x in leaves_of(s))]
    chosen = spread(_distinct(splittable or usable), limit)
    return [_sample(entry, s) for s in chosen]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most ``limit`` of the items, in order, evenly spaced, including the first."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _distinct(found: Sequence[SampleInput]) -> list[SampleInput]:
    """Return one sample for each combination of shapes, dtypes and other arguments."""
    return list({_text(s): s for s in reversed(found)}.values())[::-1]


def _text(sample: SampleInput) -> str:
    def short(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

    args = (sample.input, *sample.args)
    parts = [str(pytree.tree_map(short, a)) for a in args]
    parts += [f"{k}={pytree.tree_map(short, v)}" for k, v in sample.kwargs.items()]
    return ", ".join(parts).replace("'", "")


def _sample(entry: OpInfo, sample: SampleInput) -> Sample:
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    process = sample.output_process_fn_grad

    def fn(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(given, tree)
        return process(entry.op(first, *args, **kwargs))

    fn.__name__ = "".join(c if c.isalnum() else "_" for c in entry.name)
    tensors = tuple(leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in places)
    return Sample(fn=fn, leaves=tensors, text=_text(sample))


def placements(
    leaves: Sequence[torch.Tensor], *, even: bool, limit: int = 12
) -> list[tuple[Placement, ...]]:
    """Return at most ``limit`` placements of the leaves on 4 ranks, without the all-replicated one
    unless it is the only one."""
    choices = [_choices(x, even) for x in leaves]
    count = math.prod(map(len, choices))
    whole = (REPLICATE,) * len(leaves)
    if count == 1:
        return [whole]
    found: dict[tuple[Placement, ...], None] = {}
    for i, options in enumerate(choices):  # one tensor split, the others whole
        for placement in options[1:]:
            found[(*whole[:i], placement, *whole[i + 1 :])] = None
    together = {
        tuple(p if p in options else REPLICATE for options in choices): None
        for p in sorted({p for options in choices for p in options[1:]}, key=str)
    }
    single = list(found)
    first = spread(single, max(limit // 2, limit - len(together)))
    found = dict.fromkeys((*first, *together))
    if len(found) < limit:
        rest = [p for p in _product(choices, count) if p not in found and p != whole]
        found.update(dict.fromkeys(spread(rest, limit - len(found))))
    return list(found)[:limit]


def pending(leaves: Sequence[torch.Tensor], limit: int = 2) -> list[tuple[Placement, ...]]:
    """Return placements with one leaf partial and the others replicated."""
    numbers = [i for i, x in enumerate(leaves) if x.is_floating_point() or x.is_complex()]
    whole = (REPLICATE,) * len(leaves)
    return [(*whole[:i], Partial("sum"), *whole[i + 1 :]) for i in numbers[:limit]]


def _choices(tensor: torch.Tensor, even: bool) -> tuple[Placement, ...]:
    if tensor.dtype == torch.bool or tensor.dim() == 0:
        return (REPLICATE,)
    ranks = MESH.size
    dims = [d for d, s in enumerate(tensor.shape) if s > 1 and (not even or s % ranks == 0)]
    return (REPLICATE, *(Shard(d) for d in dims))


def _product(
    choices: Sequence[tuple[Placement, ...]], count: int, most: int = 4000
) -> list[tuple[Placement, ...]]:
    """Return the product of the choices; of a very long one, evenly spaced elements."""
    found: list[tuple[Placement, ...]] = []
    for number in range(0, count, max(1, count // most)):
        placed: list[Placement] = []
        rest = number
        for options in reversed(choices):
            rest, place = divmod(rest, len(options))
            placed.append(options[place])
        found.append(tuple(reversed(placed)))
    return found
