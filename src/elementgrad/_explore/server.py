"""A server of one page on the loopback interface.

It has one address, with a random token in it: GET gives the page with the names in it, and POST answers one message.
Answers are lines of JSON, the last of which is the answer; those before it say that the model is still running. There
are no files to be read or written. Every refusal is one line in the log `elementgrad.explore`.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future
from importlib import resources
from typing import Any

from elementgrad._explore.messages import MAX_BYTES, SLOW, MessageError, parse_message
from elementgrad._explore.session import Session
from elementgrad._explore.worker import Worker
from elementgrad.errors import require_packages, shortened

LOG = logging.getLogger("elementgrad.explore")
HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Names by which a browser may call this machine; any other in `Host` is another site's name for it."""
SHUTDOWN_SECONDS = 5
"""The longest that closing waits for a page that does not take its answer."""
PROGRESS_SECONDS = 0.5
"""The time between two lines that say that a read is going on."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data: "
    "blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Explorer:
    """A page that is being served. `eg.explore` gives it; open `url` in a browser on this machine.

    >>> import torch, elementgrad as eg
    >>> with eg.explore(torch.nn.Linear(3, 2), torch.ones(1, 3)) as explorer:
    ...     explorer.url[:17]
    'http://127.0.0.1:'
    """

    __module__ = "elementgrad"

    def __init__(self, session: Session):
        require_packages("starlette uvicorn", "eg.explore", "explore")
        import uvicorn

        self._session = session
        self._token = secrets.token_urlsafe(24)
        self._worker = Worker()
        self._closed = threading.Event()
        self._socket = socket.create_server((HOST, 0))
        self._port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            make_app(session, self._worker, self._token, self._port),
            log_config=None,
            access_log=False,
            server_header=False,
            http="h11",  # not whichever is installed beside it
            ws=WebSocketRefusal,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="elementgrad-explore-server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address, with the secret token in it."""
        return f"http://{HOST}:{self._port}/?token={self._token}"

    def close(self) -> None:
        """Stop serving, after the read that is running. The model is as it was; further calls do nothing."""
        if not self._closed.is_set():
            # The worker is first: pages get the answer that is being read, and hear that no other will come.
            self._worker.close()
            self._server.should_exit = True
            self._thread.join()
            self._socket.close()
            self._session.close()
            self._closed.set()

    def wait(self) -> None:
        """Return when the page is no longer served; Ctrl-C closes it."""
        try:
            while not self._closed.wait(0.5):
                pass
        finally:
            self.close()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "Explorer(closed)" if self._closed.is_set() else f"Explorer({self.url!r})"

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        for connection in self._server.server_state.connections:
            connection.transport.abort()  # type: ignore[union-attr]  # its page does not take what was sent


class WebSocketRefusal(asyncio.Protocol):
    """Refuses a connection that is to become a WebSocket, of which the page has none."""

    def __init__(self, **_: Any):
        """Take what uvicorn gives the protocol that it hands a connection to."""

    def connection_made(self, transport: Any) -> None:
        LOG.warning("refused with 403: a WebSocket")
        transport.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        transport.close()


def make_app(session: Session, worker: Worker, token: str, port: int) -> Any:
    """Return the ASGI application."""
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

    hosts = {f"{name}:{port}" for name in NAMES}
    origins = {f"http://{host}" for host in hosts}

    def refuse(request: Request, status: int, why: str) -> Response:
        where = shortened(repr(request.url.path), 80)
        LOG.warning("refused with %d: %s %s, since %s", status, request.method[:10], where, why)
        headers = HEADERS | {"Connection": "close"}  # the rest of what is being sent is not read
        return PlainTextResponse(f"{why}\n", status, headers)

    async def serve(request: Request) -> Response:
        if request.headers.get("host", "").lower() not in hosts:
            return refuse(request, 403, "Host is not the address of this server")
        if not {origin.lower() for origin in request.headers.getlist("origin")} <= origins:
            return refuse(request, 403, "Origin is another site")
        if not hmac.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
            return refuse(request, 403, "the token is missing or wrong; open the address as it was printed")
        if request.url.path != "/":
            return refuse(request, 404, "there is nothing at this path")
        if request.method in ("GET", "HEAD"):
            nonce = secrets.token_urlsafe(16)
            headers = HEADERS | {"Content-Security-Policy": POLICY.format(nonce=nonce)}
            return HTMLResponse(render_page(session, nonce), headers=headers)
        if request.method != "POST":
            return refuse(request, 405, "only GET and POST are answered")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return refuse(request, 415, "a message is application/json")
        try:
            body = await read_bounded(request)
            if body is None:
                return refuse(request, 413, f"a message has at most {MAX_BYTES} bytes")
            message = parse_message(body)
        except ClientDisconnect:
            return refuse(request, 400, "the message breaks off")
        except MessageError as error:
            return refuse(request, 400, str(error))
        future = worker.submit(session.answer, message, slow=message.ask in SLOW)
        return StreamingResponse(stream_answer(future), media_type="application/x-ndjson", headers=HEADERS)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Serve every request alike: a router would answer unknown paths and methods itself, unchecked and unlogged."""
        request = Request(scope, receive)
        response = await serve(request)
        try:
            await response(scope, receive, send)
        except asyncio.CancelledError:  # closing has waited long enough
            LOG.warning("broke off an answer that its page does not take")

    return app


async def read_bounded(request: Any) -> bytes | None:
    """Return the body of a request, or None if it is too large, of which no more than that is read."""
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BYTES:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            return None
    return bytes(body)


async def stream_answer(future: "Future[Any]") -> AsyncIterator[str]:
    """Yield lines of JSON until the answer has come. A reader that goes away cancels a read that waits."""
    answer = asyncio.wrap_future(future)
    started = asyncio.get_running_loop().time()
    try:
        while True:
            try:
                result = await asyncio.wait_for(asyncio.shield(answer), PROGRESS_SECONDS)
                yield json.dumps(result, allow_nan=False) + "\n"
                return
            except TimeoutError:
                seconds = asyncio.get_running_loop().time() - started
                state = "reading" if future.running() else "waiting for another read"
                yield json.dumps({"progress": state, "seconds": round(seconds, 1)}) + "\n"
            except (CancelledError, asyncio.CancelledError):
                if not future.cancelled():
                    raise
                yield json.dumps({"error": "the explorer was closed"}) + "\n"
                return
    finally:
        future.cancel()


def render_page(session: Session, nonce: str) -> str:
    """Return the page, with the front end, its style and the names in it."""
    folder = resources.files("elementgrad._explore")
    page, style, script = [folder.joinpath(f"page.{ending}").read_text("utf-8") for ending in ("html", "css", "js")]
    # In a script element only `</` could end it early, and JSON may have any character as an escape.
    data = json.dumps(session.start(), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
    parts = {"nonce": nonce, "style": style, "script": script, "data": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], page)
