"""Tests that a captured graph, interpreted on real values, gives eager results and gradients."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor.errors import PlanningError
from dtensor.frontend.annotate import annotate
from dtensor.frontend.capture import canonical
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Arg, Const, Grad, ModuleBuffer, Mutation, Param, Tangent
from tests.frontend.eager import check, close, run_graph
from tests.models import GPT, MLP, Llama, SwiGLU, batch, loss_fn

MODELS: dict[str, Any] = {
    "gpt_tied": lambda: GPT(layers=2),
    "gpt_untied": lambda: GPT(layers=1, tied=False, bias=False),
    "llama_hand_gqa": lambda: Llama(layers=2),
    "llama_torch_repeat": lambda: Llama(layers=1, norm="torch", spread="repeat"),
    "llama_full_heads": lambda: Llama(layers=1, groups=4),
}


@pytest.mark.default("llama_full_heads")
@pytest.mark.parametrize("name", MODELS)
def test_captured_language_models_give_eager_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    tokens, targets = batch(ignored=True)
    check(loss_fn, (MODELS[name](), tokens, targets))


@pytest.mark.parametrize("make", [MLP, SwiGLU])
def test_capture_with_tangents_gives_eager_gradients_of_inputs(make: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, requires_grad=True)
    graph = check(make(), (x,), grads="tangents")
    assert Tangent(0) in graph.inputs
    assert Grad(Arg(0, "x")) in graph.outputs


def test_capture_without_gradients_has_only_forward_ops() -> None:
    tokens, _ = batch()
    graph = check(GPT(layers=1), (tokens,), grads="none")
    assert not any(isinstance(o, Grad) for o in graph.outputs)
    assert all(n.meta["phase"] == "forward" for n in graph.nodes)


def test_tied_weights_are_captured_as_one_parameter_with_one_gradient() -> None:
    tokens, targets = batch()
    graph = capture(loss_fn, (GPT(layers=1), tokens, targets), grads="loss")
    assert Param("embed.weight") in graph.inputs
    assert Param("head.weight") not in graph.inputs
    assert graph.outputs.count(Grad(Param("embed.weight"))) == 1
    # test_captured_language_models_give_eager_loss_and_gradients compares its value.


def test_captured_autocast_and_no_grad_regions_match_eager() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = model(x)
            q = h.view(2, 3, 4, 4).transpose(1, 2)
            h = h + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 3, 16)
            loss = F.cross_entropy(h.view(-1, 16), y)
        with torch.no_grad():
            scale = h.float().abs().mean()
        return loss / scale

    torch.manual_seed(0)
    y = torch.randint(0, 16, (6,))
    graph = check(loss, (MLP(), torch.randn(2, 3, 16), y), tolerance=2e-2)
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in graph.nodes if "mm" in n.name)


def test_buffers_changed_by_forward_are_graph_outputs() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.norm(x) * self.calls

    model = Counting()
    graph = check(model, (torch.randn(5, 4),), grads="tangents")
    mutated = {o.name for o in graph.outputs if isinstance(o, Mutation)}
    assert mutated == {
        "calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    assert ModuleBuffer("calls") in graph.inputs
    assert float(model.calls) == 0.0


def test_closed_over_tensor_stays_resizable_after_capture() -> None:
    held = torch.ones(2)
    capture(lambda x: x * held.sum(), (torch.randn(2),), grads="none")
    assert held.untyped_storage().resizable()


def test_constant_tensors_become_const_inputs_with_their_values() -> None:
    closed = torch.tensor([1.0, 2.0, 3.0])

    def fn(x: Tensor) -> Tensor:
        return x * torch.tensor([3.0, 2.0, 1.0]) + closed + closed

    graph = check(fn, (torch.randn(2, 3),), grads="none")
    constants = [i for i in graph.inputs if isinstance(i, Const)]
    assert [c.value.tolist() for c in constants] == [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Buffer(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


def test_tensors_of_closed_over_module_are_captured_and_match_eager() -> None:
    """`nn.Buffer` and `register_buffer` are captured alike."""
    torch.manual_seed(0)
    teacher, free = Scaled().eval().requires_grad_(False), nn.Buffer(torch.rand(4))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return ((model(x) - teacher(x)) * free).square().mean()

    graph = check(loss, (nn.Linear(4, 4), torch.randn(3, 4)))
    held = [teacher.norm.weight, teacher.norm.bias, teacher.norm.running_mean]
    held += [teacher.norm.running_var, teacher.scale, free]
    caught = {id(c.tensor) for c in graph.reads.caught} if graph.reads else set()
    assert {id(x) for x in held} <= caught


class Late(types.ModuleType):
    """A lazy module, imported when an attribute is read, as in lazy packages."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{self.__name__} is not installed")


