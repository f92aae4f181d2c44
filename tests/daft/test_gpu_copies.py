"""Tests that inputs reach a GPU, and results the host, without a wait of the host in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft.run.input_copies import InputCopies
from dtensor.testing.gpus.guard import CompilerMissing, install

try:
    install()
except CompilerMissing as error:
    pytest.skip(str(error), allow_module_level=True)

CUDA = torch.device("cuda")


@pytest.mark.parametrize("num_queues", [1, 32])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_are_copied_without_wait_and_may_change_at_once(seed: int, num_queues: int) -> None:
    """Small, large, strided and empty inputs of several runs, whose copies overlap."""

    def inputs(run: int) -> dict[str, Tensor]:
        return {
            "number": torch.tensor(run),
            "half": torch.tensor(0.5 * run, dtype=torch.bfloat16),
            "mask": torch.tensor([True, False, run > 1]),
            "strided": torch.arange(20_000.0).view(2, -1).t() + run,
            "small": torch.arange(6.0).view(2, 3).t() * run,
            "empty": torch.zeros(0, 4),
        }

    with dt.testing.simulated_gpus(seed=seed, num_queues=num_queues) as gpus:
        copies, results = InputCopies(CUDA), list[dict[str, Tensor]]()
        for run in range(3):
            values = inputs(run)
            on_gpu = copies.of({0: values, 1: {"plain": 3}})
            results.append({name: x.clone() for (_, name), x in on_gpu.items()})
            del on_gpu
            for value in values.values():
                value.zero_()
        assert not gpus.report().host_waits
        for run, found in enumerate(results):
            for name, value in inputs(run).items():
                assert torch.equal(found[name].cpu(), value), name
        assert not gpus.report().races and not gpus.report().early_frees
