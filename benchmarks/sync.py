"""A sync from a trainer's ranks to a generator's on Ray, beside raw gloo sends of the same bytes.

    OMP_NUM_THREADS=1 python -m benchmarks.sync [--width 512] [--layers 4] [--rounds 15] [--write]

A small GPT's weights go from dp=2 with ZeRO-3 to tp=2 of other ranks, one thread a process, in one
run and interleaved; ratios are taken round by round. The sides:

    sync    dt.sync(policy, actor), as it is, and until all ranks have ended it
    gloo    in the same four actors: for each pair of ranks one message of as many bytes as the sync
            sends between the two, from and into memory that is there already; nothing is cut or put
            together, nothing agreed

Bytes are those of the plan, and are held against the sum over the target's shards of what is not
already held, counted apart from it; the controller's bytes are what it writes to the actors and
reads from them in a sync.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.daft import Call, Function, Program, RankProgram
from dtensor.daft.ray.channel import run_channel
from dtensor.daft.ray.channel.messages import Data, Kind, _Stream
from dtensor.daft.ray.transports.gloo import Messenger, gloo_group

VOCAB = 8192
TP = {
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.proj(mixed.transpose(1, 2).flatten(-2))
        return h + self.down(F.gelu(self.up(self.other(h))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.norm(h) @ self.embed.weight.T


# -- gloo, in the actors ---------------------------------------------------------------------------

_groups: dict[int, tuple[Messenger, list[tuple[int, Tensor]], list[tuple[int, Tensor]]]] = {}


def raw(rank: int, port: int, size: int, gives: dict[int, int], takes: dict[int, int]) -> tuple[()]:
    """Send and receive so many bytes, by the other rank."""
    if rank not in _groups:
        store = TCPStore("127.0.0.1", port, size, is_master=False)
        group = gloo_group(store, rank, size, "127.0.0.1")
        own = [
            [(other, torch.ones(n, dtype=torch.uint8)) for other, n in sorted(table.items())]
            for table in (gives, takes)
        ]
        _groups[rank] = group, own[0], own[1]
    group, sent, received = _groups[rank]
    works = [group.recv([data], other, 0) for other, data in received]
    works += [group.send([data], other, 0) for other, data in sent]
    for work in works:
        work.wait()
    return ()


def raw_program(bytes_by_pair: dict[tuple[int, int], int], size: int, port: int) -> Program:
    functions: list[tuple[str, Function]] = []
    ranks: list[RankProgram] = []
    for rank in range(size):
        gives = {t: n for (s, t), n in bytes_by_pair.items() if s == rank}
        takes = {s: n for (s, t), n in bytes_by_pair.items() if t == rank}
        name = f"raw {rank}"
        functions.append((name, Function.of(partial(raw, rank, port, size, gives, takes), name)))
        ranks.append(RankProgram(instructions=(Call(name, (), ()),)))
    return Program(
        name="raw gloo", ranks=tuple(ranks), functions=tuple(functions), stage_of=(0,) * size
    )


# -- what the controller writes and reads ----------------------------------------------------------


class Counter:
    """Bytes between the controller and its actors, while `counting`."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        encode, read = run_channel.encoded, _Stream._read

        def encoded(
            number: int, kind: Kind, functions: tuple[Any, ...], value: object
        ) -> list[Data]:
            pieces = encode(number, kind, functions, value)
            self.sent += sum(memoryview(piece).nbytes for piece in pieces)
            return pieces

        def was_read(reader: _Stream, into: memoryview) -> Generator[None, None, int]:
            count = yield from read(reader, into)
            self.received += count
            return count

        run_channel.encoded = encoded
        _Stream._read = was_read  # type: ignore[method-assign]


# -- the run ---------------------------------------------------------------------------------------


def lacking(policy: dt.ParallelModule, plan: dt.SyncPlan) -> int:
    """Bytes of the targets' shards; the meshes share no rank, so nothing is there already."""
    return sum(
        t.target.local_nbytes(t.target.mesh.coordinates(rank))
        for t in plan.transfers.values()
        for rank in t.there.at
    )


def measure(width: int, layers: int, rounds: int) -> list[str]:
    torch.manual_seed(0)
    train, play = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
    module = GPT(width, layers)
    policy = dt.parallelize(module, train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, TP)
    counter = Counter()
    with dt.launch(train, play, backend="ray") as session:
        cluster = session.launch.cluster
        dt.sync(policy, actor)
        logits = dt.compile(lambda model, tokens: model(tokens), play)
        tokens = torch.randint(VOCAB, (1, 8))
        found = logits(actor, tokens).full_tensor()
        torch.testing.assert_close(found, module(tokens).detach(), rtol=1e-4, atol=1e-4)
        plan = dt.sync_plan(policy, actor)
        assert plan.bytes_sent == lacking(policy, plan)
        store = TCPStore("127.0.0.1", 0, cluster.size, is_master=True, wait_for_workers=False)
        handle = cluster.load(raw_program(plan.bytes_by_pair, cluster.size, store.port))
        nothing = [{} for _ in range(cluster.size)]
        asked = [()] * cluster.size
        sides: dict[str, Callable[[], object]] = {
            "sync": lambda: dt.sync(policy, actor),
            "gloo": lambda: cluster.run(handle, nothing),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 2):
            for side in sorted(sides, reverse=bool(number % 2)):
                cluster.get(asked).get()
                began = time.perf_counter()
                sides[side]()
                cluster.get(asked).get()  # all have ended what was asked for before
                if number >= 2:
                    times[side].append(time.perf_counter() - began)
        counter.sent = counter.received = 0
        dt.sync(policy, actor)
        session.launch.settle()
        sent, received = counter.sent, counter.received
        state, mine = (dt.gather_state_dict(model)["model"] for model in (policy, actor))
        assert all(torch.equal(state[name], mine[name]) for name in state)
    ratios = sorted(a / b for a, b in zip(times["sync"], times["gloo"], strict=True))
    cells = [f"{1e3 * min(own):.1f} / {1e3 * statistics.median(own):.1f}" for own in times.values()]
    tenth = len(ratios) // 10
    spread = f"({ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f})"
    return [
        "| bytes | messages | sync, ms | gloo, ms | ratio (10th to 90th) | controller's bytes |",
        "|---|---|---|---|---|---|",
        f"| {plan.bytes_sent:,} | {len(plan.messages)} | {cells[0]} | {cells[1]} | "
        f"**{statistics.median(ratios):.2f}** {spread} | {sent:,} out, {received:,} in |",
        "",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, argv, width=64, layers=1, rounds=1)
    # the actors import this module
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    load = os.getloadavg()[0]
    from benchmarks import sync  # under the name that they import it by

    lines = [
        "# A sync beside raw gloo",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.sync --width {given.width} --layers "
        f"{given.layers} --rounds {given.rounds}`: a GPT of vocabulary {VOCAB:,} in float32 from "
        f"dp=2 with ZeRO-3 to tp=2 of other ranks on Ray; minimum / median of {given.rounds} "
        f"interleaved rounds; ratios round by round, their median. {os.cpu_count()} cores "
        f"({platform.machine()}), load {load:.1f} before, torch {torch.__version__}.",
        "",
        *sync.measure(given.width, given.layers, given.rounds),
    ]
    print("\n".join(lines))
    if given.write:
        path = Path(__file__).parent / "results" / "sync.md"
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
