"""A reward server on this machine that behaves as it is told."""

from __future__ import annotations

import http.server
import json
import threading

PATIENCE = 20.0
"""Seconds after which what should have happened will not."""


class Server:
    """A reward server on this machine; ``script`` has one behaviour per request, the last one again and again."""

    def __init__(self, *script):
        self.requests, self.paths, outer = [], [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(json.loads(body))
                outer.paths.append(self.path)
                behave = script[min(len(outer.requests), len(script)) - 1]
                try:
                    behave(self, outer.requests[-1])
                except ConnectionError:
                    pass  # the client went away, as it should

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Watched(Server):
    """A server that lets one wait until so many requests were answered, and knows how many it had at once."""

    def __init__(self, *script):
        self.answered, self.now, self.at_once, self._changed = 0, 0, 0, threading.Condition()
        super().__init__(*(self._watched(behave) for behave in script))

    def _watched(self, behave):
        def watched(handler, request):
            begin_answer = handler.send_response

            def send_response(*status):  # from here on the client may go on before this thread does
                with self._changed:
                    self.now -= 1
                begin_answer(*status)

            handler.send_response = send_response
            with self._changed:
                self.now += 1
                self.at_once = max(self.at_once, self.now)
            behave(handler, request)
            with self._changed:
                self.answered += 1
                self._changed.notify_all()

        return watched

    def has_answered(self, num):
        with self._changed:
            return self._changed.wait_for(lambda: self.answered >= num, PATIENCE)

    @property
    def labels(self):
        return [request["labels"] for request in self.requests]


def say(handler, body, status=200, length=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(length or len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def lengths(handler, request):
    say(handler, {"rewards": [float(len(q) - len(p)) for q, p in zip(request["query"], request["prompts"])]})


def answer(body, status=200):
    return lambda handler, request: say(handler, body, status)
