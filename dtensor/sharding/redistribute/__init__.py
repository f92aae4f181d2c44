"""Redistribution from one spec to another; `dt.topologies` is its file of that name."""

from dtensor.sharding.redistribute import topologies as topologies
