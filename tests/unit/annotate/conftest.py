import pytest
from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher

from heedful.annotate import passwords


@pytest.fixture
def light_hashes(monkeypatch):
    """Argon2id with little memory; what is really used is a test of its own."""
    cheap = PasswordHash((Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1),))
    monkeypatch.setattr(passwords, "_hasher", lambda: cheap)
    passwords.nobodys.cache_clear()
    yield
    passwords.nobodys.cache_clear()
