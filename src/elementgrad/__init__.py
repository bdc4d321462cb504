"""Gradients, one element at a time: read, explain, edit and train single elements of any tensor.

Importing elementgrad imports no framework: public names are resolved when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elementgrad._audit.api import audit as audit
    from elementgrad._audit.result import Audit as Audit
    from elementgrad._audit.result import Finding as Finding
    from elementgrad._explain.api import explain as explain
    from elementgrad._explain.check import Check as Check
    from elementgrad._explain.check import check as check
    from elementgrad._explain.diagnosis import Diagnosis as Diagnosis
    from elementgrad._explore.api import explore as explore
    from elementgrad._explore.server import Explorer as Explorer
    from elementgrad._names.names import names as names
    from elementgrad._names.tag import tag as tag
    from elementgrad._place.choose import choose as choose
    from elementgrad._place.place import Place as Place
    from elementgrad._place.place import at as at
    from elementgrad._place.selection import Selection as Selection
    from elementgrad._read.api import grad as grad
    from elementgrad._read.api import hessian as hessian
    from elementgrad._read.api import jacobian as jacobian
    from elementgrad._read.api import value as value
    from elementgrad._read.blocks import Blocks as Blocks
    from elementgrad._read.contributions import Share as Share
    from elementgrad._read.contributions import Shares as Shares
    from elementgrad._read.contributions import contributions as contributions
    from elementgrad._read.field import field as field
    from elementgrad._read.jacobian import Jacobian as Jacobian
    from elementgrad._read.plan import Block as Block
    from elementgrad._read.plan import Plan as Plan
    from elementgrad._read.record import Recording as Recording
    from elementgrad._read.record import record as record
    from elementgrad._read.sparse import Prepared as Prepared
    from elementgrad._show.plot import plot as plot
    from elementgrad._show.report import report as report
    from elementgrad._sparsity.pattern import Pattern as Pattern
    from elementgrad._train.api import apply as apply
    from elementgrad._train.api import patches as patches
    from elementgrad._train.api import trainable as trainable
    from elementgrad._train.diff import diff as diff
    from elementgrad._train.elements import Elements as Elements
    from elementgrad._train.elements import Uses as Uses
    from elementgrad._train.patch import Conflicts as Conflicts
    from elementgrad._train.patch import Patch as Patch
    from elementgrad._train.patch import inspect as inspect
    from elementgrad._train.patch import merge as merge
    from elementgrad._train.top import top as top
    from elementgrad._watch.api import Watch as Watch
    from elementgrad._watch.api import WatchReplay as WatchReplay
    from elementgrad._watch.api import watch as watch
    from elementgrad.errors import BatchError as BatchError
    from elementgrad.errors import BroadcastError as BroadcastError
    from elementgrad.errors import DtypeError as DtypeError
    from elementgrad.errors import DuplicateError as DuplicateError
    from elementgrad.errors import ElementgradError as ElementgradError
    from elementgrad.errors import ElementgradWarning as ElementgradWarning
    from elementgrad.errors import FrameworkError as FrameworkError
    from elementgrad.errors import OptionError as OptionError
    from elementgrad.errors import ParseError as ParseError
    from elementgrad.errors import PatchError as PatchError
    from elementgrad.errors import PatternError as PatternError
    from elementgrad.errors import PlaceError as PlaceError
    from elementgrad.errors import SelectionError as SelectionError
    from elementgrad.errors import SizeError as SizeError
    from elementgrad.errors import TracedError as TracedError
    from elementgrad.errors import UnconnectedError as UnconnectedError
    from elementgrad.errors import WatchError as WatchError
    from elementgrad.errors import WorkerError as WorkerError

__version__ = "0.2.0"

_MODULES = {
    name: module
    for module, names in {
        "_place.choose": ("choose",),
        "_audit.api": ("audit",),
        "_audit.result": ("Audit", "Finding"),
        "_explain.api": ("explain",),
        "_explain.check": ("check", "Check"),
        "_explain.diagnosis": ("Diagnosis",),
        "_explore.api": ("explore",),
        "_explore.server": ("Explorer",),
        "_names.names": ("names",),
        "_names.tag": ("tag",),
        "_place.place": ("at", "Place"),
        "_place.selection": ("Selection",),
        "_read.api": ("grad", "hessian", "jacobian", "value"),
        "_read.blocks": ("Blocks",),
        "_read.contributions": ("contributions", "Share", "Shares"),
        "_read.field": ("field",),
        "_read.jacobian": ("Jacobian",),
        "_read.plan": ("Block", "Plan"),
        "_read.record": ("record", "Recording"),
        "_read.sparse": ("Prepared",),
        "_show.plot": ("plot",),
        "_show.report": ("report",),
        "_sparsity.pattern": ("Pattern",),
        "_train.api": ("trainable", "apply", "patches"),
        "_train.diff": ("diff",),
        "_train.elements": ("Elements", "Uses"),
        "_train.patch": ("inspect", "merge", "Patch", "Conflicts"),
        "_train.top": ("top",),
        "_watch.api": ("watch", "Watch", "WatchReplay"),
        "errors": (
            "ElementgradError",
            "ElementgradWarning",
            "BatchError",
            "BroadcastError",
            "DtypeError",
            "DuplicateError",
            "FrameworkError",
            "OptionError",
            "ParseError",
            "PatchError",
            "PatternError",
            "PlaceError",
            "SelectionError",
            "SizeError",
            "TracedError",
            "UnconnectedError",
            "WatchError",
            "WorkerError",
        ),
    }.items()
    for name in names
}
"""The public names and the modules that define them."""
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'elementgrad' has no attribute {name!r}")
    value = getattr(import_module(f"elementgrad.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
