"""State that a program changes is written in place when no one can observe a partial write, and is
copied otherwise."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Program
from tests.state_programs import WRITES, Held, arguments, declared, drawn, program

S, H, T, D = 4, 4, 8, 2
MESHES = {
    "one": (dt.Mesh(), {}),
    "heads": (dt.Mesh(tp=2), dict(tp=dt.Shard(1))),
    "slots": (dt.Mesh(dp=2), dict(dp=dt.Shard(0))),
    "both": (dt.Mesh(dp=2, tp=2), dict(dp=dt.Shard(0), tp=dt.Shard(1))),
    "positions": (dt.Mesh(tp=2), dict(tp=dt.Shard(2))),
}


class Cached(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = forward
        self.proj = nn.Linear(D, D, bias=False).double()
        self.register_buffer("k", torch.zeros(S, H, T, D).double())

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(self, *args)


def decode(m: Any, x: Tensor, pos: Tensor) -> Tensor:
    k = m.proj(x)
    m.k.scatter_(2, pos[:, None, None, None].expand(S, H, 1, D), k)
    return (m.k * k).sum((2, 3))


def prefill(m: Any, x: Tensor, row: Tensor) -> Tensor:
    k = m.proj(x)
    m.k[:, :, : x.shape[2]].index_copy_(0, row, k)
    return k.sum((2, 3))


def plain(m: Any, x: Tensor, pos: Tensor) -> Tensor:
    m.k.index_copy_(2, pos[:1], m.proj(x))
    return m.k.sum((2, 3))


def where(m: Any, x: Tensor, pos: Tensor) -> Tensor:
    hit = (torch.arange(T)[None] == pos[:, None])[:, None, :, None]
    m.k.copy_(torch.where(hit, m.proj(x), m.k))
    return m.k.sum((2, 3))


TOKEN = torch.randn(S, H, 1, D).double()
FORMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "decode": (decode, (TOKEN, torch.tensor([3, 0, 7, 3])), "in place"),
    "prefill": (
        prefill,
        (torch.randn(1, H, 3, D).double(), torch.tensor([2])),
        "at the commit",
    ),
    "index_copy": (plain, (TOKEN, torch.tensor([5, 1, 2, 3])), "in place"),
    "where": (where, (TOKEN, torch.tensor([3, 0, 7, 3])), "in place"),
}


def source(made: Program) -> str:
    return "\n".join(fn.source for _, fn in made.functions)


def latest(mesh: dt.Mesh) -> Program:
    return list(programs_of(session_for(mesh)))[-1].program


@pytest.mark.default("slots-index_copy")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("split", MESHES)
def test_kv_cache_is_written_in_place(name: str, split: str) -> None:
    (fn, args, how), (mesh, placed) = FORMS[name], MESHES[split]
    if (name, split) == ("prefill", "positions"):
        pytest.skip("a slice of a split dim is no part of what each rank holds")
    net = Cached(fn)
    reference = copy.deepcopy(net)
    step = dt.compile(lambda m, *a: m(*a), mesh)
    with dt.launch(mesh), declared() as looked:
        model = dt.parallelize(net, mesh, {"k": placed})
        for shift in range(3):
            shifted = (args[0] + shift, (args[1] + shift) % S)
            with torch.no_grad():
                want = reference(*shifted)
            assert torch.allclose(step(model, *shifted).full_tensor(), want, atol=1e-12)
        made = latest(mesh)
        assert torch.allclose(net.k, reference.k, atol=1e-12)
    (write,) = step.plan(model, *args).state_writes
    assert (write.how, write.nbytes, looked[0] > 0) == (how, 0, True)
    assert "clone" not in source(made) and "k.copy_" not in source(made)
    for own in made.ranks:
        assert bool(own.replayable) == (how == "in place")


@pytest.mark.default("12")
@pytest.mark.parametrize("seed", range(24))
def test_random_buffer_programs_match_torch(seed: int) -> None:
    draw = random.Random(1000 + seed)
    statements = drawn(draw)
    f = program(statements)
    mesh, placed = MESHES[draw.choice(("one", "heads", "slots", "both"))]
    net = Held()
    reference = copy.deepcopy(net)
    step = dt.compile(f, mesh)
    with dt.launch(mesh), declared():
        model = dt.parallelize(net, mesh, {"[ab]": placed}, misaligned="gather")
        for _ in range(3):
            given = arguments(draw)
            want = [t.clone() for t in f(reference, *given)]
            for a, b in zip(step(model, *given), want, strict=True):
                assert torch.equal(a.full_tensor(), b), statements
        for name, buffer in net.named_buffers():
            assert torch.equal(buffer, reference.get_buffer(name)), statements


@pytest.mark.default("False-m.{a}.index_copy_(2, i, {x}[:, :, :2])")
@pytest.mark.parametrize("text", [w for w in WRITES if "m.n" not in w and "{b}" not in w])
@pytest.mark.parametrize("reads", [False, True])
def test_each_form_of_buffer_write_is_in_place_copied_or_at_commit(text: str, reads: bool) -> None:
    statements = [text.format(a="a", x="x")] + ["out.append(m.a * 2)"] * reads
    step = dt.compile(program(statements), dt.Mesh())
    model = dt.parallelize(Held(), dt.Mesh(), {})
    (write,) = step.plan(model, *arguments(random.Random(0))).state_writes
    again = any(op in text for op in ("add_", "mul_", "m.{a}[:, :, 3:]"))
    if "m.{a}[:, :, 3:]" in text:
        assert write.how == "copied"
    else:
        assert write.how == (("copied" if again else "in place") if reads else "at the commit")


def test_plan_states_copied_buffers_and_bytes() -> None:
    def f(m: Any, x: Tensor) -> Tensor:
        m.a.add_(x)
        return m.a.sum()

    model = dt.parallelize(Held(), dt.Mesh(), {})
    text = str(dt.compile(f, dt.Mesh()).plan(model, torch.zeros(4, 2, 6)))
    assert "a: computed, and copied at the commit" in text and "192 B copied" in text


def test_in_place_write_adds_no_memory_or_cost_to_plan() -> None:
    def f(m: Any, x: Tensor) -> Tensor:
        m.k[:, :, :1] = x
        return m.k.sum()

    def old(m: Any, x: Tensor) -> Tensor:
        m.k[:, :, :1] += x
        return m.k.sum()

    big = nn.Module()
    big.register_buffer("k", torch.zeros(4, 4, 512, 64))
    model = dt.parallelize(big, dt.Mesh(), {})
    x = torch.zeros(4, 4, 1, 64)
    here, copied = (dt.compile(fn, dt.Mesh()).plan(model, x) for fn in (f, old))
    assert here.memory[0].activations < big.k.nbytes < copied.memory[0].activations
    assert here.cost.seconds < copied.cost.seconds


# -- failures --------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A model with one cache that is read after it was written, and two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, D).double()
        self.register_buffer("k", torch.zeros(S, T, D).double())
        self.register_buffer("late", torch.zeros(S, T, D).double())
        self.register_buffer("steps", torch.zeros(()).double())

    def forward(self, tokens: Tensor, pos: Tensor, number: Tensor) -> Tensor:
        x = self.table(pos)  # in range wherever the cache is
        self.k[:, :1] = x[:, None] * number
        self.k.scatter_(1, pos[:, None, None].expand(S, 1, D), x[:, None] * number)
        self.late.index_copy_(1, pos[:1], x[:, None] * number)
        self.steps.add_(1)
        return (self.k.sum((1, 2)) + self.table(tokens).sum(1)).log1p()


@pytest.mark.default("heads-True")
@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("split", ["one", "heads", "slots"])
def test_failed_call_between_good_ones_leaves_buffers_unchanged(detect: bool, split: str) -> None:
    mesh = MESHES[split][0]
    placed: dict[str, Any] = {
        "one": {},
        "heads": {"k": dict(tp=dt.Shard(1)), "table.weight": dict(tp=dt.Row())},
        "slots": {"k": dict(dp=dt.Shard(0)), "late": dict(dp=dt.Shard(0))},
    }[split]
    net = Failing()
    nn.init.uniform_(net.table.weight, 0.1, 1.0)
    reference = copy.deepcopy(net)
    step = dt.compile(lambda m, *a: m(*a), mesh, detect_nan=detect)
    one, tokens = torch.ones(()).double(), torch.tensor([1, 2, 3, 4])
    places = torch.tensor([3, 0, 7, 3])
    with dt.launch(mesh):
        model = dt.parallelize(net, mesh, placed, misaligned="gather")

        def both(tokens: Tensor, pos: Tensor) -> None:
            with torch.no_grad():
                want = reference(tokens, pos, one)
            assert torch.allclose(step(model, tokens, pos, one).full_tensor(), want, atol=1e-12)

        both(tokens, places)
        bad = (tokens + 5, places + 0, one) if not detect else (tokens, places, one * float("nan"))
        for _ in range(2):
            with pytest.raises(dt.daft.TaskError):
                step(model, *bad).full_tensor()
            late, steps = copy.deepcopy(net.late), float(net.steps)
            assert torch.allclose(late, reference.late, atol=1e-12) and steps == reference.steps
            both(tokens, places)
            both(tokens + 1, (places + 1) % 8)
            bad = (bad[0], (places + 1) % 8, bad[2])
        for name, buffer in net.named_buffers():
            assert torch.allclose(buffer, reference.get_buffer(name), atol=1e-12), name


def test_out_of_range_cache_index_fails_before_any_write() -> None:
    fn, (x, _), _ = FORMS["prefill"]
    for mesh, placed in (MESHES["one"], MESHES["slots"]):
        net = Cached(fn)
        step = dt.compile(lambda m, *a: m(*a), mesh)
        with dt.launch(mesh):
            model = dt.parallelize(net, mesh, {"k": placed})
            with pytest.raises(dt.daft.TaskError, match="out of range"):
                step(model, x, torch.tensor([S])).full_tensor()
            assert not net.k.any()
            step(model, x, torch.tensor([S - 1])).full_tensor()
            assert net.k[S - 1].any() and not net.k[: S - 1].any()


def test_write_at_position_received_by_message_is_copied() -> None:
    mesh = dt.Mesh(tp=2)

    def f(m: Any, x: Tensor, weight: Tensor) -> Tensor:
        pos = (x @ weight).abs().long().sum() % T
        m.k.index_copy_(2, pos[None], x[:, :, None].expand(S, H, 1, D))
        return m.k.sum()

    net = nn.Module()
    net.register_buffer("k", torch.zeros(S, H, T, D))
    model = dt.parallelize(net, mesh, {})
    with dt.launch(mesh):
        x = dt.distribute(torch.ones(S, H, D), mesh, tp=dt.Shard(2))
        weight = dt.distribute(torch.ones(D, 1), mesh, tp=dt.Shard(0))
        plan = dt.compile(f, mesh).plan(model, x, weight)
    (write,) = plan.state_writes
    assert plan.collectives and (write.how, "message" in write.why) == ("copied", True)


# -- stages, training ------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D).double()
        self.register_buffer("k", torch.zeros(S, T, D).double())

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        self.k.scatter_(1, pos[:, None, None].expand(S, 1, D), self.proj(x)[:, None])
        return (self.k * x[:, None]).sum(1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, pos)
        return x


def decoded(mesh: dt.Mesh, backend: str = "inprocess", **more: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = Two()
    reference = copy.deepcopy(net)
    stages = {"pp": [["layers.0.*"], ["layers.1.*"]]} if "pp" in mesh.axes else None
    placed = dict(tp=dt.Shard(0)) if "tp" in mesh.axes else {}
    step = dt.compile(lambda m, x, pos: m(x, pos), mesh)
    found: list[Tensor] = []
    with dt.launch(mesh, backend=backend, **more):
        model = dt.parallelize(net, mesh, {"layers.*.k": placed}, stages=stages)
        for number in range(4):
            x, pos = torch.randn(S, D).double(), torch.tensor([number, 0, 7 - number, 3])
            with torch.no_grad():
                want = reference(x, pos)
            got = step(model, x, pos).full_tensor()
            assert torch.allclose(got, want, atol=1e-12)
            found.append(got)
        plan = step.plan(model, x, pos)
        assert [write.how for write in plan.state_writes] == ["in place"] * 2
    assert torch.allclose(net.layers[1].k, reference.layers[1].k, atol=1e-12)
    return [*found, net.layers[0].k.clone()]


@pytest.mark.default("mesh(pp=2, tp=2)")
@pytest.mark.parametrize("mesh", [dt.Mesh(pp=2), dt.Mesh(pp=2, tp=2)], ids=str)
def test_kv_caches_on_pipeline_stages_match_reference(mesh: dt.Mesh) -> None:
    decoded(mesh)


@pytest.mark.slow
@pytest.mark.ray
def test_decoding_on_ray_is_bitwise_equal_to_in_process() -> None:
    mesh = dt.Mesh(pp=2, tp=2)
    for a, b in zip(decoded(mesh), decoded(mesh, "ray"), strict=True):
        assert torch.equal(a, b)


def test_gradients_call_leaves_buffers_unchanged_and_step_updates_them() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    reference = copy.deepcopy(net)
    mesh = dt.Mesh(dp=2)
    model = dt.parallelize(net, mesh, {})
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    step = dt.train_step(
        model, lambda m, x: m(x).square().mean(), opt, inputs={"x": dict(dp=dt.Row())}
    )
    with dt.launch(mesh):
        for _ in range(3):
            step(x)
            plain.zero_grad()
            reference(x).square().mean().backward()
            plain.step()
        made = source(latest(mesh))
    assert "running_mean_new" not in made and "_new = " not in made
    for a, b in zip(net.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.default("positions", "slots")
@pytest.mark.parametrize("split", MESHES)
def test_argument_changed_in_place_matches_torch(split: str) -> None:
    mesh, placed = MESHES[split]
    start, x = torch.randn(S, H, T, D), torch.randn(S, H, 1, D)
    put = dt.compile(lambda cache, i, x: cache.index_copy_(2, i, x), mesh)
    use = dt.compile(lambda cache, i, x: cache.index_copy_(2, i, x).sum((1, 2, 3)), mesh)
    with dt.launch(mesh):
        cache = dt.distribute(start, mesh, **placed)
        view, clone, name = cache[:, :, 3:4], cache.clone(), cache.name
        assert torch.equal(view.full_tensor(), start[:, :, 3:4])
        want = start.clone()
        for at in (3, 7, 3):
            i, x = torch.tensor([at]), x + 1
            assert put(cache, i, x) is cache
            want.index_copy_(2, i, x)
            assert torch.equal(cache.full_tensor(), want)
            assert torch.equal(view.full_tensor(), want[:, :, 3:4])
            name, before = cache.name, name
        assert name == before  # the first call made it its own, for the clone has the same shards
        got = use(cache, torch.tensor([0]), x)
        want[:, :, 0] = x[:, :, 0]
        assert torch.allclose(got.full_tensor(), want.sum((1, 2, 3)), atol=1e-4)
        assert torch.equal((cache + 0).full_tensor(), want)
        assert torch.equal(clone.full_tensor(), start)
    assert [w.how for w in put.plan(cache, i, x).state_writes] == ["at the commit"]
    assert [w.how for w in use.plan(cache, i, x).state_writes] == ["in place"]


def test_backward_raises_if_compiled_call_changed_saved_argument() -> None:
    mesh = dt.Mesh()
    with dt.launch(mesh):
        x = dt.distribute(torch.ones(3), mesh)
        w = dt.distribute(torch.ones(3), mesh).requires_grad_()
        y = (x * w).sum()
        dt.compile(lambda x: x.mul_(2), mesh)(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda cache: (torch.zeros(4, 2), torch.zeros(4, 2)),
            "only parameters and buffers may be, and DTensors",
        ),
        (lambda cache: (cache[1:], cache[1:]), "is a view of another DTensor"),
        (lambda cache: (cache, cache), "shares its memory with another argument"),
        (lambda cache: (cache, cache[:]), "shares its memory with another argument"),
    ],
)
def test_arguments_that_cannot_be_changed_in_place_are_refused(given: Any, message: str) -> None:
    mesh = dt.Mesh()
    with dt.launch(mesh):
        cache = dt.distribute(torch.zeros(4, 2), mesh)
        with pytest.raises(dt.PlanningError, match=message):
            dt.compile(lambda a, b: a.add_(b + 1), mesh)(*given(cache))


def test_train_step_that_changes_argument_is_refused() -> None:
    mesh = dt.Mesh()
    net = nn.Linear(2, 2)
    model = dt.parallelize(net, mesh, {})

    def loss(m: Any, x: Tensor) -> Tensor:
        x.add_(1)
        return m(x).sum()

    step = dt.train_step(model, loss, torch.optim.SGD(net.parameters(), lr=0.1))
    with dt.launch(mesh), pytest.raises(dt.PlanningError, match="changes an argument in place"):
        step(dt.distribute(torch.zeros(4, 2), mesh))


def test_argument_named_like_buffer_is_not_confused_with_it() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(4))

        def forward(self, k: Tensor) -> Tensor:
            self.k.copy_(k * 2)
            return k.sum()

    net = Named()
    model = dt.parallelize(net, dt.Mesh(), {})
    dt.compile(lambda m, k: m(k), dt.Mesh())(model, torch.arange(4.0))
    assert net.k.tolist() == [0, 2, 4, 6]
