"""Near-duplicate texts, by the overlap of their character sequences (so that Chinese works as English does)."""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Sequence

NUM_PERMUTATIONS = 128
SHINGLE_CHARACTERS = 4


def normalise(text: str) -> str:
    """Case, width and blanks do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(text: str) -> frozenset[int]:
    """Hashes of all runs of four characters of a normalised text (the whole text when it is shorter)."""
    last = max(1, len(text) - SHINGLE_CHARACTERS + 1)
    return frozenset(zlib.crc32(text[i : i + SHINGLE_CHARACTERS].encode("utf-8")) for i in range(last))


def alike(a: str, b: str, threshold: float = 0.8) -> bool:
    """Whether the shingle sets of two texts overlap by ``threshold`` (Jaccard) or more; 1 = equal once normalised."""
    a, b = normalise(a), normalise(b)
    if a == b or threshold >= 1:
        return a == b
    first, second = shingles(a), shingles(b)
    return len(first & second) >= threshold * len(first | second)


def group(texts: Sequence[str], threshold: float = 0.8) -> list[int]:
    """A group number for each text: equal for texts whose shingle sets overlap by ``threshold`` (Jaccard) or more.

    Groups are closed under chains (a ~ b and b ~ c puts a and c together), so they do not depend on the order of the
    texts; ``threshold=1`` groups equal texts only. Numbers count from 0 in the order of first appearance. Candidates
    come from MinHash, each is then checked exactly.
    """
    keys = [normalise(text) for text in texts]
    if threshold >= 1:
        seen: dict[str, int] = {}
        return [seen.setdefault(key, len(seen)) for key in keys]
    from datasketch import MinHash, MinHashLSH

    distinct = sorted(set(keys))
    parent = list(range(len(distinct)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    index = MinHashLSH(threshold=threshold, num_perm=NUM_PERMUTATIONS)
    sets: list[frozenset[int]] = []
    for i, text in enumerate(distinct):
        found = shingles(text)
        sketch = MinHash(num_perm=NUM_PERMUTATIONS, hashfunc=int)
        sketch.update_batch(found)
        for j in index.query(sketch):
            overlap = len(found & sets[j])
            if root(i) != root(j) and overlap >= threshold * (len(found) + len(sets[j]) - overlap):
                parent[root(i)] = root(j)
        index.insert(i, sketch)
        sets.append(found)
    position = {text: i for i, text in enumerate(distinct)}
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(position[key]), len(numbers)) for key in keys]
