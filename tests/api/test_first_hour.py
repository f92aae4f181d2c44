"""What new users try out of habit from other libraries: it works, or the error fits on a screen and
its fix works."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dtensor as dt
from dtensor.__main__ import main

TP2 = dt.Mesh(tp=2)
PAIR = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
torch.manual_seed(0)
X, Y = torch.randn(4, 8), torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def placed(placements: Any = None) -> dt.ParallelModule:
    torch.manual_seed(1)
    return dt.parallelize(Net(), TP2, PAIR if placements is None else placements)


def adam(model: dt.ParallelModule) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(loss: Callable[..., Any] = loss_fn, placements: Any = None, **stated: Any) -> Any:
    model = placed(placements)
    return dt.train_step(model, loss, adam(model), **stated)


def raises(call: Callable[[], Any], *words: str, kind: type[Exception] = TypeError) -> str:
    """Return the text of the error that ``call`` raises, which must fit on a screen and have
    a fix."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "fix: " in text and len(text.splitlines()) <= 12
    for word in words:
        assert word in text, text
    return text


# -- what other libraries' loops have --------------------------------------------------------------


def test_grad_scaler_misuse_raises_and_autocast_fix_works() -> None:
    scaler, step = torch.amp.GradScaler("cpu"), train()
    loss = step(X, Y)
    raises(lambda: scaler.scale(loss), "GradScaler", "torch.bfloat16")
    raises(lambda: list(loss), "one number")

    def inside(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scaler.scale(loss_fn(model, x, y))

    raises(lambda: train(inside).plan(X, Y), "GradScaler", kind=dt.PlanningError)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the fix
        assert float(train()(X, Y)) > 0


@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(0)])
def test_moving_parallelized_model_to_device_raises_with_launch_fix(
    move: Callable[[Any], Any],
) -> None:
    model = placed()
    raises(lambda: move(model), 'dt.launch(mesh, device="cuda")', kind=dt.PlanningError)
    with dt.launch(TP2, device="cpu"):  # the fix, where there is no GPU
        assert float(dt.train_step(model, loss_fn, adam(model))(X, Y)) > 0


def test_dtype_change_of_parallelized_model_works_in_place() -> None:
    model = placed()
    for changed in (model.to("cpu"), model.cpu(), model.to(torch.float64), model.double()):
        assert changed is model
    step = dt.train_step(model, loss_fn, adam(model))
    assert step(X.double(), Y.double()).tensor().dtype == torch.float64
    assert model.requires_grad_(False) is model


def test_averaged_model_of_parallelized_model_raises_and_module_fix_works() -> None:
    model = placed()
    raises(lambda: AveragedModel(model), "AveragedModel(model.module)")  # type: ignore[arg-type]
    net: Any = model.module
    average: Any = AveragedModel(net)  # the fix
    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with dt.launch(TP2):
        for _ in range(2):
            step(X, Y)
            average.update_parameters(net)
        first = average.module.up.weight.detach().clone()
    assert not torch.equal(first, net.up.weight)
    assert torch.equal(copy.deepcopy(model).state_dict()["up.weight"], net.up.weight)


def test_pickling_parallelized_model_raises_and_fixes_work() -> None:
    step = train()
    model = step.model
    raises(lambda: pickle.dumps(model), "a parallelized Net", 'torch.save(model.state_dict(), "mod')
    raises(lambda: torch.save({"model": model}, io.BytesIO()), "dt.save(")
    step(X, Y)
    raises(lambda: pickle.dumps(step), "the step of loss_fn", "dt.save(")
    raises(lambda: copy.deepcopy(step), "the step of loss_fn cannot be pickled or copied")
    torch.save(model.state_dict(), io.BytesIO())  # the fixes
    assert torch.equal(pickle.loads(pickle.dumps(model.module)).up.weight, model.module.up.weight)
    product = dt.compile(torch.mm, TP2)
    expected = product(X, Y.t()).full_tensor()
    for again in (pickle.loads(pickle.dumps(product)), copy.deepcopy(product)):
        assert torch.equal(again(X, Y.t()).full_tensor(), expected)


def test_step_accepts_numpy_arrays() -> None:
    expected = float(train()(X, Y))
    step = train()
    assert float(step(X.numpy(), y=Y.numpy())) == expected
    frozen = np.asfortranarray(X.numpy())[::-1]
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(train()(frozen, np.flip(Y.numpy(), 0))) == pytest.approx(expected)
        step(X.numpy(), Y.numpy())
    assert len(step.plans) <= 2


