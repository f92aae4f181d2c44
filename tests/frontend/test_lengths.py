"""Tests that one export for many lengths equals a capture at each length, or is refused."""

from __future__ import annotations

import builtins
import copy
import decimal
import enum
import functools
import importlib
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.sym_node import SymNode

from dtensor.api.step.lengths import difference
from dtensor.frontend.call_lock import is_capturing
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.lengths import ExportForLengths, NotForLengths, export_for_lengths
from tests.models import GPT, Llama, batch, loss_fn

BOTH = {(0, 1): 0, (1, 1): 0}


def hugging_face() -> tuple[nn.Module, Callable[..., Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return model, lambda model, x, y: model(input_ids=x, labels=y).loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Any]]]] = {
    "llama": lambda: (Llama(layers=2), loss_fn),
    "gpt": lambda: (GPT(positions=64), loss_fn),
    "hugging face": hugging_face,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name == "gpt" else pytest.mark.slow)
        for name, make in MODELS.items()
    ],
)
def test_export_for_many_lengths_equals_capture_at_each_length(
    make: Callable[[], tuple[nn.Module, Callable[..., Any]]],
) -> None:
    model, loss = make()

    def called(length: int) -> tuple[Any, ...]:
        return (model, *batch(length=length))

    captured = {length: capture(loss, called(length), grads="loss") for length in (2, 33)}
    reads = captured[2].reads
    assert reads is not None
    found = export_for_lengths(
        loss, called(12), {}, grads="loss", main=model, dims=BOTH, ran=reads.ran
    )
    for length, graph in captured.items():
        assert difference(found.graph(loss, called(length), {}, model), graph) is None
    with pytest.raises(NotForLengths, match="0 or 1"):
        found.graph(loss, called(1), {}, model)


def exported(
    use: Callable[[Tensor, Any], Tensor], after_a_capture: bool = False
) -> tuple[ExportForLengths, Any, nn.Module]:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return use(model(x), x.shape[0]).square().sum()

    args = (model, torch.empty(12, 4))
    reads = capture(loss, args, grads="loss").reads if after_a_capture else None
    found = export_for_lengths(
        loss, args, {}, grads="loss", main=model, dims={(0, 0): 0}, ran=reads and reads.ran
    )
    return found, loss, model


TABLE = {f"{n}": float(n) for n in range(64)} | {n: float(n) for n in range(64)}  # type: ignore


@functools.lru_cache
def doubled(n: int) -> float:
    return 2.0 * n


class Known(enum.IntEnum):
    LONG = 20


class Whole(int):
    pass


def in_class(n: Any) -> int:
    match n:
        case int():
            return 3
        case _:
            return 1


