"""The explorer as a widget of notebooks. Messages are answered in the kernel, between the cells.

The kernel waits for the thread that reads, so that no cell runs meanwhile. That thread has none of the notebook's own
frames on its stack, among which lines of the user's model would be looked for.
"""

from functools import cache
from importlib import resources
from typing import Any

from elementgrad._explore.messages import MessageError, parse_message
from elementgrad._explore.session import Session
from elementgrad._explore.worker import Worker
from elementgrad.errors import require_packages


def make_widget(session: Session) -> Any:
    """Return the widget that shows a session."""
    return _widget_class()(session)


@cache
def _widget_class() -> Any:
    """Define the widget's class, once anywidget is needed."""
    require_packages("anywidget", "eg.explore in a notebook", "explore")
    import anywidget
    import traitlets

    folder = resources.files("elementgrad._explore")

    class ExplorerWidget(anywidget.AnyWidget):
        """The page in a notebook, by anywidget."""

        _esm = folder.joinpath("page.js").read_text("utf-8")
        _css = folder.joinpath("page.css").read_text("utf-8")
        start = traitlets.Dict().tag(sync=True)

        def __init__(self, session: Session):
            super().__init__(start=session.start())
            self._session, self._worker = session, Worker()
            self.on_msg(self._answer)

        def _answer(self, _: Any, content: Any, buffers: Any) -> None:
            """Answer a message with its own number, by which the page knows what it asked."""
            number = content.get("id") if isinstance(content, dict) else None
            if type(number) is not int:
                return
            try:
                message = parse_message(content.get("message") or {})
                answer = self._worker.submit(self._session.answer, message).result()
            except MessageError as error:
                answer = {"error": str(error)}
            self.send({"id": number, "answer": answer})

        def close(self) -> None:
            """Take the widget away; the model is as it was."""
            self._worker.close()
            self._session.close()
            super().close()

    return ExplorerWidget
