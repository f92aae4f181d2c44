"""Errors that are the user's to mend, raised while planning, before any actor starts."""


class PlanningError(ValueError):
    """The program, its placements or its arguments cannot be planned as stated."""
