"""Places: a tensor, given itself or by name, and which of its elements.

`index.py` brings what the user writes between the brackets of `x[...]` into a normal form of ints, spans, `...` and
frozen arrays. `selection.py` resolves such an index against a shape, by NumPy's rules: a `Selection` keeps the
structure of the index, and knows the named elements, their positions, and the index in the form that a framework takes.
`place.py` has `Place`, which joins a tensor or a name with an index, and `eg.at`, which makes places. `grammar.py`
parses the text of a place, such as `conv1[0, 12, 5:9]`. `edit.py` has the edits of a live tensor's elements,
`eg.at(x)[i].set(v)` and the like, and `choose.py` the learned choice of an element.
"""
