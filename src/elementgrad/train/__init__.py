"""Training of named elements: patches (which elements changed, from what to what) and what they are checked by."""
"""The verb train: only the named elements, exactly."""
