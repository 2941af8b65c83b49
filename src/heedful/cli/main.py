"""``heedful VERB …``: finds the verb, runs it, and turns every error into one sentence and an exit code.

Exit codes: 0 done, 1 a fault in heedful itself, 2 something the user can put right, 130 interrupted (resumable).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from heedful import __version__
from heedful.cli import (
    annotate,
    audit,
    card,
    check,
    data,
    models,
    plan,
    replay,
    report,
    round,
    run,
    sample,
    score,
    serve,
)
from heedful.errors import HeedfulError

DESCRIPTION = """Train language models from human feedback: demonstrations, rankings, reward model, PPO, report.

  heedful quickstart                 the whole pipeline on a small real model, ends with a report
  heedful data inspect FILE          what is in a file of demonstrations, rankings or prompts
  heedful run RECIPE.yaml            your own pipeline: sft → reward → ppo → evaluate → report
"""
EPILOG = "`heedful VERB --help` explains a verb. Results go to standard output, progress to standard error."


def parser() -> argparse.ArgumentParser:
    """The whole command line; cheap to build, nothing heavy is imported."""
    top = argparse.ArgumentParser(
        prog="heedful", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"heedful {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    for verb in (data, annotate, models, plan, check, run, sample, round, score, card, audit, serve, replay, report):
        verb.add_parser(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 shows \u escapes instead of failing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    overrides: list[str] = []
    if words and words[0] in run.TAKE_KEYS:
        words[1:], overrides = run.take_overrides(words[1:])
    top = parser()
    known = top.parse_args(words)
    if known.verb is None:
        top.print_help()
        return 0
    known.overrides = overrides
    try:
        return int(known.handler(known))
    except HeedfulError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt as error:
        stopped = str(error) or "interrupted"
        return _say(f"{stopped}; the same command with --resume goes on from the last checkpoint, if there is one", 130)
    except BrokenPipeError:  # the reader of a pipe has gone, as in `heedful data inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _say("out of memory; lower micro_batch_tokens or max_tokens of the stage", 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror or error}", 2)
    except Exception as error:
        return _fault(error)


def _say(message: str, code: int) -> int:
    print(f"heedful: {message}", file=sys.stderr)
    return code


def _fault(error: Exception) -> int:
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return _say("out of memory; lower micro_batch_tokens or max_tokens of the stage", 2)
    handle, name = tempfile.mkstemp(prefix="heedful-fault-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        traceback.print_exc(file=file)
    summary = f"{type(error).__name__}: {error}".split("\n")[0]
    return _say(f"a fault in heedful itself ({summary}); please report it with {Path(name)}", 1)


if __name__ == "__main__":
    sys.exit(main())
