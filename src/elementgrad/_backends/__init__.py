"""One package per framework, found by the type of the tensor given, among the frameworks already imported."""
