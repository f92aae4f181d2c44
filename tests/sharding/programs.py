"""Random small programs, and their execution under a plan, rank by rank in this process.

    program = random_program(random.Random(7))
    print(program)                       # p0 = x0 @ w0; p1 = softmax(p0, 1); ...
    found = plan_program(program, Mesh(tp=2), pins, free=True)
    outcome = execute(found, program)    # {"result 0": tensor, "gradient w0": tensor}

A program is a list of ops on 2-D and 3-D values; inputs named x are arguments, those named w are
parameters. `Program.reference` runs it on one device. All numbers are float64.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dtensor.daft import launch_cluster
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.runtime.lower.program import argument_spec, lower, on_mesh
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement, Shard
from dtensor.sharding.spec.shards import assemble_at, shard_of

Instruction = tuple[str, str, tuple[object, ...]]  # result, op, operands and numbers


@dataclass(frozen=True)
class Program:
    inputs: Mapping[str, tuple[int, ...]]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    loss: bool = False  # the result is one scalar, whose gradients are taken

    def run(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        env: dict[str, Tensor] = dict(values)
        for result, op, given in self.instructions:
            first, *rest = (env[g] if isinstance(g, str) else g for g in given)
            env[result] = getattr(first, op)(*rest)
        found = [env[name] for name in self.outputs]
        if not self.loss:
            return found
        first, *rest = ((x * x).sum() for x in found)
        return [sum(rest, first)]

    def tensors(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(shape, generator=g, dtype=torch.float64)
            for name, shape in self.inputs.items()
        }

    def reference(self) -> dict[str, Tensor]:
        values = self.tensors()
        weights = {n: t.requires_grad_(self.loss) for n, t in values.items() if n[0] == "w"}
        results = self.run(values)
        found = {f"result {i}": t.detach() for i, t in enumerate(results)}
        if self.loss and weights and results[0].requires_grad:
            grads = torch.autograd.grad(results[0], list(weights.values()), allow_unused=True)
            for name, grad in zip(weights, grads, strict=True):
                if grad is not None:
                    found[f"gradient {name}"] = grad
        return found

    def __str__(self) -> str:
        heads = [f"{name}: {list(shape)}" for name, shape in self.inputs.items()]
        lines = [f"{r} = {op}({', '.join(map(str, given))})" for r, op, given in self.instructions]
        return "\n".join([*heads, *lines, f"return {', '.join(self.outputs)}"])


# -- making one ---------------------------------------------------------------------------------


@dataclass
class _Maker:
    rng: random.Random
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    def size(self) -> int:
        return self.rng.choice((2, 3, 4, 4, 5, 6))

    def input(self, shape: tuple[int, ...], kind: str | None = None) -> str:
        name = f"{kind or self.rng.choice('xw')}{len(self.inputs)}"
        self.inputs[name] = self.shapes[name] = shape
        return name

    def emit(self, op: str, given: tuple[object, ...], shape: tuple[int, ...]) -> None:
        name = f"p{len(self.instructions)}"
        self.instructions.append((name, op, given))
        self.shapes[name] = shape

    def step(self) -> None:
        a = self.rng.choice(list(self.shapes)[-4:])
        shape = self.shapes[a]
        op = self.rng.choice(
            ("mm", "mm", "add", "mul", "relu", "sum", "softmax", "reshape", "permute")
        )
        match op:
            case "mm" if len(shape) == 2:
                fit = [n for n, s in self.shapes.items() if len(s) == 2 and s[0] == shape[1]]
                b = self.rng.choice([*fit, ""]) or self.input((shape[1], self.size()))
                self.emit(op, (a, b), (shape[0], self.shapes[b][1]))
            case "add" | "mul":
                fit = [n for n, s in self.shapes.items() if s == shape]
                b = self.rng.choice([*fit, "", ""]) or self.broadcast(shape)
                self.emit(op, (a, b), shape)
            case "relu":
                self.emit(op, (a,), shape)
            case "softmax":
                self.emit(op, (a, self.rng.randrange(len(shape))), shape)
            case "sum" if len(shape) > 1:
                dim, keep = self.rng.randrange(len(shape)), self.rng.random() < 0.5
                rest = tuple(1 if i == dim else s for i, s in enumerate(shape) if keep or i != dim)
                self.emit(op, (a, dim, keep), rest)
            case "reshape":
                self.reshape(a, shape)
            case "permute" if len(shape) > 1:
                order = self.rng.sample(range(len(shape)), len(shape))
                self.emit(op, (a, *order), tuple(shape[d] for d in order))
            case _:
                pass

    def broadcast(self, shape: tuple[int, ...]) -> str:
        """Return an input that broadcasts to ``shape``: some dims of size 1, leading dims left
        out."""
        wide = [self.rng.random() < 0.6 for _ in shape]
        sizes = tuple(s if keep else 1 for s, keep in zip(shape, wide, strict=True))
        start = wide.index(True) if True in wide else len(shape) - 1
        return self.input(sizes[self.rng.choice((0, start)) :], "w")

    def reshape(self, a: str, shape: tuple[int, ...]) -> None:
        dims = range(len(shape))
        if len(shape) > 1 and self.rng.random() < 0.6:
            i = self.rng.choice(dims[:-1])
            new = (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
        else:
            splits = [(i, f) for i in dims for f in (2, 3) if shape[i] % f == 0 and shape[i] > f]
            if not splits or len(shape) > 3:
                return
            i, f = self.rng.choice(splits)
            pair = self.rng.choice(((f, shape[i] // f), (shape[i] // f, f)))
            new = (*shape[:i], *pair, *shape[i + 1 :])
        self.emit("reshape", (a, *new), new)


def random_program(
    rng: random.Random,
    *,
    loss: bool = False,
    num_ops: tuple[int, int] = (3, 7),
) -> Program:
    maker = _Maker(rng)
    shape = (maker.size(), maker.size(), *([maker.size()] if rng.random() < 0.4 else []))
    maker.input(shape, "x")
    wanted = rng.randint(*num_ops)
    while len(maker.instructions) < wanted:
        maker.step()
    outputs = [f"p{wanted - 1}"]
    if rng.random() < 0.4 and wanted > 1:
        outputs.append(f"p{rng.randrange(wanted - 1)}")
    if loss:  # gradients need at least one parameter
        shape = maker.shapes[outputs[0]]
        maker.emit("mul", (outputs[0], maker.input(shape[1:], "w")), shape)
        outputs[0] = maker.instructions[-1][0]
    return Program(dict(maker.inputs), tuple(maker.instructions), tuple(outputs), loss)


def random_topology(rng: random.Random) -> Topology:
    """Return a topology between expensive communication (all replicated) and free communication
    (all split)."""
    return Topology(
        latency=rng.choice((0.0, 1e-9, 5e-6)),
        bandwidth=rng.choice((1e6, 1e9, 1e12)),
        flops=rng.choice((1e6, 1e9, 1e12)),
        memory_bandwidth=rng.choice((1e6, 1e9, 1e12)),
    )


# -- planning and running it -------------------------------------------------------------------


class _Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.names = [n for n in program.inputs if n[0] == "w"]
        for name, tensor in program.tensors().items():
            if name in self.names:
                self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        given = [n for n in self.program.inputs if n[0] == "x"]
        values = dict(zip(given, args, strict=True))
        values.update({n: self.get_parameter(n) for n in self.names})
        found = self.program.run(values)
        return found[0] if len(found) == 1 else tuple(found)


def fused(flow: Dataflow) -> Dataflow:
    """Return the program with its composite ops fused, on which exact searches are compared."""
    return replace(flow, ops=tuple(replace(op, expand=None) for op in flow.ops))


def flow_of(program: Program) -> Dataflow:
    tensors = program.tensors()
    args = tuple(t for n, t in tensors.items() if n[0] == "x")
    graph = capture(_Module(program), args, grads="loss" if program.loss else "none")
    flow = dataflow(graph)
    flow.verify()
    return flow


def program_name(program: Program, flow: Dataflow, value: str) -> str:
    """Return the program's name of a plan input: parameters by label, arguments in order."""
    item = next(i for i in flow.inputs if i.name == value)
    if item.kind == "parameter":
        return item.label
    position = int(item.label.rpartition(".")[2])
    return [n for n in program.inputs if n[0] == "x"][position]


