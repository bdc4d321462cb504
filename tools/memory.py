"""`python tools/memory.py torch|keras|jax [verb ...]`: call each verb thousands of times, and print how memory grows.

A verb is called a few hundred times first, since caches fill then. The figures are those from there to the end:
resident memory, after free memory was given back, and objects of the garbage collector. The verbs are those of the
tests of isolation. A call that takes long is repeated for as long as `--seconds` says.
"""

import argparse
import ctypes
import gc
import importlib
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
MOST_BYTES, MOST_OBJECTS = 10**6, 250
"""Growth that counts as flat, in all: pages are not given back one by one, and a cache may still make a few objects."""


def resident() -> int:
    """Return the bytes of memory of this process, with what is free given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def count_objects() -> Counter[str]:
    """Count the objects of each type that there are."""
    return Counter(f"{type(x).__module__}.{type(x).__qualname__}" for x in gc.get_objects())


def main() -> bool:
    """Run the verbs, print a line for each, and return True if one of them grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["torch", "keras", "jax"])
    parser.add_argument("verbs", nargs="*")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60)
    parsed = parser.parse_args()
    module = importlib.import_module(f"tests.support.user_{parsed.framework}")
    grew = False
    for name in parsed.verbs or module.VERBS:
        user, call = module.User(), module.VERBS[name]
        for _ in range(min(300, parsed.calls // 10)):
            call(user)()
        before, objects, start, calls = resident(), count_objects(), time.monotonic(), 0
        while calls < parsed.calls and time.monotonic() - start < parsed.seconds:
            call(user)()
            calls += 1
        grown = count_objects() - objects
        size, count = resident() - before, sum(grown.values())
        flat = size <= MOST_BYTES and count <= MOST_OBJECTS
        grew |= not flat
        most = "" if flat else f"  {dict(grown.most_common(3))}"
        print(f"{name:30} {calls:6} calls {size / 1024:9.0f} kB {count:7} objects{most}", flush=True)
    return grew


if __name__ == "__main__":
    sys.exit(main())
