"""Parameters initialized on the ranks: the values are bitwise equal on every mesh, no rank holds a
full split parameter, and errors name the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.model import initial_values
from tests.extras import missing
from tests.models import DropoutGPT, batch

MEGATRON: dict[str, Any] = {
    "*.qkv.*": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}
MESHES: dict[str, tuple[dt.Mesh, dict[str, Any]]] = {
    "tp2": (dt.Mesh(tp=2), MEGATRON),
    "tp3": (dt.Mesh(tp=3), {"*.up.*": dict(tp=dt.Row()), "embed.*": dict(tp=dt.Row())}),
    "dp2tp2": (dt.Mesh(dp=2, tp=2), MEGATRON),
}


def small_normal(model: nn.Module) -> None:
    """Initialize as many models do: Linear and Embedding only; norms keep their values."""

    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=0.02, a=-0.03, b=0.03)
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.data.zero_()

    model.apply(init)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def values(mesh: dt.Mesh, pins: dict[str, Any], init: Any) -> dict[str, Tensor]:
    dt.manual_seed(5)
    model = dt.parallelize(on_meta(DropoutGPT), mesh, pins, init=init)
    model.eval()
    dt.compile(lambda m, x: m(x), mesh)(model, batch()[0])
    return dt.gather_state_dict(model)["model"]


INITS: dict[str, Any] = {"reset": "reset", "function": small_normal, "builder": DropoutGPT}


@pytest.mark.default("reset")
@pytest.mark.parametrize("init", INITS)
def test_initial_values_are_bitwise_equal_on_every_mesh(init: str) -> None:
    whole = values(dt.Mesh(), {}, INITS[init])
    assert {t.device.type for t in whole.values()} == {"cpu"}
    for mesh, pins in MESHES.values():
        found = values(mesh, pins, INITS[init])
        assert found.keys() == whole.keys()
        for name in whole:
            assert torch.equal(found[name], whole[name]), name


def test_init_function_runs_once_for_all_ranks() -> None:
    """So random numbers that it draws from other generators are the same on all ranks."""
    drawn: list[Tensor] = []

    def init(model: nn.Module) -> None:
        drawn.append(torch.rand(3, 4, generator=torch.Generator().manual_seed(len(drawn))))
        model.weight.data.copy_(drawn[-1])  # type: ignore[union-attr, operator]

    mesh = dt.Mesh(tp=3)
    bare = on_meta(lambda: nn.Linear(4, 3, bias=False))
    model = dt.parallelize(bare, mesh, {"weight": dict(tp=dt.Row())}, init=init)
    y = dt.compile(lambda m, x: m(x), mesh)(model, torch.eye(4)).full_tensor()
    assert len(drawn) == 1
    assert torch.equal(y, drawn[0].T)


def test_rank_initializes_only_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of a split parameter ever holds all of it."""
    sizes: dict[str, set[int]] = {}
    inner = initial_values.make

    def watched(recipe: Any, pieces: Any, device: torch.device) -> Tensor:
        made = inner(recipe, pieces, device)
        assert recipe.split
        sizes.setdefault(recipe.name, set()).add(made.numel())
        return made

    monkeypatch.setattr(initial_values, "make", watched)
    values(*MESHES["tp2"], "reset")
    assert sizes["blocks.0.up.weight"] == {4 * 16 * 16 // 2}
    assert sizes["embed.weight"] == {32 * 16 // 2}
    assert sizes["norm.weight"] == {16}


def test_initial_values_are_same_inside_and_outside_launch() -> None:
    dt.manual_seed(5)
    model = dt.parallelize(on_meta(DropoutGPT), dt.Mesh(), init="reset")
    before = dt.gather_state_dict(model)["model"]
    after = values(dt.Mesh(), {}, "reset")
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_initial_values_depend_on_seed_and_parameter_name() -> None:
    first = values(dt.Mesh(), {}, "reset")
    dt.manual_seed(6)
    model = dt.parallelize(on_meta(DropoutGPT), dt.Mesh(), init="reset")
    second = dt.gather_state_dict(model)["model"]
    assert not torch.equal(first["embed.weight"], second["embed.weight"])
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])


