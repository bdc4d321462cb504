"""Elements of Keras models that train."""
