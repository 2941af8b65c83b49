"""Passwords: which ones are taken, and their Argon2id hashes."""

from __future__ import annotations

import secrets
import threading
from functools import cache

from pwdlib import PasswordHash

from heedful.errors import DataError

MIN_CHARACTERS, MAX_CHARACTERS = 10, 1024
_AT_ONCE = threading.BoundedSemaphore(2)
"""A hash takes 64 MiB: a burst of logins must not use up the memory."""


def check(name: str, password: str) -> None:
    """Raises DataError: too short, too long, or what everybody would try first."""
    if not MIN_CHARACTERS <= len(password) <= MAX_CHARACTERS:
        raise DataError("A password has 10 to 1,024 characters.")
    if password.casefold() == name.casefold() or len(set(password)) < 4:
        raise DataError("This password is too easy to guess.")


def make_hash(password: str) -> str:
    """Argon2id with its salt and its parameters in one text."""
    with _AT_ONCE:
        return _hasher().hash(password)


def fits(password: str, known: str) -> bool:
    """Whether ``known`` is the hash of the password."""
    with _AT_ONCE:
        return _hasher().verify(password[: MAX_CHARACTERS + 1], known)


@cache
def nobodys() -> str:
    """The hash of a password that nobody knows, to be checked for names that nobody has."""
    return make_hash(secrets.token_urlsafe(32))


@cache
def _hasher() -> PasswordHash:
    return PasswordHash.recommended()
