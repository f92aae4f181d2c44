"""Fixtures of the command line tests: a small configuration, and a function that runs a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dtensor.__main__ import main

GPT2 = dict(
    model_type="gpt2", n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=96,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
MLP = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


def loss_fn(model, x):
    return model(x).square().mean()


def make(width=16):
    return MLP(width), loss_fn, torch.randn(8, width)


def reads_a_value():
    return MLP(torch.tensor(16).item()), loss_fn, torch.randn(8, 16)


def broken():
    return MLP(16).no_such(), loss_fn, torch.randn(8, 16)
"""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a command in a folder with tiny/config.json and mlp.py."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "mlp.py").write_text(MLP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dtensor"])

    def run(line: str) -> Ran:
        try:
            status = main(line.split())
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return Ran(status, *capsys.readouterr())

    return run
