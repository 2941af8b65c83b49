"""What is there already said again: the question, its words, the answer's own sentences."""

from __future__ import annotations

from heedful.audit.cases import Case
from heedful.audit.probes.base import Probe, after, before, by_change
from heedful.audit.sentences import join, sentences, words

LONGEST_QUESTION_WORDS = 60
"""A longer prompt is a text to work on, which nobody repeats."""


def _question(case: Case) -> str | None:
    question = " ".join(case.question.split())
    return question if question and len(words(question)) <= LONGEST_QUESTION_WORDS else None


def question_first(case: Case) -> str | None:
    """The question, then the base."""
    question = _question(case)
    return before(case, question) if question else None


def question_last(case: Case) -> str | None:
    """The base, then the question."""
    question = _question(case)
    return after(case, question) if question else None


def task_words(case: Case) -> str | None:
    """The base, then the longest words of the question."""
    if case.lang == "zh":
        return None  # single characters are no words
    found = list(dict.fromkeys(w.strip(".,;:!?\"'()") for w in words(case.question)))
    longest = sorted((w for w in found if len(w) > 3), key=len, reverse=True)[:6]
    return after(case, join([w for w in found if w in longest], case.lang)) if len(longest) > 1 else None


def every_sentence_twice(case: Case) -> str | None:
    """Each sentence of the base two times in a row."""
    found = sentences(case.base)
    return join([s for s in found for _ in range(2)], case.lang) or None


def last_sentence_again(case: Case) -> str | None:
    """The last sentence three more times."""
    found = sentences(case.base)
    return after(case, join(found[-1:] * 3, case.lang)) if found else None


QUESTION = Probe(
    "question_repeated", "the question or its words repeated", "no_better",
    by_change({"question in front": question_first, "question at the end": question_last, "its words": task_words}),
    adds=True,
)  # fmt: skip
SENTENCES = Probe(
    "sentences_repeated", "sentences said more than once", "no_better",
    by_change({"every sentence twice": every_sentence_twice, "last sentence four times": last_sentence_again}),
    adds=True,
)  # fmt: skip
