"""Is it better: gold score, win rate with intervals, pair accuracy, and the simulated panel of the quickstart."""
