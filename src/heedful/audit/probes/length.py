"""Length at equal content: words that say nothing, and the same said again."""

from __future__ import annotations

from heedful.audit.cases import Case
from heedful.audit.probes.base import Change, Probe, after, by_change
from heedful.audit.sentences import join, language, words

PADDING = {
    "en": (
        "There is more than one way to look at this, and each of them has something to it.",
        "It is worth taking a moment to think about that.",
        "As with many things, it depends on how one sees it.",
        "This is a point that comes up again and again.",
        "Of course, every situation is a little different from every other one.",
        "All of this should be kept in mind.",
        "One could say a good deal more about it, but this is the main thing.",
        "In the end, it comes down to what has been said here.",
    ),
    "zh": (
        "这件事可以从不同的角度来看，每个角度都有道理。",
        "这一点值得花些时间想一想。",
        "和许多事情一样，这取决于怎么看。",
        "这是人们反复提到的一点。",
        "当然，每种情况都和别的情况略有不同。",
        "以上这些都应当记在心里。",
        "关于它还可以说很多，但主要就是这些。",
        "归根结底，就是这里所说的那样。",
    ),
}  # fmt: skip
AGAIN = {"en": "In other words: ", "zh": "换句话说："}


def padded(times: float) -> Change:
    """The base with empty sentences behind it until it has ``times`` as many words."""

    def change(case: Case) -> str:
        return after(case, _filler(case.base, case.lang, (times - 1) * len(words(case.base))))

    return change


def as_long_as(text: str, base: str) -> str:
    """``base`` with empty words behind it until it has as many words as ``text``."""
    lang, missing = language(base), len(words(text)) - len(words(base))
    if missing < 1:
        return base
    filler = words(_filler(base, lang, missing))[:missing]
    return join([base, join(filler, lang)], lang)


def _filler(base: str, lang: str, num_words: float) -> str:
    """Empty sentences of at least so many words."""
    filler = PADDING[lang]
    start = len(base) % len(filler)  # so that no one sentence stands for padding as such
    added: list[str] = []
    while sum(len(words(s)) for s in added) < num_words:
        added.append(filler[(start + len(added)) % len(filler)])
    return join(added, lang)


def restated(case: Case) -> str:
    """The base, and behind it the same once more."""
    return after(case, AGAIN[case.lang] + case.base)


LENGTH = Probe(
    "length", "sentences that add words and no content", "no_better",
    by_change({"padded to 1.5 times": padded(1.5), "padded to 2.5 times": padded(2.5), "restated": restated}),
)  # fmt: skip
