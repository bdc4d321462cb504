"""The code that the tour shows and runs, for each framework."""
