"""What the tour is made of: its questions, its data, the running of its code, and how that is shown."""
