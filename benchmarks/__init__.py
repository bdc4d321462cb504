"""`make bench`: what a call costs, as a ratio against the framework's own way, measured in one run."""
