"""Data that the models of the tour learn from: real handwritten digits, and sentences of fifty words.

The digits are the 1797 images of 8 x 8 pixels that scikit-learn has as `load_digits`: the test set of "Optical
Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, under CC BY 4.0.
"""

from importlib import resources

import numpy as np

NOUNS = "cat dog bird fish mouse horse cow sheep frog bee ant fox owl hen duck goat"
VERBS = "sees hears likes finds calls meets follows helps"
MORE_VERBS = "wants draws paints feeds holds misses hides knows"
ADJECTIVES = "tall young big small red blue green wise shy brave quick slow kind loud calm proud"
WORDS = tuple(f"the a {NOUNS} {VERBS} {MORE_VERBS} {ADJECTIVES}".split())
"""Token 0 is "the", 1 is "a", 2 to 17 are nouns, 18 to 33 verbs and 34 to 49 adjectives."""


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images from 0 to 1, and the digits that they show.

    >>> from elementgrad._tour.data import load_digits
    >>> images, labels = load_digits()
    >>> images.shape, float(images.max()), labels[:5].tolist()
    ((1797, 8, 8), 1.0, [0, 1, 2, 3, 4])
    """
    file = resources.files("elementgrad._tour").joinpath("digits.npz")
    with file.open("rb") as opened, np.load(opened) as arrays:
        return arrays["images"].astype("float32") / 16, arrays["labels"].astype("int32")


def make_photo(side: int = 512) -> np.ndarray:
    """Return a sheet of handwritten digits on sepia paper, of the size and shape of a photograph.

    >>> from elementgrad._tour.data import make_photo
    >>> photo = make_photo()
    >>> photo.shape, photo.dtype
    ((512, 512, 3), dtype('float32'))
    """
    images, _ = load_digits()
    count = side // 8
    sheet = np.resize(images, (count, count, 8, 8)).swapaxes(1, 2).reshape(side, side, 1)
    return (1 - sheet) * np.array([0.9, 0.8, 0.6], "float32")


def make_sentences(count: int = 512) -> np.ndarray:
    """Return sentences of six tokens, such as "the shy cat sees a dog": a verb is followed by one of four nouns.

    >>> from elementgrad._tour.data import WORDS, make_sentences
    >>> sentences = make_sentences()
    >>> len(WORDS), sentences.shape, " ".join(WORDS[token] for token in sentences[0])
    (50, (512, 6), 'a calm fish misses the sheep')
    """
    rng = np.random.default_rng(0)
    article, second_article = rng.integers(0, 2, (2, count))
    adjective, noun, verb, choice = (rng.integers(0, size, count) for size in (16, 16, 16, 4))
    second_noun = (4 * verb + choice) % 16
    columns = [article, 34 + adjective, 2 + noun, 18 + verb, second_article, 2 + second_noun]
    return np.stack(columns, axis=1).astype("int32")
