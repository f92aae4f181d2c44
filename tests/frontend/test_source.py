"""Tests which source line a captured op, an eager warning and an error name: the user's own line,
or the line of an installed model that runs; never a line inside a library function.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.extras import missing

pytest.importorskip("einops", reason=missing("einops"))

from einops import rearrange
from einops.layers.torch import EinMix, Rearrange

import dtensor as dt
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.source import Source

TP2 = dt.Mesh(tp=2)
ROOT = Path(__file__).resolve().parent.parent.parent


def texts(fn: Callable[..., Any], *args: Any, grads: Any = "none") -> set[str]:
    """Return the source lines of the ops of a captured call."""
    graph = capture(fn, args or (torch.randn(4, 6),), grads=grads)
    return {n.meta["source"].text for n in graph.nodes if n.meta["source"] is not None}


def sources(fn: Callable[..., Any], *args: Any) -> list[Source]:
    return [n.meta["source"] for n in capture(fn, args, grads="none").nodes]


# -- the user's own code --------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    h = rearrange(x, "b (h d) -> b h d", h=2)
    return rearrange(h.sin(), "b h d -> h b d")


def test_op_inside_library_call_has_line_of_calling_function() -> None:
    assert texts(heads) == {
        'h = rearrange(x, "b (h d) -> b h d", h=2)',
        'return rearrange(h.sin(), "b h d -> h b d")',
    }
    graph = capture(heads, (torch.randn(4, 6),), grads="none")
    assert graph.nodes[0].name == "h"  # named after the assigned variable, as a view would be


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.split = nn.Sequential(Rearrange("b (h d) -> b h d", h=2), nn.Flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(self.proj(x), "b (h d) -> b (d h)", h=3)
        return self.split(x)


def test_library_layer_without_parameters_has_line_of_calling_module() -> None:
    """einops' Rearrange has neither parameters nor submodules, so it is treated as an op."""
    lines = {
        'x = rearrange(self.proj(x), "b (h d) -> b (d h)", h=3)',
        "return self.split(x)",
    }
    assert texts(Heads()) == lines
    loss: Any = lambda model, x: model(x).sin().sum()  # noqa: E731
    assert texts(loss, Heads(), torch.randn(4, 6), grads="loss") == lines | {
        "loss: Any = lambda model, x: model(x).sin().sum()  # noqa: E731"
    }


def test_op_in_lambda_has_file_and_function_of_lambda() -> None:
    for source in sources(lambda x: rearrange(x, "a b -> b a") * 2, torch.randn(2, 3)):
        assert (source.file, source.function) == (__file__, "<lambda>")


@pytest.mark.parametrize("name", ["<ipython-input-1-5e1f>", "<stdin>", "<string>"])
def test_op_in_ipython_cell_has_line_of_cell(name: str) -> None:
    """IPython keeps the text of a cell in linecache, as tracebacks expect."""
    cell = 'def fn(x):\n    return rearrange(x, "a b -> b a").exp()\n'
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__", "rearrange": rearrange}
    try:
        exec(compile(cell, name, "exec"), space)
        for source in sources(space["fn"], torch.randn(2, 3)):
            assert (source.file, source.line, source.function) == (name, 2, "fn")
            assert source.text == 'return rearrange(x, "a b -> b a").exp()'
    finally:
        del linecache.cache[name]


def test_op_in_generated_code_has_line_of_its_caller() -> None:
    space: dict[str, Any] = {"__name__": "generated"}
    exec(compile("def fn(f, x):\n    return f(x)\n", "<made by a library>", "exec"), space)

    def caller(x: Tensor) -> Tensor:
        return space["fn"](torch.sin, x)

    assert texts(caller) == {'return space["fn"](torch.sin, x)'}


@pytest.mark.slow
def test_op_in_python_c_program_has_line_of_string() -> None:
    code = """
import torch, warnings, dtensor as dt
from einops import rearrange
from dtensor.frontend.capture.capture import capture
def fn(x):
    return rearrange(x, "a b -> b a")
print(capture(fn, (torch.randn(2, 3),), grads="none").nodes[0].meta["source"])
x = dt.distribute(torch.randn(4, 6), dt.Mesh(tp=2), tp=dt.Row())
with warnings.catch_warnings(record=True) as seen:
    rearrange(x, "a b -> (a b)").cumsum(0)
print(seen[0].filename, seen[0].lineno)"""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout.split() == ["<string>:6", "<string>", "10"], done.stderr


