"""The peers of benchmarks/context_parallel.py: a ring and Ulysses by hand on gloo, and all sides'
shapes.

    with Peers(2, shapes) as peers:
        peers.steps("ring", shape, 3)        # [loss, loss, loss]: three training steps

Each process has its tokens of the sequence and all weights; it sums gradients in one flat buffer,
which is all_reduced. Attention calls torch's flash kernel for CPUs, as dtensor does.

``ring``: k and v travel as one tensor, which is sent on while it is computed with, to the ranks
that read it. Parts are folded by their log-sum-exp. The backward of a part takes the out and the
log-sum-exp of all keys; gradients of k and v are sent to their owner, which adds them.
``heads``: one all_to_all_single of q, k and v, and one of the output, as in DeepSpeed-Ulysses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.pipelining_peer import Block
from benchmarks.processes import Processes, answer, gloo

LR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One sequence of ``tokens``, one block. ``zigzag``: the layout of the tokens."""

    tokens: int
    zigzag: bool
    heads: int = 4
    width: int = 256

    def model(self) -> Block:
        """The same weights at each call."""
        torch.manual_seed(0)
        return Block(self.width, self.heads)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target, f32[1, tokens, width]."""
        generator = torch.Generator().manual_seed(1)
        size = (1, self.tokens, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)

    def pieces(self, rank: int, num: int) -> list[int]:
        """The pieces of the sequence on a rank, of 2 num pieces."""
        return [rank, 2 * num - 1 - rank] if self.zigzag else [2 * rank, 2 * rank + 1]


# -- the controller's side -------------------------------------------------------------------------


class Peers(Processes):
    def __init__(self, num: int, shapes: Sequence[Shape]) -> None:
        super().__init__(num, _work, num, shapes)

    def steps(self, kind: str, shape: Shape, count: int) -> list[float]:
        """Train for ``count`` steps; the losses."""
        return self.ask_one("steps", kind, shape, count)

    def gradients(self, kind: str, shape: Shape) -> dict[str, Tensor]:
        """The gradients of one step, which changes nothing."""
        return self.ask("gradients", kind, shape)[0]


# -- one process -----------------------------------------------------------------------------------


def _work(rank: int, num: int, shapes: Sequence[Shape], directory: str, pipe: Connection) -> None:
    with gloo(rank, num, directory):
        sides = {
            (kind, shape): _Side(rank, num, kind, shape)
            for kind in ("ring", "heads")
            for shape in shapes
        }
        calls = {
            "steps": lambda kind, shape, count: sides[kind, shape].steps(count),
            "gradients": lambda kind, shape: sides[kind, shape].gradients(),
        }
        answer(pipe, calls)


class _Side:
    """One kind of peer on this rank."""

    def __init__(self, rank: int, num: int, kind: str, shape: Shape) -> None:
        self.model = shape.model()
        own = _Own(rank, num, shape)
        self.attend = _Ring(own) if kind == "ring" else _Heads(own)
        parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
        self.optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
        self.count = shape.tokens * shape.width
        pieces = shape.pieces(rank, num)
        self.batch = [
            torch.cat([x.chunk(2 * num, 1)[piece] for piece in pieces], 1) for x in shape.batch()
        ]

    def forward_backward(self) -> Tensor:
        model, (x, y) = self.model, self.batch
        self.flat.zero_()
        h = x + model.proj(_Attention.apply(model.qkv(model.norm1(x)), self.attend))
        h = h + model.down(F.gelu(model.up(model.norm2(h))))
        loss = (h - y).square().sum() / self.count
        loss.backward()
        dist.all_reduce(self.flat)
        total = loss.detach()
        dist.all_reduce(total)
        return total

    def steps(self, count: int) -> list[float]:
        losses: list[Tensor] = []
        for _ in range(count):
            losses.append(self.forward_backward())
            self.optimizer.step()
        return [float(loss) for loss in losses]

    def gradients(self) -> dict[str, Tensor]:
        self.forward_backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


# -- attention -------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """qkv[b t 3hd] -> out[b t hd] of causal attention, by a ring or by heads."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, attend: _Ring | _Heads) -> Tensor:
        out, kept = attend.forward(qkv)
        ctx.save_for_backward(*kept)
        ctx.attend = attend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.attend.backward(grads[0], *ctx.saved_tensors), None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )


class _Own:
    """This rank, and its tokens of a shape."""

    def __init__(self, rank: int, num: int, shape: Shape) -> None:
        self.rank, self.num, self.shape = rank, num, shape
        self.tokens = shape.tokens // num
        self.head = shape.width // shape.heads


class _Part(NamedTuple):
    """The part of attention with the chunk of rank - distance: which rows of the rank's queries
    and of the chunk's keys are read. All queries read all keys of the part, but in part 0."""

    distance: int
    queries: slice
    keys: slice


