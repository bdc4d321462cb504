"""The figures that docs/costs.md states, held against measured ones.

The page has tables whose last column is headed "at most". Each of their rows names a row of a suite, what it is
measured against, and the largest ratio; `make bench` fails if a steady row that it has measured is above that.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import Result

COSTS = Path(__file__).parents[1] / "docs" / "costs.md"
ROW = re.compile(r"^\| (?P<name>.+?) \| (?P<baseline>.+?) \| (?P<most>[\d.]+) \|$", re.MULTILINE)


def stated_ratios(page: str) -> dict[tuple[str, str], float]:
    """Return the largest ratio that a page states for each row and baseline."""
    tables = [table for table in page.split("\n\n") if table.partition("\n")[0].rstrip().endswith("| at most |")]
    rows = [row for table in tables for row in ROW.finditer(table)]
    return {(row["name"], row["baseline"]): float(row["most"]) for row in rows}


def contradictions(results: Iterable[Result], page: str) -> list[str]:
    """Return a line for each measured row that is above what the page states."""
    stated = stated_ratios(page)
    return [
        f"{result.name}: docs/costs.md says at most {stated[key]:g} of {result.baseline}, measured {result.ratio:.3g}"
        for result in results
        if (key := (result.name, result.baseline)) in stated and result.steady and result.ratio > stated[key]
    ]
