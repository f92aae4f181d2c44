from dtensor.api.search import placements as placements
