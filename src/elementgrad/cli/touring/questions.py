"""The questions of the tour, in order and in people's words: the same on every framework.

The code that answers a question stands in `stops/on_<framework>/`, in the module of its chapter: a function of its key,
and one of its key and `_usually` for the usual answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """What people ask."""

    key: str
    text: str
    picture: str | None = None
    """Arguments of `eg.plot`, as text, in the names of the answer."""
    seen: str = ""
    """What there is to be seen in the picture."""


@dataclass(frozen=True)
class Chapter:
    """Questions that belong together."""

    module: str
    title: str
    questions: Sequence[Question]


CHAPTERS = (
    Chapter(
        "vectors",
        "One element of a vector",
        [
            Question("replaced", "How do I replace one element and still get gradients?"),
            Question("alone", "How do I get the gradient of one element alone, all others zero?"),
            Question("stepped", "How do I take one gradient step on one element and leave the others?"),
        ],
    ),
    Chapter(
        "results",
        "One element of a result",
        [
            Question("itself", "How do I differentiate X[1, 2] with respect to X? And the sum of X?"),
            Question("product", "What is the gradient of one element of a matrix product?"),
            Question(
                "pixel",
                "How does one feature-map element depend on one pixel?",
                "field, image=image, mark=(3, 4)",
                "The receptive field over the digit, 5 x 5 of 8 x 8 pixels, and in it the pixel that was asked about.",
            ),
            Question(
                "score",
                "Which feature maps, and which single weight, drive the score of this digit?",
                'slopes["maps"], title="The score of 3 by the first feature maps"',
                "More of what is orange raises the score of 3, more of what is blue lowers it.",
            ),
            Question(
                "words",
                "Which word of the sentence drives the next word?",
                'of_words, tokens=sentence, title="The score of cat by each word"',
                "Each word by the size of its gradient.",
            ),
            Question(
                "large",
                "What if the Jacobian would never fit?",
                "J",
                "The Jacobian of conv2 by the pixels: most of it is zero, as every element sees 25 pixels.",
            ),
            Question("second", "How do I get one entry of a Hessian?"),
        ],
    ),
    Chapter(
        "inside",
        "An element that makes another",
        [
            Question(
                "uses",
                "y = 2 x[2] + sum(x). How much of the gradient of x[2] comes through which use?",
                'shares, title="d y / d x[2]"',
                "The shares as a waterfall.",
            ),
            Question("twice", "sum(x * w): is the gradient of x[2] hidden in there? And if I ask twice?"),
            Question("own_rule", "How do I write a derivative rule of my own that takes an index?"),
            Question("written", "t[1], t[3] and t[4] are written one after another. What is d t[4] / d t[1]?"),
        ],
    ),
    Chapter(
        "missing",
        '"element 0 of tensors does not require grad"',
        [
            Question("message", "Why is there no gradient, and which line is to blame?"),
            Question("three_ways", "Is plain indexing differentiable?"),
            Question("element_zero", "How do I enable gradients for element 0 alone?"),
            Question(
                "choice",
                "Can a model learn which element to take?",
                'weights, title="The weight of each element"',
                "After 200 steps, element 1 has nearly all of the weight.",
            ),
        ],
    ),
    Chapter(
        "training",
        "Train single elements",
        [
            Question("entry", "How do I train one entry of an embedding, [0, 5] of 100 x 10, and nothing else?"),
            Question(
                "token",
                "How do I train one number of one word in a sequence model?",
                'steps, title="The one number that trains"',
                "The entry over twelve steps of Adam.",
            ),
            Question("unseen", "The gradient of my embedding entry is zero. Why?"),
            Question("routed", "How do I give each entry a loss of its own?"),
            Question(
                "shipped",
                "How do I fix one mistake of a model, ship the fix, and take it back?",
                'patch, title="A row of the head, before and after"',
                "What the patch holds: the elements before and after.",
            ),
        ],
    ),
)
