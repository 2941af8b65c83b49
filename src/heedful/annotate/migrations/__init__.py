"""Alembic migrations: one file per change of ``tables.py``; a test compares their sum with it."""
