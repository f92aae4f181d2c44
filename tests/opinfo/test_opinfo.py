"""A fixed sample of the OpInfo run for CI, and checks that the run detects errors.

`make opinfo` runs all entries.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dtensor.sharding.rules import pattern, registry
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.testing import execute
from tests.opinfo import judge as judging
from tests.opinfo.entries import MESH, entries, name_of, placements
from tests.opinfo.judge import judge, ran_split
from tests.opinfo.record import Record
from tests.opinfo.table import crashed, numbers, summary

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo


@functools.cache
def entry(name: str) -> OpInfo:
    (found,) = (e for e in entries() if name_of(e) == name)
    return found


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer placements than the full run, and no time limit."""
    monkeypatch.setattr(judging, "PER_OP", 12)
    monkeypatch.setattr(judging, "SAMPLES", 3)
    monkeypatch.setattr(judging, "SECONDS", 1500)


SAMPLED = (
    ("even", "matmul"),
    ("uneven", "addmm"),
    ("uneven", "softmax"),
    ("even", "nn.functional.layer_norm"),
    ("uneven", "cat"),
    ("even", "view"),
    ("uneven", "expand"),
    ("even", "var"),
    ("uneven", "cumsum"),
    ("even", "gather"),
    ("uneven", "index_put"),
    ("even", "nn.functional.conv2d"),
    ("uneven", "nn.functional.avg_pool2d"),
    ("even", "nn.functional.embedding"),
    ("uneven", "nn.functional.cross_entropy"),
    ("even", "sort"),
    ("uneven", "linalg.cholesky"),
    ("even", "fft.rfft"),
    # PyTorch's own DTensor divides their gradients by the number of local elements, or writes at
    # local places
    ("even", "nn.functional.mse_loss"),
    ("uneven", "nn.functional.huber_loss"),
    ("even", "nn.functional.smooth_l1_loss"),
    ("uneven", "nn.functional.soft_margin_loss"),
    ("even", "nn.functional.binary_cross_entropy"),
    ("uneven", "nn.functional.binary_cross_entropy_with_logits"),
    ("uneven", "scatter"),
    ("even", "scatter_add"),
    ("uneven", "index_add"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SAMPLED)
def test_opinfo_entry_is_right_under_its_placements(kind: str, name: str) -> None:
    record = judge(entry(name), kind)
    assert not record.wrong, record.wrong
    assert record.passes, record.errors
    assert record.forward["right"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rand_like", "random"),
        ("arange", "no tensor input: nothing to place"),
        ("empty_like", "its values are not defined: uninitialised memory"),
        ("bitwise_and", "takes no float32"),
        ("nonzero", "its result's shape or a branch depends on data"),
    ],
)
def test_opinfo_entry_is_not_counted_with_reason(name: str, reason: str) -> None:
    record = judge(entry(name), "even")
    assert (record.verdict, record.note) == ("not counted", reason)


@pytest.mark.slow
def test_opinfo_run_finds_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the planted rule, a cumulative sum over part of a dim ignores the earlier parts."""
    monkeypatch.setitem(registry._BUILDERS, "aten.cumsum.default", pattern("... -> ..."))
    record = judge(entry("cumsum"), "even")
    assert record.verdict == "wrong"
    assert all("(S" in line for line in record.wrong)


def test_opinfo_run_finds_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the planted rule, the backward of a mean divides by the number of local elements."""
    wrong = pattern(", ..., ... -> ...", linear=((0,),))
    monkeypatch.setitem(registry._BUILDERS, "aten.mse_loss_backward.default", wrong)
    record = judge(entry("nn.functional.mse_loss"), "even")
    assert record.verdict == "wrong"
    assert set(record.forward) == {"right"}
    assert record.gradient["wrong"] > 0


def test_opinfo_run_reports_missing_rule_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._BUILDERS, "aten.mm.default")
    record = judge(entry("mm"), "even")
    assert record.verdict == "refused"
    assert "aten.mm.default" in record.errors[0]


class FourRanks:
    """The interface of a mesh that DTensorConverter uses."""

    def size(self) -> int:
        return 4


def test_opinfo_placements_equal_those_of_torch_dtensor_tests() -> None:
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter

    leaves = (torch.randn(8, 4), torch.randn(4, 1, 6), torch.ones(8, dtype=torch.bool))
    converter = DTensorConverter(FourRanks(), leaves, {})  # type: ignore[arg-type]
    theirs = {
        tuple(Shard(p.dim) if p.is_shard() else REPLICATE for p in option)  # type: ignore
        for option in itertools.product(
            *(converter.gen_sharding_choices_for_arg(x) for x in leaves)
        )
    }
    ours = placements(leaves, even=True, limit=100)
    assert set(ours) | {(REPLICATE,) * 3} == theirs
    assert len(set(ours)) == len(ours)


def test_ran_split_is_true_only_if_op_ran_on_shard() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.t().exp()

    traced = execute.trace(total, (torch.randn(8, 4),))
    split = execute.planned(traced, MESH, [{"x": Shard(0)}]).plan
    whole = execute.planned(traced, MESH, [{"x": REPLICATE}]).plan
    assert (ran_split(split), ran_split(whole)) == (True, False)


def test_opinfo_records_survive_json() -> None:
    record = judge(entry("mul"), "even")
    again = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert again == record
    figures = numbers([record, crashed("dead"), Record(name="random", note="random")])
    assert (figures["counted"], figures["forward"], figures["wrong"]) == (2, 1, 0)
    assert "| 50.0% |" in summary({"even": [record, crashed("dead")]})


def test_committed_coverage_table_has_no_wrong_results() -> None:
    text = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| wrong numbers |"))
    assert line.split("|")[2:4] == [" 0 ", " 0 "]