def test_initial_values_follow_torch_distributions() -> None:
    model = dt.parallelize(on_meta(lambda: nn.Linear(400, 300)), dt.Mesh(), init="reset")
    state = dt.gather_state_dict(model)["model"]
    bound = 1 / 400**0.5
    assert abs(float(state["weight"].std()) - bound / 3**0.5) < 3e-4
    assert float(state["weight"].abs().max()) <= bound

    def truncated(m: nn.Module) -> None:
        nn.init.trunc_normal_(m.weight, std=1.0, a=-1.0, b=2.0)  # type: ignore[arg-type]

    model = dt.parallelize(on_meta(lambda: nn.Linear(400, 300)), dt.Mesh(), init=truncated)
    drawn = dt.gather_state_dict(model)["model"]["weight"]
    expected = torch.empty(300, 400)
    nn.init.trunc_normal_(expected, std=1.0, a=-1.0, b=2.0)
    assert float(drawn.min()) >= -1 and float(drawn.max()) <= 2
    assert abs(float(drawn.mean() - expected.mean())) < 0.02
    assert abs(float(drawn.std() - expected.std())) < 0.02


class Odd(nn.Module):
    """A model with a padding row, a parameter made from a product, a RoPE cache and an orthogonal
    matrix."""

    def __init__(self, square: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(8, 4) * 0.02)
        self.blocks = nn.Parameter(torch.empty(6, 4))
        nn.init.ones_(self.blocks[:2])
        nn.init.normal_(self.blocks[2:])
        self.turned = nn.Parameter(torch.empty(square, square))
        nn.init.orthogonal_(self.turned)
        at = torch.arange(5.0)[:, None] * 10.0 ** -torch.arange(2.0)[None, :]
        self.register_buffer("cos", at.cos(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) @ self.scaled.T @ self.scaled
        return x + (self.blocks @ x.T).sum() + self.turned.sum() + self.cos.sum()  # type: ignore[operator]


def test_init_handles_padding_rows_buffers_and_orthogonal_matrices() -> None:
    def run(mesh: dt.Mesh, pins: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        dt.manual_seed(1)
        model = dt.parallelize(on_meta(Odd), mesh, pins, init=Odd)
        y = dt.compile(lambda m, x: m(x), mesh)(model, torch.tensor([0, 3, 8, 3, 1]))
        return y.full_tensor(), dt.gather_state_dict(model)["model"]

    y, state = run(dt.Mesh(), {})
    assert float(state["embed.weight"][3].abs().max()) == 0
    assert float(state["embed.weight"].abs().min(1).values.sum()) > 0
    assert 0.01 < float(state["scaled"].std()) < 0.03
    assert torch.equal(state["blocks"][:2], torch.ones(2, 4))
    assert float(state["blocks"][2:].std()) > 0.5
    torch.testing.assert_close(state["turned"] @ state["turned"].T, torch.eye(6))
    pins = {"embed.*": dict(tp=dt.Row()), "blocks": dict(tp=dt.Row()), "turned": dict(tp=dt.Row())}
    for mesh in (dt.Mesh(tp=2), dt.Mesh(tp=3)):
        z, found = run(mesh, pins)
        assert all(torch.equal(found[n], state[n]) for n in state)
        torch.testing.assert_close(y, z)


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))


def test_parameter_without_initialization_is_refused_by_name() -> None:
    with pytest.raises(dt.PlanningError, match=r"Nothing initialises all of gain.*\n.*\nfix: give"):
        dt.parallelize(on_meta(Forgets), dt.Mesh(), init="reset")
    model = dt.parallelize(on_meta(Forgets), dt.Mesh(), init=Forgets)
    assert torch.equal(dt.gather_state_dict(model)["model"]["gain"], torch.ones(3))


