"""Passwords: which ones are taken, and their Argon2id hashes.

A hash takes 64 MiB and a tenth of a second: two are computed at once and few may wait, so that a burst of logins uses
up neither the memory nor the threads that serve pages. Compute them outside of transactions.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from pwdlib import PasswordHash

from heedful.errors import DataError, HeedfulError

MIN_CHARACTERS, MAX_CHARACTERS = 10, 1024
_AT_ONCE = threading.BoundedSemaphore(2)
_IN_LINE = threading.BoundedSemaphore(20)


class Busy(HeedfulError, RuntimeError):
    """More people log in at this moment than can be served; a second later it works."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """A password that was checked and hashed."""

    text: str


def hashed(name: str, password: str) -> Hashed:
    """The hash of a new password of ``name``.

    Raises:
        DataError: too short, too long, or what everybody would try first.
        Busy: too many at once.
    """
    if not MIN_CHARACTERS <= len(password) <= MAX_CHARACTERS:
        raise DataError("A password has 10 to 1,024 characters.")
    if password.casefold() == name.strip().casefold() or len(set(password)) < 4:
        raise DataError("This password is too easy to guess.")
    return Hashed(_hash(password))


def fits(password: str, known: str) -> bool:
    """Whether ``known`` is the hash of the password. Raises Busy."""
    with _turn():
        return _hasher().verify(password[: MAX_CHARACTERS + 1], known)


@cache
def nobodys() -> str:
    """The hash of a password that nobody knows, to be checked for names that nobody has."""
    return _hash(secrets.token_urlsafe(32))


def _hash(password: str) -> str:
    with _turn():
        return _hasher().hash(password)


@contextmanager
def _turn() -> Iterator[None]:
    if not _IN_LINE.acquire(blocking=False):
        raise Busy("Many people log in at this moment; try again.")
    try:
        with _AT_ONCE:
            yield
    finally:
        _IN_LINE.release()


@cache
def _hasher() -> PasswordHash:
    return PasswordHash.recommended()
