"""Run one function on plain tensors and on DTensors, and compare all results."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dtensor as dt

MESHES = (dt.Mesh(tp=2), dt.Mesh(tp=3), dt.Mesh(dp=2, tp=2))
Placements = dict[str, dt.Placement]


def placements(mesh: dt.Mesh, ndim: int, *, pending: bool = True) -> list[Placements]:
    """Return every combination of Replicate, Shard(d) and Partial over the axes."""
    options: list[dt.Placement] = [dt.Replicate(), *(dt.Shard(d) for d in range(ndim))]
    options += [dt.Partial()] if pending else []
    return [
        dict(zip(mesh.axes, choice, strict=True))
        for choice in itertools.product(options, repeat=len(mesh.axes))
    ]


def sampled(
    mesh: dt.Mesh, shapes: Sequence[tuple[int, ...]], most: int
) -> Iterator[tuple[Placements, ...]]:
    """Return at most ``most`` combinations of placements of several tensors; the same ones in each
    run."""
    choices = list(itertools.product(*(placements(mesh, len(s)) for s in shapes)))
    random.Random(str(shapes)).shuffle(choices)
    yield from choices[:most]


def same(got: Any, wanted: Any, *, atol: float = 1e-9) -> None:
    """Assert that nested structures of tensors and numbers are equal; DTensors by their full
    values."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, dt.DTensor), f"{type(got)} for {wanted}"
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(
            got.detach().full_tensor(), wanted.detach(), rtol=atol, atol=atol
        )
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            same(a, b, atol=atol)
    else:
        assert got == wanted


def gradients(fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the value of ``fn`` and its gradients for a fixed cotangent."""
    out = fn(*inputs)
    cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    if isinstance(out, dt.DTensor):
        cotangent = dt.distribute(cotangent, out.mesh)
    return (out, *torch.autograd.grad(out, inputs, cotangent))