def _of_batch(model: Any, batch: Any) -> torch.Tensor:
    return loss_fn(model, batch.x, batch.y) if hasattr(batch, "x") else loss_fn(model, **batch)


def test_step_accepts_mapping_types_as_batch() -> None:
    def of_its_class(model: Any, batch: Any) -> torch.Tensor:
        assert type(batch) is UserDict
        return _of_batch(model, batch)

    step = train(of_its_class)
    assert float(step(UserDict({"x": X, "y": Y.numpy()}))) == float(train()(X, Y))
    step(UserDict({"x": X.clone(), "y": Y}))
    assert len(step.plans) == 1


def test_mapping_that_cannot_be_rebuilt_raises_and_dict_fix_works() -> None:
    class Odd(UserDict[str, Any]):
        def __init__(self, a: int, b: int) -> None:
            super().__init__({"x": X, "y": Y})

    fix = "pass dict(...) of it"
    raises(lambda: train(lambda m, b: loss_fn(m, **b))(Odd(1, 2)), fix, kind=dt.PlanningError)
    assert float(train(lambda m, b: loss_fn(m, **b))(dict(Odd(1, 2))))


def test_unknown_option_name_error_proposes_right_option() -> None:
    text = raises(
        lambda: train(microbatches=4), "microbatches", "schedule=dt.GPipe(microbatches=4)"
    )
    assert "train_step" in text
    assert float(train(schedule=dt.GPipe(microbatches=4))(X, Y))
    raises(lambda: train(clip_grad_nrom=1.0), "'clip_grad_nrom'", "fix: clip_grad_norm")
    raises(lambda: train(gradient_accumulation_steps=2), "schedule=dt.GPipe(microbatches=2)")
    raises(lambda: train(schedule=4), "schedule=4", kind=dt.PlanningError)
    raises(lambda: train(schedule=dt.GPipe("4")), "'4'", kind=dt.PlanningError)  # type: ignore[arg-type]
    raises(lambda: dt.train_step(placed(), loss_fn), "optimizer")  # type: ignore[call-arg]
    raises(lambda: dt.parallelize(Net(), TP2, PAIR, stage=[]), "fix: stages")  # type: ignore[call-arg]
    assert "*" not in str(inspect.signature(dt.Row)).replace("*, ", "")


def test_float64_batch_error_proposes_float() -> None:
    raises(lambda: train()(X.double(), Y), "x: f64[4,8]", "x.float()", kind=dt.PlanningError)
    numpy = np.ones((4, 8))
    raises(lambda: train()(numpy, Y), "astype", kind=dt.PlanningError)
    raises(
        lambda: train(lambda m, x, y: loss_fn(m, x * 2, y))(X.double(), Y),
        "x.float()",
        kind=dt.PlanningError,
    )
    assert float(train()(X.double().float(), Y))
    assert float(train()(numpy.astype("float32"), Y))


def test_swapped_train_step_arguments_error_shows_right_order() -> None:
    model = placed()
    opt: Any = adam(model)
    for args in ((loss_fn, model, opt), (model, opt, loss_fn), (opt, loss_fn, model)):
        raises(
            lambda args=args: dt.train_step(*args),  # type: ignore[arg-type]
            "dt.train_step(model, loss_fn, optimizer)",
            kind=dt.PlanningError,
        )
    assert float(dt.train_step(model, loss_fn, opt)(X, Y))


def test_calling_parallelized_model_raises_and_compile_fix_works() -> None:
    model: Any = placed()
    text = raises(lambda: model(X), "a parallelized model cannot be called directly")
    fix = text.partition("fix: ")[2].splitlines()[0]
    result = eval(fix, {"dt": dt, "model": model, "mesh": TP2, "x": X})
    torch.testing.assert_close(result.full_tensor(), model.module(X))


def test_reading_gradients_inside_launch_raises_and_step_gradients_works() -> None:
    step = train()
    model = step.model
    with dt.launch(TP2):
        float(step(X, Y))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            for parameter in model.parameters():
                assert parameter.grad is None
            step.optimizer.zero_grad()
            model.module.zero_grad()
        assert ["step.gradients(" in str(w.message) for w in told] == [True]
        assert told[0].filename == __file__
        raises(
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "clip_grad_norm=1.0",
            "step.gradients(",
            kind=dt.PlanningError,
        )
        assert set(step.gradients(X, Y)) == {n for n, _ in model.named_parameters()}


