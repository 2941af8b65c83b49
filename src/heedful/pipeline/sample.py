"""Answers for people to rank: several policies answer a stratified choice of prompts, and nothing is sampled twice."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heedful.data.export import record_row, write_rows
from heedful.data.load import load_prompts, load_rankings
from heedful.data.shipped import data_path
from heedful.data.strata import choose, unlike
from heedful.data.writing import refuse_to_replace
from heedful.errors import ConfigError, DataError
from heedful.pipeline.candidates import Sampled, Source, deal, differing, rankings_of, with_baits, with_gold
from heedful.records import Prompt, Ranking
from heedful.runs.journal import alone, append_entry, read_entries
from heedful.runs.progress import Progress, tell

ATTEMPTS = 3
"""How often an answer that is like another one is sampled anew."""
Known = dict[tuple[str, int], Sampled]
"""Answers by prompt id and sample index."""
Wanted = tuple[Prompt, int, Source]
"""A prompt, the sample index of an answer to it, and who shall give it."""


@dataclass(frozen=True)
class Policy:
    """A model that answers."""

    model: str
    """Folder, hub id or alias"""
    name: str = ""
    """What its answers are marked with; "" takes the folder's"""
    weight: float = 1.0
    """Its part of the answers, relative to the other policies'"""


@dataclass(frozen=True)
class SampleConfig:
    """What is asked of the policies."""

    num_answers: int = 4
    """Per prompt, 2 to 9"""
    temperatures: tuple[float, ...] = (1.0,)
    """With several, each policy answers at each in turn, and the marks tell them apart"""
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    num_prompts: int | None = None
    """None = all"""
    quotas: Mapping[str, float] = field(default_factory=dict)
    """Category → share; {} = as the prompts are"""
    threshold: float = 0.8
    """Overlap from which two prompts, or two answers, are alike"""
    round: int = 0
    bait_rate: float = 0.0
    """Share of the prompts whose last answer is one to another prompt"""
    gold_rate: float = 0.09
    """Share of control items, where a file of them is given"""
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            f"num_answers is {self.num_answers}; people rank 2 to 9 answers": 2 <= self.num_answers <= 9,
            f"temperatures are {self.temperatures}; give numbers of 0 or more": self.temperatures
            and min(self.temperatures) >= 0,
            f"threshold is {self.threshold}; give a number above 0, at most 1": 0 < self.threshold <= 1,
            f"bait_rate is {self.bait_rate}; give a share from 0 to 1": 0 <= self.bait_rate <= 1,
            f"gold_rate is {self.gold_rate}; give a share from 0, below 1": 0 <= self.gold_rate < 1,
            f"quotas are {dict(self.quotas)}; give numbers above 0": all(share > 0 for share in self.quotas.values()),
        }
        for message, is_right in checks.items():
            if not is_right:
                raise ConfigError(message)


@dataclass(frozen=True)
class SampleResult:
    """What sampling came to."""

    rankings: list[Ranking]
    """Not judged yet; control items among them"""
    num_baits: int
    num_gold: int
    num_prompts_left_out: dict[str, int]
    """By reason"""
    num_answers_left_out: int
    """Empty, or nearly the same as another answer to the prompt; most were sampled anew"""
    num_short: int
    """Rankings with fewer answers than asked for, since no more different ones came"""
    num_resumed: int
    """Answers of an earlier attempt"""

    def to_json(self) -> dict[str, Any]:
        own = [r for r in self.rankings if r.gold is None]
        answers = [a for r in own for a in r.answers]
        return {
            "num_rankings": len(own),
            "num_answers": len(answers),
            "num_cut": sum("cut" in a.flags for a in answers),
            "num_baits": self.num_baits,
            "num_gold": self.num_gold,
            "num_short": self.num_short,
            "num_answers_left_out": self.num_answers_left_out,
            "num_prompts_left_out": self.num_prompts_left_out,
            "num_resumed": self.num_resumed,
            "by_category": dict(sorted(Counter(r.category for r in own).items())),
            "by_policy": dict(sorted(Counter(a.policy for a in answers).items())),
        }


