"""A reward model as a server that speaks OpenRLHF's protocol, for trainers that ask over HTTP.

POST /get_reward {"query": [prompt + answer], "prompts": [prompt], "labels": […]}
    → {"rewards": [number], "scores": [number], "extra_logs": {}}
GET /health → {"status": "ok", "model": …, "num_requests": …, "num_scored": …}

A query is text as the policy's chat template wrote it, which must be the reward model's own; it is brought back to the
token ids that PPO with the model itself reads, so that both give the same scores (see
:func:`~heedful.data.chat.written_ids`). Labels are not looked at.
"""

from __future__ import annotations

import json
import math
import signal
import string
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

from heedful.data import chat
from heedful.errors import ConfigError, DataError, ModelError
from heedful.models.parts import ScalarModel
from heedful.records import Message
from heedful.runs.progress import tell

MAX_BODY_BYTES = 64 * 2**20
_TRIED = (
    "It is 4.", " Sure?\n", "", "a  b\n\n c\t", *(f"{c} {c}{c} x{c}x\n{c}" for c in string.punctuation),
    string.digits + " 2024 3.5", "don't , I 'm . so ! we 've ?", "Ünïcode e\u0301 ﬁ ½", "汉字，。 한국어",
    "🙂 👩\u200d🔬",
)  # fmt: skip
"""Blanks, every mark at every border, clean-up, normal forms and bytes."""
READ_TIMEOUT_SECONDS = 60.0
"""A client that sends nothing for so long is let go."""


