"""A Hub on localhost: the few requests that a download makes, with one repository of given files."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.checkpoints.hub_cache import COMMIT


class Hub:
    """What the server offers and what it was asked.

    ``files`` are those of ``repo`` at ``COMMIT``, also called ``main``; ``requests`` are ``(method, path, range)``.
    """

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.requests: list[tuple[str, str, str | None]] = []
        self.gated = False
        self.told: set[tuple[str, str | None]] = set()
        """Hosts by which the server was called, each with the authorization it was given."""
        self.url = ""

    def gets(self, name: str) -> list[str | None]:
        """The ranges in which a file's content was asked for."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            span = self.headers.get("Range")
            hub.requests.append((self.command, self.path, span))
            hub.told.add((self.headers["Host"].split(":")[0], self.headers.get("Authorization")))
            error, content = self.look_up()
            start = int(span.removeprefix("bytes=").split("-")[0]) if span and content else 0
            self.send_response(error[0] if error else 206 if start else 200)
            if error:
                self.send_header("X-Error-Code", error[1])
            else:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if body:
                self.wfile.write(content[start:])

        def look_up(self) -> tuple[tuple[int, str] | None, bytes]:
            repo, _, rest = self.path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            if repo != hub.repo:
                return (404, "RepoNotFound"), b""
            if hub.gated:
                return (403, "GatedRepo"), b""
            if revision not in (COMMIT, "main"):
                return (404, "RevisionNotFound"), b""
            if name not in hub.files:
                return (404, "EntryNotFound"), b""
            return None, hub.files[name]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
