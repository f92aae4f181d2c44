"""Row-by-row computations match plain torch over a split batch and in microbatches, without a
collective on activations.

Rows are uneven over 3 ranks and in 2 microbatches. Single rules are tested in tests/certify.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt

ROWS = 7


class After(nn.Module):
    """Apply the first module, ``fn``, then the other modules."""

    def __init__(self, first: nn.Module, fn: Callable[..., Tensor], *rest: nn.Module) -> None:
        super().__init__()
        self.first, self.fn, self.rest = first, fn, nn.Sequential(*rest)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.rest(self.fn(self.first(x), *others))


def channels_last(*rest: nn.Module) -> nn.Module:
    """As Swin and ConvNeXt: a linear layer over the last dim, channels, which then moves to the
    front."""
    return After(nn.Linear(5, 4), lambda x: x.movedim(-1, 1), *rest)


def complex_pairs(fn: Callable[[Tensor], Tensor]) -> nn.Module:
    return After(nn.Linear(4, 4), lambda h: fn(torch.view_as_complex(h.view(-1, 2, 2))))


def matrices(fn: Callable[[Tensor], Tensor]) -> nn.Module:
    return After(nn.Linear(4, 32), lambda h: fn(h.view(-1, 2, 4, 4)))


class Weighted(nn.Module):
    """An embedding bag with computed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, mode="sum", padding_idx=1)
        self.weights = nn.Linear(3, 3)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=self.weights(x))


def bags() -> Tensor:
    """Return bags, one of padding only and one with the same id twice."""
    ids = torch.randint(10, (ROWS, 3))
    ids[2], ids[0, 1], ids[4] = 1, 1, torch.tensor([3, 5, 3])
    return ids


def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
    out = model(*batch)
    return (torch.view_as_real(out) if out.is_complex() else out).square().mean()


Case = tuple[Callable[[], nn.Module], Callable[[], Sequence[Tensor]]]