def test_printed_loss_shows_value_and_metrics() -> None:
    def with_metrics(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = loss_fn(model, x, y)
        return loss, {"root": loss.sqrt(), "half": loss / 2}

    loss, plain = train(with_metrics)(X, Y), train()(X, Y)
    number = float(loss)
    assert re.fullmatch(rf"{number} \(root=[\d.]+, half=[\d.]+\)", str(loss))
    assert repr(loss).startswith("Loss(") and "root=" in repr(loss)
    assert f"{loss:.3f}" == f"{number:.3f}" and str(plain) == str(float(plain))


def test_wrong_key_of_gathered_state_error_and_state_saves_and_loads(tmp_path: Any) -> None:
    model = placed()
    opt = adam(model)
    state = dt.gather_state_dict(model, opt)
    for key, right in (
        ("up.weight", 'state["model"]["up.weight"]'),
        ("param_groups", 'state["optimizer"]["param_groups"]'),
    ):
        with pytest.raises(KeyError, match=re.escape(right)):
            state[key]
    with pytest.raises(KeyError, match="nothing"):
        state["nothing"]
    assert "up.weight" not in state and state.get("up.weight") is None
    assert type(copy.deepcopy(state)) is dict and isinstance(state, dict)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["model"]["up.weight"], model.state_dict()["up.weight"])
    dt.load_state_dict(model, opt, loaded)


class Crooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad @ grad.new_ones(3, 5)


