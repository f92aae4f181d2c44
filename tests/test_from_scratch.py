"""docs/from_scratch.md runs as written, prints the output that it shows, and makes true
statements."""

from __future__ import annotations

import ast
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages import DOCS, run_page

TEXT = (DOCS / "from_scratch.md").read_text()
FROM_TORCH_ALONE, WITH_DTENSOR = TEXT.split("\n## 10.")


@pytest.mark.slow
def test_from_scratch_page_prints_what_it_shows(tmp_path: Path) -> None:
    names = run_page("from_scratch", TEXT, tmp_path)

    # Section 4: with 65,536 rows "it would gather the weights and split the batch".
    resize(names, m=65536, d=1024, f=4096)
    free = names["choose"](names["start"], names["wanted"], {"m", "d", "f"})
    assert [s.value for s in free.values() if s.does == "all_gather"] == ["w1", "w2"]
    assert free["y", names["Shard"](0)].does == "product"

    assert list(free.values())[-1].does == "reduce_scatter"

    # Its code holds beyond what it runs: such a plan, which ends in collectives, on uneven shards.
    resize(names, m=7, d=5, f=6)
    tensors = {v: torch.randn(names["shapes"][v], dtype=torch.float64) for v in names["inputs"]}
    for value, op, operands in names["graph"]:
        tensors[value] = op.fn(*(tensors[operand] for operand in operands))
    for names["TP"] in (2, 3):
        results = names["execute"](free, tensors, seed=0)
        torch.testing.assert_close(results, [tensors[value] for value in names["wanted"]])


def resize(names: dict[str, Any], **sizes: int) -> None:
    """Give the factors of the page's MLP other sizes."""
    for value, factors in names["factors"].items():
        names["shapes"][value] = tuple(sizes[factor] for factor in factors)
        names["nbytes"][value] = 4 * prod(names["shapes"][value])
    names["sizes"].update(sizes)


def test_from_scratch_first_part_imports_only_torch_and_stdlib() -> None:
    for code in re.findall(r"```python\n(.*?)```", FROM_TORCH_ALONE, re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            assert {m.partition(".")[0] for m in modules} <= {"torch", *sys.stdlib_module_names}


def test_paths_named_in_page_exist_and_lines_fit_100_columns() -> None:
    package = DOCS.parent / "dtensor"
    named = re.findall(r"`(\w+(?:/\w+)+(?:\.py)?|\w+\.py|api)`", WITH_DTENSOR)
    assert len(named) >= 10
    assert [path for path in named if not (package / path).exists()] == []
    assert [line for line in TEXT.splitlines() if len(line) > 100] == []
