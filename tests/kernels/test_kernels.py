"""Tests Triton kernels: without a GPU, their values in the interpreter and their machine code;
with a GPU, their values there.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "counted"),
    [(["sweep", "--quick"], ": cases "), (["moved"], ": launches ")],
    ids=["numbers in the interpreter", "bytes moved are those that are stated"],
)
def test_triton_kernels_pass_in_interpreter(command: list[str], counted: str) -> None:
    """Runs in a separate process, because an access out of bounds would end it."""
    module, *options = command
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}", *options],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(counted) == {"sweep": 16, "moved": 14}[module], done.stdout


@pytest.mark.slow
def test_triton_kernels_compile_to_expected_sm_90_code() -> None:
    """Other architectures: python -m benchmarks.kernels --aot."""
    from tests.kernels import ahead

    table = list(ahead.rows(["sm_90"], ["aligned", "odd"]))
    assert {row[0] for row in table} == {*ahead.LEAST, "sum of partial results"}
    assert {row[1] for row in table} == {"aligned", "odd"}


@pytest.mark.gpu
def test_triton_kernels_match_reference_on_gpu(request: pytest.FixtureRequest) -> None:
    """On a simulated GPU only float32 is tested: its interpreter truncates bfloat16 instead of
    rounding."""
    from tests.kernels.cases import cases

    failed: list[str] = []
    full = not request.config.getoption("simulated_gpus")
    for case in cases(torch.device("cuda"), full=full):
        try:
            case.check()
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join(failed)


class Block(nn.Module):
    """A norm, a gate, dropout and a residual, as programs write them out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down, self.head = nn.Linear(96, 64, bias=False), nn.Linear(64, 50, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        y = self.down(F.silu(self.gate(n)) * self.up(n))
        return F.cross_entropy(self.head(F.dropout(y, 0.1) + x), target)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_losses_with_and_without_kernels_agree(device: str) -> None:
    """On a CPU, which has no kernels, the losses are equal."""
    mesh = dt.Mesh(tp=2)
    row, column = {"tp": dt.Row()}, {"tp": dt.Column()}
    placed = {"gate.weight": row, "up.weight": row, "down.weight": column, "head.weight": row}
    x, target = torch.randn(40, 64), torch.randint(50, (40,))
    losses: list[list[float]] = []
    for chosen in (True, False):
        with ExitStack() as stack:
            for name in () if chosen else ("rms_norm", "gated", "dropout_add", "ce_stats"):
                stack.enter_context(dt.kernel(f"dt::{name}", device).using(None))
            torch.manual_seed(0)
            dt.manual_seed(0)
            model = dt.parallelize(Block(), mesh, placed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step = dt.train_step(model, lambda m, x, t: m(x, t), optimizer)
            stack.enter_context(dt.launch(mesh, device=device))
            losses.append([float(step(x, target)) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if device == "cuda" else 0)
    assert losses[0][-1] < losses[0][0]