def sample(
    prompts: str | Path,
    policies: Sequence[Policy],
    config: SampleConfig,
    *,
    out: str | Path | None = None,
    project: str | Path | None = None,
    gold: str | Path | None = None,
    on_bad_row: str = "error",
    device: str = "auto",
    dtype: str = "auto",
    batch_size: int = 64,
    say: Callable[[str], None] = tell,
) -> SampleResult:
    """Sample answers to prompts and write what people are to rank, to a file in the master form or into a project.

    Until then the answers lie in ``OUT.partial`` (of a project, ``sample.partial`` in its folder), from which the same
    call goes on. An answer depends on the seed, its prompt and its number, not on what is sampled beside it.

    Args:
        prompts: a file of any kind that has prompts.
        gold: a file of control items (rankings with ``gold``).

    Raises:
        ConfigError: two policies of one name, or neither ``out`` nor ``project``.
        DataError: too few prompts or control items, or as :func:`load_prompts`.
        ModelError, EngineError: a policy cannot be loaded or cannot answer.
        CheckpointError: another process writes ``out``.
    """
    if out is None and project is None:
        raise ConfigError("nothing says where the answers shall go; give out or project")
    sources = _sources(policies, config)
    source_file = data_path(str(prompts))
    if out is not None:
        _check_output(out, source_file, gold)
    asked, left_out = _prompts(source_file, policies, config, on_bad_row)
    controls = _controls(gold)
    baited = with_baits(asked, config.bait_rate, config.seed)
    key = _key(asked, policies, config)
    partial = Path(f"{out}.partial") if out is not None else Path(str(project)) / "sample.partial"
    with ExitStack() as stack:
        opened = _open_project(project)  # a wrong one shows before anything is sampled
        stack.enter_context(alone(partial))
        known = _known(partial, key)
        num_resumed = len(known)
        if num_resumed:
            say(f"{num_resumed:,} answers were sampled before; going on")
        wanted = {p.id: config.num_answers - (p.id in baited) for p in asked}
        engines = _Engines(config, partial, key, device=device, dtype=dtype, batch_size=batch_size)
        answers = _collect(asked, sources, wanted, config, known, engines)
        rankings = rankings_of(
            asked, answers, baited, round=config.round, seed=config.seed, threshold=config.threshold
        )
        result = _result(rankings, controls, asked, left_out, known, answers, num_resumed, config, say)
        if opened is not None:
            from heedful.annotate.project import add_rankings

            for warning in add_rankings(opened, result.rankings, now=time.time()).warnings:
                say(warning)
        if out is not None:  # last, so that the file says: all is done
            write_rows(out, [record_row(r) for r in result.rankings])
    return result


def _sources(policies: Sequence[Policy], config: SampleConfig) -> list[Source]:
    """Every policy at every temperature."""
    if not policies:
        raise ConfigError("no policy answers; name one or several")
    names = [policy.name or name_of(policy.model) for policy in policies]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"two policies are called {twice[0]!r}; give them names, as in --policy new=FOLDER")
    for policy in policies:
        if not policy.weight > 0:
            raise ConfigError(f"the weight of {policy.model} is {policy.weight}; give a number above 0")
    if len(policies) == 1 and not any(config.temperatures):
        raise ConfigError("one policy at temperature 0 gives one answer; name another temperature or another policy")
    return [
        Source(f"{name}@{t:g}" if len(config.temperatures) > 1 else name, policy.model, t,
               policy.weight / len(config.temperatures))
        for name, policy in zip(names, policies, strict=True) for t in config.temperatures
    ]  # fmt: skip


def name_of(model: str) -> str:
    """A short name of a model: its folder's, or RUN-STAGE for the model that a stage of a run has left."""
    path = Path(model)
    stage = re.fullmatch(r"\d+-(\w+)", path.parent.name) if path.name == "model" else None
    if stage and path.parent.parent.name == "stages":
        return f"{path.resolve().parents[2].name}-{stage.group(1)}"
    return path.name or model


def _check_output(out: str | Path, prompts: str, gold: str | Path | None) -> None:
    if not str(out).endswith((".jsonl", ".jsonl.gz", ".json", ".parquet")):
        raise DataError(f"{out}: name the output .jsonl, .jsonl.gz, .json or .parquet")
    for source in (prompts, gold):
        if source is not None:
            refuse_to_replace(source, out)


