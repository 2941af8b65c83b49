"""The probes, one file per family."""
