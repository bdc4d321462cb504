"""What TensorFlow tells of a run, so that somebody can say where a derivative was lost."""
