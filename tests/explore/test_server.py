"""The explorer's server, by real requests on loopback: what comes from elsewhere is refused, and it stays up."""

import http.client
import json
import logging
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest
import torch

import elementgrad as eg

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def explorer():
    net = torch.nn.Sequential()
    net.add_module("</script><img src=x onerror=alert(1)>", torch.nn.Linear(3, 2))
    net.add_module("tanh", torch.nn.Tanh())
    with eg.explore(net, torch.ones(1, 3), labels=[SCRIPT, "b"]) as explorer:
        yield explorer


class Client:
    """Sends requests as they are, with the headers that are given."""

    def __init__(self, explorer):
        parts = urlsplit(explorer.url)
        self.port, self.path = parts.port, f"{parts.path}?{parts.query}"

    def send(self, method="GET", path=None, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, self.path if path is None else path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def ask(self, **message):
        response, content = self.send("POST", body=json.dumps(message), Content_Type="application/json")
        assert response.status == 200
        return json.loads(content.splitlines()[-1])


@pytest.fixture
def client(explorer):
    return Client(explorer)


def test_the_printed_address_answers_with_the_names(explorer, client):
    response, content = client.send()
    assert response.status == 200
    assert b'"tanh"' in content
    assert explorer.url.startswith("http://127.0.0.1:")
    assert len(explorer._token) >= 32
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-store"
    assert not [name for name in response.headers if name.lower().startswith("access-control")]
    assert client.send("HEAD")[0].status == 200


def test_names_and_labels_are_never_markup(client):
    page = client.send()[1].decode()
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    start = json.loads(data)
    assert "</script><img src=x onerror=alert(1)>" in [row["name"] for row in start["names"]]
    assert start["labels"] == [SCRIPT, "b"]
    assert "<img" not in page
    assert SCRIPT not in page
    assert page.count("</script>") == 2


REFUSED = {
    "no token": ({"path": "/"}, 403),
    "a wrong token": ({"path": "/?token=wrong"}, 403),
    "half a token": (lambda client: {"path": client.path[:-4]}, 403),
    "a token that is no text": ({"path": "/?token=%ff%00"}, 403),
    "another host": ({"Host": "evil.example"}, 403),
    "another host with our port": (lambda client: {"Host": f"evil.example:{client.port}"}, 403),
    "another port": ({"Host": "127.0.0.1:1"}, 403),
    "another origin": ({"Origin": "http://evil.example"}, 403),
    "no origin of a page": ({"Origin": "null"}, 403),
    "another origin that asks": (lambda client: {"method": "POST", "body": "{}", "Origin": "http://localhost:1"}, 403),
    "a path outside": (lambda client: {"path": "/../../etc/passwd" + client.path[1:]}, 404),
    "a path in code": (lambda client: {"path": "/%2e%2e/%2e%2e/etc/passwd" + client.path[1:]}, 404),
    "a file of ours": (lambda client: {"path": "/page.js" + client.path[1:]}, 404),
    "an address elsewhere": (
        lambda client: {"path": f"http://evil.example{client.path}", "Host": f"127.0.0.1:{client.port}"},
        404,
    ),
    "another method": ({"method": "DELETE"}, 405),
    "an unknown method": ({"method": "BREW"}, 405),
    "an unknown method without a token": ({"method": "BREW", "path": "/"}, 403),
    "a preflight": ({"method": "OPTIONS", "Origin": "http://evil.example"}, 403),
    "a form": ({"method": "POST", "body": "ask=view", "Content_Type": "application/x-www-form-urlencoded"}, 415),
    "no JSON": ({"method": "POST", "body": "{", "Content_Type": "application/json"}, 400),
    "no question": ({"method": "POST", "body": '{"ask": "shell"}', "Content_Type": "application/json"}, 400),
    "nested JSON": ({"method": "POST", "body": "[" * 99999, "Content_Type": "application/json"}, 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_here_is_refused_and_logged_in_one_line(client, case, caplog):
    request, status = REFUSED[case]
    request = request(client) if callable(request) else request
    with caplog.at_level(logging.WARNING, "elementgrad.explore"):
        response, content = client.send(**request)
    assert response.status == status
    assert b"tanh" not in content
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert client.send()[0].status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_message_of_100_mb_is_refused_before_it_is_read(client, chunked):
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {100 << 20}"
        head = f"POST {client.path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode())
        piece = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n" if chunked else b" " * (1 << 16)
        sent = 0
        try:
            while sent < 100 << 20:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:  # the server has closed the connection
            pass
        assert sent < 50 << 20
    assert client.send()[0].status == 200


def test_a_websocket_is_refused_and_logged_in_one_line(client, caplog):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    upgrade |= {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec_WebSocket_Version": "13"}
    response, content = client.send(**upgrade)
    assert response.status == 403
    assert content == b""
    assert [record.getMessage() for record in caplog.records] == ["refused with 403: a WebSocket"]
    assert client.send()[0].status == 200


def test_closing_does_not_wait_long_for_a_page_that_does_not_take_its_answer(monkeypatch, caplog):
    monkeypatch.setattr("elementgrad._explore.server.SHUTDOWN_SECONDS", 1)
    with socket.socket() as page, eg.explore(torch.nn.Linear(3, 2), torch.ones(1, 3)) as explorer:
        client = Client(explorer)
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        page.connect(("127.0.0.1", client.port))
        page.sendall(f"GET {client.path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode() * 100)
        assert client.send()[0].status == 200
    assert "broke off an answer" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_log_line_is_one_line_whatever_is_asked(client, caplog):
    with caplog.at_level(logging.WARNING, "elementgrad.explore"):
        client.send(path="/%0d%0aforged%20line" + client.path[1:])
    assert "\n" not in caplog.text.rstrip("\n")


def test_a_second_origin_is_looked_at_as_well(client):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    connection.putrequest("GET", client.path)
    connection.putheader("Origin", f"http://127.0.0.1:{client.port}")
    connection.putheader("Origin", "http://evil.example")
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_localhost_is_this_machine(client):
    assert client.send(Host=f"localhost:{client.port}")[0].status == 200


def test_questions_of_two_pages_do_not_disturb_each_other(client):
    of = {"tensor": 1, "index": [0, 0]}
    plain = client.ask(ask="view", tensor=0, of=of)
    edited = {"ask": "view", "tensor": 0, "of": of, "edits": [{"tensor": 0, "index": [0, 1], "value": 3.0}]}
    answers = {}

    def page(name, message):
        answers[name] = [client.ask(**message) for _ in range(10)]

    pages = [
        threading.Thread(target=page, args=("plain", {"ask": "view", "tensor": 0, "of": of})),
        threading.Thread(target=page, args=("edited", edited)),
    ]
    for thread in pages:
        thread.start()
    for thread in pages:
        thread.join()
    assert plain["gradient"]
    assert all(answer == plain for answer in answers["plain"])
    assert len({json.dumps(answer) for answer in answers["edited"]}) == 1
    assert answers["edited"][0]["values"] != plain["values"]


def test_a_slow_read_tells_of_progress_and_reads_are_made_one_after_another():
    running, most, gate = [], [], threading.Event()

    def slow(x):
        running.append(1)
        most.append(len(running))
        if len(most) > 1:
            gate.wait(20)
        running.pop()
        return x * 2

    with eg.explore(slow, torch.ones(2)) as explorer:
        client, lines = Client(explorer), []

        def page():
            body = json.dumps({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [0]}})
            lines.append(client.send("POST", body=body, Content_Type="application/json")[1].splitlines())

        pages = [threading.Thread(target=page) for _ in range(2)]
        for thread in pages:
            thread.start()
        threading.Timer(1.5, gate.set).start()
        for thread in pages:
            thread.join()
    states = {json.loads(line)["progress"] for answer in lines for line in answer[:-1]}
    assert states == {"reading", "waiting for another read"}
    assert all("gradient" in json.loads(answer[-1]) for answer in lines)
    assert max(most) == 1


def test_a_read_that_is_cancelled_while_it_waits_is_never_made():
    calls, gate = [], threading.Event()

    def slow(x):
        calls.append(1)
        if len(calls) > 1:
            gate.wait(20)
        return x * 2

    with eg.explore(slow, torch.ones(2)) as explorer:
        client = Client(explorer)

        def body(element):
            return json.dumps({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [element]}})

        first = threading.Thread(target=lambda: client.send("POST", body=body(0), Content_Type="application/json"))
        first.start()
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
        connection.request("POST", client.path, body(1), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert b"progress" in response.fp.readline() + response.fp.readline()
        response.close()
        connection.close()
        threading.Timer(1.5, gate.set).start()
        first.join()
        made = len(calls)
        client.ask(ask="code", tensor=0)
    assert len(calls) == made


def test_a_page_gets_the_answer_that_is_being_read_while_the_explorer_closes(caplog):
    calls, gate = [], threading.Event()

    def slow(x):
        calls.append(1)
        if len(calls) > 1:
            gate.wait(20)
        return x * 2

    def ask(client, answers, element):
        body = json.dumps({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [element]}})
        answers[element] = json.loads(
            client.send("POST", body=body, Content_Type="application/json")[1].splitlines()[-1]
        )

    answers = {}
    with eg.explore(slow, torch.ones(2)) as explorer:
        pages = [threading.Thread(target=ask, args=(Client(explorer), answers, element)) for element in (0, 1)]
        pages[0].start()
        while len(calls) < 2:
            pages[0].join(0.01)
        pages[1].start()
        while explorer._worker._queue.empty():
            pages[1].join(0.01)
        threading.Timer(1.8, gate.set).start()
    for page in pages:
        page.join()
    assert "gradient" in answers[0]
    assert answers[1] == {"error": "the explorer was closed"}
    assert not caplog.records  # such as the server's on what it had to break off


def test_closing_leaves_the_model_as_it_was_and_the_port_free():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    x = torch.ones(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, threads = torch.get_rng_state(), set(threading.enumerate())
    explorer = eg.explore(model, x)
    client = Client(explorer)
    assert "gradient" in client.ask(ask="view", tensor=0, of={"tensor": 1, "index": [0, 0]})
    explorer.close()
    explorer.close()
    assert repr(explorer) == "Explorer(closed)"
    with pytest.raises(ConnectionRefusedError):
        client.send()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert set(threading.enumerate()) <= threads
