"""Pictures and reports.

`eg.plot` (`plot.py`) reads the numbers of anything that the library returns as NumPy arrays (`values.py`), chooses a
picture by their kind and shape, and draws it (`pictures.py`): arrays and Jacobians in colours, numbers in an order as
lines and bars, all as figures in our style (`style.py`), light or dark (`theme.py`). `eg.report` (`report.py`) computes
a derivative and its diagnosis, and lays them out with their pictures in the parts of a page (`page.py`), which becomes
one HTML file by the template `page.html`.
"""
