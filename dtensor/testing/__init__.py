"""Functions that users call in unit tests of collectives, rules and placements."""

from dtensor.api.eager.policy import eager_collectives
from dtensor.testing import strategies
from dtensor.testing.certificates import Certificate, certify
from dtensor.testing.collectives import assert_collectives, plan_of
from dtensor.testing.gpus import GpuReport, simulated_gpus
from dtensor.testing.same import Same, assert_same

__all__ = [
    "Certificate",
    "GpuReport",
    "Same",
    "assert_collectives",
    "assert_same",
    "certify",
    "eager_collectives",
    "plan_of",
    "simulated_gpus",
    "strategies",
]
