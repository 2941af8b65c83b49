"""The run folder: its layout, the list of every metric, the writer, the reader, trackers, progress, environment."""