FAR = 5 * torch.eye(4)
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
PLANES = {n: (ROWS, *(8, 6, 4)[:n], 5) for n in (1, 2, 3)}
POOLS = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
CASES: dict[str, Case] = {
    **{
        f"pooled to one place, {n}d, channels last": (
            lambda n=n: channels_last(POOLS[n](1), nn.Flatten(), nn.Linear(4, 3)),
            lambda n=n: [torch.randn(PLANES[n])],
        )
        for n in POOLS
    },
    "pooled to some places, channels last": (
        lambda: channels_last(nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(24, 3)),
        lambda: [torch.randn(PLANES[2])],
    ),
    "pooled after a convolution, channels last": (
        lambda: channels_last(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)),
        lambda: [torch.randn(PLANES[2])],
    ),
    "pooled in memory format channels_last": (
        lambda: nn.Sequential(nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(
            memory_format=torch.channels_last  # pyright: ignore[reportCallIssue]
        ),
        lambda: [torch.randn(ROWS, 5, 8, 6).to(memory_format=torch.channels_last)],
    ),
    "mean, channels last": (
        lambda: After(
            nn.Linear(5, 4), lambda x: x.permute(0, 3, 1, 2).mean((2, 3), True).flatten(1)
        ),
        lambda: [torch.randn(PLANES[2])],
    ),
    **{
        f"complex {name}": (lambda fn=fn: complex_pairs(fn), lambda: [torch.randn(ROWS, 4)])
        for name, fn in {
            "c * 1j": lambda c: c * 1j,
            "1j * c": lambda c: 1j * c,
            "1j / c": lambda c: 1j / (c + 3),
            "c ** 0.5j": lambda c: (c + 3) ** 0.5j,
            "real * 1j": lambda c: c.real * 1j,
            "ifft": lambda c: torch.fft.irfft(torch.fft.rfft(c.real) * 2j),
        }.items()
    },
    **{
        f"circular convolution, {n}d": (
            lambda n=n: nn.Sequential(
                CONVS[n](5, 4, 3, padding=2, padding_mode="circular"),
                nn.Tanh(),
                CONVS[n](4, 3, 3, padding=1, padding_mode="circular"),
            ),
            lambda n=n: [torch.randn(ROWS, 5, *(8, 6, 4)[:n])],
        )
        for n in CONVS
    },
    "circular, cropped": (
        lambda: After(nn.Conv2d(5, 4, 1), lambda x: F.pad(x, (-1, 2, 1, 0), mode="circular")),
        lambda: [torch.randn(ROWS, 5, 8, 6)],
    ),
    **{
        f"bags, {mode}{', padded' if pad else ''}": (
            lambda mode=mode, pad=pad: nn.EmbeddingBag(10, 4, mode=mode, padding_idx=pad),
            lambda: [bags()],
        )
        for mode in ("sum", "mean", "max")
        for pad in (None, 1)
    },
    "bags, weighted": (Weighted, lambda: [bags(), torch.randn(ROWS, 3)]),
    **{
        # torch factors the transpose of a matrix that is contiguous: the gradient must know
        f"matrices {name}": (lambda fn=fn: matrices(fn), lambda: [torch.randn(ROWS, 4)])
        for name, fn in {
            "det of a part": lambda m: torch.linalg.det(m[:, 0]),
            "det of a transpose": lambda m: m.mT.det(),
            "det of a copy": lambda m: m.mT.contiguous().det(),
            "slogdet": lambda m: (m + FAR).mT.slogdet()[1],
            "solve": lambda m: torch.linalg.solve((m[:, 0] + FAR).mT, m[:, 1]),
            "solve a copy": lambda m: torch.linalg.solve((m + FAR).mT.contiguous()[:, 0], m[:, 1]),
            "solve by rows": lambda m: torch.linalg.solve((m + FAR).mT, m.flip(1), left=False),
        }.items()
    },
    "istft": (
        lambda: After(nn.Linear(4, 64), lambda x: torch.istft(_stft(x), 16, window=torch.ones(16))),
        lambda: [torch.randn(ROWS, 4)],
    ),
}
FAST = (
    "pooled to one place, 2d, channels last",
    "complex c * 1j",
    "circular convolution, 1d",
    "matrices det of a part",
    "bags, mean, padded",
)


def _stft(x: Tensor) -> Tensor:
    return torch.stft(x, 16, window=torch.ones(16), return_complex=True)


def trained(
    model: nn.Module, batch: Sequence[Tensor], mesh: dt.Mesh, **stated: Any
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the kinds of the plan's collectives, and the loss and parameters after a step."""
    placed = dt.parallelize(model, mesh)
    step = dt.train_step(placed, loss_fn, torch.optim.SGD(placed.parameters(), lr=0.1), **stated)
    kinds = [c.kind for c in step.plan(*batch).collectives]
    with dt.launch(mesh):
        loss = torch.tensor(float(step(*batch)))
        return kinds, {"loss": loss, **dt.gather_state_dict(placed)["model"]}


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_row_by_row_models_match_torch_with_only_gradient_all_reduces(name: str) -> None:
    make, draw = CASES[name]
    torch.manual_seed(0)
    model, batch = make(), draw()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    loss = loss_fn(whole, *batch)
    loss.backward()
    optimizer.step()
    expected = {"loss": loss.detach(), **whole.state_dict()}

    placings: list[tuple[dt.Mesh, dict[str, Any]]] = [
        (dt.Mesh(), {}),
        (dt.Mesh(), dict(schedule=dt.GPipe(microbatches=2))),
        (dt.Mesh(), dict(schedule=dt.OneFOneB(microbatches=3))),
        (dt.Mesh(dp=2), dict(inputs=dict(dp=dt.Row()))),
        (dt.Mesh(dp=3), dict(inputs=dict(dp=dt.Row()))),
    ]
    for mesh, stated in placings:
        kinds, found = trained(copy.deepcopy(model), batch, mesh, **stated)
        assert set(kinds) <= {"all_reduce"}  # of gradients
        torch.testing.assert_close(found, expected)
