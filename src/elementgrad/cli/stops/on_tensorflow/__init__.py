"""The answers of the tour on TensorFlow, a module for each chapter."""