def random_pins(
    rng: random.Random, flow: Dataflow, mesh: Mesh, often: float = 0.5
) -> dict[str, dict[str, Placement]]:
    """Return pins that split some inputs, some of them in blocks or units."""
    pins: dict[str, dict[str, Placement]] = {}
    for item in flow.inputs:
        if item.kind not in ("parameter", "argument"):
            continue
        shape = item.meta.shape
        for axis in mesh.axes:
            dims = [d for d, s in enumerate(shape) if s > 1]
            if not dims or rng.random() > often:
                continue
            dim = rng.choice(dims)
            halves = [(2, 1), (1, 2)] if shape[dim] % 2 == 0 else []
            blocks, unit = rng.choice([(1, 1), *halves])
            pins.setdefault(item.name, {})[axis] = Shard(dim, blocks, unit)
    return pins


def plan_program(
    flow: Dataflow,
    mesh: Mesh,
    pins: Mapping[str, Mapping[str, Placement]],
    *,
    free: bool = True,
    topology: Topology | None = None,
    results: Mapping[int, Mapping[str, Placement]] | None = None,
) -> Plan:
    found = plan(
        Request(
            name="program",
            flow=flow,
            mesh=mesh,
            pins=pins,
            search="free" if free else "predictable",
            topology=topology or Topology(),
            results=results or {},
        )
    )
    found.verify()
    return found


def execute(found: Plan, program: Program) -> dict[str, Tensor]:
    """Lower the plan, run it on in-process ranks, and assemble the results."""
    lowered = lower(found, None, roles=Roles(gradients=True))
    tensors = program.tensors()
    mesh = found.mesh
    constants = {i.name: i.constant for i in found.flow.inputs if i.constant is not None}

    def shards(names: tuple[str, ...], rank: int) -> dict[str, object]:
        cut: dict[str, object] = {}
        for name in names:
            whole = constants.get(name)
            if whole is None:
                whole = tensors[program_name(program, found.flow, name)]
            cut[name] = shard_of(whole, argument_spec(found, name), mesh.coordinates(rank))
        return cut

    with launch_cluster(mesh.size) as cluster:
        state = [rank.state for rank in lowered.ranks]
        cluster.put([shards(names, rank) for rank, names in enumerate(state)])
        handle = cluster.load(lowered)
        fed = [shards(own.inputs, rank) for rank, own in enumerate(lowered.ranks)]
        results = cluster.run(handle, fed).get()
    outcome: dict[str, Tensor] = {}
    for output in found.outputs:
        name = f"{output.kind} {output.of}"
        pieces = {rank: result[name] for rank, result in enumerate(results)}
        outcome[name] = assemble_at(pieces, on_mesh(found, output.spec))
    return outcome
