"""The TensorFlow and Keras backend.

A function is evaluated once on a persistent tape, which all sweeps use; sweeps over stacks of seeds are traced from it
into programs. What the function writes to variables is saved by patches of their methods, and restored. Layers of Keras
are captured by patches of their classes' `__call__` and `call` while a capture is open. Compiled functions run as the
Python that they were written in meanwhile.

`graph_ops.py` runs operations again on other tensors, and `distributed.py` has variables under a `tf.distribute`
strategy.
"""
