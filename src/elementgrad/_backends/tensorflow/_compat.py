"""Every private name of TensorFlow and Keras that this backend relies on, so that an upgrade is one file."""

import sys
from typing import Any

from tensorflow.python import pywrap_tfe as pywrap_tfe
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as Status
from tensorflow.python.eager import context as context
from tensorflow.python.eager import execute as execute
from tensorflow.python.eager import record as record
from tensorflow.python.eager.backprop import _gradient_function as _gradient_function
from tensorflow.python.eager.context import Context as Context
from tensorflow.python.eager.polymorphic_function.function_type_utils import (
    bind_function_inputs as bind_function_inputs,
)
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget as TfMethodTarget
from tensorflow.python.eager.record import could_possibly_record as could_possibly_record
from tensorflow.python.eager.record import should_record_backprop as should_record_backprop
from tensorflow.python.framework import constant_op as constant_op
from tensorflow.python.framework import indexed_slices as indexed_slices
from tensorflow.python.framework import op_callbacks as op_callbacks
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies as AutomaticControlDependencies
from tensorflow.python.framework.ops import _EagerTensorBase as _EagerTensorBase
from tensorflow.python.framework.ops import uid as uid
from tensorflow.python.ops import script_ops as script_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as BaseResourceVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as ResourceVariable


def in_stateless_scope() -> bool:
    """Return True if Keras keeps updates of variables apart, as in `stateless_call`."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope as inside

    return bool(inside())


def get_stateless_scope() -> Any:
    """Return the scope that keeps updates of variables apart."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope as current

    return current()


def base_convolution() -> type:
    """Return the base of Keras's convolution layers, whose `call` is known."""
    from keras.src.layers.convolutional.base_conv import BaseConv

    return BaseConv


def keras_backend() -> Any:
    """Return the module of Keras from which its layers take `rnn`; Keras must be imported."""
    return sys.modules["keras.src.backend"]


def in_symbolic_scope() -> bool:
    """Return True if Keras runs layers only to find out shapes."""
    scopes = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return scopes is not None and bool(scopes.in_symbolic_scope())
