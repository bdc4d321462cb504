"""Gradients, one element at a time: read, explain, edit and train single elements of any tensor.

Importing elementgrad imports no framework; public names are resolved when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elementgrad.address import at as at
    from elementgrad.choice import choose as choose
    from elementgrad.distributed.blocks import Blocks as Blocks
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
    from elementgrad.errors import WorkerError as WorkerError
    from elementgrad.explaining.checking import Check as Check
    from elementgrad.explaining.checking import check as check
    from elementgrad.explaining.diagnosis import Diagnosis as Diagnosis
    from elementgrad.explaining.start import explain as explain
    from elementgrad.lazy import Jacobian as Jacobian
    from elementgrad.naming import names as names
    from elementgrad.paths import contributions as contributions
    from elementgrad.place import Place as Place
    from elementgrad.plan.layout import Block as Block
    from elementgrad.plan.plan import Plan as Plan
    from elementgrad.prepared import Prepared as Prepared
    from elementgrad.read import grad as grad
    from elementgrad.read import hessian as hessian
    from elementgrad.read import jacobian as jacobian
    from elementgrad.recording import Recording as Recording
    from elementgrad.recording import record as record
    from elementgrad.selection import Selection as Selection
    from elementgrad.shares import Share as Share
    from elementgrad.shares import Shares as Shares
    from elementgrad.show.pictures import plot as plot
    from elementgrad.show.reporting import report as report
    from elementgrad.sparsity.pattern import Pattern as Pattern
    from elementgrad.tap import tag as tag
    from elementgrad.train.elements import Elements as Elements
    from elementgrad.train.functional import Uses as Uses
    from elementgrad.train.patch import Patch as Patch
    from elementgrad.train.patch import inspect as inspect
    from elementgrad.train.ranking import top as top
    from elementgrad.train.start import apply as apply
    from elementgrad.train.start import trainable as trainable

__version__ = "0.1.0"

_HOMES = {
    "at": "address",
    "check": "explaining.checking",
    "choose": "choice",
    "contributions": "paths",
    "explain": "explaining.start",
    "grad": "read",
    "hessian": "read",
    "inspect": "train.patch",
    "jacobian": "read",
    "names": "naming",
    "plot": "show.pictures",
    "report": "show.reporting",
    "tag": "tap",
    "top": "train.ranking",
    "record": "recording",
    "Recording": "recording",
    "Check": "explaining.checking",
    "Diagnosis": "explaining.diagnosis",
    "Share": "shares",
    "Shares": "shares",
    "Block": "plan.layout",
    "Blocks": "distributed.blocks",
    "Jacobian": "lazy",
    "Patch": "train.patch",
    "Pattern": "sparsity.pattern",
    "Prepared": "prepared",
    "Plan": "plan.plan",
    "Place": "place",
    "Selection": "selection",
    "trainable": "train.start",
    "apply": "train.start",
    "Elements": "train.elements",
    "Uses": "train.functional",
    "ElementgradError": "errors",
    "ElementgradWarning": "errors",
    "BatchError": "errors",
    "BroadcastError": "errors",
    "DtypeError": "errors",
    "DuplicateError": "errors",
    "FrameworkError": "errors",
    "OptionError": "errors",
    "ParseError": "errors",
    "PatchError": "errors",
    "PatternError": "errors",
    "PlaceError": "errors",
    "SelectionError": "errors",
    "SizeError": "errors",
    "TracedError": "errors",
    "UnconnectedError": "errors",
    "WorkerError": "errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elementgrad' has no attribute {name!r}")
    value = getattr(import_module(f"elementgrad.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