def made_on_the_way() -> Any:
    return eval("lambda h: h * 2")  # a function that is not reachable from the roots


def test_capture_tolerates_lazy_and_blocked_entries_in_sys_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"late": Late("late"), "no_module": object(), "blocked": None}.items():
        monkeypatch.setitem(sys.modules, name, value)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return made_on_the_way()(model(x)).sum()

    check(loss, (nn.Linear(4, 4), torch.randn(3, 4)))


@pytest.mark.slow
def test_capture_tolerates_lazy_module_when_torch_compiler_is_not_loaded() -> None:
    program = (
        "import sys, types, torch\n"
        "class Late(types.ModuleType):\n"
        "    def __getattr__(self, name): raise ImportError(name)\n"
        "from dtensor.frontend.capture.capture import capture\n"
        "sys.modules['late'] = Late('late')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "capture(lambda m, x: m(x).sum(), (model, torch.ones(2, 4)), grads='loss')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)


def test_unflatten_restores_nested_structure_of_results() -> None:
    def fn(x: Tensor) -> dict[str, Any]:
        return {"a": [x, "text", x * 2], "b": (x.view(-1), None, 3)}

    x = torch.randn(2, 3)
    graph = capture(fn, (x,), grads="none")
    out = run_graph(graph, None, (x,), {})
    rebuilt = graph.unflatten(list(out.values()))
    assert rebuilt["a"][1] == "text" and rebuilt["b"][1:] == (None, 3)
    close(rebuilt["a"][0], x)
    close(rebuilt["a"][2], x * 2)
    close(rebuilt["b"][0], x.view(-1))
    with pytest.raises(ValueError, match="returns 3 tensors, but 1 were given"):
        graph.unflatten([x])


def test_graph_arguments_are_named_and_indexed_by_pytree_leaf() -> None:
    def fn(
        model: nn.Module, batch: dict[str, Tensor], *more: Tensor, scale: float, z: Tensor
    ) -> Any:
        return model(batch["x"]) * scale + batch["y"] + more[0] + z

    x = torch.randn(2, 16)
    args = (MLP(), {"x": x, "y": x}, x)
    graph = capture(fn, args, {"scale": 2.0, "z": x}, grads="none")
    assert [i for i in graph.inputs if isinstance(i, Arg)] == [
        Arg(1, "batch.x"), Arg(2, "batch.y"), Arg(3, "more.0"), Arg(5, "z"),
    ]  # fmt: skip


def test_parameters_of_several_modules_are_prefixed_with_argument_name() -> None:
    def loss(actor: nn.Module, critic: nn.Module, x: Tensor) -> Tensor:
        return (actor(x) - critic(x)).pow(2).mean()

    graph = capture(loss, (MLP(), SwiGLU(), torch.randn(2, 16)), grads="loss")
    names = {i.name for i in graph.inputs if isinstance(i, Param)}
    assert "actor.up.bias" in names and "critic.gate.weight" in names
    assert {n.meta["module"] for n in graph.nodes} >= {"actor.up", "critic.gate"}


def test_captured_bound_method_finds_parameters_of_its_module() -> None:
    class Model(MLP):
        def generate(self, x: Tensor) -> Tensor:
            return self(x).argmax(-1)

    model = Model()
    graph = capture(model.generate, (torch.randn(2, 16),), grads="none")
    assert Param("up.weight") in graph.inputs


