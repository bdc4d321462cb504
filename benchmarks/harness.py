"""Interleaved repeats, medians, ratios against a baseline, and the peak memory of one call."""

import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

SAMPLE, LONGEST = 0.02, 0.3  # seconds: shorter samples are noise, longer ones tell no more
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Row:
    """One comparison: our way against the baseline, and the bound we hold ourselves to."""

    name: str
    ours: Callable[[], object]
    baseline: Callable[[], object]
    baseline_name: str
    most: float | None = None
    """The largest ratio allowed."""
    most_over: float | None = None
    """The most microseconds allowed over the baseline."""
    most_mb: float | None = None
    """The most megabytes that our way may add to the memory of the process."""
    most_mb_over: float | None = None
    """The most megabytes that our way may add beyond what the baseline adds."""
    memory: Callable[[Callable[[], object]], float | None] | None = None
    """How the memory of a call is measured, if not as resident memory."""
    repeats: int | None = None
    """Fewer repeats, for what takes long."""


@dataclass
class Result:
    """The figures of one row; times in milliseconds, memory in megabytes."""

    name: str
    baseline: str
    ours_ms: float
    baseline_ms: float
    ratio: float
    again: float
    """The baseline against itself, measured as if it were a third candidate."""
    over_us: float
    ours_mb: float | None
    baseline_mb: float | None
    most: float | None
    most_over: float | None
    most_mb: float | None
    most_mb_over: float | None
    steady: bool = field(init=False)
    """Whether the times can be trusted; memory can be on a busy machine too."""
    holds: bool | None = field(init=False)

    def __post_init__(self) -> None:
        bounds = [self.ratio <= self.most] if self.most else []
        bounds += [self.over_us <= self.most_over] if self.most_over else []
        sizes = [self.ours_mb <= self.most_mb] if self.most_mb and self.ours_mb is not None else []
        if self.most_mb_over and self.ours_mb is not None and self.baseline_mb is not None:
            sizes.append(self.ours_mb - self.baseline_mb <= self.most_mb_over)
        self.steady = abs(self.again - 1) <= 0.05 or bool(sizes and not bounds)
        self.holds = all(bounds + sizes) if bounds + sizes else None

    @property
    def bound(self) -> str:
        """The bounds, for a person."""
        bounds = [f"<= {self.most:.3g}"] if self.most else []
        bounds += [f"+{self.most_over} us"] if self.most_over else []
        bounds += [f"{self.most_mb:.0f} MB"] if self.most_mb else []
        bounds += [f"+{self.most_mb_over} MB"] if self.most_mb_over else []
        return ", ".join(bounds)


def measure(row: Row, repeats: int) -> Result:
    """Time both ways and the baseline once more, in every order by turns, each sample at least `SAMPLE` long.

    One call of the slower way drives the other out of the caches, which no loop of that way alone would see: a sample
    of the faster lasts as long, up to `LONGEST`.
    """
    candidates = {"ours": row.ours, "baseline": row.baseline, "again": row.baseline}
    once = {name: _calls_per_sample(candidates[name], SAMPLE) for name in ("ours", "baseline")}
    lasting = max(_sample(candidates[name], count) * count for name, count in once.items())
    calls = {name: _calls_per_sample(candidates[name], min(lasting, LONGEST)) for name in once}
    calls["again"] = calls["baseline"]
    times: dict[str, list[float]] = {name: [] for name in candidates}
    orders = list(permutations(candidates))  # by turns, since one leaves memory warm or cold for the next
    for repeat in range(repeats):
        for name in orders[repeat % len(orders)]:
            times[name].append(_sample(candidates[name], calls[name]))
    ours, baseline, again = (statistics.median(times[name]) for name in candidates)
    memory = row.memory or peak_memory
    return Result(
        name=row.name,
        baseline=row.baseline_name,
        ours_ms=ours * 1e3,
        baseline_ms=baseline * 1e3,
        ratio=ours / baseline,
        again=again / baseline,
        over_us=(ours - baseline) * 1e6,
        ours_mb=memory(row.ours),
        baseline_mb=memory(row.baseline),
        most=row.most,
        most_over=row.most_over,
        most_mb=row.most_mb,
        most_mb_over=row.most_mb_over,
    )