REFUSED: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "f-string key": (lambda x, n: x * TABLE[f"{n}"], "turned into text"),  # type: ignore[index]
    "dict key": (lambda x, n: x * TABLE[n], "hashed"),
    "dict get": (lambda x, n: x * (TABLE.get(n) or 1.0), "hashed"),
    "lru_cache": (lambda x, n: x * doubled(n), "hashed"),
    "len(str)": (lambda x, n: x * len(str(n)), "turned into text"),
    "shape text": (lambda x, n: x * len(str(x.shape)), "turned into text"),
    "int": (lambda x, n: x * int(n), "to a plain number"),
    "sqrt": (lambda x, n: x / math.sqrt(n), "to a plain number"),
    "range": (lambda x, n: x * sum(range(n)), "to a plain number"),
    "percent": (lambda x, n: x * len("%d" % n), "to a plain number"),  # noqa: UP031
    "list": (lambda x, n: x * sum([1.0] * n), "to a plain number"),
    "cut of a list": (lambda x, n: x * sum(list(range(64))[:n]), "to a plain number"),
    "rows": (lambda x, n: torch.stack([row * i for i, row in enumerate(x)]), "a plain number"),
    "bits": (lambda x, n: x * n.bit_length(), "to a plain number"),
    "float": (lambda x, n: x * (n * 0.1), "becomes a float"),
    "power": (lambda x, n: x * n**-0.5, "becomes a float"),
    "floor of a float": (lambda x, n: x * (n // 0.3), "becomes a float"),
    "rest of a float": (lambda x, n: x * (n % 0.7), "becomes a float"),
    "enum": (lambda x, n: x * (2 if n == Known.LONG else 1), "compared with a Known"),
    "int of another class": (lambda x, n: x * (2 if n in [Whole(5)] else 1), "with a Whole"),
    "decimal": (lambda x, n: x * (2 if decimal.Decimal(5) != n else 1), "with a Decimal"),
    "class": (lambda x, n: x * in_class(n), "asks for a type"),
    "round": (lambda x, n: x * round(n, -1), "rounded"),
    "copy": (lambda x, n: x * copy.copy(n), "copied"),
    "isinstance": (
        lambda x, n: x * (2 if isinstance(n, int) and n > 20 else 1),
        "asked for its type",
    ),
    "type": (lambda x, n: x * (2 if type(n) is int and n > 20 else 1), "asks for a type"),
    "attribute": (lambda x, n: x * (2 if hasattr(n, "to_bytes") else 1), "its to_bytes"),
    "one length": (lambda x, n: x * 2 if n == 12 else x, "one length only"),
    "returned draw": (lambda x, n: x * random.random(), "side effects"),
}


@pytest.mark.parametrize(("use", "why"), REFUSED.values(), ids=REFUSED)
def test_length_converted_to_another_kind_of_value_is_refused(
    use: Callable[[Tensor, Any], Tensor], why: str
) -> None:
    before = random.getstate()
    with pytest.raises(NotForLengths, match=why):
        exported(use)
    assert random.getstate() == before


def test_stand_in_for_type_compares_and_hashes_equal_to_type() -> None:
    """Other threads meet the stand-in in the modules that the call uses."""

    def use(x: Tensor, n: Any) -> Tensor:
        assert type(Whole) == type and {type: 1}[type(Whole)] == 1  # noqa: E721
        return x * n

    exported(use, after_a_capture=True)


def test_module_that_tests_identity_with_type_is_refused_but_equality_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def use(x, n):\n    return x * (n if type(type) {} type else 2)\n"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "equals_type.py").write_text(text.format("=="))
    exported(importlib.import_module("equals_type").use, after_a_capture=True)
    (tmp_path / "is_type.py").write_text(text.format("is"))
    with pytest.raises(NotForLengths, match="use asks for a type"):
        exported(importlib.import_module("is_type").use, after_a_capture=True)


def test_branch_on_length_limits_export_to_lengths_on_same_side() -> None:
    found, loss, model = exported(lambda x, n: x * 2 if n > 20 else x * n)
    for length in (5, 20):
        args = (model, torch.empty(length, 4))
        graph = found.graph(loss, args, {}, model)
        assert difference(graph, capture(loss, args, grads="loss")) is None
    with pytest.raises(NotForLengths, match="branches"):
        found.graph(loss, (model, torch.empty(21, 4)), {}, model)


def test_comparison_of_length_returns_bool_and_becomes_guard() -> None:
    def use(x: Tensor, n: Any) -> Tensor:
        assert (n > 5) is True and (n == 4) is False
        return x * (3 + (n >= 12))

    found, loss, model = exported(use)
    args = (model, torch.empty(14, 4))
    graph = found.graph(loss, args, {}, model)
    assert difference(graph, capture(loss, args, grads="loss")) is None
    with pytest.raises(NotForLengths, match="branches"):
        found.graph(loss, (model, torch.empty(11, 4)), {}, model)


def test_argument_with_other_strides_or_dtype_does_not_fit_export() -> None:
    found, loss, model = exported(lambda x, n: x * n)
    with pytest.raises(NotForLengths, match="other strides"):
        found.graph(loss, (model, torch.empty(4, 9).T), {}, model)
    with pytest.raises(NotForLengths, match="another shape"):
        found.graph(loss, (model, torch.empty(9, 4, dtype=torch.float64)), {}, model)


def test_export_after_capture_refuses_program_that_asks_type_of_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "not there", None)  # marks an import that must fail
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        class Kind(type):
            pass

        class Own(metaclass=Kind):
            pass

        assert type(Own) is Kind and isinstance(Own, Kind) and not isinstance(Tensor, Kind)
        assert type("Made", (), {}).__module__ == __name__
        assert issubclass(type(x), Tensor) and isinstance(Tensor, type)
        return model(x).sum() * (2 if type(x.shape[seen[0]]) is int else 1)

    seen = [1]
    reads = capture(loss, (model, torch.empty(12, 4)), grads="loss").reads
    assert reads is not None
    for dim in (1, 0):
        seen[0] = dim
        exports = functools.partial(
            export_for_lengths,
            loss, (model, torch.empty(12, 4)), {},
            grads="loss", main=model, dims={(0, 0): 0}, ran=reads.ran,
        )  # fmt: skip
        if dim == 1:
            assert exports().guards is not None
        else:
            with pytest.raises(NotForLengths, match="asked for its type"):
                exports()
    assert "type" not in globals()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_failed_export_restores_patched_state(error: type[BaseException]) -> None:
    seen: list[Any] = []

    def stop(x: Tensor, n: Any) -> Tensor:
        x.sum()
        seen.append(n)
        raise error("stop")

    def now() -> list[Any]:
        return [builtins.isinstance, dict(vars(torch.SymInt)), dict(vars(SymNode))]

    exported(lambda x, n: x * n)  # torch adds state at its first export
    before = now()
    with pytest.raises(error, match="stop"):
        exported(stop)
    assert now() == before
    assert seen == [] and not is_capturing()


def test_program_that_stores_length_in_global_is_refused_and_undone() -> None:
    kept: dict[str, Any] = {}

    def store(x: Tensor, n: Any) -> Tensor:
        kept["length"] = n
        return x

    with pytest.raises(NotForLengths, match="side effects"):
        exported(store)
    assert kept == {}
