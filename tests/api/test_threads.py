"""Several threads: a capture does not affect other threads, and calls of dtensor from all threads
have one order."""

import copy
import math
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtensor as dt
from tests.api.generation import placed

WAIT_S = 600.0  # far beyond what anything here takes: only what would wait for ever gets there
TIMES = 5  # captures in a row: where the other thread acts is the same in each (`meet`)


class Beside:
    """A second thread that runs during a capture: ``meet``, called in the program, lets it run and
    waits until it is done."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.found: list[Any] = []
        self.errors: list[BaseException] = []
        self._does = does
        self._go, self._done, self._over = (threading.Semaphore(0) for _ in range(3))
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._go.release()
        self._thread.join()
        assert not self.errors, self.errors

    def meet(self) -> None:
        self._go.release()
        assert self._done.acquire(timeout=WAIT_S)

    def _run(self) -> None:
        while self._go.acquire() and not self._ended:
            try:
                self.found.append(self._does())
            except BaseException as error:
                self.errors.append(error)
            self._done.release()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


def captured(net: nn.Module, within: Callable[[], Any], *, size: int = 4) -> Any:
    """Plan a step of the net, calling ``within`` in the loss."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        within()
        return model(x).square().mean()

    model = dt.parallelize(net, dt.Mesh(dp=2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.train_step(model, loss_fn, opt).plan(torch.empty(6, size))


def torch_now() -> dict[str, Any]:
    """Return everything in torch and Python that a capture changes."""
    from torch._export import non_strict_utils
    from torch.export import _trace
    from torch.fx import _symbolic_trace

    flags = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    flags += (_symbolic_trace.is_fx_tracing, _symbolic_trace.is_fx_symbolic_tracing)
    lstm = torch.ops.aten.upsample_nearest2d.default, torch.ops.aten.lstm.input
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return {
        "module": {name: vars(nn.Module)[name] for name in vars(nn.Module)},
        "rnn": dict(vars(nn.RNNBase)),
        "graph module": torch.fx.GraphModule.recompile,
        "tracer": torch.fx.proxy.TracerBase._filter_traceback_frames,
        "patcher": _symbolic_trace._Patcher.patch_method,
        "autocast": (torch.autocast.__init__, torch.autocast.__enter__),
        "apply": vars(torch.autograd.function._SingleLevelFunction).get("apply"),
        "checkpoint": torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        "trace": (_trace._override_builtin_ops, vars(_trace).get("print")),
        "strict": non_strict_utils._override_builtin_ops,
        "flags": [(f.__code__, f.__kwdefaults__, f()) for f in flags],
        "kernels": [dict(op.py_kernels) for op in (*lstm, attention)],
        "builtins": (max, min, math.pow, print),
        "thread": threading.Thread.start,
        "filters": list(warnings.filters),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "grad": torch.is_grad_enabled(),
        "gc": __import__("gc").isenabled(),
    }


# -- a thread that calls nothing of ours -----------------------------------------------------------


def test_other_thread_sees_real_parameters_during_capture() -> None:
    net = Net()
    known = float(net.up.weight.detach().norm())

    def look() -> Any:
        state = net.state_dict()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
        assert all(type(x) is torch.Tensor for x in state.values())
        assert type(twin.up._parameters) is dict
        assert {n: x.shape for n, x in twin.named_parameters()} == {
            n: x.shape for n, x in net.named_parameters()
        }
        made = net.eval()(torch.ones(3, 4)).shape
        net.train()
        return float(net.up.weight.detach().norm()), float(twin.up.weight.detach().norm()), made

    with Beside(look) as beside:
        for _ in range(TIMES):
            captured(net, beside.meet)
    assert beside.found == [(known, known, (3, 1))] * TIMES
    assert type(net.up._parameters) is dict


def test_parameters_assigned_by_other_thread_during_capture_stay() -> None:
    net = Net()
    held = net.up._parameters
    new = nn.Parameter(torch.zeros(8))

    def assign() -> None:
        net.up.bias = new
        net.up.register_buffer("count", torch.ones(1))
        with torch.no_grad():
            net.down.weight.fill_(2.0)

    with Beside(assign) as beside:
        captured(net, beside.meet)
    assert net.up._parameters is held and net.up.bias is new
    assert float(net.up.count) == 1.0 and bool((net.down.weight == 2.0).all())


def test_other_thread_sees_real_lstm_weights_during_capture() -> None:
    net = nn.Sequential(nn.LSTM(4, 3, batch_first=True))
    lstm = net[0]
    x = torch.ones(2, 5, 4)
    known = lstm(x)[0].tolist()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        beside.meet()
        return model(x)[0].square().mean()

    model = dt.parallelize(net, dt.Mesh(dp=2))
    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with Beside(lambda: lstm(x)[0].tolist()) as beside:
        step.plan(torch.empty(4, 5, 4))
    assert beside.found == [known]
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_counters_of_other_thread_are_kept_and_not_reported() -> None:
    counts, seen, found = {"looks": 0, "scale": 1.0}, [0], {1.0}
    net = Net()

    def within() -> None:
        beside.meet()
        found.add(counts["scale"] * bool(seen))

    def count() -> None:
        counts["looks"] += 1
        counts[f"new {counts['looks']}"] = 1
        seen.append(1)

    with Beside(count) as beside:
        for _ in range(TIMES):
            captured(net, within)
    assert counts["looks"] == len(beside.found) == len(seen) - 1 and len(counts) == 2 + TIMES


def test_counter_of_captured_program_is_refused_beside_other_thread() -> None:
    counts, own = {"looks": 0}, {"calls": 0}
    net = Net()

    def within() -> None:
        beside.meet()
        own["calls"] += len(counts) > 0  # the same keys are another matter

    def count() -> None:
        counts["looks"] += 1

    with Beside(count) as beside, pytest.raises(dt.PlanningError, match=r"calls.*: 1 -> 2") as told:
        captured(net, within)
    assert own == {"calls": 0} and counts["looks"] == len(beside.found)
    assert "looks" not in str(told.value)


def test_list_grown_by_captured_program_is_refused_beside_other_thread() -> None:
    """An op pauses Python's profiler, which then forgets which function runs."""
    seen: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen.append(1)
        return y

    beside = Beside(lambda: None)
    with beside, pytest.raises(dt.PlanningError, match=r"seen.*: \[1\] -> \[1, 1\]"):
        dt.compile(f, dt.Mesh(dp=2)).plan(torch.empty(4))
    assert seen == []


def test_random_draws_of_other_thread_are_unaffected_by_capture() -> None:
    generator = torch.Generator()
    own = np.random.default_rng(7)
    held = [generator, own]

    def seed() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        generator.manual_seed(7)
        own.bit_generator.state = np.random.default_rng(7).bit_generator.state

    def draw() -> list[float]:
        return [
            *(random.random(), float(np.random.rand()), float(own.random())),
            *(float(torch.rand(())), float(torch.rand((), generator=generator))),
        ]

    net = Net()
    seed()
    known = [draw() for _ in range(TIMES)]
    seed()
    with Beside(draw) as beside:
        for _ in range(TIMES):
            captured(net, lambda: (beside.meet(), held))
    assert beside.found == known


def test_numpy_draws_of_other_thread_are_not_blamed_on_captured_program() -> None:
    with Beside(lambda: float(np.random.rand())) as beside:
        captured(Net(), lambda: (beside.meet(), np.float64(1.0)))
        with pytest.raises(dt.PlanningError, match="draws from numpy.random;"):
            captured(Net(), lambda: (beside.meet(), np.random.rand()))


def test_random_draw_of_captured_program_is_refused_beside_other_thread() -> None:
    with (
        Beside(lambda: float(np.random.rand())) as beside,
        pytest.raises(dt.PlanningError, match="draws from Python's random;"),
    ):
        captured(Net(), lambda: (beside.meet(), random.random()))


def test_other_thread_sees_unpatched_torch_during_capture() -> None:
    def look() -> Any:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            warnings.warn_explicit("of torch", UserWarning, "x.py", 1, module="torch.x")
        made = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
        return (
            *(torch.compiler.is_compiling(), torch.compiler.is_exporting()),
            *(math.pow(2, 3), max(1, 2), len(heard), torch._C._get_mkldnn_enabled()),
            *(made(torch.ones(2)).tolist(), nn.Linear(2, 2).double().weight.dtype),
        )

    known = look()
    with Beside(look) as beside:
        captured(Net(), beside.meet)
    assert beside.found == [known]


def test_torch_compiled_function_of_other_thread_stays_compiled_in_capture() -> None:
    made: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(3)
    known = compiled(x).tolist()
    with Beside(lambda: compiled(x).tolist()) as beside:
        captured(Net(), beside.meet)
    assert beside.found == [known] and made == [1]


def test_torch_compile_in_other_thread_waits_for_capture() -> None:
    """It waits as for another thread that compiles."""
    made: list[int] = []
    begun = threading.Event()
    found: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: x.cos() + 1, backend=backend)

    def call() -> None:
        begun.set()
        found.append(compiled(torch.zeros(3)))

    thread = threading.Thread(target=call)

    def within() -> None:
        starter.meet()
        assert begun.wait(WAIT_S)

    before = torch_now()
    with Beside(thread.start) as starter:
        captured(Net(), within)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert torch.equal(found[0], torch.full((3,), 2.0)) and made == [1]
    assert torch_now() == before


# -- what is put back ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failed_capture_restores_torch(error: type[BaseException]) -> None:
    def within() -> None:
        raise error("within")

    net = Net()
    captured(net, lambda: None)
    before, held = torch_now(), net.up._parameters
    with pytest.raises(error, match="within"):
        captured(net, within)
    assert torch_now() == before and net.up._parameters is held
    captured(net, lambda: None)
    assert torch_now() == before


# -- calls of ours ---------------------------------------------------------------------------------


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call each function in its own thread and return the results."""
    found: list[Any] = [None] * len(calls)
    ready = threading.Barrier(len(calls))

    def run(index: int) -> None:
        ready.wait()
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it waits for ever"
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def test_plans_made_by_three_threads_at_once_are_equal() -> None:
    alone = str(captured(Net(), lambda: None))
    before = torch_now()
    for _ in range(3):
        assert together(*[lambda: str(captured(Net(), lambda: None))] * 3) == [alone] * 3
    assert torch_now() == before


def test_dtensor_call_in_thread_joined_by_captured_program_is_refused() -> None:
    errors: list[BaseException] = []
    net, other = Net(), Net()

    def call() -> None:
        try:
            captured(other, lambda: None)
        except BaseException as error:
            errors.append(error)

    def within() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with pytest.raises(dt.PlanningError, match=r"errors.*A call of dtensor in a thread"):
        captured(net, within)


def test_dtensor_call_in_pool_awaited_by_captured_program_is_refused() -> None:
    x = dt.distribute(torch.ones(2), dt.Mesh(dp=2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()  # its thread is there before
        with pytest.raises(dt.PlanningError, match="thread that the program being captured waits"):
            captured(Net(), lambda: pool.submit(x.sum).result())


def test_thread_started_by_captured_program_sees_fake_tensors() -> None:
    def loss_fn(model: Net, x: torch.Tensor) -> torch.Tensor:
        kinds: list[str] = []
        thread = threading.Thread(target=lambda: kinds.append(type(model.up.weight.data).__name__))
        thread.start()
        thread.join()
        return model(x).square().mean() * (kinds == ["FakeTensor"])

    model = dt.parallelize(Net(), dt.Mesh(dp=2))
    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    assert float(step(torch.ones(6, 4))) > 0


@pytest.mark.slow
def test_step_plan_generation_and_save_in_parallel_equal_sequential(tmp_path: Any) -> None:
    """An evaluation of the trained model runs at the same time too."""
    torch.manual_seed(0)
    mesh = dt.Mesh(dp=2)
    net = Net()
    twin = copy.deepcopy(net)
    gen = dt.generator(placed("llama", "dp2"), slots=2, length=16)
    prompts = [[1, 2, 3], [4, 5]]
    x = torch.randn(6, 4)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def training(module: nn.Module) -> Any:
        model = dt.parallelize(module, mesh)
        return model, dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))

    _, other = training(twin)
    losses = [float(other(x)) for _ in range(20)]
    texts = [text.tokens for text in gen(prompts, max_new_tokens=4)]
    planned = str(captured(Net(), lambda: None))
    model, step = training(net)
    sums = dt.compile(lambda model: sum(p.sum() for p in model.parameters()), mesh)
    eager = dt.distribute(torch.arange(4.0), mesh, dp=dt.Row())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(20):
            path = tmp_path / str(number)
            found = together(
                lambda: float(step(x)),
                lambda: str(captured(Net(), lambda: None)),
                lambda: [text.tokens for text in gen(prompts, max_new_tokens=4)],
                lambda path=path: dt.save(str(path), model).get(),
                lambda: float(sums(model).full_tensor()),
                lambda: float((eager * 2).sum().full_tensor()),
                lambda: float(net.up.weight.detach().norm()),
            )
            assert found[:4] == [losses[number], planned, texts, str(path)]
            assert found[5] == 12.0
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