class _Refused(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@final
class RewardServer:
    """Serves one reward model; requests wait for each other, the texts of a request share batches."""

    def __init__(
        self,
        model: ScalarModel,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        micro_batch_tokens: int = 4096,
        max_body_bytes: int = MAX_BODY_BYTES,
        say: Callable[[str], None] = tell,
    ) -> None:
        """Binds the address; :meth:`serve` answers.

        Args:
            name: of the model, for /health.
            port: 0 takes a free one, see :attr:`url`.
            micro_batch_tokens: padded tokens per forward.
            max_body_bytes: of a request; longer ones are refused unread.
            say: takes the lines about requests that fail.

        Raises:
            ConfigError: the address cannot be bound.
            ModelError: a tokenizer whose texts do not tell which tokens they were. One of which only some do is
                served: :meth:`score` refuses the others.
        """
        _check_template(model.tokenizer)
        self._model, self._name, self._micro_batch_tokens = model, name, micro_batch_tokens
        self._max_body_bytes, self._say = max_body_bytes, say
        self._lock, self._num_requests, self._num_scored = threading.Lock(), 0, 0
        try:
            self._http = _HTTPServer((host, port), self._handler())
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot serve on {host}:{port}: {error}; take another --host or --port") from error

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def serve(self) -> None:
        """Answer until :meth:`stop`; requests that have begun are answered first."""
        try:
            self._http.serve_forever(poll_interval=0.1)
        finally:
            self._http.server_close()

    def stop(self) -> None:
        """Let :meth:`serve` return; from any other thread."""
        self._http.shutdown()

    def serve_until_told(self) -> None:
        """:meth:`serve` until SIGTERM or Ctrl-C; from the main thread."""

        def on_signal(number: int, frame: object) -> None:
            threading.Thread(target=self.stop).start()  # shutdown waits for the loop that this signal interrupted

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.serve()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def score(self, queries: Sequence[str], prompts: Sequence[str] | None = None) -> list[float]:
        """One score per query, in order, each that of the live model.

        Raises:
            DataError: a query cannot be read, with its number, as ``chat.written_ids``.
        """
        sequences = []
        with self._lock:  # tokenizers, too, do one thing at a time
            for i, query in enumerate(queries):
                try:
                    sequences.append(chat.written_ids(self._model.tokenizer, query, prompts[i] if prompts else None))
                except DataError as error:
                    raise DataError(f"query {i}: {error}") from None
            rows = self._model.output_ids(sequences, micro_batch_tokens=self._micro_batch_tokens)
            self._num_requests += 1
            self._num_scored += len(rows)
        return [row[0] for row in rows]

    def health(self) -> dict[str, Any]:
        """What /health says; never waits for a batch."""
        return {
            "status": "ok", "model": self._name, "num_requests": self._num_requests, "num_scored": self._num_scored
        }  # fmt: skip

    def _answer(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is no JSON ({error})") from None
        queries = _texts(request, "query")
        if queries is None:
            raise _Refused(400, 'the body must be an object with "query": [texts], and "prompts": [texts] if it can be')
        prompts = _texts(request, "prompts")
        if prompts is not None and len(prompts) != len(queries):
            raise _Refused(400, f"{len(prompts)} prompts for {len(queries)} queries")
        try:
            scores = self.score(queries, prompts)
        except (DataError, ModelError) as error:
            raise _Refused(400, str(error)) from None
        if not all(map(math.isfinite, scores)):
            raise _Refused(422, "the model gave a score that is not finite; its weights are damaged")
        return {"rewards": scores, "scores": scores, "extra_logs": {}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_SECONDS

            def do_GET(self) -> None:
                if self.path.rstrip("/") == "/health":
                    self._send(200, server.health())
                else:
                    self._send(404, {"error": "GET /health or POST /get_reward"})

            def do_POST(self) -> None:
                try:
                    self._send(200, server._answer(self._body()))
                except _Refused as error:
                    server._say(f"refused a request of {self.client_address[0]}: {error}")
                    self._send(error.status, {"error": str(error)})
                except OSError:
                    self.close_connection = True  # the client has gone
                except Exception as error:  # out of memory, say: the next request may be smaller
                    server._say(f"a request of {self.client_address[0]} failed: {error!r}")
                    self._send(500, {"error": f"{type(error).__name__}: {error}"})

            def _body(self) -> bytes:
                if self.path.rstrip("/") not in ("", "/get_reward"):
                    raise _Refused(404, "POST to /get_reward")
                try:
                    length = int(self.headers["Content-Length"])
                except (TypeError, ValueError):
                    raise _Refused(411, "the request must say its Content-Length") from None
                if not 0 <= length <= server._max_body_bytes:
                    self.close_connection = True
                    limit = server._max_body_bytes
                    raise _Refused(413, f"a body of {length:,} bytes, the limit is {limit:,}; send fewer texts at once")
                body = self.rfile.read(length)
                if len(body) < length:
                    raise ConnectionError("the body broke off")
                return body

            def _send(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *arguments: Any) -> None:
                """A line per request would drown what matters."""

        return Handler


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True  # answers that have begun are finished
    request_queue_size = 128


def _texts(request: Any, key: str) -> list[str] | None:
    """A list of texts, or one text; None where the key is missing or empty."""
    value = request.get(key) if isinstance(request, dict) else None
    values = [value] if isinstance(value, str) else value
    if not values:
        return None
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise _Refused(400, f'"{key}" must be a list of texts')
    return values


def _check_template(tokenizer: Any) -> None:
    """Queries are read as the ids of the live reward or refused: tried on texts that tokenizers are known to change."""
    tried = [
        _read_as_live(tokenizer, turns, said)
        for said in _TRIED
        for turns in ([said], ["What is 2 + 2?", "It is 4.", said], [said, said, "Sure?"])
    ]
    if False in tried or True not in tried:
        raise ModelError(
            "this model's tokenizer does not give texts back as they were, so queries cannot be scored as PPO scores "
            "them; use the model itself (ppo.rewards.NAME.model)"
        )


def _read_as_live(tokenizer: Any, turns: list[str], said: str) -> bool | None:
    """Whether a policy's answer to these turns is read from its text as PPO reads it; None = it would be refused."""
    roles = [Message(role, turn) for role, turn in zip(("user", "assistant", "user"), turns)]
    try:
        prompt = chat.prompt_ids(tokenizer, roles)
        answer = chat.answer_ids(tokenizer, said)
        query, opening = (
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for ids in (prompt + answer, prompt)
        )
        read = chat.written_ids(tokenizer, query, opening)
    except DataError:
        return None
    return bool(read == prompt + chat.answer_ids(tokenizer, chat.answer_text(tokenizer, answer)))


def open_server(
    model: str, *, device: str = "auto", dtype: str = "auto", attention: str = "auto", **options: Any
) -> RewardServer:
    """A server for a reward model's folder; ``options`` as of :class:`RewardServer`.

    Raises:
        ModelError: no such model, or one without a score head.
    """
    from heedful.models import hardware
    from heedful.models.load import resolve
    from heedful.models.roles import build_reward

    path, place = resolve(model), hardware.device(device)
    reward = build_reward(path, device=place, dtype=hardware.compute_dtype(place, dtype), attention=attention)
    return RewardServer(reward.part, Path(model).name, **options)
