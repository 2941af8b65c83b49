"""The start-up self-test: before anything long, the user's own set-up proves that it can work.

Each proof is a function of the :class:`Bench` that says what it measured, what that must be, and what to do if it is
not. Nothing is left behind: no gradient, no moved weight, no drawn random number, no moved running statistic.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from heedful.config.ppo import PPOConfig
from heedful.errors import GuardError, HeedfulError
from heedful.models.hardware import random_state, release_memory, restore_random_state, seed_everything
from heedful.models.roles import Roles
from heedful.records import Prompt
from heedful.rollout.engine import Engine
from heedful.rollout.score import Scoring
from heedful.train import proofs
from heedful.train.bench import Bench
from heedful.train.proofs import Finding


@dataclass(frozen=True)
class Proof:
    """One thing that must hold in a set-up, and whether it does."""

    name: str
    passed: bool
    measured: str
    bound: str
    """What ``measured`` must be."""
    advice: str
    """What to do when it is not; empty when it is."""
    seconds: float

    def __str__(self) -> str:
        if self.passed:
            return f"{self.name}: {self.measured}"
        return f"{self.name}: {self.measured}; it must be: {self.bound}; {self.advice}"


def run_self_test(
    roles: Roles,
    scoring: Scoring,
    prompts: Sequence[tuple[Prompt, list[int]]],
    config: PPOConfig,
    engine: Engine,
    *,
    seed: int,
    on_proof: Callable[[Proof], None] | None = None,
) -> list[Proof]:
    """Every proof in order, cheap ones first; one that fails does not stop the others.

    Args:
        prompts: all prompts of the run with their ids.
        engine: speaks for the policy; it is given the policy's weights as version 0, and rests afterwards.
        on_proof: is told each proof when it is done.
    """
    bench = Bench(roles, scoring, prompts, config, engine, seed)
    found = []
    with _same_randomness(seed):
        for name, prove in proofs.ALL.items():
            found.append(_run(name, prove, bench))
            if on_proof is not None:
                on_proof(found[-1])
    return found


def require(found: Iterable[Proof]) -> None:
    """Raise GuardError with the first proof that failed."""
    for proof in found:
        if not proof.passed:
            raise GuardError(f"the set-up fails its self-test: {proof} (--ppo.self_test false starts all the same)")


def _run(name: str, prove: Callable[[Bench], Finding], bench: Bench) -> Proof:
    started = time.perf_counter()
    try:
        finding = prove(bench)
    except HeedfulError as error:
        finding = Finding(False, str(error), "no error", "put right what this sentence says")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        advice = proofs.memory_advice(bench.config)
        finding = Finding(False, f"out of memory (largest batch: {bench.longest_batch})", "it fits", advice)
    if not finding.passed:
        gc.collect()  # the tensors that the error held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    release_memory()
    seconds = time.perf_counter() - started
    advice = "" if finding.passed else finding.advice
    return Proof(name, finding.passed, finding.measured, finding.bound, advice, seconds)


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class of its own for CUDA only; the others say it in words."""
    words = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        w in words for w in ("can't allocate memory", "not enough memory", "out of memory")
    )


@contextmanager
def _same_randomness(seed: int) -> Iterator[None]:
    """Random streams are afterwards what they were before."""
    randomness = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_random_state(randomness)
