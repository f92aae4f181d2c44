"""What of PyTorch's OpInfo database is run: entries, their samples, placements of the inputs.

    with sizes(EVEN):
        for entry in entries():
            for sample in samples(entry, limit=8):
                for placement in placements(sample, even=True): ...

A sample is a function of tensor leaves alone; its other arguments are closed over. The placements
are those that torch's own `DTensorConverter` enumerates: of each tensor Replicate and Shard of each
dim that is longer than 1 and divides by the ranks (with UNEVEN sizes: of each dim longer than 1),
bool tensors and scalars whole; of tensors together the product. Of a product longer than the limit:
one tensor split and the others whole, then all split along one dim, then evenly from the rest.

Invariants: the same torch gives the same samples and placements in the same order.
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
    """Within: OpInfo's samples have these sizes, in each of the modules that copied the names."""
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
    """All samples of an entry in float32; with torch's own sizes where it cannot draw these."""
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
    """What DTensorConverter takes: plain strided tensors."""
    x = tensor
    special = (x.is_sparse, x.is_sparse_csr, x.is_mkldnn, x.is_quantized, x.is_nested, x.is_neg())
    plain = x.layout == torch.strided and x.device.type == "cpu"
    return plain and not any((*special, x.is_conj()))


def samples(found: Sequence[SampleInput], entry: OpInfo, limit: int) -> list[Sample]:
    """At most ``limit`` samples, evenly from those with tensors to split, else from all."""
    usable = [s for s in found if all(supported(x) for x in leaves_of(s))]
    splittable = [s for s in usable if any(max(x.shape, default=0) > 1 for x in leaves_of(s))]
    chosen = spread(_distinct(splittable or usable), limit)
    return [_sample(entry, s) for s in chosen]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the items, in order, evenly spaced, the first among them."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _distinct(found: Sequence[SampleInput]) -> list[SampleInput]:
    """One of those with the same shapes, dtypes and other arguments."""
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
    """At most ``limit`` placements of the leaves on 4 ranks, the all-whole one left out unless it
    is the only one."""
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
    """Placements with one leaf a pending sum, the others whole."""
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
    """The product of the choices; of a very long one, evenly spaced elements."""
    found: list[tuple[Placement, ...]] = []
    for number in range(0, count, max(1, count // most)):
        placed: list[Placement] = []
        rest = number
        for options in reversed(choices):
            rest, place = divmod(rest, len(options))
            placed.append(options[place])
        found.append(tuple(reversed(placed)))
    return found
