"""The code that the tour shows and runs, one script for each framework."""
