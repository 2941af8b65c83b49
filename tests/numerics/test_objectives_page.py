"""The example of the objectives page runs."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "03-objectives.md"


def test_the_example_runs():
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(compile(block.split("```")[0], PAGE.name, "exec"), {})
