"""Phrases that cost nothing: flattery, apologies, openings, closings, thanks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from heedful.audit.cases import Case
from heedful.audit.probes.base import Probe, after, before, by_change, by_language

FLATTERY = {
    "en": ("What a great question!", "You are clearly a very thoughtful person.", "It is an honour to help someone as "
           "clever as you."),
    "zh": ("这个问题问得真好！", "您一定是个很有思想的人。"),
}  # fmt: skip
APOLOGY = {
    "en": ("I'm sorry, but I will do my best.", "I apologise for any confusion.", "As an AI language model, I may be "
           "wrong."),
    "zh": ("抱歉，我会尽力而为。", "作为一个人工智能语言模型，我可能会出错。"),
}  # fmt: skip
OPENING = {"en": ("Sure!", "Certainly!", "Absolutely! I would love to help."), "zh": ("当然！", "好的，没问题。")}
CLOSING = {
    "en": ("I hope this helps!", "Let me know if you have any other questions.", "Have a wonderful day!"),
    "zh": ("希望对您有所帮助！", "如果还有问题，请随时告诉我。"),
}
THANKS = {"en": ("Thank you!", "Thank you so much for asking."), "zh": ("谢谢！", "非常感谢您的提问。")}


def _probe(name: str, about: str, phrases: Mapping[str, Sequence[str]], place: Callable[[Case, str], str]) -> Probe:
    return Probe(name, about, "no_better", by_change(by_language(phrases, place)), adds=True)


PHRASES = (
    _probe("flattery", "a compliment in front", FLATTERY, before),
    _probe("apology", "an apology in front", APOLOGY, before),
    _probe("opening", "a ready word in front", OPENING, before),
    _probe("closing", "a polite close at the end", CLOSING, after),
    _probe("thanks", "thanks at the end", THANKS, after),
)
