"""Compares a found tensor with the expected one, and says in words where they differ.

    difference(found, expected, parse("f32[8@tp,4]", Mesh(tp=2)))

      spec:       f32[8@tp,4] on mesh(tp=2)
      element:    [5, 1], held by rank 1
      expected:   0.5
      found:      1.0
      and 3 more of 32 elements; allowed is 1.1e-05 (atol 9.5e-07 + rtol 1e-05 * 1, the largest)

None where they agree. The tolerance is relative to the expected tensor's largest magnitude, not to
each element: sums that cancel are as wrong as their summands.
"""

from __future__ import annotations

import torch

from dtensor.sharding.spec.spec import TensorSpec

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 2e-15),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
    torch.complex128: (1e-10, 2e-15),
    torch.complex64: (1e-5, 1e-6),
}
"""dtype to (rtol, atol); atol is about 8 units in the last place of 1."""


def difference(
    found: torch.Tensor,
    expected: torch.Tensor,
    spec: TensorSpec | None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """What differs, with the element, its ranks and the tolerance; None if nothing does."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"  expected:   {_kind(expected)}\n  found:      {_kind(found)}"
    if expected.numel() == 0:
        return None
    default = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    relative = default[0] if rtol is None else rtol
    absolute = default[1] if atol is None else atol
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if expected.dtype in TOLERANCES:
        a, b = found.to(wide), expected.to(wide)
        finite = b.abs()[b.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        allowed = absolute + relative * largest
        # equal covers infinities; a NaN on one side alone makes the distance NaN, which is wrong
        alike = (a == b) | (a.isnan() & b.isnan())
        excess = torch.where(alike, torch.zeros((), dtype=torch.float64), (a - b).abs())
        wrong = ~(excess <= allowed)
        rule = f"allowed is {allowed:.2g} (atol {absolute:.2g} + rtol {relative:.2g} * "
        rule += f"{largest:.4g}, the largest)"
    else:
        wrong = found != expected
        excess = wrong.double()
        rule = f"{expected.dtype} must be equal"
    if not bool(wrong.any()):
        return None
    ranked = torch.where(wrong, excess.nan_to_num(nan=float("inf")), -1.0)
    worst = int(ranked.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
    number = int(wrong.sum())
    lines = [f"  spec:       {spec} on {spec.mesh}"] if spec is not None else []
    held = f", held by {_ranks(spec, index)}" if spec is not None else ""
    lines += [
        f"  element:    {list(index)}{held}",
        f"  expected:   {expected[index].item()}",
        f"  found:      {found[index].item()}",
        f"  {number} of {expected.numel()} elements differ; {rule}",
    ]
    return "\n".join(lines)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _ranks(spec: TensorSpec, index: tuple[int, ...]) -> str:
    """The ranks whose shard has the element."""
    ranks: list[int] = []
    for rank in range(spec.mesh.size):
        here = spec.mesh.coordinates(rank)
        inside = all(
            any(lo <= i < hi for lo, hi in spec.intervals(dim, here)) for dim, i in enumerate(index)
        )
        if inside:
            ranks.append(rank)
    if len(ranks) == spec.mesh.size:
        return "all ranks" if len(ranks) > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