def _by_value(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_fn(model, x, y) if model(x).sum() > 0 else model(x).sum()


def _by_size(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x)[y[:, 0] > 0].reshape(-1, 3).sum()


def _crooked(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_fn(model, Crooked.apply(model(x)), y)


@pytest.mark.parametrize("loss", [_by_value, _by_size, _crooked])
def test_capture_failure_prints_nothing_from_torch(
    loss: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    raises(lambda: train(loss).plan(X, Y), "test_first_hour.py", kind=dt.PlanningError)
    assert capfd.readouterr() == ("", "")


# -- placements ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Column", "Row", "Replicate"])
def test_axis_name_passed_to_placement_error_shows_dict_form(name: str) -> None:
    text = raises(lambda: getattr(dt, name)("tp"), f"dict(tp=dt.{name}())")
    fix = eval(text.partition("fix: ")[2].splitlines()[0], {"dt": dt})
    assert fix == dict(tp=getattr(dt, name)())


def test_eager_collectives_records_what_redistribute_sends() -> None:
    x = dt.distribute(X, TP2, tp=dt.Row())
    with dt.testing.eager_collectives() as sent:
        x.redistribute(tp=dt.Replicate())
        with dt.testing.eager_collectives() as inner:
            x.redistribute(tp=dt.Column()).redistribute(tp=dt.Row())
        x.redistribute(tp=dt.Row()).full_tensor()
    x.redistribute(tp=dt.Replicate())
    assert [c.key for c in inner] == ["all_to_all@tp"] * 2
    assert [c.key for c in sent] == ["all_gather@tp", "all_to_all@tp", "all_to_all@tp"]
    assert sent[0].bytes_sent == X.numel() * 4 // 2


def test_plan_warns_if_placements_split_nothing_and_fixes_work() -> None:
    def warning(step: Any) -> str:
        words = " ".join(str(step.plan(X, Y)).split())
        assert words.count("warning ") <= 1
        return words.partition("warning ")[2].partition(" inputs ")[0]

    for placements, said in (
        ({"up.bias": dict(tp=dt.Row())}, "tp splits up.bias alone, 5.7% of the parameters"),
        ({"*": dict(tp=dt.Replicate())}, "are Replicate()"),
        ({}, "no placement is stated on it"),
    ):
        text = warning(train(placements=placements))
        assert said in text and "fix: " in text
    assert not warning(train())  # the fixes
    assert not warning(train(placements={"*.weight": dict(tp=dt.Row())}))
    assert not warning(train(placements={}, inputs=dict(tp=dt.Row())))
    for stated in (dict(zero={"tp": 1}), dict(stages={"tp": [["up*"], ["down*"]]})):
        model = dt.parallelize(Net(), TP2, **stated)  # type: ignore[arg-type]
        assert not warning(dt.train_step(model, loss_fn, adam(model)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, 4, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(4, 8))


class WrittenOut(Attention):
    """Attention written with torch.matmul, and another product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, 4, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = (q @ k.mT).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(4, 8))


DP2 = dt.Mesh(dp=2)
UNALIGNED = {"qkv.weight": dict(tp=dt.Row())}
OUT_ALONE = {"out.weight": dict(tp=dt.Row())}
ALL = r"the 2 ranks of {0} repeat the same work: 100% of the FLOP of each, most of it in mm at .*\n"
SPLITS = r"fix: inputs=dict\({0}=dt.Row\(\)\) splits the batch, .*; inputs=dict\({0}=dt.Repl"


@pytest.mark.parametrize(
    ("net", "mesh", "placements", "inputs", "said"),
    [
        (Net, DP2, {}, None, (ALL + SPLITS).format("dp")),
        (Net, TP2, {}, None, (ALL + SPLITS).format("tp")),
        (
            Attention,
            TP2,
            OUT_ALONE,
            None,
            r"of tp .*: \d\d% of (?s:.*)\.explain",
        ),
        (
            WrittenOut,
            TP2,
            UNALIGNED,
            None,
            r"bmm at .*\nfix: qkv.weight as tp=Shard\(0, blocks=3\)",
        ),
        (
            Attention,
            TP2,
            UNALIGNED,
            dict(tp=dt.Column()),
            r"fix: .*; {.*=dt.Replicate\(\)\)} of the",
        ),
        (Net, DP2, {"*": dict(dp=dt.Replicate())}, None, (ALL + SPLITS).format("dp")),
        (Attention, TP2, UNALIGNED | {"out.bias": dict(tp=dt.Replicate())}, None, "blocks=3"),
        (Net, DP2, {}, dict(dp=dt.Row()), ""),  # the fixes
        (WrittenOut, TP2, {"qkv.weight": dict(tp=dt.Row(blocks=3))}, None, ""),
        (Attention, TP2, {"qkv.weight": dict(tp=dt.Row(blocks=3))}, None, ""),
        (Attention, TP2, UNALIGNED | {"out.weight": dict(tp=dt.Replicate())}, None, ""),
        (Net, DP2, {}, dict(dp=dt.Replicate()), ""),
        (Net, TP2, {"*": dict(tp=dt.Replicate())}, dict(tp=dt.Replicate()), ""),
        (Attention, TP2, OUT_ALONE, dict(tp=dt.Replicate()), ""),
        (Net, dt.Mesh(dp=2, tp=2), {"*": dict(tp=dt.Replicate())}, dict(dp=dt.Row()), ""),
        (Net, TP2, PAIR, None, ""),
        (Net, dt.Mesh(dp=1), {}, None, ""),
    ],
)
def test_step_warns_if_all_ranks_repeat_same_work(
    net: Callable[[], nn.Module], mesh: dt.Mesh, placements: Any, inputs: Any, said: str
) -> None:
    model = dt.parallelize(net(), mesh, placements)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = dt.train_step(model, loss_fn, adam(model), inputs=inputs)
        assert str(step.plan(X, Y)) and not warned
        for _ in range(2):
            step(X, Y).wait()
    assert [bool(re.search(said, str(warning.message))) for warning in warned] == [True] * bool(
        said
    )
    assert not warned or warned[0].filename == __file__


def test_plan_notes_swapped_row_and_column_with_more_all_reduces() -> None:
    swapped = {"up.weight": dict(tp=dt.Column()), "down.weight": dict(tp=dt.Row())}
    planned = train(placements=swapped).plan(X, Y)
    text = str(planned)
    assert "3 all_reduces" in text and "1 all_reduce" in text and "Megatron" in text
    assert sum(c.kind == "all_reduce" for c in planned.collectives) == 3
    fixed = train().plan(X, Y)  # the fix
    assert sum(c.kind == "all_reduce" for c in fixed.collectives) == 1
    assert "Megatron" not in str(fixed)


# -- the command line ------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn


def make():
    return nn.Linear(8, 8), lambda model, x: model(x).sum(), torch.zeros(4, 8)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explore gpt2 --mesh tp=2 --save out.html", "explore ... -o FILE.html"),
        ("search gpt2 --ranks 2 --save=out.html", "search ... -o FILE.html"),
        ("plan gpt2 --mesh tp=2 --save out.html", "explore ... -o FILE.html"),
        ("search llama 8", "search llama --ranks 8"),
        ("plan llama tp=2", "plan llama --mesh tp=2"),
        ("plan train.py", "plan train.py:make --mesh tp=2"),
        ("plan train.py --mesh tp=2", "fix: train.py:make"),
    ],
)
def test_command_line_mistake_exits_2_and_its_fix_works(
    words: str,
    said: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr().err
    assert status == 2 and said in told and len(told.splitlines()) <= 4, told
    if "plan train.py:make" in told:  # the fix
        assert main(told.partition("fix: ")[2].split("plan", 1)[1].join(["plan", ""]).split()) == 0
