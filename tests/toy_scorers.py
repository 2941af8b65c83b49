"""Python scorers and rankings for tests of the audit: an honest judge of its shipped texts and of toy rankings."""

from __future__ import annotations

import random

from heedful.audit.cases import shipped_cases
from heedful.audit.sentences import language, sentences, words
from heedful.records import Answer, Message, Prompt, Ranking

CASES = {case.prompt.id: case for case in shipped_cases()}
TOPICS = ("tea", "rain", "bread", "trains", "moss", "copper", "violins", "bees", "chess", "clouds")
GOOD = [
    "{} was known to people long before it was written about.",
    "The price of {} follows the harvest of the year before.",
    "Children learn about {} from their grandparents.",
    "A museum in the north shows old tools for {}.",
]
OFF = ["Nobody was at home that evening.", "The door had been painted green.", "He counted his coins twice.",
       "Snow is white in every country."]  # fmt: skip


def rankings(num: int = 40, seed: int = 0, longer_is_better: bool = False) -> list[Ranking]:
    """Four answers each, of one to four sentences; more sentences on the topic are better, whatever the length."""
    rng = random.Random(seed)
    found = []
    for i in range(num):
        topic = f"{TOPICS[i % len(TOPICS)]} {i}"
        answers, quality = [], []
        for k in range(4):
            size = rng.randint(1, 4)
            good = k if k < size else size
            lines = [s.format(topic) for s in rng.sample(GOOD, good)] + rng.sample(OFF, size - good)
            answers.append(Answer(f"a{k}", " ".join(lines)))
            quality.append(len(lines) if longer_is_better else good / size)
        order = sorted(set(quality), reverse=True)
        ranks = {a.id: 1 + order.index(q) for a, q in zip(answers, quality)}
        category = ("chat", "writing")[i % 2]
        prompt = (Message("user", f"Tell me something about {topic}, please, in a few words."),)
        found.append(Ranking(f"g{i}", prompt, tuple(answers), consensus=ranks, category=category))
    return found


def quality(prompt: Prompt, answer: str) -> float:
    """How well an answer serves its prompt: shared words with the good answer, minus what is false and garbled."""
    case = CASES.get(prompt.id)
    if case is None:
        topic = prompt.messages[-1].content.split(" about ")[1].split(",")[0]
        lines = sentences(answer)
        share = sum(topic in s for s in lines) / len(lines) if lines else 0.0
        return 2 * share - (0 if answer.strip().endswith((".", "!", "?", ",")) else 0.5)
    known = set(words(case.base))
    said = words(answer)
    overlap = len(known & set(said)) / len(known)
    styled = any(answer == case.written.get(s) for s in ("formal", "casual", "exclaiming", "reversed", "rotated"))
    garbled = sum(a in "。.；" for a in said[:-1]) > 2 and language(answer) == "zh" and answer not in case.answers
    return (3.0 if styled else 3 * overlap) - 2 * (answer == case.written["wrong"]) - 0.5 * garbled


def length(prompts: list[Prompt], answers: list[str]) -> list[float]:
    """A scorer that loves length and nothing else."""
    return [float(len(answer)) for answer in answers]
