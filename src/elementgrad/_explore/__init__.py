"""The explorer: click an element of a model's tensor, and see what drives it.

A `Session` (`session.py`) holds a model with its arguments and answers messages, one at a time. It keeps no state of a
page: a message says which element is asked about and which input elements are edited, so that two pages do not disturb
each other. All numbers come from the public verbs (`eg.names`, `eg.value`, `eg.grad`, ...), by way of `tensors.py`,
which keeps them for a while. `walk.py` follows them from layer to layer, and `views.py` lays them out as tiles of
cells, reduced where there are too many. `messages.py` checks what a page sends before anything is done.

One front end (`page.js`, a single ES module, with `page.css`) has two hosts: `widget.py` in a notebook, and `server.py`
on the loopback interface, which puts both files and the names into the one page `page.html`. Both read on the one
thread of a `Worker` (`worker.py`). `spelling.py` has the words of the user's code for code that is copied. `api.py` has
`eg.explore`.
"""
