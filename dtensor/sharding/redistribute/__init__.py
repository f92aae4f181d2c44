"""Redistribution of a value from one spec to another, and its price."""

from dtensor.sharding.redistribute import topologies as topologies
