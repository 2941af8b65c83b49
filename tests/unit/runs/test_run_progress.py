import io
import sys

import pytest

from heedful.runs.progress import Progress, duration, peak_memory_bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_first_last_and_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("PPO", 20, plain=True, stream=stream, clock=clock) as progress:
        progress.message("sampling [4 answers]")
        for step in range(20):
            clock.now += 1.0
            progress.step({"score": step / 10, "kl": 1.23456})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sampling [4 answers]"
    assert lines[1] == "PPO 1/20 · score 0 · kl 1.235 · 1 s · about 19 s left"
    assert [line.split(" · ")[0] for line in lines[1:]] == [
        "PPO 1/20",
        "PPO 6/20",
        "PPO 11/20",
        "PPO 16/20",
        "PPO 20/20",
    ]
    assert lines[-1] == "PPO 20/20 · score 1.9 · kl 1.235 · 20 s"


def test_the_estimate_of_a_resumed_stage_counts_only_its_own_steps() -> None:
    clock = Clock()
    with Progress("SFT", 100, first_step=90, plain=True, stream=io.StringIO(), clock=clock) as progress:
        assert progress.seconds_left is None
        clock.now += 10.0
        progress.step()
        assert progress.seconds_left == pytest.approx(90.0)


def test_the_bar_shows_the_numbers_and_text_with_brackets() -> None:
    stream = io.StringIO()
    with Progress("SFT", 3, plain=False, stream=stream) as progress:
        progress.message("file [1/2] read")
        for _ in range(3):
            progress.step({"loss": 0.5})
    assert "file [1/2] read" in stream.getvalue()
    assert "SFT 3/3 · loss 0.5" in stream.getvalue()


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    stream = io.StringIO()
    with Progress("SFT", 1, stream=stream) as progress:
        progress.step()
    assert stream.getvalue().startswith("SFT 1/1") and "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_peak_memory_is_in_bytes() -> None:
    import resource

    block = bytearray(b"x" * 60_000_000)
    peak = peak_memory_bytes()
    assert len(block) < peak < 2**40
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, rel=0.1)
