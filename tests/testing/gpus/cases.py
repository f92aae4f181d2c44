"""The cases of `matrix.py`, which must give the same numbers on simulated GPUs and on the CPU.

case = next(cases())
case.body("cpu")                # {"losses": [...], "embed.weight": tensor, ...}
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from tests.api import generation, precision
from tests.api import test_schedules as chains
from tests.models import MLP, DropoutGPT, batch, loss_fn
from tests.optimizers import Counted
from tests.training import SIX, Run, adamw, batches, make_model, sgd

Body: TypeAlias = Callable[[str], Mapping[str, Any]]
"""Of a device; its numbers by name."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num: int
    body: Body
    tolerance: float = 2e-6
    has_kernels: bool = False


def backend(device: str) -> dt.daft.Backend:
    """Return the backend that puts a rank on each simulated GPU."""
    return "inprocess" if device == "cpu" else "ray"


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def training(
    placed: str, make: Any = sgd, *, per_gpu: int = 1, steps: int = 2, **given: Any
) -> Body:
    data = batches(steps)

    def body(device: str) -> Mapping[str, Any]:
        # AdamW and Adafactor turn the rounding of a zero gradient into a full step: compare only
        # their losses
        run = Run.of(placed, make=make, **given)
        with dt.launch(run.mesh, backend(device), device=device, ranks_per_actor=per_gpu):
            losses = run.losses(data)
            compares_weights = make not in (adamw, adafactor)
            return {"losses": losses, **(run.state()["model"] if compares_weights else {})}

    return body


def in_process(device: str) -> Mapping[str, Any]:
    run = Run.of("tp2_pp2", make=sgd)
    with dt.launch(run.mesh, device=device):
        return {"losses": run.losses(batches(2)), **run.state()["model"]}


def schedule(make: Callable[[int], dt.Schedule], p: int, v: int) -> Body:
    """Train one step, and a second one."""

    def body(device: str) -> Mapping[str, Any]:
        mesh = dt.Mesh(pp=p)
        with dt.launch(mesh, backend(device), device=device):
            step = chains.step_of(p * v, mesh, make(2 * p))
            losses = [float(step(*chains.data(8 * p))) for _ in range(2)]
            state = dt.gather_state_dict(step.model, step.optimizer)
            return {"losses": losses, **state["model"]}

    return body


def zero(level: int, **axes: int) -> Body:
    def body(device: str) -> Mapping[str, Any]:
        mesh = dt.Mesh(**axes)
        torch.manual_seed(0)
        module = MLP()
        model = dt.parallelize(module, mesh, {}, zero=dict.fromkeys(axes, level))
        optimizer = adamw(module)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        given: dict[str, Any] = dict(inputs=dict.fromkeys(axes, dt.Row()), clip_grad_norm=1.0)
        step = dt.train_step(model, _square, optimizer, **given)
        with dt.launch(mesh, backend(device), device=device):
            losses = [float(step(x)) for _ in range(3)]
            return {"losses": losses, **dt.gather_state_dict(model, optimizer)["model"]}

    return body


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def counted_in_python(model: nn.Module) -> torch.optim.Optimizer:
    return Counted(model.parameters(), lr=1e-2)


