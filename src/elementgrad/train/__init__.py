"""The verb train: only the named elements, exactly."""
