"""The command line: ``main`` and one small file per verb; a room is imported only when its verb is called."""
