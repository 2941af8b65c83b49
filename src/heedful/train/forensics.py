"""What a failed proof leaves behind: one file from which ``heedful replay`` runs the failing batch again.

    recorder = Recorder(stage, roles, config)
    recorder.begin(step)
    with recorder:
        recorder.note(phase="scoring", rollouts=rollouts, kl_coefficient=beta)
        recorder.note(micro_batch=tokens)                                          # one by one
        recorder.note(phase="policy update", minibatch=(epoch, number))
        recorder.note(micro_batch=experience_batch)                                # one by one

Noting keeps references only; nothing is copied or written before a proof fails.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from heedful.batches import ExperienceBatch, TokenBatch
from heedful.config.ppo import PPOConfig
from heedful.errors import CheckpointError, GuardError, NonFiniteError
from heedful.models.roles import Roles
from heedful.records import Record
from heedful.runs.folder import RunFolder, StageFolder

VERSION = 1


class Recorder:
    """Remembers what a PPO step is working on; as a context it writes that to a file when a proof fails inside.

    The file (``replay-step-000012.pt`` in the stage folder, the newest only) holds plain values and tensors alone:
    recipe, step, what was noted, the trained weights as they are. The error goes on with the file's name added; when
    the file cannot be written the error says so and is otherwise the same.
    """

    def __init__(self, stage: StageFolder, roles: Roles, config: PPOConfig) -> None:
        self._stage, self._roles, self._config = stage, roles, config
        self._notes: dict[str, Any] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new PPO step, kept as ``step``: what was noted before is forgotten."""
        self.step, self._notes = step, {"phase": "scoring", "micro_batches": []}

    def note(
        self,
        *,
        phase: str | None = None,
        minibatch: tuple[int, int] | None = None,
        micro_batch: TokenBatch | ExperienceBatch | None = None,
        **facts: Any,
    ) -> None:
        """Add or replace facts.

        Args:
            phase: "scoring", "policy update" or "value update".
            minibatch: (epoch, number); it and another phase forget the micro-batches noted before.
            micro_batch: the one that is worked on now; those of a minibatch are kept together, since a gradient is
                checked after all of them. In "scoring" the tokens whose streams are checked, of which the last count.
            facts: ``rollouts`` and ``kl_coefficient`` of the step, and whatever else may help; plain values, tensors,
                records, batches, or lists and dicts of them.
        """
        if minibatch is not None:
            facts["minibatch"] = minibatch
        if phase is not None:
            facts["phase"] = phase
        if minibatch is not None or phase not in (None, self._notes["phase"]):
            self._notes["micro_batches"] = []
        self._notes |= facts
        if micro_batch is not None:
            earlier = [] if self._notes["phase"] == "scoring" else self._notes["micro_batches"]
            self._notes["micro_batches"] = [*earlier, micro_batch]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the file and add its name to the error; any other exception passes untouched."""
        if not isinstance(error, GuardError):
            return
        try:
            path = self._write(error)
        except Exception as problem:  # whatever it is, it must not hide the first error
            error.args = (f"{error}; no replay file could be written ({next(iter(str(problem).splitlines()), '?')})",)
        else:
            error.args = (f"{error}; replay it: heedful replay {shlex.quote(str(path))}",)

    def _write(self, error: GuardError) -> Path:
        folder = self._stage.path
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"replay-step-{self.step:06d}.pt"
        partial = folder / f".{path.name}.tmp"
        try:
            with partial.open("wb") as handle:
                torch.save(self._content(error), handle)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        for older in folder.glob("replay-step-*.pt"):
            if older != path:
                older.unlink()
        return path

    def _content(self, error: GuardError) -> dict[str, Any]:
        roles, run = self._roles, self._stage.path.parent.parent
        try:
            recipe = RunFolder.open(run).recipe
        except CheckpointError:  # train_ppo called by hand, outside a run
            recipe = None
        found = error if isinstance(error, NonFiniteError) else NonFiniteError("")
        return {
            "version": VERSION,
            "run": str(run.resolve()),
            "recipe": recipe,
            "config": self._config.model_dump(mode="json"),
            "hardware": {
                "device": str(roles.policy.device),
                "dtype": str(roles.policy.dtype).removeprefix("torch."),
                "attention": roles.policy.base.config._attn_implementation,
            },
            "step": self.step,
            "error": {"message": str(error), "stream": found.stream, "ids": list(found.ids), "module": found.module},
            "notes": saved(self._notes),
            "weights": {
                "policy": saved(roles.policy.trainable_parameters()),
                "value": saved(roles.value.trainable_parameters()),
            },
        }


def saved(value: Any) -> Any:
    """``value`` as lists, dicts, plain values and tensors on the CPU, which ``torch.load(weights_only=True)`` takes."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Record):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: saved(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): saved(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [saved(v) for v in value]
    return value


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay file as it was read."""

    run: Path
    """The run folder at the time."""
    recipe: dict[str, Any] | None
    """None when train_ppo was called outside a run."""
    config: PPOConfig
    hardware: dict[str, str]
    """device, dtype and attention of the policy"""
    step: int
    error: dict[str, Any]
    """message, stream, ids, module"""
    phase: str
    minibatch: tuple[int, int]
    """Epoch and number."""
    micro_batches: list[TokenBatch | ExperienceBatch]
    notes: dict[str, Any]
    weights: dict[str, dict[str, torch.Tensor]]
    """Trained weights of "policy" and "value", by name."""

    def put_weights(self, roles: Roles) -> None:
        """Give ``roles`` the recorded weights.

        Raises:
            CheckpointError: other names or shapes than the roles have.
        """
        for who, part in (("policy", roles.policy), ("value", roles.value)):
            parameters, recorded = part.trainable_parameters(), self.weights[who]
            shapes = ({n: p.shape for n, p in x.items()} for x in (parameters, recorded))
            if next(shapes) != next(shapes):
                raise CheckpointError(f"the recorded {who} weights do not fit the run's model; was it replaced since?")
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(recorded[name])


def read(path: Path) -> Replay:
    """The record in a replay file.

    Raises:
        CheckpointError: no such file, not a replay file, damaged, or of another version.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a replay file is in the stage folder, stages/03-ppo")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        version = content["version"]
        if version == VERSION:
            return _parse(content)
    except Exception as error:  # torch has many ways to fail on a file that is not its own
        raise CheckpointError(f"{path}: not a replay file, or damaged ({type(error).__name__})") from None
    raise CheckpointError(f"{path}: written by another version of heedful (format {version}, this one {VERSION})")


def _parse(content: dict[str, Any]) -> Replay:
    notes = content["notes"]
    return Replay(
        Path(content["run"]), content["recipe"], PPOConfig(**content["config"]), content["hardware"], content["step"],
        content["error"], notes["phase"], tuple(notes.get("minibatch", (0, 0))),
        [_batch(b) for b in notes["micro_batches"]], notes, content["weights"],
    )  # fmt: skip


def _batch(streams: dict[str, Any]) -> TokenBatch | ExperienceBatch:
    if "tokens" not in streams:
        return TokenBatch(**{**streams, "ids": tuple(streams["ids"])})
    tokens = _batch(streams["tokens"])
    assert isinstance(tokens, TokenBatch)
    return ExperienceBatch(**{**streams, "tokens": tokens})
