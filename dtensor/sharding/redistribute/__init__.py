from dtensor.sharding.redistribute import topologies as topologies
