"""Search of placements; `dt.placements` is its file of that name."""

from dtensor.api.search import placements as placements
