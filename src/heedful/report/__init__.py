"""Tell people: one self-contained HTML file about a run, and the same numbers as JSON."""