class _Ring:
    def __init__(self, own: _Own) -> None:
        self.own = own

    def part(self, rank: int, distance: int) -> _Part | None:
        """Return a rank's part; None if its queries read no key of the chunk."""
        half, every = self.own.tokens // 2, slice(None)
        if distance == 0:
            return _Part(0, every, every)
        before = rank >= distance
        if self.own.shape.zigzag:
            return (
                _Part(distance, every, slice(half))
                if before
                else _Part(distance, slice(half, None), every)
            )
        return _Part(distance, every, every) if before else None

    def chunks(self, kv: Tensor) -> Iterator[tuple[_Part, Tensor]]:
        """Yield each part and its chunk, k and v. The next chunk travels while one is used."""
        own = self.own
        after, before = (own.rank + 1) % own.num, (own.rank - 1) % own.num
        for distance in range(own.num):
            more = distance + 1 < own.num
            works: list[Any] = []
            if more and self.part(after, distance + 1):
                works.append(dist.isend(kv, after))
            received = torch.empty_like(kv)
            if more and self.part(own.rank, distance + 1):
                works.append(dist.irecv(received, before))
            if part := self.part(own.rank, distance):
                yield part, kv
            for work in works:
                work.wait()
            kv = received

    def forward(self, qkv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = self.own
        q, k, v = qkv.view(*qkv.shape[:2], 3, own.shape.heads, own.head).permute(2, 0, 3, 1, 4)
        kv = torch.stack([k, v])
        out = lse = q
        for part, (k, v) in self.chunks(kv):
            keys = part.keys
            if part.distance == 0:
                out, lse = _flash(q, k, v, True)
                continue
            new, new_lse = _flash(q[:, :, part.queries], k[:, :, keys], v[:, :, keys], False)
            old, old_lse = out[:, :, part.queries], lse[:, :, part.queries]
            old.lerp_(new, torch.sigmoid(new_lse - old_lse)[..., None])
            old_lse += F.softplus(new_lse - old_lse)
        return out.transpose(1, 2).flatten(2), (q, kv, out, lse)

    def backward(self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        own = self.own
        grad = grad.view(*grad.shape[:2], own.shape.heads, own.head).transpose(1, 2)
        dqkv = grad.new_empty(*grad.transpose(1, 2).shape[:2], 3, own.shape.heads, own.head)
        dq, dk, dv = dqkv.permute(2, 0, 3, 1, 4)
        sent: list[tuple[Any, Tensor]] = []
        home: list[tuple[Any, Tensor, slice]] = []
        for distance in range(1, own.num):
            reader = (own.rank + distance) % own.num
            if part := self.part(reader, distance):
                received = torch.empty(kv[:, :, :, part.keys].shape)
                home.append((dist.irecv(received, reader, tag=1), received, part.keys))
        for part, (k, v) in self.chunks(kv):
            rows, keys = part.queries, part.keys
            of_q, of_k, of_v = _flash_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys],
                out[:, :, rows], lse[:, :, rows], part.distance == 0,
            )  # fmt: skip
            if part.distance == 0:
                for whole, new in ((dq, of_q), (dk, of_k), (dv, of_v)):
                    whole.copy_(new)
                continue
            dq[:, :, rows] += of_q
            grads = torch.stack([of_k, of_v])
            owner = (own.rank - part.distance) % own.num
            sent.append((dist.isend(grads, owner, tag=1), grads))
        for work, received, keys in home:
            work.wait()
            dk[:, :, keys] += received[0]
            dv[:, :, keys] += received[1]
        for work, _ in sent:
            work.wait()
        return dqkv.flatten(2)


class _Heads:
    def __init__(self, own: _Own) -> None:
        self.own = own
        pieces = [piece for rank in range(own.num) for piece in own.shape.pieces(rank, own.num)]
        self.to_sequence = torch.tensor(pieces).argsort() if own.shape.zigzag else None
        self.to_pieces = torch.tensor(pieces) if own.shape.zigzag else None

    def split_heads(self, x: Tensor) -> Tensor:
        """x[b t a hd], a rank's tokens of ``a`` tensors -> [b T a hd/n], a rank's heads."""
        own = self.own
        b, t, a, width = x.shape
        x = x.view(b, t, a, own.num, width // own.num).permute(3, 1, 0, 2, 4).contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return self.reordered(received, self.to_sequence).transpose(0, 1)

    def split_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `split_heads`."""
        own = self.own
        x = self.reordered(x.transpose(0, 1).contiguous(), self.to_pieces)
        received = x.new_empty(own.num, own.tokens, *x.shape[1:])
        dist.all_to_all_single(received, x)
        return received.permute(2, 1, 3, 0, 4).flatten(3)

    def reordered(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return x[T ...], or x of shape [n t ...], with its 2n pieces of tokens in an order."""
        x = x.flatten(0, 1) if x.dim() == 5 else x
        return x if order is None else x.unflatten(0, (len(order), -1))[order].flatten(0, 1)

    def forward(self, qkv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        heads = self.own.shape.heads // self.own.num
        qkv = self.split_heads(qkv.unflatten(2, (3, -1)))
        q, k, v = qkv.unflatten(3, (heads, -1)).permute(2, 0, 3, 1, 4)
        out, lse = _flash(q, k, v, True)
        own = self.split_tokens(out.transpose(1, 2).flatten(2)[:, :, None])
        return own[:, :, 0], (q, k, v, out, lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Tensor:
        grad = self.split_heads(grad[:, :, None])[:, :, 0].unflatten(2, (q.shape[1], -1))
        grads = _flash_backward(grad.transpose(1, 2), q, k, v, out, lse, True)
        dqkv = torch.stack([x.transpose(1, 2).flatten(2) for x in grads], 2)
        return self.split_tokens(dqkv).flatten(2)
