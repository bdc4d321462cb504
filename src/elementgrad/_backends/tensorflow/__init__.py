"""The TensorFlow and Keras backend."""