def _prompts(
    path: str, policies: Sequence[Policy], config: SampleConfig, on_bad_row: str
) -> tuple[list[Prompt], dict[str, int]]:
    """The chosen prompts, which every policy can read, and how many were left out before the choice, by reason."""
    from heedful.data import tokenise
    from heedful.models.load import load_tokenizer, resolve

    there = load_prompts(path, on_bad_row=on_bad_row)
    distinct = unlike(there, config.threshold)
    left_out = Counter({"like_another": len(there) - len(distinct)})
    for folder in dict.fromkeys(resolve(policy.model) for policy in policies):
        read = tokenise.prompts(distinct, load_tokenizer(folder), max_prompt_tokens=config.max_prompt_tokens)
        left_out.update(read.dropped)
        distinct = [prompt for prompt, _ in read.samples]
    chosen = choose(distinct, config.num_prompts, config.quotas, seed=config.seed)
    return chosen, {reason: count for reason, count in left_out.items() if count}


def _controls(gold: str | Path | None) -> list[Ranking]:
    if gold is None:
        return []
    controls = [r for r in load_rankings(data_path(str(gold)), keep_ties=True, keep_unranked=True) if r.gold]
    if not controls:
        raise DataError(f"{gold}: no control items: a ranking with gold [[better, worse], …] is one")
    return controls


def _open_project(folder: str | Path | None) -> Any:
    if folder is None:
        return None
    require_annotate("a project needs")
    from heedful.annotate.project import open_project

    return open_project(Path(folder))


def require_annotate(what: str) -> None:
    """Raises ConfigError where the libraries of the annotation room are not installed; ``what`` begins its sentence."""
    try:
        import heedful.annotate.project  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} the extra annotate; pip install 'heedful[annotate]' ({error})") from error


def _key(prompts: Sequence[Prompt], policies: Sequence[Policy], config: SampleConfig) -> str:
    """What sampled answers belong to; they are not mixed with those of other prompts, policies or settings."""
    from heedful.models.folders import folder_digest
    from heedful.models.load import resolve

    of_policies = [[p.name, p.weight, folder_digest(resolve(p.model))] for p in policies]
    asked = [[p.id, [m.to_json() for m in p.messages]] for p in prompts]
    told = json.dumps([of_policies, asked, asdict(config)], default=dict)
    return hashlib.sha256(told.encode()).hexdigest()


def _known(journal: Path, key: str) -> Known:
    return {
        (prompt, index): Sampled(*answer)
        for entry in read_entries(journal) if entry["key"] == key
        for prompt, index, *answer in entry["answers"]
    }  # fmt: skip


class _Engines:
    """Loads one policy after the other, lets it answer part by part, and has each part on disk before the next."""

    def __init__(
        self, config: SampleConfig, journal: Path, key: str, *, device: str, dtype: str, batch_size: int
    ) -> None:
        self._config, self._journal, self._key = config, journal, key
        self._device, self._dtype, self._batch_size = device, dtype, batch_size

    def answer(self, wanted: Sequence[Wanted], known: Known, what: str) -> None:
        """Add what is not known yet to ``known``."""
        missing = [(p, index, source) for p, index, source in wanted if (p.id, index) not in known]
        if not missing:
            return
        with Progress(what, len(wanted), first_step=len(wanted) - len(missing)) as progress:
            for model in dict.fromkeys(source.model for *_, source in missing):
                own = [w for w in missing if w[2].model == model]
                for rows in self._answers_of(model, own):
                    append_entry(self._journal, {"key": self._key, "answers": rows})
                    for prompt, index, *answer in rows:
                        known[prompt, index] = Sampled(*answer)
                        progress.step()

    def _answers_of(self, model: str, wanted: Sequence[Wanted]) -> Iterator[list[list[Any]]]:
        """Prompt id, sample index, source, text and whether it was cut, part by part."""
        from heedful.data.chat import end_token_ids, prompt_ids
        from heedful.models import hardware
        from heedful.models.load import resolve
        from heedful.models.roles import build_policy
        from heedful.rollout.engine import Request, Sampling
        from heedful.rollout.hf import HFEngine

        place = hardware.device(self._device)
        dtype = hardware.compute_dtype(place, self._dtype)
        policy = build_policy(resolve(model), lora=None, trained=False, device=place, dtype=dtype)
        tokenizer = policy.tokenizer
        engine = HFEngine(policy, end_token_ids(tokenizer), batch_size=self._batch_size)
        del policy  # the engine has a copy
        for temperature in self._config.temperatures:
            own = [w for w in wanted if w[2].temperature == temperature]
            for start in range(0, len(own), self._batch_size):
                part = own[start : start + self._batch_size]
                requests = [Request(p.id, index, prompt_ids(tokenizer, p.messages)) for p, index, _ in part]
                sampling = Sampling(self._config.max_new_tokens, temperature)
                given = engine.generate(requests, sampling, seed=self._config.seed)
                yield [
                    [prompt.id, index, source.name, c.text, c.finish_reason == "length"]
                    for (prompt, index, source), c in zip(part, given, strict=True)
                ]
        del engine
        hardware.release_models()


