"""Kernels whose offsets are computed in 32 bits, one at a time.

    for what, source in mutants(norms):       # "norms.py:150 26: row = ...", the module's text
        with loaded(norms, source) as module:
            ...                               # what does not fail with it would not find the fault

A mutant has a 32-bit factor where the source has a 64-bit one, or lacks a cast to 64 bits. Used by
large.py, in Triton's interpreter, and by widths.py, which compiles.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

CASTS = r"\.to\(tl\.int64\)"
FACTORS = r"\b(row|part|i0|i1|i2)(?= \* )|group\[:, None\](?= \* GROUP)"
VALUES = ("target = tl.load(TARGET + row).to(tl.int64)", "keep = words.to(tl.int64) >= drop")
"""Lines whose casts are of values, not of offsets."""
NO_NEED = {
    "tl.store(PARTS + part * length + c, dweight, mask=inside)": "at most 512 rows of 16,384",
    "LOGITS + (group[:, None] * GROUP + e),": "a column of a row, at most launches.MAX_COLUMNS",
    "at = group[:, None] * GROUP + e": "the same",
}
"""Products that 32 bits hold, by the line: mutants there live."""


def mutants(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(where and what was changed, the source)."""
    assert module.__file__ is not None
    path = Path(module.__file__)
    source = path.read_text()
    for match in re.finditer(f"{CASTS}|{FACTORS}", source):
        begin = source.rfind("\n", 0, match.start()) + 1
        line = source[begin : source.find("\n", match.end())].strip()
        if line in VALUES or "@triton.jit" not in source[: match.start()]:
            continue
        made = "" if match[0].startswith(".") else f"{match[0]}.to(tl.int32)"
        number = source.count("\n", 0, match.start()) + 1
        what = f"{path.name}:{number} {match.start() - begin}: {line}"
        yield what, source[: match.start()] + made + source[match.end() :]


@contextmanager
def loaded(module: ModuleType, source: str) -> Iterator[ModuleType]:
    """The module made of another source; Triton reads it from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{module.__name__.rpartition('.')[2]}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"mutated_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        yield made


def report(module: ModuleType, failure: Callable[[ModuleType], str]) -> tuple[int, int, int]:
    """(mutants, those of no need, those not found); ``failure``: what is wrong with a module, or
    nothing."""
    count = kept = lived = 0
    for what, source in mutants(module):
        with loaded(module, source) as made:
            found = failure(made)
        reason = "" if found else NO_NEED.get(what.partition(": ")[2], "")
        count, kept, lived = count + 1, kept + bool(reason), lived + (not found and not reason)
        print(f"{what}\n    {found[:160] or reason or 'NOT FOUND'}", flush=True)
    return count, kept, lived
