"""The tour: questions about single elements, answered on two small models, in a terminal and as a page.

`cells/tour_<framework>.py` has the answers: one script in cells for each framework, which is read as a text.
`runner.py` has the questions and executes cells in order: imports and data, two models that are trained, then for each
question the usual answer and ours. `render.py` prints each answer when it is there, and writes all with their pictures
to one HTML file. `data.py` has what the models learn from, and `explorer.py` one of the models for `elementgrad
explore`.
"""
