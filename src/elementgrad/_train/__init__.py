"""Training of named elements, and patches: what was trained, as a value and as a file."""
