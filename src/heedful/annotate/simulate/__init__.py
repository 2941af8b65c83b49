"""Simulated raters that work through the JSON interface: for tests, demonstrations and power calculations."""
