"""Messages of a page: what is no question is refused before anything is done."""

import json

import pytest

from elementgrad._explore.messages import MAX_BYTES, QUESTIONS, Element, MessageError, parse_message

OF = {"tensor": 1, "index": [0]}


def test_a_question_is_read():
    message = parse_message(
        json.dumps({"ask": "view", "tensor": 2, "of": OF, "rows": [0, 4], "edits": [{**OF, "value": 1}]}).encode()
    )
    assert message.of == Element(1, (0,))
    assert message.rows == (0, 4)
    assert message.edits == ((Element(1, (0,)), 1.0),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"view"',
        b"{}",
        b'{"ask": 3}',
        b'{"ask": "shell"}',
        b'{"ask": ["view"]}',
        b'{"ask": "__init__"}',
        b'{"ask": "view"}',
        b'{"ask": "view", "tensor": null}',
        b'{"ask": "view", "tensor": "0"}',
        b'{"ask": "view", "tensor": 1.0}',
        b'{"ask": "view", "tensor": true}',
        b'{"ask": "view", "tensor": NaN}',
        b'{"ask": "view", "tensor": 1e999}',
        b'{"ask": "view", "tensor": 123456789012345678901234567890}',
        b'{"ask": "view", "tensor": 0, "path": "/etc/passwd"}',
        b'{"ask": "view", "tensor": 0, "index": {"a": 1}}',
        b'{"ask": "view", "tensor": 0, "index": [[1]]}',
        b'{"ask": "view", "tensor": 0, "rows": [1]}',
        b'{"ask": "view", "tensor": 0, "of": {"tensor": 1}}',
        b'{"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [], "x": 1}}',
        b'{"ask": "view", "tensor": 0, "edits": [{"tensor": 1, "index": [], "value": "1"}]}',
        b'{"ask": "view", "tensor": 0, "edits": [{"tensor": 1, "index": [], "value": Infinity}]}',
        b'{"ask": "view", "tensor": 0, "edits": [1]}',
        b'{"ask": "find", "text": 1}',
        json.dumps({"ask": "find", "text": "x" * 5000}).encode(),
        json.dumps({"ask": "view", "tensor": 0, "index": [0] * 100}).encode(),
        json.dumps({"ask": "thumbnails", "tensors": [0] * 1000}).encode(),
        json.dumps({"ask": "view", "tensor": 0, "edits": [{**OF, "value": 1}] * 2000}).encode(),
        b"[" * 100_000,
        b'{"ask": "find", "text": "' + b"x" * MAX_BYTES + b'"}',
        '{"ask": "view", "tensor": "\ud800"}'.encode("utf-8", "surrogatepass"),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_question_is_refused_in_one_line(data):
    with pytest.raises(MessageError) as refused:
        parse_message(data)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_every_question_has_an_answer():
    from elementgrad._explore.session import ANSWERS

    assert set(ANSWERS) == set(QUESTIONS)