# -- installed models ------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """Return an installed library with a model, a layer and a function."""
    text = """
import torch
from torch import nn
from einops import rearrange

def twice(x):
    return x * 2

def decide(x):
    return x if x.sum() > 0 else -x

def pick(x):
    return x[x > 0]

def total(x):
    return x.cumsum(0)

def mixed(x):
    return x + torch.ones(4, 6)

class Block(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.inner = inner
    def forward(self, x):
        x = twice(rearrange(self.proj(x), "b (h d) -> b (d h)", h=2))
        return x if self.inner is None else self.inner(x)

class Plain(nn.Module):
    def forward(self, x):
        return twice(x)

class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
    def forward(self, x):
        x = x + self.weight
        return x if x.sum() > 0 else -x
"""
    file = tmp_path / "site-packages" / "modelling" / "blocks.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("modelling_blocks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BLOCK = {'x = twice(rearrange(self.proj(x), "b (h d) -> b (d h)", h=2))', "return x * 2"}


def test_ops_of_installed_model_have_lines_of_its_library(library: ModuleType) -> None:
    """Lines of other libraries that the model calls (einops) are not used."""
    assert texts(lambda model, x: model(x), library.Block(), torch.randn(4, 6)) == BLOCK
    assert texts(library.Block()) == BLOCK


def test_library_function_called_outside_its_model_has_line_of_caller(library: ModuleType) -> None:
    def fn(x: Tensor) -> Tensor:
        x = library.twice(x)
        return library.Plain()(x)

    assert texts(fn) == {"x = library.twice(x)", "return library.Plain()(x)"}


def test_user_module_inside_installed_model_has_its_own_lines(library: ModuleType) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return library.twice(x.sin())

    assert texts(library.Block(Own())) == BLOCK | {"return library.twice(x.sin())"}
    assert texts(library.Block(library.Block())) == BLOCK


def test_library_layer_with_weights_has_lines_of_library() -> None:
    lines = texts(lambda layer, x: layer(x), EinMix("b i -> b o", weight_shape="i o", i=6, o=3),
                  torch.randn(4, 6))  # fmt: skip
    assert len(lines) == 1 and "einsum" in lines.pop()


def test_standard_library_frames_are_skipped() -> None:
    @contextlib.contextmanager
    def nothing() -> Iterator[None]:
        yield

    def fn(x: Tensor) -> Tensor:
        return nothing()(torch.sin)(x)  # runs in contextlib.py

    assert texts(fn) == {"return nothing()(torch.sin)(x)  # runs in contextlib.py"}
    assert texts(nothing()(torch.sin)) == set()


def test_op_without_user_line_has_library_line(library: ModuleType) -> None:
    assert texts(library.twice) == {"return x * 2"}


def test_ops_of_hugging_face_model_have_lines_of_transformers() -> None:
    pytest.importorskip("transformers", reason=missing("transformers"))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ids = torch.zeros(1, 4, dtype=torch.int64)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return rearrange(logits, "b t v -> (b t) v").logsumexp(-1).sum()

    graph = capture(loss, (LlamaForCausalLM(config), ids), grads="loss")
    found = {n.meta["source"] for n in graph.nodes if n.meta["source"] is not None}
    files = {os.path.basename(source.file) for source in found}
    assert {"modeling_llama.py", "sdpa_attention.py", "test_source.py"} <= files
    assert not any("einops" in source.file for source in found)
    assert {s.function for s in found if s.file == __file__} == {"loss"}


# -- errors and eager ops --------------------------------------------------------------------------


def test_planning_error_inside_library_names_caller_line(library: ModuleType) -> None:
    def told(x: Tensor) -> Tensor:
        return library.decide(x)

    def asked(x: Tensor) -> Tensor:
        return library.pick(x)

    for fn, line in ((told, "return library.decide"), (asked, "return library.pick")):
        with pytest.raises(dt.PlanningError, match=rf"test_source.py:\d+: {line}"):
            capture(fn, (torch.randn(2),), grads="none")
    with pytest.raises(dt.PlanningError, match=r"blocks.py:\d+: return x if x.sum"):
        capture(library.Decides(), (torch.randn(2, 6),), grads="none")


def test_eager_warning_inside_library_names_caller_line(library: ModuleType) -> None:
    x = dt.distribute(torch.randn(4, 6), TP2, tp=dt.Row())
    with pytest.warns(UserWarning, match="implicit redistribution") as seen:
        rearrange(x, "a b -> (a b)").cumsum(0)
        library.total(x)
    assert {w.filename for w in seen} == {__file__} and len(seen) == 2
    with pytest.raises(dt.PlanningError, match=r"test_source.py:\d+: library.mixed\(x\)"):
        library.mixed(x)
    model = library.Decides()
    with pytest.raises(dt.PlanningError, match=r"blocks.py:\d+: x = x \+ self.weight"):
        model(x)
