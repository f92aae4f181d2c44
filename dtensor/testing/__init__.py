"""What users import to unit-test collectives, rules and placements."""

from dtensor.testing.collectives import assert_collectives, plan_of

__all__ = ["assert_collectives", "plan_of"]
