"""The peers of benchmarks/muon.py: Muon by hand on gloo, and the model of all sides.

    with Peers(2, shapes) as peers:
        peers.steps("dp, owners", shape, 3)        # [loss, loss, loss]: three training steps

"owners": each matrix belongs to one process. The gradients are summed (dp) or gathered (tp) at
their owners, which keep whole copies of their matrices. torch's Muon updates the copies there, and
every process gets its part of the new values. "all": each process gets all whole gradients, and
updates a copy of every matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.processes import Processes, answer, gloo
from benchmarks.transformer_block_peer import _F, _G, by_torchs_group

LR = 1e-3
KINDS = ("owners", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``blocks`` blocks of two matrices [width, width]; ``rows`` rows of input."""

    width: int
    rows: int = 64
    blocks: int = 4
    steps: int  # training steps in one timing

    def model(self) -> Net:
        """The same weights at each call."""
        torch.manual_seed(0)
        return Net(self)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target, f32[rows, width]."""
        generator = torch.Generator().manual_seed(1)
        size = (self.rows, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


SHAPES = {
    shape.width: shape
    for shape in (
        Shape(width=64, steps=5),
        Shape(width=256, steps=2),
        Shape(width=512, steps=1),
    )
}


class Net(nn.Module):
    """Residual blocks of two square matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, n = shape.width, shape.blocks
        self.ups = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(n))
        self.downs = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


class Peers(Processes):
    def __init__(self, num: int, shapes: Sequence[Shape]) -> None:
        super().__init__(num, _work, num, shapes)

    def steps(self, kind: str, shape: Shape, count: int) -> list[float]:
        """Train for ``count`` steps; the losses."""
        return self.ask_one("steps", kind, shape, count)


# -- one process -----------------------------------------------------------------------------------


def _work(rank: int, num: int, shapes: Sequence[Shape], directory: str, pipe: Connection) -> None:
    sides: dict[tuple[str, Shape], _Side] = {}

    def steps(kind: str, shape: Shape, count: int) -> list[float]:
        if (kind, shape) not in sides:
            axis, _, who = kind.partition(", ")
            cls = {"dp": _DataParallel, "tp": _TensorParallel}[axis]
            sides[kind, shape] = cls(rank, num, shape, owned=who == "owners")
        return sides[kind, shape].steps(count)

    with gloo(rank, num, directory):
        answer(pipe, {"steps": steps})


class _Side:
    """The peer's part of a model on this rank. ``whole``: whole copies of the matrices that this
    rank updates, by number; ``owners``: the rank of each matrix, or None if all ranks update it."""

    def __init__(self, rank: int, num: int, shape: Shape, owned: bool) -> None:
        self.rank, self.num, self.model = rank, num, shape.model()
        self.matrices = [*self.model.parameters()]
        size = len(self.matrices) // num
        self.owners = [number // size if owned else None for number in range(len(self.matrices))]
        self.whole = {
            number: nn.Parameter(p.detach().clone())
            for number, p in enumerate(self.matrices)
            if self.owners[number] in (None, rank)
        }
        self.optimizer = torch.optim.Muon(self.whole.values(), lr=LR)
        self.batch = shape.batch()

    def loss(self) -> Tensor:
        """Run the forward and backward; return this rank's part of the loss."""
        raise NotImplementedError

    def collect(self, gradients: list[Tensor]) -> None:
        """Set the whole gradients of the matrices that this rank updates."""
        raise NotImplementedError

    def spread(self) -> None:
        """Write the updated matrices to all ranks' parameters."""
        raise NotImplementedError

    def steps(self, count: int) -> list[float]:
        losses: list[float] = []
        for _ in range(count):
            loss = self.loss()
            gradients = [p.grad for p in self.matrices if p.grad is not None]
            with torch.no_grad():
                self.collect(gradients)
                self.optimizer.step()
                self.spread()
            self.model.zero_grad()
            dist.all_reduce(loss)
            losses.append(float(loss))
        return losses

    def updated(self) -> Tensor:
        return torch.stack([p.detach() for p in self.whole.values()])


class _DataParallel(_Side):
    """Rows of the batch are split. Owners get their gradients from one reduce_scatter, and send
    new values in one all_gather."""

    def __init__(self, rank: int, num: int, shape: Shape, owned: bool) -> None:
        super().__init__(rank, num, shape, owned)
        self.batch = tuple(x.chunk(num)[rank] for x in self.batch)
        self.numel = shape.rows * shape.width

    def loss(self) -> Tensor:
        x, y = self.batch
        loss = (self.model(x) - y).square().sum() / self.numel
        loss.backward()
        return loss.detach()

    def collect(self, gradients: list[Tensor]) -> None:
        stacked = torch.stack(gradients)
        if len(self.whole) < len(gradients):
            own = stacked.new_empty(len(self.whole), *stacked.shape[1:])
            dist.reduce_scatter(own, [*stacked.chunk(self.num)])
        else:
            dist.all_reduce(own := stacked)
        for p, gradient in zip(self.whole.values(), own, strict=True):
            p.grad = gradient

    def spread(self) -> None:
        values = self.updated()
        if len(self.whole) < len(self.matrices):
            own, values = values, values.new_empty(len(self.matrices), *values.shape[1:])
            dist.all_gather([*values.chunk(self.num)], own)
        for p, value in zip(self.matrices, values, strict=True):
            p.copy_(value)


class _TensorParallel(_Side):
    """``ups`` are split by rows, ``downs`` by columns. Owners get the parts of their gradients in
    one all_to_all, and send new values in one all_to_all."""

    def __init__(self, rank: int, num: int, shape: Shape, owned: bool) -> None:
        super().__init__(rank, num, shape, owned)
        for p, dim in zip(self.matrices, self.dims(), strict=True):
            p.data = p.detach().chunk(num, dim)[rank].clone()

    def dims(self) -> list[int]:
        half = len(self.matrices) // 2
        return [0] * half + [1] * half

    def loss(self) -> Tensor:
        x, y = self.batch
        for up, down in zip(self.model.ups, self.model.downs, strict=True):
            h = F.gelu(F.linear(_F.apply(x, by_torchs_group), up.weight))
            x = x + _G.apply(F.linear(h, down.weight), by_torchs_group)
        loss = F.mse_loss(x, y)
        loss.backward()
        return loss.detach() / self.num

    def collect(self, gradients: list[Tensor]) -> None:
        sent = torch.stack([g if dim == 0 else g.t() for g, dim in zip(gradients, self.dims())])
        owned = len(self.whole) < len(gradients)
        parts = sent.new_empty(self.num, len(self.whole), *sent.shape[1:])
        if owned:
            dist.all_to_all_single(parts.flatten(0, 1), sent)
        else:
            dist.all_gather([*parts], sent)
        for at, (number, p) in enumerate(self.whole.items()):
            whole = torch.cat([*parts[:, at]])
            p.grad = whole if self.dims()[number] == 0 else whole.t().contiguous()

    def spread(self) -> None:
        if len(self.whole) == len(self.matrices):
            for p, (whole, dim) in zip(self.matrices, zip(self.whole.values(), self.dims())):
                p.copy_(whole.chunk(self.num, dim)[self.rank])
            return
        turned = [
            p.detach() if self.dims()[number] == 0 else p.detach().t()
            for number, p in self.whole.items()
        ]
        sent = torch.stack([torch.stack(w.chunk(self.num)) for w in turned], 1).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        parts = got.view(len(self.matrices), *got.shape[2:])
        for p, part, dim in zip(self.matrices, parts, self.dims(), strict=True):
            p.copy_(part if dim == 0 else part.t())
