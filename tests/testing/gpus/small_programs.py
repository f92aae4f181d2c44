"""Small programs that use what must synchronise or copy on a device, for `mutations.py`.

for name, body in PROGRAMS.items():
    expected = body("cpu")
    with dt.testing.simulated_gpus(2):
        assert difference(body("cuda"), expected) < 1e-5
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import launch_cluster
from dtensor.daft.ir.instructions import Buffer, Call, Collective, Free, Recv, Send, Wait
from dtensor.daft.run import timestamps
from tests.api import test_schedules as chains
from tests.daft.programs import function, program
from tests.testing.gpus.cases import Body, backend, bad_data, saved, schedule
from tests.training import Run, batches, sgd

NUM_GPUS = 2


def trained(device: str) -> Mapping[str, Any]:
    """Train without reading steps at once, gather the state, and go on training."""
    run, data = Run.of("tp2", make=sgd), batches(4)
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [run.step(*each) for each in data[:3]]
        state = run.state()["model"]
        kept = {f"{name}, early": value.clone() for name, value in state.items()}
        losses.append(run.step(*data[3]))
        numbers = [float(loss) for loss in losses]
        late = run.state()["model"]
        return {"losses": numbers, **{f"{n}, read": v for n, v in state.items()}, **kept, **late}


def as_graphs(device: str) -> Mapping[str, Any]:
    """Train with CUDA graphs, without reading steps at once, and load weights between steps."""
    run, data = Run.of("tp2", make=sgd), batches(6)
    graphs = device.startswith("cuda")
    with dt.launch(run.mesh, backend(device), device=device, graphs=graphs):
        before = run.state()["model"]
        losses = [run.step(*each) for each in data[:4]]
        dt.load_state_dict(run.model, None, {"model": before})
        losses += [run.step(*each) for each in data[4:]]
        return {"losses": [float(loss) for loss in losses], **run.state()["model"]}


def in_one_process(device: str) -> Mapping[str, Any]:
    """Write to inputs on the device after the call that takes them, and write to results."""
    run = Run.of("tp2", make=sgd)
    mesh = run.mesh
    both = dt.compile(lambda x: (x, x.mT, x * 2, x.sum(0)), mesh)
    with dt.launch(mesh, device=device):
        losses: list[Any] = []
        for each in batches(3):
            at, y = (t.to(device) for t in each)
            losses.append(run.step(at, y))
            at.zero_()
            y.fill_(7)
        x = torch.arange(12.0).reshape(3, 4).to(device)
        first = both(x)
        x.fill_(-1.0)
        second = both(dt.distribute(torch.ones(4, 6), mesh, tp=dt.Row()))
        values = [value.full_tensor() for value in (*first, *second)]
        read = {str(n): value.cpu() for n, value in enumerate(values)}
        for value in values:
            value.fill_(3.0)  # a tensor of the caller
        again = {f"{n}, again": v.full_tensor().cpu() for n, v in enumerate((*first, *second))}
        numbers = [float(loss) for loss in losses]
        return {
            "losses": numbers,
            **read,
            **again,
            **run.state()["model"],
        }


def timed(device: str) -> Mapping[str, Any]:
    """Check that the work of an instruction's stream is done when its time is taken."""
    idle: list[bool] = []

    def monotonic() -> float:
        idle.append(device == "cpu" or torch.cuda.current_stream().query())
        return time.monotonic()

    mesh = dt.Mesh(pp=2)
    with (
        patch.object(timestamps, "time", SimpleNamespace(monotonic=monotonic)),
        dt.launch(mesh, backend(device), device=device),
    ):
        step = chains.step_of(2, mesh, dt.GPipe(2))
        float(step(*chains.data(4)))
        dt.trace(step, *chains.data(4))
    assert device == "cpu" or len(idle) > 20
    return {"idle": float(all(idle))}


def by_hand(device: str) -> Mapping[str, Any]:
    """Run ranks of one process that write to values received, sent, and exchanged with the
    caller."""
    buffer, made = Buffer((4,), torch.float32), torch.arange(4.0)
    both, group = (buffer, buffer), (0, 1)
    written = Call("write", ("a", "b", "c", "d"), (), writes=("a", "b", "c", "d"))
    lists = [
        [
            Call("same", ("x",), ("y",)),
            Collective("all_reduce", group, ("a",), ("c",), (buffer,), (buffer,), "sum", "r"),
            Collective("all_gather", group, ("a",), ("d", "e"), (buffer,), both, None, "g"),
            Send("a", 1, "m", buffer) if rank == 0 else Recv("b", 0, "m", buffer),
            Wait(("c",)),
            Wait(("d",)),
            Wait(("a",) if rank == 0 else ("b",)),
            *([Call("twice", ("a",), ("b",))] if rank == 0 else []),
            written,
        ]
        for rank in group
    ]
    functions = [
        function(
            "write", "def forward(a, b, c, d):\n    for t in (a, b, c, d): t.add_(t)\n    return ()"
        ),
        function("twice", "def forward(a):\n    return (a * 2,)"),
        function("same", "def forward(x):\n    return (x,)"),
    ]
    names = [("a", "b", "c", "d", "e", "y")] * 2
    whole = program(*lists, functions=functions, inputs=[("x", "a")] * 2, outputs=names)
    found: dict[str, Any] = {}
    with launch_cluster(2, device=device) as cluster:
        handle = cluster.load(whole)
        fed = [{"x": (made + r).to(device), "a": (made * (r + 1)).to(device)} for r in group]
        cluster.put([{"kept": fed[0]["x"]}, {"kept": fed[1]["x"]}])
        results = cluster.run(handle, fed, keep={"y": "later", "e": "too"}).get()
        for own in fed:
            for value in own.values():
                value.fill_(-5.0)
        for rank in group:
            stored = cluster.get([["later", "too", "kept"]] * 2).get()[rank]
            for n, value in enumerate(stored):
                found[f"{rank}, {n}"] = value.clone()
                value.fill_(9.0)
            again = cluster.get([["later", "too", "kept"]] * 2).get()[rank]
            found |= {f"{rank}, {n}, again": value for n, value in enumerate(again)}
            found |= {f"{rank}, {name}": value for name, value in results[rank].items()}
    return {name: value.clone() for name, value in found.items()}