def test_unused_and_frozen_parameters_have_no_gradient_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x)).sum()

    graph = check(Model(), (torch.randn(2, 4),))
    owners = {o.of.name.split(".")[0] for o in graph.outputs if isinstance(o, Grad)}
    assert owners == {"used"}
    assert Param("frozen.weight") in graph.inputs and Param("unused.weight") not in graph.inputs


def test_inputs_returned_as_results_have_eager_gradients() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return x.view(-1), y, y

    check(fn, (torch.randn(2, 3, requires_grad=True),), grads="tangents")


def test_capture_of_meta_model_allocates_nothing_and_leaves_model_unchanged() -> None:
    with torch.device("meta"):
        model = MLP(width=8192, hidden=1 << 17)  # 8 GiB if it were real
    before = dict(model.named_parameters())
    gc.collect()
    graph = capture(model, (torch.empty(16, 8192, device="meta"),), grads="tangents")
    assert {n.meta["val"].device.type for n in graph.nodes} == {"cpu"}
    after = dict(model.named_parameters())
    assert all(after[k] is before[k] and after[k].is_meta for k in before)


def test_failed_capture_leaves_model_parameters_unchanged() -> None:
    model = MLP()
    before = dict(model.named_parameters())
    with pytest.raises(PlanningError, match="must have same reduction dim"):
        capture(model, (torch.randn(2, 7),), grads="none")
    assert all(p is before[k] for k, p in model.named_parameters())
    assert annotate(before["up.bias"], "h@tp") is before["up.bias"]


def test_repeated_captures_print_same_text() -> None:
    tokens, targets = batch()
    texts = {
        str(capture(loss_fn, (GPT(layers=1), tokens, targets), grads="loss")) for _ in range(2)
    }
    assert len(texts) == 1


def masked(model: nn.Module, x: Tensor) -> Tensor:
    q = model(x).view(2, 3, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3).tril().bool()).mean()


def in_place(model: MLP, x: Tensor) -> Tensor:
    h = model.up(x)
    h.mul_(2)
    h[..., :3] += 1
    return model.down(h).sum()


def smoothed(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), torch.ones(2, 3).long(), label_smoothing=0.1)


def per_position(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.tensor([[0, 3, -1], [2, 2, 15]])
    rows = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none", ignore_index=-1)
    one = F.cross_entropy(model(x)[0, 0], y[0, 1], reduction="sum")
    return (rows * torch.arange(6).view(2, 3)).sum() + one


@pytest.mark.default("masked")
@pytest.mark.parametrize("fn", [masked, in_place, smoothed, per_position])
def test_captured_loss_functions_match_eager(fn: Any) -> None:
    torch.manual_seed(0)
    check(fn, (MLP(), torch.randn(2, 3, 16)))


LABELS = torch.tensor([[0, 3, -100], [2, 2, 15]])


def upcast(model: nn.Module, x: Tensor) -> Tensor:
    """Cast the logits to float32, as the causal models of Hugging Face do."""
    logits = model(x).float()
    labels = F.pad(LABELS, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, 16), labels.view(-1), reduction="sum") / 4


def upcast_then_shifted(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, 16), LABELS[..., 1:].reshape(-1))


def upcast_and_permuted(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).to(torch.float32).transpose(1, 2), LABELS)


def upcast_within_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return upcast(model, x)


def upcast_and_read_twice(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x).float()
    return F.cross_entropy(logits.view(-1, 16), LABELS.view(-1)) + logits.square().mean()


def upcast_and_scaled(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x).float()
    logits /= 0.7
    return F.cross_entropy(logits.view(-1, 16), LABELS.view(-1))


def upcast_of_what_changes(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)
    copy = logits.float().view(-1, 16)
    logits.detach().mul_(0)
    return F.cross_entropy(copy, LABELS.view(-1))


def upcast_and_smoothed(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float().view(-1, 16), LABELS.view(-1), label_smoothing=0.1)


NARROW = [upcast, upcast_then_shifted, upcast_and_permuted, upcast_within_autocast]
WIDE = [upcast_and_read_twice, upcast_and_scaled, upcast_of_what_changes, upcast_and_smoothed]