def by_speed(candidates: Mapping[str, Callable[[], object]]) -> list[str]:
    """The names of several ways to one result, the fastest first, by the median of a few interleaved calls."""
    for function in candidates.values():
        function()
    times = [{name: _sample(function, 1) for name, function in candidates.items()} for _ in range(5)]
    return sorted(candidates, key=lambda name: statistics.median(time[name] for time in times))


def peak_memory(function: Callable[[], object]) -> float | None:
    """How far one call raises the resident memory of this process, in megabytes; None where Linux cannot say."""
    gc.collect()
    _give_back()
    try:
        CLEAR_REFS.write_text("5")  # start the high-water mark anew
    except OSError:
        return None
    before = _status("VmRSS")
    function()
    return max(0.0, (_status("VmHWM") - before) / 1024)


def resident_growth(function: Callable[[], object], calls: int, warm: int, seconds: float) -> float | None:
    """Return how many megabytes the process grows by in some calls that follow on `warm` others.

    The calls end after so many seconds of processor time, and then there are fewer of them.
    """
    if not STATUS.exists():
        return None
    for _ in range(warm):
        function()
    before = _settled()
    end = time.process_time() + seconds
    for _ in range(calls):
        function()
        if time.process_time() > end:
            break
    return max(0.0, (_settled() - before) / 1024)


def _settled() -> int:
    """Return the resident memory in kilobytes, without what is only waiting to be freed."""
    gc.collect()
    _give_back()
    return _status("VmRSS")


def report(results: list[Result], path: Path) -> None:
    """Print one table and write the same figures as JSON."""
    table = Table(title="elementgrad against the framework's own way")
    for column in (
        "row",
        "baseline",
        "ours ms",
        "baseline ms",
        "ratio",
        "bound",
        "over us",
        "A/A",
        "ours MB",
        "base MB",
        "",
    ):
        table.add_column(column, justify="left" if column in ("row", "baseline") else "right", overflow="fold")
    for result in results:
        verdict = "" if result.holds is None else "ok" if result.holds else "OVER"
        table.add_row(
            escape(result.name),
            escape(result.baseline),
            f"{result.ours_ms:.4g}",
            f"{result.baseline_ms:.4g}",
            f"{result.ratio:.3g}",
            result.bound,
            f"{result.over_us:+.1f}",
            f"{result.again:.2f}",
            "-" if result.ours_mb is None else f"{result.ours_mb:.0f}",
            "-" if result.baseline_mb is None else f"{result.baseline_mb:.0f}",
            verdict if result.steady else "noisy",
        )
    Console(width=max(140, Console().width)).print(table)
    path.write_text(json.dumps({"cores": os.cpu_count(), "rows": [asdict(result) for result in results]}, indent=1))


def run(rows: Iterable[Row], repeats: int) -> list[Result]:
    """Measure rows one after another; one with a bound whose A/A is off is measured again, with twice the repeats."""
    results = []
    for row in rows:
        count = min(repeats, row.repeats or repeats)
        result = measure(row, count)
        results.append(result if result.steady or result.holds is None else measure(row, 2 * count))
    return results


def _give_back() -> None:
    """Have the allocator return what is free, so that a later call does not reuse it unseen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return


def _calls_per_sample(function: Callable[[], object], lasting: float) -> int:
    function()
    calls = 1
    while (lasted := _sample(function, calls) * calls) < lasting:
        calls = max(calls + 1, int(calls * min(10.0, 1.2 * lasting / max(lasted, 1e-9))))
    return calls


def _sample(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])
