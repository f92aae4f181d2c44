"""What a new user tries: it works, or the error says what is wrong and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from tests import optimizers
from tests.models import batch, loss_fn
from tests.training import MEGATRON, SIX, adamw, make_model, sgd

TP2 = dt.Mesh(tp=2)
TOKENS, TARGETS = batch()


def step(loss: Callable[..., Any] = loss_fn, make: Any = adamw, **options: Any) -> dt.TrainStep:
    model = make_model()
    return dt.train_step(dt.parallelize(model, TP2, MEGATRON), loss, make(model), **options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x, y: 3.0, "A loss is one number"),
        (lambda m, x, y: None, "A loss is one number"),
        (lambda m, x, y: m(x).mean().detach(), "does not depend on any parameter"),
    ],
)
def test_invalid_loss_is_refused_with_users_line_and_fix(
    loss: Callable[..., Any], message: str
) -> None:
    with pytest.raises(dt.PlanningError, match=message) as caught:
        step(loss).plan(TOKENS, TARGETS)
    assert "test_mistakes.py:" in str(caught.value) and "fix: " in str(caught.value)


X = torch.ones(4, 4)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: step(make=lambda m: torch.optim.LBFGS(m.parameters())),
        r"LBFGS needs a closure(.|\n)*its line: (.|\n)*fix: ",
    ),
    (
        lambda: step(make=lambda m: optimizers.GlobalNorm(m.parameters())),
        r"GlobalNorm couples parameters(.|\n)*its line: (.|\n)*fix: ",
    ),
    (
        lambda: step(make=lambda _: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])),
        r"a parameter of shape \[2\] that is not one of the model's",
    ),
    (lambda: step(make=lambda _: 3), r"the optimizer is 3 \(int\), not a torch.optim optimizer"),
    (lambda: step(make=lambda _: []), r"the list of optimizers is empty(.|\n)*fix: "),
    (
        lambda: step(make=lambda m: [adamw(m), 3]),
        r"optimizer 1 of the list is 3 \(int\), not a torch.optim optimizer",
    ),
    (lambda: step(make=lambda m: [adamw(m)] * 2), "in the list twice: AdamW, AdamW"),
    (
        lambda: step(make=lambda m: [adamw(m), sgd(m)]),
        r"embed.weight is a parameter of two optimizers(.|\n)*: AdamW, (.|\n)* SGD, (.|\n)*fix: ",
    ),
    (
        lambda: step(make=lambda m: [adamw(m), torch.optim.SGD([dict(params=[])])]),
        "the SGD has no parameter of the model",
    ),
    (lambda: step(clip_grad_norm=0.0), "clip_grad_norm=0.0"),
    (lambda: dt.parallelize(dt.parallelize(make_model(), TP2), TP2), "parallelized already"),
    (
        lambda: dt.train_step(make_model(), loss_fn, adamw(make_model())),  # type: ignore[arg-type]
        "takes a parallelized module, not GPT",
    ),
    (lambda: launched(backend="x"), "backend='x'"),
    (lambda: launched(mode="x"), "mode='x'"),
    (
        lambda: step(inputs=dict(dp=dt.Row())).plan(TOKENS, TARGETS),
        'names the axis "dp", which is not in the mesh',
    ),
    (lambda: dt.Mesh(tp="2"), r"axis 'tp' has size '2'(.|\n)*fix: dt.Mesh\(tp=2\)"),
    (lambda: dt.Mesh(tp=0), r"axis 'tp' has size 0(.|\n)*fix: dt.Mesh\(tp=1\)"),
    (lambda: dt.Topology(bandwidth="fast"), "Topology: bandwidth='fast' is not a number above 0"),
    (lambda: dt.Topology(bandwidth={"tp": 0}), "Topology: bandwidth=0 is not a number above 0"),
    (lambda: dt.Topology(flops=float("nan")), "Topology: flops=nan is not a number above 0"),
    (lambda: dt.Topology(memory_bytes={"tp": 1}), "memory_bytes={'tp': 1} is not a number above 0"),
    (lambda: dt.Topology(op_latency=-1), "op_latency=-1 is not a number of at least 0"),
    (lambda: dt.Topology(step_latency=-1.0), "step_latency=-1.0 is not a number of at least 0"),
    (lambda: dt.Topology(attention_flops=0.0), "attention_flops=0.0 is not a number above 0"),
    (lambda: dt.Shard("0"), r"Shard\('0'\): a dim is a whole number"),
    (lambda: dt.Row(blocks="qkv"), r"blocks='qkv'\): blocks and unit are whole numbers"),
    (lambda: dt.Column(unit=1.5), r"unit=1.5\): blocks and unit are whole numbers"),
    (lambda: dt.ColumnParallel(blocks=0), r"ColumnParallel\(blocks=0\).* at least 1"),
    (lambda: dt.RowParallel(unit="a"), "unit='a'.*: blocks and unit are whole numbers"),
    (lambda: dt.Auto(num_stages="2"), "num_stages='2' is not a whole number of at least 1"),
    (lambda: dt.GPipe(2.0), "at least one microbatch, and this one has 2.0"),
    (lambda: dt.OneFOneB(True), "at least one microbatch, and this one has True"),
    (lambda: dt.Searched(microbatches=4, costs=3), r"Searched's costs is 3 \(int\), not a Costs"),
    (lambda: dt.Searched(microbatches=4, most_held="3"), "most_held='3' is not a whole number"),
    (lambda: dt.Costs(forward="a"), "A cost is 0 or more, and forward is 'a'"),
    (lambda: dt.Custom(3), r"Custom's schedule is 3 \(int\), not a text"),
    (lambda: dt.Ordered(3, 4), r"Ordered's schedule is 3 \(int\), not a function"),
    (lambda: dt.parallelize(torch.nn.Linear, TP2), "is the class Linear, not an nn.Module"),
    (lambda: dt.parallelize(torch.nn.LazyLinear(2), TP2), "weight has no shape yet"),
    (
        lambda: dt.parallelize(torch.nn.ParameterList([X.to_sparse()]), TP2),
        r"0 is a sparse tensor(.|\n)*fix: 0.to_dense\(\) before the call",
    ),
    (lambda: planned(torch.nn.LazyLinear(2)), "weight has no shape yet"),
    (
        lambda: dt.compile(torch.mm, TP2).plan(X, X.to_sparse()),
        r"an argument is a sparse tensor(.|\n)*fix: pass x.to_dense\(\) before the call",
    ),
    (lambda: dt.parallelize(make_model(), {"tp": 2}), r"the mesh is {'tp': 2} \(dict\)"),
    (lambda: dt.parallelize(make_model(), TP2, {3: {}}), "a key of placements is 3"),
    (
        lambda: dt.parallelize(make_model(), TP2, stages={"tp": 2}),
        r"stages has patterns(.|\n)*tp: 2",
    ),
    (lambda: dt.parallelize(make_model(), TP2, stages={"tp": [["*"], [3]]}), "stages has patterns"),
    (lambda: dt.parallelize(make_model(), TP2, stages={3: []}), 'stages names the axis "3"'),
    (
        lambda: dt.parallelize(make_model(), TP2, zero=3),
        'zero=3 is not a mapping of an axis to a level; fix: zero={"tp": 3}',
    ),
    (
        lambda: dt.parallelize(make_model(), TP2, {"tp": {"head.weight": dt.Row()}}),
        r'fix: write {"head.weight": dict\(tp=dt.Row\(\)\)}',
    ),
    (
        lambda: step(make=lambda m: torch.optim.SparseAdam(m.parameters())),
        "SparseAdam needs sparse gradients, and the gradients of a train step are dense",
    ),
    (lambda: step()(TOKENS.to("meta"), TARGETS), "has no values(.|\n)*fix: pass a tensor"),
    (
        lambda: planned(lambda x: torch.rms_norm(x.long(), [4])),
        r"not implemented for(.|\n)*fix: give the operands dtypes that go together: x.float\(\)",
    ),
    (lambda: step(3), r"loss_fn is 3 \(int\), not a function"),
    (lambda: step(clip_grad_norm="1"), "clip_grad_norm='1' is not a number above 0"),
    (lambda: step(clip_grad_norm=torch.ones(())), r"clip_grad_norm=tensor\(1.\) is not a number"),
    (lambda: step(topology="h100"), r"topology is 'h100' \(str\), not a Topology"),
    (lambda: step(topology=dt.Topology), "topology is the class Topology, not a Topology"),
    (lambda: step(search="fre"), 'search=\'fre\': it is "predictable" or "free"'),
    (lambda: step(keep_gradients="no"), r"keep_gradients is 'no' \(str\), not True or False"),
    (lambda: step(master_weights=1), r"master_weights is 1 \(int\), not True or False"),
    (lambda: dt.compile(3, TP2), r"what compile takes is 3 \(int\), not a function"),
    (lambda: dt.compile(torch.relu, dt.Mesh), "the mesh is the class Mesh, not a Mesh"),
    (lambda: dt.compile(torch.relu, TP2, topology=3), "topology is 3"),
    (
        lambda: step(delay=2),
        r"delay=2 is not a delay of gradients in steps.\nfix: delay=1, or leave",
    ),
    (lambda: step(delay=True), "delay=True is not a delay"),
    (
        lambda: step(delay=1, grad_scaler=torch.amp.GradScaler("cpu")),
        "delay=1 updates with gradients of the step before, which have its loss scale",
    ),
    (lambda: launched(mesh="tp2"), r"the mesh is 'tp2' \(str\), not a Mesh"),
    (lambda: launched(device="gpu"), 'device=\'gpu\': it is "cpu" or "cuda"'),
    (lambda: launched(device=torch.device("cpu")), "device=device"),
    (lambda: launched(deadline_s=0), "deadline_s=0 is not a number above 0"),
    (lambda: launched(deadline_s="60"), "deadline_s='60' is not a number above 0"),
    (lambda: launched(call_deadline_s=None), "call_deadline_s=None is not a number above 0"),
    (lambda: launched(address=3), r"address is 3 \(int\)"),
    (lambda: launched(address="a:1"), "address='a:1' is of a Ray cluster(.|\n)*backend=\"ray\""),
    (lambda: dt.spec(3, TP2), r"a spec is 3 \(int\), not a text"),
    (lambda: dt.spec("f32[4]", TP2, requires_grad=1), "requires_grad is 1"),
    (
        lambda: dt.distribute([1.0], TP2),
        r"the first argument of distribute is \[1.0\] \(list\), not a tensor",
    ),
    (lambda: dt.distribute(X, 2), "the mesh is 2"),
    (
        lambda: dt.distribute(X.to_sparse(), TP2),
        r"the first argument of distribute is a sparse tensor(.|\n)*fix: pass x.to_dense\(\)",
    ),
    (
        lambda: dt.distribute(torch.nested.nested_tensor([X], layout=torch.jagged), TP2),
        r"is a nested tensor \(torch.jagged\)(.|\n)*fix: pass x.to_padded_tensor\(0\)",
    ),
    (
        lambda: dt.transfer(X, TP2),
        "the first argument of transfer is of type Tensor, not a DTensor",
    ),
    (lambda: dt.transfer(dt.distribute(X, TP2), TP2, 3), r"ranks is 3 \(int\), not a list"),
    (lambda: dt.gather_state_dict(make_model()), "takes a parallelized module, not GPT"),
    (lambda: dt.gather_state_dict(dt.parallelize(make_model(), TP2), 3), "the optimizer is 3"),
    (lambda: dt.load_state_dict(dt.parallelize(make_model(), TP2), None, 3), "the state is 3"),
    (lambda: planned(lambda x: dt.annotate(x, 3)), r"annotate's text is 3 \(int\)"),
    (lambda: planned(lambda x: dt.annotate(x, tp="row")), "annotate's tp is 'row'"),
    (lambda: planned(lambda x: dt.annotate(x, "tp=Shrd(0)")), r"'tp=Shrd\(0\)' is no placement"),
    (
        lambda: planned(lambda x: dt.annotate(x[:3], "b@tp:zigzag t")),
        r"dim 0 has only \d elements.\n  test_mistakes.py:\d+: .*\nfix: tp=dt.Shard\(0\), or",
    ),
    (lambda: dt.simulate(step(), TOKENS, TARGETS, topology=3), "topology is 3"),
    (lambda: dt.calibrate(TP2, dtype="f32"), "matrices of f32"),
    (lambda: dt.compare(3, loss_fn, {"a": (TP2, {})}), "the first argument of compare is 3"),
    (lambda: dt.compare(make_model(), loss_fn, {"a": (TP2, {})}, optimizer="adam"), "is 'adam'"),
    (lambda: dt.rule("aten::erfc", 3), r"the pattern is 3 \(int\), not a text"),
    (lambda: dt.rule("aten::erfc", "... -> ...", linear=3.5), "linear is 3.5"),
    (lambda: dt.placements.for_model(make_model(), TOKENS), "example_args is of type Tensor"),
    (lambda: dt.placements.for_model(make_model(), (TOKENS,), size="2"), "size='2'"),
]


def launched(mesh: Any = TP2, **options: Any) -> None:
    dt.launch(mesh, **options).__enter__()


def planned(fn: Callable[..., Any]) -> dt.Plan:
    return dt.compile(fn, TP2).plan(X)


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_invalid_argument_is_refused_by_called_function(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(dt.PlanningError, match=message):
        call()


def test_step_on_other_mesh_than_launch_is_refused() -> None:
    with (
        dt.launch(dt.Mesh(tp=4)),
        pytest.raises(dt.PlanningError, match=r"launch is on mesh\(tp=4\), .* for mesh\(tp=2\)"),
    ):
        step()(TOKENS, TARGETS)


@pytest.mark.slow
def test_output_of_last_stage_is_refused_as_argument_of_train_step() -> None:
    """A compiled function accepts it (test_results.py); a step with a backward does not."""
    where = SIX["pp2"]
    model = dt.parallelize(make_model(), where.mesh, stages=where.stages)
    logits = dt.compile(model, where.mesh)(TOKENS)
    assert str(logits.spec) == "f32[4,8,32] on pp=1"
    train = dt.train_step(model, lambda m, x, y: (m(x) - y).square().mean(), adamw(model.module))
    with pytest.raises(dt.PlanningError, match=r"on pp=1: only a part of the mesh holds it, and w"):
        train(TOKENS, logits)
    train(TOKENS, logits.full_tensor())


def test_in_process_launch_refuses_gpu_other_than_current(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for device, said in {
        "cuda:2": r'"cuda:2", and this process sees 2 GPUs; fix: device="cuda"',
        "cuda:1": r"current GPU is cuda:0, where(.|\n)*fix: torch.cuda.set_device\(1\)",
    }.items():
        with pytest.raises(dt.PlanningError, match=said), dt.launch(TP2, device=device):
            pass