def _collect(
    prompts: Sequence[Prompt], sources: Sequence[Source], wanted: Mapping[str, int], config: SampleConfig,
    known: Known, engines: _Engines,
) -> dict[str, list[Sampled]]:  # fmt: skip
    """The differing answers to every prompt; one that is like another is asked for anew, ``ATTEMPTS`` times."""
    dealt = deal(prompts, sources, wanted, config.seed)
    warm = [source for source in sources if source.temperature > 0]
    asks = [(p, index, source) for p in prompts for index, source in enumerate(dealt[p.id])]
    there: dict[str, dict[int, Sampled]] = {p.id: {} for p in prompts}
    kept: dict[str, list[int]] = {}
    for attempt in range(1 + ATTEMPTS):
        engines.answer(asks, known, "Sampling anew" if attempt else "Sampling")
        for prompt, index, _ in asks:
            there[prompt.id][index] = known[prompt.id, index]
        kept = {p.id: differing(there[p.id], config.threshold) for p in prompts}
        lost = [(p, source) for p, index, source in asks if index not in kept[p.id]]
        next_index = Counter({name: len(answers) for name, answers in there.items()})
        asks = []
        for prompt, source in lost:
            if source.temperature == 0 and not warm:
                continue  # it would say the same again
            another = source if source.temperature else warm[next_index[prompt.id] % len(warm)]
            asks.append((prompt, next_index[prompt.id], another))
            next_index[prompt.id] += 1
    return {p.id: [there[p.id][index] for index in kept[p.id]] for p in prompts}


def _result(
    rankings: list[Ranking], controls: list[Ranking], prompts: Sequence[Prompt], left_out: dict[str, int],
    known: Known, answers: Mapping[str, Sequence[Sampled]], num_resumed: int, config: SampleConfig,
    say: Callable[[str], None],
) -> SampleResult:  # fmt: skip
    """The rankings with control items among them, and the counts."""
    if not rankings:
        raise DataError(
            "no prompt got two different answers; raise the temperature or max_new_tokens, or add another policy"
        )
    mixed, num_gold = list(rankings), 0
    if controls:
        mixed, wanted = with_gold(rankings, controls, config.gold_rate, config.seed)
        num_gold = len(mixed) - len(rankings)
        if num_gold < wanted:
            say(f"gold_rate {config.gold_rate:g} takes {wanted:,} control items; the file has {num_gold:,}, all taken")
    ids = Counter(r.group_id for r in mixed)
    if twice := [name for name, count in ids.items() if count > 1]:
        raise DataError(f"a control item has the id of another item, {twice[0]!r}; give it another in its file")
    return SampleResult(
        mixed,
        num_baits=sum(a.kind == "bait" for r in rankings for a in r.answers),
        num_gold=num_gold,
        num_prompts_left_out={**left_out, **({"no_two_answers": n} if (n := len(prompts) - len(rankings)) else {})},
        num_answers_left_out=len(known) - sum(map(len, answers.values())),
        num_short=sum(len(r.answers) < config.num_answers for r in rankings),
        num_resumed=num_resumed,
    )
