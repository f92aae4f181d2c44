"""The peers of benchmarks/transformer_block.py: tensor parallelism on two processes, by hand and
with PyTorch's DTensor, sharded data parallelism with FSDP2, and the shapes of all sides.

    with Peers(shapes) as peers:
        peers.steps("hand", shape, 3)        # [loss, loss, loss]: three training steps
        peers.gradients("hand", shape)       # of the whole model, at the present weights

Both cut the block as Megatron does: `qkv` and `up` by columns (whole heads), `proj` and `down` by
rows; two all_reduces forward, two backward. By hand these are Megatron's f (the identity; an
all_reduce in its backward) and g (the reverse) around `torch.nn.functional.linear`. PyTorch's
DTensor cuts the same modules with `parallelize_module`; attention runs on local heads on both.

FSDP2 (`fully_shard`) splits the rows of the batch; its loss is the mean of both halves'.

On GPUs (``device="cuda"``) each process has one, with NCCL in place of gloo, and without dtensor's
own transport, which is of hosts.

Two processes, one thread each, block on a pipe from the controller between two calls, so they are
idle while another side runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.pipelining_peer import Block
from benchmarks.processes import Processes, answer
from dtensor.daft.ir.instructions import Buffer, Collective, Wait, key_of
from dtensor.daft.ir.program import Program, RankProgram
from dtensor.daft.ray.transports.gloo import join_gloo
from dtensor.daft.ray.transports.same_host import join_same_host
from dtensor.daft.ray.transports.shared_memory_peers import own_place
from tests.daft.programs import parts_of

NUM_RANKS = 2
LR = 1e-4

AllReduce = Callable[[Tensor], Tensor]
"""The sum over both ranks; what it is given is not used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``rows`` sequences of ``tokens``, one block."""

    width: int
    heads: int
    tokens: int
    rows: int
    steps: int  # training steps in one timing

    def model(self) -> Block:
        """The same weights at each call."""
        torch.manual_seed(0)
        return Block(self.width, self.heads)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target, f32[rows, tokens, width]."""
        generator = torch.Generator().manual_seed(1)
        size = (self.rows, self.tokens, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


SHAPES: Mapping[int, Shape] = {
    shape.width: shape
    for shape in (
        Shape(width=64, heads=4, tokens=32, rows=4, steps=10),
        Shape(width=256, heads=4, tokens=128, rows=4, steps=3),
        Shape(width=512, heads=8, tokens=256, rows=2, steps=2),
        Shape(width=1024, heads=16, tokens=512, rows=1, steps=1),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to take the step on two processes. ``fused``: of torch's AdamW."""

    fused: bool | None = None
    own_transport: bool = False
    torch_dtensor: bool = False
    fsdp: bool = False


KINDS: Mapping[str, Kind] = {
    "hand": Kind(),
    "hand, fused AdamW": Kind(fused=True),
    "hand, our transport": Kind(own_transport=True),
    "hand, our transport, fused AdamW": Kind(own_transport=True, fused=True),
    "PyTorch's DTensor": Kind(torch_dtensor=True),
    "FSDP2, fused AdamW": Kind(fused=True, fsdp=True),
}


# -- the controller's side -------------------------------------------------------------------------


def kinds(device: str, *, fsdp: bool = False) -> dict[str, Kind]:
    """Return the peers of dtensor at tp=2, or with ``fsdp`` at dp=2."""
    here = {n: kind for n, kind in KINDS.items() if device == "cpu" or not kind.own_transport}
    return {n: kind for n, kind in here.items() if kind.fsdp == fsdp}


class Peers(Processes):
    def __init__(self, shapes: Sequence[Shape], device: str = "cpu") -> None:
        super().__init__(NUM_RANKS, _work, shapes, device)

    def steps(self, kind: str, shape: Shape, count: int) -> list[float]:
        """Train for ``count`` steps; the losses."""
        return self.ask_one("steps", kind, shape, count)

    def gradients(self, kind: str, shape: Shape) -> dict[str, Tensor]:
        """The gradients of one step, which changes nothing, whole."""
        found = self.ask("gradients", kind, shape)
        if KINDS[kind].fsdp:
            return {name: torch.cat([own[name] for own in found]) for name in found[0]}
        return {name: joined(name, [own[name] for own in found]) for name in found[0]}


# -- a process of two ------------------------------------------------------------------------------


def _work(
    rank: int, shapes: Sequence[Shape], device: str, directory: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=NUM_RANKS,
    )
    own = own_all_reduces(rank, f"{directory}/ours", shapes) if device == "cpu" else {}
    sides = {
        (name, shape): _Side(
            rank, shape, kind, own[shape] if kind.own_transport else by_torchs_group, device
        )
        for name, kind in (kinds(device) | kinds(device, fsdp=True)).items()
        for shape in shapes
        if not kind.fsdp or shape.rows >= NUM_RANKS
    }
    calls = {
        "steps": lambda name, shape, count: sides[name, shape].steps(count),
        "gradients": lambda name, shape: sides[name, shape].gradients(),
    }
    answer(pipe, calls)
    dist.destroy_process_group()


def by_torchs_group(value: Tensor) -> Tensor:
    value = value.contiguous()
    dist.all_reduce(value)
    return value


def own_all_reduces(rank: int, path: str, shapes: Sequence[Shape]) -> dict[Shape, AllReduce]:
    """By shape, an all_reduce over what dtensor's own processes use between two on one host."""
    everyone = tuple(range(NUM_RANKS))
    store = dist.PrefixStore("ours", dist.FileStore(path, NUM_RANKS))

    def meet(card: str) -> None:
        store.set(f"here{rank}", card)
        store.wait([f"here{other}" for other in everyone])

    transport = join_same_host(
        store,
        own_place("here"),
        rank,
        everyone,
        meet=meet,
        connect=lambda: join_gloo(store, rank, everyone, "127.0.0.1", b""),
    )
    found: dict[Shape, AllReduce] = {}
    for number, shape in enumerate(shapes):
        buffer = (Buffer((shape.rows, shape.tokens, shape.width), torch.float32),)
        start = Collective("all_reduce", everyone, ("x",), ("y",), buffer, buffer, "sum", "tp")
        own = RankProgram(instructions=(start, Wait(("y",))), inputs=("x",), outputs=("y",))
        program = Program(
            name=f"d={shape.width}", ranks=(own,) * NUM_RANKS, functions=(), stage_of=(0, 0)
        )
        transport.open({key_of(rank, start): 0})
        own = parts_of(program, [(other,) for other in everyone])[rank]
        begin = transport.prepare(own, number).begins[rank, 0]
        found[shape] = lambda value, begin=begin: begin([value]).wait()[0]
    return found


class _Side:
    """One kind on this rank, with its part of a model of its own."""

    def __init__(
        self, rank: int, shape: Shape, kind: Kind, all_reduce: AllReduce, device: str
    ) -> None:
        whole = shape.model().to(device)
        self.batch = [x.to(device) for x in shape.batch()]
        self.model: nn.Module = whole
        self.halves = kind.fsdp
        if kind.fsdp:
            fully_shard(whole, mesh=init_device_mesh(device, (NUM_RANKS,)))
            self.batch = [x.chunk(NUM_RANKS)[rank] for x in self.batch]
        else:
            self.model = local = LocalBlock(whole, NUM_RANKS)
            if kind.torch_dtensor:
                by_torch(local, whole, device)
            else:
                by_hand(local, whole, rank, all_reduce)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=LR, fused=kind.fused)

    def forward_backward(self) -> Tensor:
        x, y = self.batch
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        loss = loss.detach()
        return by_torchs_group(loss) / NUM_RANKS if self.halves else loss

    def steps(self, count: int) -> list[float]:
        losses: list[Tensor] = []
        for _ in range(count):
            losses.append(self.forward_backward())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [float(loss) for loss in losses]

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts."""
        self.forward_backward()
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            found[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).cpu()
        self.optimizer.zero_grad()
        return found


# -- the block, cut --------------------------------------------------------------------------------


def cut(name: str, whole: Tensor, rank: int) -> Tensor:
    """This rank's part of a parameter of `Block`."""
    match name.split("."):
        case ["qkv", _]:  # of each of the three, whole heads
            parts = [third.chunk(NUM_RANKS)[rank] for third in whole.chunk(3)]
            return torch.cat(parts)
        case ["up", _]:
            return whole.chunk(NUM_RANKS)[rank].clone()
        case ["proj" | "down", "weight"]:
            return whole.chunk(NUM_RANKS, dim=1)[rank].contiguous()
        case _:
            return whole.clone()


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `cut`."""
    match name.split("."):
        case ["qkv", _]:
            thirds = zip(*(part.chunk(3) for part in parts), strict=True)
            return torch.cat([piece for third in thirds for piece in third])
        case ["up", _]:
            return torch.cat(list(parts))
        case ["proj" | "down", "weight"]:
            return torch.cat(list(parts), dim=1)
        case _:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            return parts[0]


class LocalBlock(nn.Module):
    """`Block` with a rank's heads; its four linear layers are put in by whoever cuts it."""

    def __init__(self, whole: Block, num_ranks: int) -> None:
        super().__init__()
        self.heads = whole.heads // num_ranks
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        self.qkv: nn.Module = whole.qkv
        self.proj: nn.Module = whole.proj
        self.up: nn.Module = whole.up
        self.down: nn.Module = whole.down

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (u.view(b, t, self.heads, -1).transpose(1, 2) for u in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def by_hand(model: LocalBlock, whole: Block, rank: int, all_reduce: AllReduce) -> None:
    own = {n: nn.Parameter(cut(n, p.detach(), rank)) for n, p in whole.named_parameters()}
    model.qkv = _Column(own["qkv.weight"], own["qkv.bias"], all_reduce)
    model.up = _Column(own["up.weight"], own["up.bias"], all_reduce)
    model.proj = _Row(own["proj.weight"], own["proj.bias"], all_reduce)
    model.down = _Row(own["down.weight"], own["down.bias"], all_reduce)


class _F(torch.autograd.Function):
    """Megatron's f: the identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.all_reduce(grads[0]), None


class _G(torch.autograd.Function):
    """Megatron's g: summed over the ranks; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Column(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, all_reduce: AllReduce) -> None:
        super().__init__()
        self.weight, self.bias, self.all_reduce = weight, bias, all_reduce

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_F.apply(x, self.all_reduce), self.weight, self.bias)


class _Row(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, all_reduce: AllReduce) -> None:
        super().__init__()
        self.weight, self.bias, self.all_reduce = weight, bias, all_reduce

    def forward(self, x: Tensor) -> Tensor:
        return _G.apply(F.linear(x, self.weight), self.all_reduce) + self.bias


def by_torch(model: LocalBlock, whole: Block, device: str) -> None:
    """`parallelize_module` cuts `qkv` into two blocks of rows: they are put into the order in which
    these are the ranks' heads."""
    with torch.no_grad():
        for name, parameter in whole.qkv.named_parameters(prefix="qkv"):
            parameter.copy_(torch.cat([cut(name, parameter, rank) for rank in range(NUM_RANKS)]))
    column, row = ColwiseParallel(), RowwiseParallel()
    parallelize_module(
        model,
        init_device_mesh(device, (NUM_RANKS,)),
        {"qkv": column, "up": column, "proj": row, "down": row},
    )