@pytest.mark.default("upcast_and_read_twice")
@pytest.mark.parametrize("fn", [*NARROW, *WIDE])
def test_cross_entropy_reads_16_bit_logits_without_float32_copy(
    fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the loss reads the float32 copy of the logits, the copy is removed; results and
    gradients are bitwise equal."""
    torch.manual_seed(0)
    dtype = torch.float32 if fn is upcast_within_autocast else torch.bfloat16
    model, x = MLP().to(dtype), torch.randn(2, 3, 16).to(dtype)
    found = check(fn, (model, x), tolerance=2e-2)
    read = [
        n.args[0].meta["val"].dtype for n in found.nodes if str(n.target) == "dt.ce_stats.default"
    ]
    assert read == (
        [] if fn is upcast_and_smoothed else [torch.bfloat16 if fn in NARROW else torch.float32]
    )
    monkeypatch.setattr(canonical, "_remove_logits_cast", lambda graph, logits: None)
    plain = capture(fn, (model, x), grads="loss")
    tangents = {0: torch.ones((), dtype=torch.float32)}
    got, wanted = (run_graph(g, model, (model, x), tangents) for g in (found, plain))
    assert got.keys() == wanted.keys() and len(got) > 3
    for what, value in wanted.items():
        assert got[what].dtype == value.dtype and torch.equal(got[what], value), what


@pytest.mark.default("dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_captured_models_in_float64_and_16_bits_match_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, targets = batch()
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    check(loss_fn, (GPT(layers=1).to(dtype), tokens, targets), tolerance=tolerance)


def test_captured_transformer_layer_and_convolutions_match_eager() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    check(layer, (torch.randn(2, 5, 16),), grads="tangents", tolerance=1e-5)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    check(convolution, (torch.randn(2, 3, 8, 8),), grads="tangents")


@pytest.mark.default("<lambda>0")
@pytest.mark.parametrize(
    "of",
    [
        lambda m, x: m(x) * m(x).data,
        lambda m, x: m(x) * m.weight.data.sum(),
        lambda m, x: m(x) * (x.data * 2 + (torch.ones(4) * 3).data),
    ],
)
def test_captured_uses_of_tensor_data_match_eager(of: Any) -> None:
    check(lambda m, x: of(m, x).sum(), (nn.Linear(4, 4), torch.randn(3, 4)))


def test_captured_buffers_reassigned_through_data_match_eager() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(3, 4))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mask = F.dropout(torch.ones(3, 4) * 3, 0.0).data
            self.seen.data.add_(x.sum(0))
            self.seen.data = self.seen.data.to(x.device)
            return self.up(x) * self.mask + self.seen

    check(lambda m, x: m(x).sum(), (Masked(), torch.randn(3, 4)))


MOVES: dict[str, Any] = {
    "device": lambda m, x: m.to(x.device),
    "tensor": lambda m, x: m.to(x),
    "both": lambda m, x: m.to(device=x.device, dtype=torch.float32),
    "float": lambda m, x: m.float(),
    "cpu": lambda m, x: m.cpu(),
    "part": lambda m, x: m[0].to(x.device) and m,
    "train": lambda m, x: m.train(m.training),
}


@pytest.mark.parametrize("name", MOVES)
def test_module_move_without_effect_is_captured(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    check(lambda m, x: MOVES[name](m, x)(x).square().sum(), (model, torch.randn(3, 4)))


def test_move_without_effect_of_lstm_and_closed_over_module_is_captured() -> None:
    teacher = Scaled().eval().requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model.to(x.device)(x)[0].sum() - teacher.to(x.device)(x).sum()

    check(loss, (nn.LSTM(4, 4), torch.randn(3, 4)))


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_captured_greedy_generation_matches_eager(region: Any) -> None:
    @region()
    def generate(model: nn.Module, tokens: Tensor) -> Tensor:
        for _ in range(3):
            following = model(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
        return tokens

    check(generate, (GPT(layers=1), batch()[0]), grads="none")
