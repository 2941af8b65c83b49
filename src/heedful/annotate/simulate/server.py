"""The app of a project in a process of its own, started and ended from here."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from heedful.errors import EngineError

START_SECONDS = 60.0


class ServerProcess:
    """``heedful annotate serve FOLDER`` on this machine.

        with ServerProcess(folder) as server:
            Client(server.url, token)
    """

    def __init__(self, folder: str | Path, options: Sequence[str] = (), *, port: int = 0) -> None:
        self._folder, self._options, self._port = str(folder), list(options), port
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = ""

    def start(self) -> str:
        """Start it, on the port that it had before if it ran before; the address.

        Raises:
            EngineError: it does not come up.
        """
        self._close_log()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        command = [sys.executable, "-m", "heedful.cli.main", "annotate", "serve", self._folder, "--port"]
        self._process = subprocess.Popen(
            [*command, str(self._port), *self._options], stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        self.url = self._process.stdout.readline().decode().strip() if ready else ""
        if not self.url.startswith("http"):
            self.kill()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines() or ["it says nothing"]
            raise EngineError(f"the app of {self._folder} does not start: {said[-1]}")
        self._port = int(self.url.rpartition(":")[2])
        return self.url

    @property
    def pid(self) -> int:
        """Of the process, running or not."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: nothing is finished, nothing is said."""
        self._end(by_force=True)

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self._end(by_force=False)

    def _end(self, *, by_force: bool) -> None:
        if self._process is None:
            return
        (self._process.kill if by_force else self._process.terminate)()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

