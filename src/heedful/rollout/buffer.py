"""The unfinished rollout on disk: answers that were complete when the run was killed are read, not sampled again.

    rollouts/step-00000012.jsonl
        {"sha256": "a0…", "entry": {"key": "5f…", "completions": [{"prompt_id": "p7", "ids": [6, 2], …}, …]}}

A journal (:mod:`heedful.runs.journal`) with one line per chunk of answers. The key covers everything that the answers
depend on (step, seed, sampling, requests, the policy's trained weights to the last bit): a line that is torn, damaged
or of another policy is never used, its chunk is sampled again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from heedful.errors import CheckpointError
from heedful.records import Completion
from heedful.rollout.engine import Engine, Request, Sampling
from heedful.runs.journal import append_entry, read_entries

_NAME = re.compile(r"^step-(\d{8})\.jsonl$")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RolloutBuffer:
    """Generates through an engine and keeps every finished chunk in ``folder`` until it is forgotten."""

    def __init__(self, folder: Path, *, chunk: int) -> None:
        """``chunk`` is the number of answers asked for at a time."""
        self._folder, self._chunk = folder, chunk

    def generate(
        self,
        engine: Engine,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        weights: Mapping[str, Tensor],
        on_chunk: Callable[[Sequence[int], Sequence[Completion]], None] | None = None,
    ) -> list[Completion]:
        """What ``engine.generate(requests, sampling, seed=seed)`` gives, in order, a chunk of the requests at a time.

        Chunks hold prompts of like length; the longest come first, so that one that is too long shows at once. The
        cut depends on the requests alone: with chunks up to the engine's own batch size, a resumed rollout equals
        the uninterrupted one to the last bit.

        Args:
            weights: the policy's trained weights; chunks that others have sampled are not used.
            on_chunk: is told the places among ``requests`` and the answers of every chunk that is there, sampled (and
                on disk) or read.

        Raises:
            CheckpointError: a chunk cannot be written (disk full, no permission).
        """
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        chunks = [order[start : start + self._chunk] for start in range(0, len(order), self._chunk)]
        path = self._folder / f"step-{step:08d}.jsonl"
        situation = json.dumps([step, seed, dataclasses.asdict(sampling), _fingerprint(weights)])
        found = {entry["key"]: entry["completions"] for entry in read_entries(path)}
        done: dict[int, Completion] = {}
        for chosen in reversed(chunks):
            asked = [requests[i] for i in chosen]
            key = _sha256(situation, json.dumps([dataclasses.astuple(request) for request in asked]))
            if key in found:
                answers = [Completion.from_json(answer) for answer in found[key]]
            else:
                answers = engine.generate(asked, sampling, seed=seed)
                append_entry(path, {"key": key, "completions": [answer.to_json() for answer in answers]})
            done.update(zip(chosen, answers, strict=True))
            if on_chunk is not None:
                on_chunk(chosen, answers)
        return [done[i] for i in range(len(requests))]

    def forget_before(self, step: int) -> None:
        """Delete what a checkpoint of ``step`` finished steps has made useless, and the folder once it is empty."""
        if not self._folder.is_dir():
            return
        try:
            for path in self._folder.iterdir():
                match = _NAME.match(path.name)
                if match and int(match[1]) < step:
                    path.unlink()
            if not any(self._folder.iterdir()):
                self._folder.rmdir()
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be deleted: {error.strerror or error}") from error


def _fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes and bits: integer sums over the last dimension, hence exact, cheap on any device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        sums = weight.detach().contiguous().view(_BITS[weight.element_size()]).sum(dim=-1, dtype=torch.int64)
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()