def loaded(device: str) -> Mapping[str, Any]:
    """Load a checkpoint between steps: parameters and their state get other addresses."""
    torch.manual_seed(0)
    model = dt.parallelize(MLP(), dt.Mesh(), {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    step, x = dt.train_step(model, _square, optimizer), torch.ones(4, 16)
    with dt.launch(model.mesh, device=device), tempfile.TemporaryDirectory() as folder:
        losses = [step(x) for _ in range(3)]
        dt.save(f"{folder}/at", model, optimizer).get()
        losses += [step(x)]
        dt.load(f"{folder}/at", model, optimizer)
        losses += [step(x) for _ in range(4)]
        numbers = [float(loss) for loss in losses]
        return {"losses": numbers, **dt.gather_state_dict(model, optimizer)["model"]}


def two_sizes(device: str) -> Mapping[str, Any]:
    """Train on batches of two sizes: two programs update with one optimizer that has no state."""
    torch.manual_seed(0)
    model = dt.parallelize(MLP(), dt.Mesh(dp=2), {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    step = dt.train_step(model, _square, optimizer, inputs=dict(dp=dt.Row()))
    with dt.launch(model.mesh, backend(device), device=device):
        losses = [float(step(torch.ones(size, 16))) for size in (8, 8, 4, 8)]
        return {"losses": losses, **dt.gather_state_dict(model, optimizer)["model"]}


def bad_data(device: str) -> Mapping[str, Any]:
    """Pass an index out of range, which undoes its own step only."""
    run, (good, other) = Run.of("tp2", make=sgd), batches(2)
    bad = (other[0].clone().fill_(1000), other[1])
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [float(run.step(*good))]
        try:
            float(run.step(*bad))
            raise AssertionError("an index of 1000 was taken")
        except dt.daft.TaskError as error:
            assert "IndexError" in str(error) or "index" in str(error), error
        losses += [float(run.step(*good)), float(run.step(*other))]
        return {"losses": losses, **run.state()["model"]}


def saved(device: str) -> Mapping[str, Any]:
    """Save while steps run, and load into another placement."""
    data = batches(4)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.of("dp2", make=sgd)
        with dt.launch(run.mesh, backend(device), device=device):
            losses = run.losses(data[:2])
            going = dt.save(f"{folder}/at", run.model, run.optimizer)
            losses += run.losses(data[2:3])
            going.get()
        run = Run.of("tp2", make=sgd)
        with dt.launch(run.mesh, backend(device), device=device):
            dt.load(f"{folder}/at", run.model, run.optimizer)
            losses += run.losses(data[2:])
            return {"losses": losses, **run.state()["model"]}


def eager(device: str) -> Mapping[str, Any]:
    mesh = dt.Mesh(tp=2)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with dt.launch(mesh, backend(device), device=device):
        rows, columns = (
            dt.distribute(x, mesh, tp=dt.Row()),
            dt.distribute(x.T, mesh, tp=dt.Column()),
        )
        whole = dt.distribute(x, mesh)
        made: dict[str, Any] = {
            "sum": rows.sum(),
            "softmax": (rows * 2).softmax(-1),
            "product": whole @ columns,
            "positive": whole.relu(),
            "on one rank": rows.redistribute(tp=dt.Column(sizes=(0, 8))).relu(),
        }
        return {name: value.full_tensor() for name, value in made.items()}


def switched(device: str) -> Mapping[str, Any]:
    """Change placements between steps of one launch."""
    run, other = Run.of("tp2", make=sgd), Run.of("dp2", make=sgd)
    data = batches(2)
    with dt.launch(dt.Mesh(tp=2), backend(device), device=device):
        losses = run.losses(data)
    with dt.launch(dt.Mesh(dp=2), backend(device), device=device):
        losses += other.losses(data)
    return {"losses": losses}


def dropout(device: str) -> Mapping[str, Any]:
    dt.manual_seed(3)
    torch.manual_seed(0)
    run = Run.of("tp2", module=DropoutGPT(), make=sgd)
    with dt.launch(run.mesh, backend(device), device=device):
        return {"losses": run.losses(batches(2)), **run.state()["model"]}


def switched_within(device: str) -> Mapping[str, Any]:
    """Change the mesh, placements and ZeRO level between steps of one launch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    first, second = dt.Mesh(dp=3), dt.Mesh(tp=2)
    split = {"0.weight": dict(tp=dt.Row()), "2.weight": dict(tp=dt.Column())}
    model = dt.parallelize(net, first, {}, zero={"dp": 3})
    optimizer = sgd(net)
    step = dt.train_step(model, _square, optimizer, inputs=dict(dp=dt.Row()))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    with dt.launch(first, backend(device), device=device) as run:
        losses = [step(x), step(x)]
        run.switch(model, optimizer, second, split, inputs={})
        losses += [step(x), step(x)]
        run.switch(model, optimizer, first, {}, zero={"dp": 2}, inputs=dict(dp=dt.Row()))
        losses += [step(x)]
        numbers = [float(loss) for loss in losses]
        return {"losses": numbers, **dt.gather_state_dict(model, optimizer)["model"]}


def run_ahead(device: str) -> Mapping[str, Any]:
    """Submit ten steps before reading one; each batch is dropped at once."""
    run = Run.of("tp2", make=sgd)
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [run.step(*batch(n % 3)) for n in range(10)]
        return {"losses": [float(loss) for loss in reversed(losses)], **run.state()["model"]}


def two_meshes(device: str) -> Mapping[str, Any]:
    """Train a policy and run its replica: syncs between steps and calls of the replica, none
    read at once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    train, play = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
    policy = dt.parallelize(net, train, {}, zero={"dp": 3})
    split = {"0.weight": dict(tp=dt.Row()), "2.weight": dict(tp=dt.Column())}
    actor = dt.replica(policy, play, split)
    step = dt.train_step(policy, _square, sgd(net), inputs=dict(dp=dt.Row()))
    predict = dt.compile(lambda model, x: model(x), play)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    with dt.launch(train, play, backend=backend(device), device=device):
        for _ in range(3):
            dt.sync(policy, actor)
            found.append(predict(actor, x))
            found.append(step(x))
        dt.sync(policy, actor)
        found.append(predict(actor, x))
        made = [x.full_tensor() if isinstance(x, dt.DTensor) else float(x) for x in found]
        state = dt.gather_state_dict(actor)["model"]
    return {**{str(n): value for n, value in enumerate(made)}, **state}


def transferred(device: str) -> Mapping[str, Any]:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    whole, part, third = dt.Mesh(dp=2, tp=2), dt.Mesh(g=2), dt.Mesh(k=3)
    relu = dt.compile(lambda t: t.relu() @ t.T, part)
    with dt.launch(whole, backend(device), device=device):
        a = dt.distribute(x, whole, dp=dt.Row(), tp=dt.Column())
        b = dt.transfer(a, part, (2, 3), g=dt.Row())
        y = relu(b)
        c = dt.transfer(b, third, k=dt.Row(sizes=(0, 5, 2)))
        back = dt.transfer(c, whole, tp=dt.Row())
        del a, c
        return {"y": y.full_tensor(), "b": b.full_tensor(), "back": back.full_tensor()}


def recomputed(device: str) -> Mapping[str, Any]:
    """Recompute blocks in the backward."""
    net, mesh = make_model(), dt.Mesh(dp=2)
    model = dt.parallelize(net, mesh, {}, zero={"dp": 3}, recompute=["blocks.*"])
    given: dict[str, Any] = dict(inputs=dict(dp=dt.Row()), schedule=dt.GPipe(2))
    step = dt.train_step(model, loss_fn, sgd(net), clip_grad_norm=1.0, **given)
    with dt.launch(mesh, backend(device), device=device):
        losses = [float(step(*batch(n, size=8))) for n in range(2)]
        assert step.plan(*batch(0, size=8)).regions
        return {"losses": losses, **dt.gather_state_dict(model, step.optimizer)["model"]}


def autocast(listed: str, dtype: torch.dtype, **options: Any) -> Body:
    """Train under the autocast list of a device type; `precision.normed` depends on the list."""

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(listed, dtype=dtype):
            return precision.normed(model, tokens, targets)

    def body(device: str) -> Mapping[str, Any]:
        run = precision.build(dt.Mesh(dp=2), dtype=None, make=sgd, loss=loss, **options)
        with dt.launch(run.mesh, backend(device), device=device):
            return {"losses": [float(run.step(*one)) for one in batches(2)]}

    return body


def master_weights(device: str) -> Mapping[str, Any]:
    """Train bf16 parameters with float32 master weights in the optimizer."""
    run = precision.build(dt.Mesh(dp=2), zero=1, make=sgd, master_weights=True)
    with dt.launch(run.mesh, backend(device), device=device):
        return {"losses": [float(run.step(*one)) for one in batches(2)]}


def scaled(device: str) -> Mapping[str, Any]:
    """Train float16 with a loss scale that is too large at first, so that steps are skipped."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    mesh, scaler = dt.Mesh(dp=2), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    model = dt.parallelize(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16):
            out = model(x)
        return (out.float() - x).square().mean()

    rows: dict[str, Any] = dict(dp=dt.Row())
    step = dt.train_step(model, loss, optimizer, inputs=rows, grad_scaler=scaler)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with dt.launch(mesh, backend(device), device=device):
        steps = [step(x) for _ in range(12)]
        losses = [float(each) for each in steps]
        skipped = [each.skipped for each in steps]
        assert skipped[0] and not skipped[-1], skipped
        kept = [loss for loss, skips in zip(losses, skipped, strict=True) if not skips]
        state = dt.gather_state_dict(model, optimizer)["model"]
    return {"losses": kept, "skipped": skipped, "scale": scaler.get_scale(), **state}


PROMPTS = [[5, 17, 3, 30, 4], [9, 8, 7], [1], [2, 3]]
HEADS: dict[str, Any] = {
    "*.{q,k,v}.*": dict(tp=dt.Row(unit=8)),
    "*.o.weight": dict(tp=dt.Column(unit=8)),
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
LAYERS = {"pp": [["embed*", "places*", "blocks.0.*"], ["blocks.1.*", "head*"]]}


def writer_on(axes: Mapping[str, int]) -> dt.ParallelModule:
    pins = HEADS if "tp" in axes else {}
    stages = LAYERS if "pp" in axes else None
    return dt.parallelize(generation.writer(), dt.Mesh(**axes), pins, stages=stages)


def texts(**axes: int) -> Body:
    """Generate more greedy and sampled texts than the KV cache has slots, one step ahead."""

    def body(device: str) -> Mapping[str, Any]:
        model = writer_on(axes)
        gen = dt.generator(model, slots=3, length=24, buckets=(8,), ahead=1)
        how: dict[str, Any] = dict(max_new_tokens=6, temperature=[0, 1.0, 0, 0.7], seed=3)
        with dt.launch(model.mesh, backend(device), device=device):
            made = gen(PROMPTS, **how)
            return {str(n): list(text.tokens) for n, text in enumerate(made)}

    return body


def rolled_out(device: str) -> Mapping[str, Any]:
    """Generate texts on a replica, compute rewards, make a step and sync, with texts under way
    at each sync."""
    from tests.api import test_rollouts as rollouts

    policy, actor, step = rollouts.make()
    found: dict[str, Any] = {}
    meshes = (rollouts.TRAIN, rollouts.PLAY)
    with dt.launch(*meshes, backend=backend(device), device=device):
        dt.sync(policy, actor)
        prompts = itertools.cycle([[n, n + 1] for n in range(7)])
        sizes: dict[str, Any] = dict(batch_size=4, max_new_tokens=rollouts.NEW, length=16)
        drawn = dt.rollouts(actor, prompts, rollouts.score, staleness=0, **sizes)
        for n, each in enumerate(itertools.islice(drawn, 2)):
            loss = step(each.tokens, each.generated, each.logprobs, each.rewards)
            dt.sync(policy, actor)
            found |= {f"tokens {n}": each.tokens, f"logprobs {n}": each.logprobs}
            found[f"loss {n}"] = float(loss)
    return found


def experts(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows.bfloat16(), weight.bfloat16(), ends).relu()  # pyright: ignore


def grouped(**placed: dt.Placement) -> Body:
    """Multiply by groups of rows, with experts that are whole, distributed, or split inside."""
    drawn = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(16, 8, generator=drawn), torch.randn(4, 8, 16, generator=drawn)
    ends = torch.tensor([3, 3, 9, 16], dtype=torch.int32)

    def body(device: str) -> Mapping[str, Any]:
        mesh = dt.Mesh(tp=2)
        product = dt.compile(experts, mesh)
        with dt.launch(mesh, backend(device), device=device):
            given = (dt.distribute(rows, mesh), dt.distribute(weight, mesh, **placed), ends)
            return {str(n): product(*given).full_tensor() for n in range(2)}

    return body


class Experts(nn.Module):
    """Sorts rows by expert, multiplies them by group, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        rows, up, down = (t.bfloat16() for t in (x[order], self.up, self.down))
        h = torch._grouped_mm(rows, up, ends).relu()  # pyright: ignore
        y = torch._grouped_mm(h, down, ends).float()  # pyright: ignore
        out = torch.zeros_like(x).index_add(0, order, y)
        return out * weights.gather(-1, chosen[:, None])


def trained_experts(device: str) -> Mapping[str, Any]:
    torch.manual_seed(0)
    net, mesh = Experts(), dt.Mesh(tp=2)
    model = dt.parallelize(net, mesh, {"up": dict(tp=dt.Shard(0)), "down": dict(tp=dt.Shard(0))})
    optimizer = sgd(net)
    return _trained_on_tokens(dt.train_step(model, _square, optimizer), 2, device)


def _trained_on_tokens(
    step: dt.TrainStep, num: int, device: str, dtype: torch.dtype = torch.float32
) -> Mapping[str, Any]:
    """Return the losses and the weights after ``num`` steps on 12 tokens."""
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    with dt.launch(step.model.mesh, backend(device), device=device):
        losses = [float(step(x)) for _ in range(num)]
        return {"losses": losses, **dt.gather_state_dict(step.model, step.optimizer)["model"]}


class ExpertLayer(Experts):
    """Sends the rows of tokens to their experts, top 2 of 4."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        rows, route = dt.to_experts(x, ids, 4)
        h = dt.expert_linear(rows, self.up, route).relu()
        return x + dt.from_experts(dt.expert_linear(h, self.down, route), route, weights)


def experts_step(
    *, is_split: bool, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> dt.TrainStep:
    """Return a training step of two layers of experts, split over ep or whole."""
    torch.manual_seed(0)
    net = nn.Sequential(ExpertLayer(), ExpertLayer()).to(dtype)
    pins: dict[str, Any] = {"*.up": dict(ep=dt.Shard(0)), "*.down": dict(ep=dt.Shard(0))}
    model = dt.parallelize(net, dt.Mesh(ep=2), pins if is_split else {})
    return dt.train_step(model, _square, sgd(net), inputs=inputs)


def expert_layers(
    *, is_split: bool = True, dtype: torch.dtype = torch.float32, **inputs: dt.Placement
) -> Body:
    def body(device: str) -> Mapping[str, Any]:
        step = experts_step(is_split=is_split, inputs=inputs, dtype=dtype)
        return _trained_on_tokens(step, 3, device, dtype)

    return body


class Attends(nn.Module):
    """Attention of tokens to their documents and to earlier tokens, with sinks; bf16 or float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv, self.sinks = nn.Linear(32, 64), nn.Parameter(torch.randn(4))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        documents = (torch.arange(x.shape[1], device=x.device) // 5)[None]
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        causal, _ = torch.ops.dt.attention(q, k, v, True, 0.3)
        by_document, _ = torch.ops.dt.attention(
            q, k, v, True, 0.3, [], 0.0, [documents], [documents], ["eq"], self.sinks
        )
        return (causal.float() + by_document.float()).transpose(1, 2).flatten(2)


def split_tokens(dtype: torch.dtype, placement: dt.Placement, word: str = "gather") -> Body:
    """Train attention whose tokens are split over cp, in two microbatches, with ZeRO-3."""

    def body(device: str) -> Mapping[str, Any]:
        torch.manual_seed(0)
        net = Attends(dtype)
        model = dt.parallelize(net, dt.Mesh(cp=2), attention={"cp": word}, zero={"cp": 3})
        step = dt.train_step(
            model, _square, sgd(net), inputs=dict(cp=placement), schedule=dt.GPipe(microbatches=2)
        )
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
        with dt.launch(model.mesh, backend(device), device=device):
            losses = [float(step(x)) for _ in range(2)]
            return {"losses": losses, **dt.gather_state_dict(model, step.optimizer)["model"]}

    return body


def _sorted_rows(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    return x[ids.argsort(stable=True)], (ids[:, None] == torch.arange(4, device=ids.device)).sum(0)


def _rows_sent(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    first = sum(counts.tolist()[:2])
    return rows[:first].clone(), rows[first:].clone()


def _rows_returned(*received: Tensor) -> tuple[Tensor, ...]:
    return tuple(piece * 2 for piece in received)


def routed(num: int = 2) -> daft.Program:
    """Return a program in which each rank sorts rows `x` by their numbers `ids`, sends them to the
    ranks of these numbers (two on each rank), and gets them back doubled."""
    group, buffer = tuple(range(num)), daft.Buffer((6, 3), torch.float32, bounded=True)
    names = ["counts", "sent", "received", "doubled", "back"]
    counts, sent, received, doubled, back = (tuple(f"{n}.{r}" for r in group) for n in names)
    vector, buffers = daft.Buffer((4,), torch.int64), (buffer,) * num
    there = daft.Sizes(counts, tuple((2 * r, 2 * r + 1) for r in group))

    def exchange(given: tuple[str, ...], made: tuple[str, ...], returned: bool) -> daft.Collective:
        sizes = dataclasses.replace(there, returned=returned)
        given_and_made = given, made, buffers, buffers
        return daft.Collective("all_to_all", group, *given_and_made, None, "ep", sizes=sizes)

    def rank(n: int) -> daft.RankProgram:
        gathered = ("count",), counts, (vector,), (vector,) * num
        items = (
            daft.Call("sorted", ("x", "ids"), ("rows", "count")),
            daft.Collective("all_gather", group, *gathered, None, "ep", on_host=True),
            daft.Wait(counts),
            daft.Call("sent", ("rows", counts[n]), sent),
            daft.Free(("rows", "count")),
            *(exchange(sent, received, False), daft.Wait(received), daft.Free(sent)),
            *(daft.Call("returned", received, doubled), daft.Free(received)),
            *(exchange(doubled, back, True), daft.Wait(back), daft.Free((*doubled, *counts))),
        )
        return daft.RankProgram(instructions=items, inputs=("x", "ids"), outputs=back)

    functions = {"sorted": _sorted_rows, "sent": _rows_sent, "returned": _rows_returned}
    return daft.Program(
        name="routed",
        ranks=tuple(map(rank, group)),
        functions=tuple((name, daft.Function.of(fn, name)) for name, fn in functions.items()),
        stage_of=(0,) * num,
    )


def rows_to_ranks(num: int = 2) -> list[dict[str, object]]:
    drawn = torch.Generator().manual_seed(0)
    ids = [torch.tensor([3, 0, 2, 0, 3, 1]), torch.tensor([2, 2, 3, 2, 3, 3])]
    return [dict(x=torch.randn(6, 3, generator=drawn), ids=ids[r]) for r in range(num)]


def routed_rows(device: str) -> Mapping[str, Any]:
    """Exchange rows whose numbers are known only on the GPU; rank 1 sends none to rank 0."""
    found: dict[str, Any] = {}
    with daft.launch_cluster(2, backend=backend(device), device=device) as cluster:
        handle = cluster.load(routed())
        for run in range(3):
            for rank, results in enumerate(cluster.run(handle, rows_to_ranks()).get()):
                found |= {f"{run}, {rank}, {name}": each for name, each in results.items()}
    return found


def timed(device: str) -> Mapping[str, Any]:
    """Profile and trace steps under a schedule whose sends cross."""
    run = Run.of("pp2", make=sgd)
    data = batches(2)
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [float(run.step(*data[0]))]
        profile = run.step.profile(1, *data[0])
        assert [own.rank for own in profile.ranks] == [0, 1]
        assert dt.trace(run.step, *data[1])
        losses += [float(run.step(*data[1]))]
        return {"losses": losses, **run.state()["model"]}


def failed(device: str) -> Mapping[str, Any]:
    """Make steps fail in a user function; they are undone and free their memory."""
    run, data = Run.of("dp2", make=sgd), batches(3)
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [float(run.step(*data[0]))]
        for _ in range(2):
            tokens = data[1][0].clone()
            tokens[-1] = -7
            try:
                float(run.step(tokens, data[1][1]))
                raise AssertionError("an index of -7 was taken")
            except dt.daft.TaskError:
                pass
            losses.append(float(run.step(*data[2])))
        return {"losses": losses, **run.state()["model"]}


def cases() -> Iterator[Case]:
    for name, placed in SIX.items():
        num = placed.mesh.size
        yield Case(f"train {name}", num, training(name))
        yield Case(f"train {name}, AdamW", num, training(name, adamw), 1e-4)
    yield Case("train dp2_tp2, Adafactor on owners", 4, training("dp2_tp2", adafactor), 1e-4)
    yield Case("train dp4", 4, training("dp4", schedule=dt.GPipe(microbatches=1)))
    yield Case("train tp4", 4, training("tp4", schedule=dt.GPipe(microbatches=1)))
    yield Case("two ranks a GPU, dp2_tp2", 2, training("dp2_tp2", per_gpu=2))
    yield Case("all ranks on a GPU, tp2_pp2", 1, training("tp2_pp2", per_gpu=4))
    yield Case("in this process, tp2_pp2", 1, in_process)
    for make, v in chains.SCHEDULES:
        schedule_name = getattr(make, "__name__", "Searched").replace("<lambda>", "Searched")
        for p in (2, 4):
            yield Case(f"schedule {schedule_name}, p={p}", p, schedule(make, p, v))
    for level in range(4):
        yield Case(f"zero {level}", 2, zero(level, dp=2), 1e-4)
    for level in (1, 3):
        yield Case(f"zero {level} over two axes", 4, zero(level, dp=2, ep=2), 1e-4)
    yield Case("bad data", 2, bad_data)
    yield Case("checkpoint", 2, saved, 1e-4)
    yield Case("loaded between steps", 1, loaded)
    yield Case("steps counted in Python", 2, training("tp2", counted_in_python, steps=5))
    yield Case("batches of two sizes", 2, two_sizes)
    yield Case("eager", 2, eager)
    yield Case("two placements", 2, switched, 1e-4)
    yield Case("dropout", 2, dropout)
    yield Case("placements switched in a launch", 3, switched_within)
    yield Case("run ahead", 2, run_ahead)
    yield Case("sync between meshes", 4, two_meshes)
    yield Case("transfer between meshes", 4, transferred)
    yield Case("recompute, ZeRO-3", 2, recomputed)
    yield Case("autocast bf16, CUDA's list", 2, autocast("cuda", torch.bfloat16), 1e-2)
    yield Case("autocast bf16, the CPU's list", 2, autocast("cpu", torch.bfloat16), 1e-2)
    yield Case("master weights, bf16", 2, master_weights, 1e-2)
    yield Case("float16 with a scale", 2, scaled, 1e-3)
    for where in ("tp", "pp", "dp"):
        yield Case(f"generation {where}2", 2, texts(**{where: 2}))
    yield Case("rollouts", 4, rolled_out, 1e-4)
    yield Case("grouped product, whole", 2, grouped(), 1e-2)
    yield Case("grouped product, by expert", 2, grouped(tp=dt.Shard(0)), 1e-2)
    yield Case("grouped product, within", 2, grouped(tp=dt.Shard(2)), 1e-2)
    yield Case("experts trained", 2, trained_experts, 1e-2)
    yield Case("experts, tokens split", 2, expert_layers(ep=dt.Row()), 2e-5)
    yield Case("experts, tokens whole", 2, expert_layers(), 2e-5)
    yield Case("experts whole, tokens split", 2, expert_layers(is_split=False, ep=dt.Row()), 2e-5)
    whole = expert_layers(is_split=False, dtype=torch.bfloat16, ep=dt.Row())
    yield Case("experts whole, bfloat16", 2, whole, 1e-2)
    for word in ("ring", "gather", "heads"):
        f32, bf16 = (split_tokens(d, dt.Zigzag(1), word) for d in (torch.float32, torch.bfloat16))
        yield Case(f"attention, {word}", 2, f32, 1e-5)
        yield Case(f"attention in bf16, {word}", 2, bf16, 1e-2)
        contiguous = split_tokens(torch.float32, dt.Shard(1), word)
        yield Case(f"attention, {word}, contiguous", 2, contiguous, 1e-5)
    yield Case("rows to ranks and back", 2, routed_rows)
    yield Case("profile and trace", 2, timed)
    yield Case("failed steps", 2, failed)
    yield Case("kernels tp2", 2, training("tp2", steps=1), has_kernels=True)
