"""Training single elements of a Keras model.

The leaf of a group of elements is a Keras variable, a vector. While it trains, a write to it, as by an optimizer, also
writes its values into the model's variable, and a write to the model's variable updates the leaf (parameter.py): both
have a class of their own until the elements are released. On each replica of a `tf.distribute` strategy the copies are
kept current one by one.

A read of the variable is an identity whose gradient goes on to the leaves. Keras's own layers that are linear in their
kernel skip the dense gradient: they have a class of their own as well (trainer.py), which computes the entries of the
elements alone (kernels.py). The leaves are among the `trainable_variables` of the model, so `model.fit` moves them. All
other variables are frozen.
"""
