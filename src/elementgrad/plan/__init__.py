"""Plan, then run: how many sweeps, in which direction, how many at once. Nothing here knows a framework."""
