"""Certify all or some of the library's rules, and write the table.

    python -m tests.certify                          # all; exit status 1 on a wrong one
    python -m tests.certify aten.mm.default          # one, in detail
    python -m tests.certify --sample 50 --seed 7     # 50 of them, chosen by the seed
    python -m tests.certify --table docs/certified.md

A registered rule without samples is a failure too. TORCH_CPP_LOG_LEVEL=ERROR silences torch's C++
warnings about empty shards.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from dtensor.api.model.stating.patterns import listing
from dtensor.api.rule import op_overloads
from dtensor.errors import PlanningError
from dtensor.sharding.rules import registered, rule_for
from dtensor.testing.oracle import call_of, run_global
from tests.certify.judge import certify_samples
from tests.certify.samples import SAMPLES, STAND_INS, Draw
from tests.certify.table import Row, table, without_samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.certify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("ops", nargs="*", metavar="op", help="names; none: every registered rule")
    parser.add_argument("--seed", type=int, default=0, help="of values, and of --sample")
    parser.add_argument("--sample", type=int, metavar="K", help="only K ops, chosen by the seed")
    parser.add_argument("--table", metavar="FILE", help="write the table there (all ops only)")
    given = parser.parse_args(arguments)
    if given.table and (given.ops or given.sample):
        parser.error("--table needs every op: leave out the names and --sample")
    try:
        named = sorted({name for op in given.ops for name in _named(op)})
    except PlanningError as error:
        parser.error(str(error))
    lacking = without_samples(SAMPLES)
    names = named or [name for name in registered() if name not in lacking]
    unknown = [name for name in names if name not in SAMPLES]
    if unknown:
        parser.error(f"no samples of {', '.join(unknown)}")
    if given.sample is not None:
        names = sorted(random.Random(given.seed).sample(names, min(given.sample, len(names))))
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows = [_row(name, given.seed, detailed=bool(named)) for name in names]
    if given.table:
        with open(given.table, "w", encoding="utf-8") as file:
            file.write(table(rows))
    found = [row.certificate for row in rows]
    wrong = sum(len(c.wrong) for c in found)
    print(
        f"{len(rows)} rules, {sum(c.checked for c in found)} strategies run: {wrong} wrong, "
        f"{sum(len(c.missing) for c in found)} missing, "
        f"{sum(len(c.refused) for c in found)} backward ops refused "
        f"({time.perf_counter() - start:.0f} s)"
    )
    if lacking and not named:
        print(f"{len(lacking)} rules have no samples: {listing(lacking)}")
    return 1 if wrong or (lacking and not named) else 0


def _named(op: str) -> list[str]:
    """Return full op names; of several overloads, those that have samples."""
    every = [str(overload) for overload in op_overloads(op)]
    return [name for name in every if name in SAMPLES] or every


def _row(name: str, seed: int, *, detailed: bool) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statistics of empty shards
        found = certify_samples(name, seed=seed)
        row = Row(op=name, rule=_rule_text(name, seed), certificate=found)
    counts = f"{found.checked:6} checked, {len(found.wrong)} wrong, {len(found.missing)} missing"
    print(f"{name:45} {counts}  {row.rule}", flush=True)
    if found.wrong or found.refused or detailed:
        for line in str(found).splitlines()[1:]:
            print(f"  {line}", flush=True)
    return row


def _rule_text(name: str, seed: int) -> str:
    (target,) = op_overloads(name)
    args, kwargs = SAMPLES[name][0](Draw(0, seed=seed))
    call, operands = call_of(STAND_INS.get(name, target), args, kwargs)
    call, _ = run_global(call, operands)
    return str(rule_for(replace(call, target=target)))


if __name__ == "__main__":
    sys.exit(main())
