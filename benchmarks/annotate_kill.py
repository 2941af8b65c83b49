"""5,000 rankings by 12 simulated raters while the server is killed at random moments: the long form of the test.

    python benchmarks/annotate_kill.py                            # SQLite
    python benchmarks/annotate_kill.py --num_rankings 600 --rankings_per_kill 30

Prints one line of JSON; raises when a confirmed ranking is missing, changed or stored twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("e2e", ".")]

from test_annotate_kill import check, new_project, rate_under_fire  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rankings", type=int, default=5000)
    parser.add_argument("--rankings_per_kill", type=int, default=100, help="on average")
    parser.add_argument("--raters", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    overlap = 2
    num_items = options.num_rankings // overlap
    with tempfile.TemporaryDirectory() as folder:
        project, tokens = new_project(Path(folder) / "project", num_items, overlap, options.raters)
        outcome = rate_under_fire(
            Path(folder) / "project", tokens, seed=options.seed, min_kills=1,
            rankings_per_kill=options.rankings_per_kill,
        )
        check(project, outcome, num_items, overlap)
    print(json.dumps({
        "num_rankings": num_items * overlap, "num_kills": outcome.num_kills, "num_lost": 0, "num_doubled": 0,
        "num_sent_again_after_stored": sum(work.num_repeated for work in outcome.done),
        "num_retries": sum(work.num_retries for work in outcome.done), "seconds": round(outcome.seconds, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
