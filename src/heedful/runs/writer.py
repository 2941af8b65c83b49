"""Writes the numbers of one stage: JSONL (the truth), TensorBoard and trackers (copies of it)."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from heedful.errors import CheckpointError, ConfigError
from heedful.runs import metrics
from heedful.runs.distributions import Histogram, summarise
from heedful.runs.files import json_line, read_lines, write_bytes
from heedful.runs.folder import StageFolder
from heedful.runs.trackers import Tracker


class StageWriter:
    """Appends to the files of one stage; every call is on disk (short of a power cut) when it returns.

        with StageWriter(stage) as writer:
            writer.scalars(1, {"sft/loss_nats": 2.3})

    Args:
        stage: folder of an unfinished stage.
        resume_step: the step of the checkpoint that training goes on from; everything logged after it is cut off, so
            that the files of a resumed run equal those of an uninterrupted one (timing metrics apart). None starts
            from nothing and clears what a killed attempt without a checkpoint left behind.
        trackers: further places to send scalars to.

    Raises:
        CheckpointError: the stage is finished already.
    """

    def __init__(self, stage: StageFolder, *, resume_step: int | None = None, trackers: Sequence[Tracker] = ()) -> None:
        if stage.is_finished:
            raise CheckpointError(f"{stage.path} is finished; start a new run with --new instead of writing over it")
        stage.path.mkdir(parents=True, exist_ok=True)
        for path in (stage.metrics, stage.histograms, stage.samples):
            _cut(path, resume_step)
        self._last_step: dict[Path, int] = {}
        self._stage = stage
        self._trackers = tuple(trackers)
        self._tensorboard = _TensorBoard(stage)
        self._files: dict[Path, IO[bytes]] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step. One that is not finite is stored as null, with the reason under ``warnings``.

        Raises:
            ConfigError: a name is not in the list of metrics, or the step lies before one already logged.
        """
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        warnings = []
        for name, value in values.items():
            metrics.require(name)
            number = float(value)
            row[name] = number if math.isfinite(number) else None
            if row[name] is None:
                warnings.append(f"{name} is {number}")
        if warnings:
            row["warnings"] = warnings
        self._append(self._stage.metrics, step, [row])
        self._tensorboard.scalars(row)
        finite = {name: row[name] for name in values if row[name] is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log distributions of a step from their raw values.

        Raises:
            ConfigError: a name is not in the list of histograms, or the step lies before one already logged.
        """
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, numbers in values.items():
            metrics.require(name, metrics.HISTOGRAMS)
            histogram = summarise(numbers)
            row[name] = histogram.to_json() if histogram else None
        self._append(self._stage.histograms, step, [row])
        self._tensorboard.histograms(row)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log a table of samples (prompt, answer, scores, …), one row each."""
        self._append(self._stage.samples, step, [{"step": step, **row} for row in rows])

    def close(self) -> None:
        """Close every file and tracker."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._tensorboard.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> StageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, path: Path, step: int, rows: list[dict[str, Any]]) -> None:
        if step < self._last_step.get(path, step):
            raise ConfigError(
                f"{path.name}: step {step} logged after step {self._last_step[path]}; steps must not fall"
            )
        self._last_step[path] = step
        try:
            if path not in self._files:
                self._files[path] = path.open("ab")
            self._files[path].write(b"".join(json_line(row) for row in rows))
            self._files[path].flush()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error


def _cut(path: Path, resume_step: int | None) -> None:
    """Keep the rows up to ``resume_step``; a torn last line goes too."""
    if not path.exists():
        return
    if resume_step is None:
        path.unlink()
        return
    kept = b"".join(json_line(row) for row in read_lines(path) if row.get("step", 0) <= resume_step)
    if kept != path.read_bytes():
        write_bytes(path, kept)


class _TensorBoard:
    """Event files of the stage. They are a copy, so they are made anew from the JSONL files when a stage goes on."""

    def __init__(self, stage: StageFolder) -> None:
        # Imported here: reading a run, or a report, needs no TensorBoard.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2
        shutil.rmtree(stage.tensorboard, ignore_errors=True)
        self._writer = EventFileWriter(str(stage.tensorboard))
        for row in read_lines(stage.metrics):
            self.scalars(row)
        for row in read_lines(stage.histograms):
            self.histograms(row)

    def scalars(self, row: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in row.items() if "/" in name and value is not None}
        self._add(row, [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])

    def histograms(self, row: Mapping[str, Any]) -> None:
        values = []
        for name, data in row.items():
            if "/" in name and data is not None:
                histogram = Histogram.from_json(data)
                total = histogram.mean * histogram.num_values
                squares = (histogram.std**2 + histogram.mean**2) * histogram.num_values
                proto = self._summary.HistogramProto(
                    min=histogram.minimum, max=histogram.maximum, num=histogram.num_values, sum=total,
                    sum_squares=squares, bucket_limit=histogram.edges[1:], bucket=histogram.counts,
                )  # fmt: skip
                values.append(self._summary.Summary.Value(tag=name, histo=proto))
        self._add(row, values)

    def close(self) -> None:
        self._writer.close()

    def _add(self, row: Mapping[str, Any], values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=row.get("time", 0.0), step=row["step"], summary=summary))
        self._writer.flush()
