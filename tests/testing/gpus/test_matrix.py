"""A few cases of the matrix, and of the mutations, under one seed each: `make gpus` has all."""

from __future__ import annotations

import pytest

from dtensor.testing.gpus.guard import CompilerMissing, install
from tests.testing.gpus.cases import cases
from tests.testing.gpus.matrix import check, without_kernels
from tests.testing.gpus.mutations import WIRE, Mutation, found, implied, mutations

try:
    install()
except CompilerMissing as error:
    pytest.skip(str(error), allow_module_level=True)

CASES = {case.name: case for case in cases()}
FEW = [
    "train dp2_tp2",
    "schedule GPipe, p=2",
    "schedule LoopedBFS, p=2",
    "schedule DualPipeV, p=2",
    "zero 3",
    "bad data",
    "eager",
    "transfer between meshes",
    "grouped product, by expert",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_case(name: str) -> None:
    with without_kernels():
        seen = check(CASES[name], [FEW.index(name)])
    assert (seen.races, seen.early_frees) == (0, 0)


MUTATIONS = [each for each in mutations() if each.file in {*WIRE, "transport.py"}]
"""`make gpus` makes those of workers, checkpoints and undone runs too."""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation(mutation: Mutation) -> None:
    assert implied(mutation) or found(mutation, range(1))