@pytest.mark.slow
def test_builder_of_transformers_model_initializes_as_transformers_does() -> None:
    hf = pytest.importorskip("transformers", reason=missing("transformers"))
    config = hf.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, initializer_range=0.3,
    )  # fmt: skip
    with torch.device("meta"):
        empty = hf.MixtralForCausalLM(config)
    model = dt.parallelize(empty, dt.Mesh(), init=lambda: hf.MixtralForCausalLM(config))
    made = dt.gather_state_dict(model)["model"]
    for name, value in hf.MixtralForCausalLM(config).state_dict().items():
        assert float(made[name].std()) == pytest.approx(float(value.std()), rel=0.2), name


class Given(nn.Module):
    """A model with values from data, through `out=`, and of several tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.square = nn.Parameter(torch.empty(3, 3))
        nn.init.eye_(self.square)
        self.gains = nn.ParameterList(torch.ones(3, 2) for _ in range(2))
        with torch.no_grad():
            torch._foreach_mul_(list(self.gains), 3.0)
            self.gains[1].mul_(torch.tensor(0.5))
        self.register_buffer("shift", torch.as_tensor([[1, 2]]))


def test_init_accepts_values_from_data_and_tensor_lists() -> None:
    model = dt.parallelize(on_meta(Given), dt.Mesh(tp=2), init=Given)
    found = dt.gather_state_dict(model)["model"]
    expected = Given().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_init_that_reads_uninitialized_memory_is_refused() -> None:
    def zeroing(rows: Any) -> Callable[[nn.Module], None]:
        def init(model: nn.Module) -> None:
            with torch.no_grad():
                model.weight.fill_(2)  # type: ignore[operator]
                model.weight[rows] = 0.0  # type: ignore[index, operator]

        return init

    bare = on_meta(lambda: nn.Linear(2, 3, bias=False))
    # torch makes the index of a list on the meta device, without its numbers
    with pytest.raises(
        dt.PlanningError, match=r"weight reads memory that nothing .*\n.*\n.*rows\]"
    ):
        dt.parallelize(bare, dt.Mesh(), init=zeroing([0, 2]))
    model = dt.parallelize(bare, dt.Mesh(), init=zeroing(torch.tensor([0, 2])))
    found = dt.gather_state_dict(model)["model"]["weight"]
    assert torch.equal(found, torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]))


def test_init_that_needs_whole_large_matrix_is_refused() -> None:
    with pytest.raises(
        dt.PlanningError,
        match=r"initialisation of turned cannot be done shard by shard: \w+ needs the whole tensor",
    ):
        dt.parallelize(on_meta(lambda: Odd(5000)), dt.Mesh(), init=lambda: Odd(5000))


def test_init_that_branches_on_tensor_value_is_refused() -> None:
    def init(model: nn.Module) -> None:
        if float(model.weight.sum()) > 0:  # type: ignore[arg-type, operator]
            nn.init.zeros_(model.weight)  # type: ignore[arg-type]

    with pytest.raises(dt.PlanningError, match="depends on a tensor's value"):
        dt.parallelize(on_meta(lambda: nn.Linear(3, 3)), dt.Mesh(), init=init)


def test_meta_model_without_init_is_refused_when_used() -> None:
    model = dt.parallelize(on_meta(lambda: nn.Linear(3, 3)), dt.Mesh())
    with pytest.raises(dt.PlanningError, match=r"weight is on the meta device and has no value"):
        dt.compile(lambda m, x: m(x), dt.Mesh())(model, torch.ones(2, 3))


def test_loaded_values_replace_initial_values() -> None:
    mesh = dt.Mesh(tp=2)
    torch.manual_seed(0)
    real = DropoutGPT(p=0.0)
    model = dt.parallelize(on_meta(lambda: DropoutGPT(p=0.0)), mesh, MEGATRON, init="reset")
    dt.load_state_dict(model, None, {"model": real.state_dict()})
    got = dt.compile(lambda m, x: m(x), mesh)(model, batch()[0]).full_tensor()
    torch.testing.assert_close(got, real(batch()[0]).detach())
