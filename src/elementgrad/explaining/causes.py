"""Every cause of a gradient that is missing, zero, not finite or wrong: what it is called, said as, and mended by.

One table for all frameworks. A cause says one clause, in which `{operation}`, `{of}` and `{wrt}` are filled in, and one
remedy, which may differ by framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One reason for which a gradient is not what somebody expects."""

    says: str
    """The clause behind the verdict."""
    fix: str | Mapping[str, str]
    """What to do, in the framework's own words where they differ."""

    def remedy(self, framework: str) -> str:
        """What to do about it in a framework."""
        return self.fix if isinstance(self.fix, str) else self.fix[framework]


CAUSES: Mapping[str, Cause] = {
    "not-tracked": Cause(
        "nothing tracks {wrt}",
        {
            "torch": "call requires_grad_(True) on it before it is used",
            "tensorflow": "call tape.watch(x) before it is used, if it is a plain tensor; otherwise set "
            "layer.trainable = True, or trainable of the variable",
            "jax": "make it an argument of the function and name it in argnums",
        },
    ),
    "integer": Cause(
        "{wrt} holds integers, which have no gradients",
        {
            "torch": "ask about the weight that it looks up, or make it floating point before, as in x.float()",
            "tensorflow": "ask about the weight that it looks up, or make it floating point: tf.cast(x, tf.float32)",
            "jax": "ask about the table that it looks up, or make it floating point before, as in x.astype(float)",
        },
    ),
    "non-leaf": Cause(
        "{wrt} is computed from other tensors, and those do not keep their .grad",
        "call retain_grad() on it before backward(), or use eg.grad",
    ),
    "unused": Cause("it is not computed from {wrt}", "use {wrt} in the computation, or ask about what is used"),
    "not-selected": Cause(
        "{operation} takes other elements than {wrt}",
        "ask about an element that is taken, or take a weighted mean such as softmax instead",
    ),
    "resliced": Cause(
        "{wrt} is another slice of the tensor than the one that was used",
        {
            "torch": "keep the slice in a variable, use that one and ask about it, or ask about the elements of the "
            "whole tensor",
            "tensorflow": "take the slice once, inside of the tape, use that one and ask about it, or ask for the "
            "gradient of the whole tensor and slice that",
            "jax": "ask about the elements of the whole array, as in wrt='x[0]'",
        },
    ),
    "detached": Cause(
        "{operation} cuts it off",
        {
            "torch": "leave {operation} out, or apply it only where no gradient is wanted",
            "tensorflow": "leave tf.stop_gradient out, or apply it only where no gradient is wanted",
            "jax": "leave stop_gradient out, or apply it only where no gradient is wanted",
        },
    ),
    "left-framework": Cause(
        "its numbers leave the framework in {operation}",
        {
            "torch": "stay with tensors: operations of torch instead of {operation}, torch.stack to put them together",
            "tensorflow": "stay with tensors: operations of tf instead of {operation}",
            "jax": "stay with arrays: functions of jnp instead of {operation}",
        },
    ),
    "no-grad": Cause(
        "{operation} runs where gradients are switched off",
        {
            "torch": "move it out of torch.no_grad() or inference_mode()",
            "tensorflow": "move it out of tape.stop_recording()",
            "jax": "move it out of stop_gradient",
        },
    ),
    "outside-tape": Cause(
        "{operation} is computed outside of what is recorded",
        {
            "torch": "compute it inside of the function",
            "tensorflow": "compute it inside of the with block of the tape",
            "jax": "use the argument of the function, and compute inside of it what depends on it",
        },
    ),
    "discrete": Cause(
        "{operation} gives whole numbers, truths or draws, which have no slope",
        "use a smooth stand-in: softmax for argmax, sigmoid for a comparison, eg.choose(..., hard=True) to choose",
    ),
    "step-function": Cause(
        "{operation} is flat between its steps",
        {
            "torch": "use a smooth stand-in, or pass it straight through: x + (x.round() - x).detach()",
            "tensorflow": "use a smooth stand-in, or pass it straight through: x + tf.stop_gradient(tf.round(x) - x)",
            "jax": "use a smooth stand-in, or pass it straight through: x + stop_gradient(jnp.round(x) - x)",
        },
    ),
    "assigned-state": Cause(
        "{operation} keeps the value and not where it came from",
        {
            "torch": "use the new value itself, and write it to the state afterwards",
            "tensorflow": "use the tensor itself instead of reading the variable that it was assigned to",
            "jax": "use the new value itself instead of the state that holds it",
        },
    ),
    "no-rule": Cause(
        "{operation} has no derivative",
        {
            "torch": "use an operation that has one, or write a torch.autograd.Function",
            "tensorflow": "use an operation that has one, or write a tf.custom_gradient",
            "jax": "use an operation that has one, or write a jax.custom_vjp",
        },
    ),
    "inner-gradient": Cause(
        "the inner gradient, {operation}, is computed without a graph of its own",
        {
            "torch": "call it with create_graph=True",
            "tensorflow": "compute it inside of the outer tape",
            "jax": "use the argument of the function, and compute inside of it what depends on it",
        },
    ),
    "custom-rule": Cause(
        "the derivative that was written for {operation} does not pass it on as it is",
        {
            "torch": "correct the backward of {operation}; torch.autograd.gradcheck tries it out",
            "tensorflow": "correct the gradient function of {operation}",
            "jax": "correct the custom rule of {operation}; jax.test_util.check_grads tries it out",
        },
    ),
    "hook": Cause("a hook changes the gradient on its way", "remove the hook, or have it return the gradient as it is"),
    "freed-graph": Cause(
        "the graph was used by an earlier backward and is gone",
        {
            "torch": "compute the loss anew in each step, with h = h.detach() between steps for a state that is "
            "carried over, or call the first backward with retain_graph=True",
            "tensorflow": "use tf.GradientTape(persistent=True) to ask a tape twice",
            "jax": "compute it anew",
        },
    ),
    "dead-relu": Cause(
        "{operation} is flat at its input, which is not above zero",
        "check the input of {operation} and its bias, lower the learning rate, or use leaky_relu or gelu; weights that "
        "are all zero need random numbers at the start",
    ),
    "saturated": Cause(
        "{operation} is so far out that its slope is zero in this precision",
        "scale its input down, normalise before it, or use a loss that takes logits",
    ),
    "clamped": Cause(
        "{operation} is flat beyond its bounds",
        "widen the bounds, or use a smooth bound such as tanh or softplus",
    ),
    "masked": Cause(
        "{operation} puts something else in its place",
        "let the mask keep {wrt}, or ask about an element that it keeps",
    ),
    "dropped": Cause(
        "{operation} dropped it in this run",
        {
            "torch": "call model.eval(), or look at the mean over several runs",
            "tensorflow": "call the model with training=False, or look at the mean over several runs",
            "jax": "pass deterministic=True, or look at the mean over several keys",
        },
    ),
    "row-not-used": Cause(
        "{operation} does not look up its row: the input does not contain that index, or it is the padding row",
        "feed an input that contains the index, or ask about a row that occurs",
    ),
    "out-of-range": Cause(
        "{operation} is given an index out of range, which reads the nearest element or NaN and drops its gradient",
        "check the indices before, as in assert (ids < len(table)).all()",
    ),
    "overwritten": Cause(
        "{operation} writes over it before it is used",
        {
            "torch": "write to a copy, as in x.clone(), or use eg.at(x)[...].set(value), which mutates nothing",
            "tensorflow": "use what was there before, or write to other elements; eg.at(x)[...].set(value) is a copy",
            "jax": "use what was there before: x.at[...].set(value) gives a new array and keeps x",
        },
    ),
    "modified-in-place": Cause(
        "{operation} changes in place what the gradient still needs",
        "use the function that gives a new tensor instead of {operation}, or work on a clone()",
    ),
    "modified-through-data": Cause(
        "{operation} writes behind autograd's back, so that the gradient is one for other numbers",
        "compute a new tensor where autograd sees it, as in h = h * 2; writing through .data or detach(), or inside of "
        "torch.no_grad(), is for leaves between two steps",
    ),
    "cancelled": Cause(
        "its contributions cancel in {operation}",
        "ask about one term, or change what is added up: a sum over a softmax is always 1",
    ),
    "underflow": Cause(
        "the numbers are too small for the precision in {operation}",
        {
            "torch": "compute it in a wider dtype (float32 for halves, float64 for float32), or scale the loss with "
            "torch.amp.GradScaler",
            "tensorflow": "compute it in a wider dtype (float32 for halves, float64 for float32), or use a "
            "LossScaleOptimizer",
            "jax": "compute it in a wider dtype (float32 for halves, float64 for float32), or scale the loss up",
        },
    ),
    "overflow": Cause(
        "the numbers become too large for the precision in {operation}",
        "compute it in a wider dtype, or scale or clamp its input",
    ),
    "masked-branch": Cause(
        "{operation} has no finite value or slope there, and that it is masked afterwards does not help",
        {
            "torch": "make the input safe: {operation}(torch.where(ok, x, 1.0)), and mask the result too",
            "tensorflow": "make the input safe: {operation}(tf.where(ok, x, 1.0)), and mask the result too",
            "jax": "make the input safe: {operation}(jnp.where(ok, x, 1.0)), and mask the result too",
        },
    ),
    "singular": Cause(
        "{operation} has no finite slope at this input",
        "keep the input away from there, or clamp it before",
    ),
    "accumulated": Cause(
        "its .grad holds the sum of several calls of backward()",
        "call optimizer.zero_grad() before backward(), or use eg.grad, which never accumulates",
    ),
    "tie": Cause(
        "it ties with another element in {operation}, which takes only one of them",
        {
            "torch": "use amax, which shares the gradient among those that tie",
            "tensorflow": "break the tie, or use reduce_max, which shares the gradient",
            "jax": "break the tie, or use jnp.max, which shares the gradient",
        },
    ),
    "stationary": Cause(
        "{operation} has a slope of zero at this input, as at a minimum",
        "nothing, if the input is meant to be there; otherwise move it off that point",
    ),
    "kink": Cause(
        "{operation} has a kink exactly there, and its slope at it is taken to be zero",
        "move the input off the kink, or use a smooth stand-in",
    ),
}
UNDECIDED = Cause(
    "what was seen does not decide why", "look at .evidence, and try eg.explain on a part of the computation"
)