def undone_late(device: str) -> Mapping[str, Any]:
    """Write to state in several calls, then fail: the whole state is restored, twice."""
    names = ("w", "listed")
    whole = program(
        [
            Call("write", names, (), writes=names),
            Call("fails", ("if",), ("nothing",)),
            Free(("nothing",)),
        ],
        functions=[
            function("write", "def forward(w, l):\n    w.add_(w)\n    l.append(7)\n    return ()"),
            function("fails", "def forward(x):\n    return (1 // x,)"),
        ],
        inputs=[("if",)],
        outputs=[()],
        state=[names],
    )
    found: dict[str, Any] = {}
    with launch_cluster(1, device=device, snapshot_every=1) as cluster:
        cluster.put([{"w": torch.arange(4.0) + 1, "listed": [3]}])
        handle = cluster.load(whole)
        for n, x in enumerate((1, 0, 0, 1, 0, 1)):
            try:
                cluster.run(handle, [{"if": x}]).get()
                assert x
            except dt.daft.TaskError:
                assert not x
            w, listed = cluster.get([names]).get()[0]
            found |= {f"w, {n}": w.clone(), f"listed, {n}": list(listed)}
    return {name: torch.as_tensor(value) for name, value in found.items()}


class Turning(nn.Module):
    """Buffers whose values rotate in both directions, and a parameter that is a metric."""

    a: Tensor
    b: Tensor
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        for n, name in enumerate(("a", "b", "c", "d", "e", "f")):
            self.register_buffer(name, torch.full((3,), float(n)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first, last = self.c + 0, self.get_buffer("d") + 0
            self.c.copy_(self.b)
            self.b.copy_(self.a)
            self.a.copy_(first)
            self.get_buffer("d").copy_(self.get_buffer("e"))
            self.get_buffer("e").copy_(self.get_buffer("f"))
            self.get_buffer("f").copy_(last)
        return x * self.scale


def turned(device: str) -> Mapping[str, Any]:
    """Return state that the program changes as results."""
    torch.manual_seed(0)
    net, mesh = Turning(), dt.Mesh(tp=2)
    model = dt.parallelize(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x).square().mean(), {"scale": model.scale.detach()}

    step = dt.train_step(model, loss, optimizer)
    old = dt.compile(lambda model, x: (model.a.view(3, 1), model.b, model(x), model.c), mesh)
    x, found = torch.arange(4.0), dict[str, Any]()
    with dt.launch(mesh, device=device):
        for n in range(2):
            each = step(x)
            found |= {f"loss {n}": float(each), f"scale {n}": float(each.metrics["scale"])}
            results = old(model, x)
            step(x)
            found |= {f"{n}, {m}": value.full_tensor().cpu() for m, value in enumerate(results)}
        return {**found, **dt.gather_state_dict(model, optimizer)["model"]}


def first_used(device: str) -> Mapping[str, Any]:
    """Run the first matrix product between a pending receive and the cause of its message:
    cuBLAS may wait for the device at its first use, and so for the receive."""
    buffer, made = Buffer((4, 4), torch.float32), torch.arange(16.0).reshape(4, 4)
    whole = program(
        [
            Recv("b", 1, "back", buffer),
            Call("product", ("a",), ("c",)),
            Send("c", 1, "there", buffer),
            Wait(("c",)),
            Free(("c",)),
            Wait(("b",)),
        ],
        [
            Recv("c", 0, "there", buffer),
            Wait(("c",)),
            Send("c", 0, "back", buffer),
            Wait(("c",)),
            Free(("c",)),
        ],
        functions=[function("product", "def forward(a):\n    return (a @ a,)")],
        inputs=[("a",), ()],
        outputs=[("b",), ()],
    )
    with launch_cluster(2, backend=backend(device), device=device) as cluster:
        return dict(cluster.run(cluster.load(whole), [{"a": made}, {}]).get()[0])


PROGRAMS: Mapping[str, Body] = {
    "by hand": by_hand,
    "training": trained,
    "graphs": as_graphs,
    "one process": in_one_process,
    "undone": bad_data,
    "checkpoint": saved,
    "turning": turned,
    "undone late": undone_late,
    "first use": first_used,
    "first step of GPipe": schedule(dt.GPipe, 2, 1),
    "timed": timed,
}
