import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from heedful.errors import CheckpointError, ConfigError
from heedful.runs.folder import StageFolder
from heedful.runs.reader import read_samples, read_stage
from heedful.runs.writer import StageWriter


@pytest.fixture
def stage(tmp_path) -> StageFolder:
    return StageFolder(tmp_path / "03-ppo", "ppo", 3)


def log(writer: StageWriter, step: int) -> None:
    writer.scalars(step, {"ppo/kl_nats": step / 7, "ppo/score/length": -step, "ppo/seconds_train": 1.0})
    writer.histograms(step, {"ppo/scores": [step, step + 1.0, step + 5.0]})
    writer.samples(step, [{"prompt": f"p{step}", "answer": "x"}, {"prompt": f"q{step}", "answer": "y"}])


def without_time(path) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


def test_what_is_written_is_read_back(stage) -> None:
    with StageWriter(stage) as writer:
        for step in (1, 2, 3):
            log(writer, step)
    table = read_stage(stage.path)
    assert table.column("ppo/kl_nats") == ([1, 2, 3], [1 / 7, 2 / 7, 3 / 7])
    assert table.column("ppo/clip_fraction") == ([], [])
    assert table.last("ppo/score/length") == -3 and table.last_step == 3
    step, histogram = table.histogram("ppo/scores")[1]
    assert (step, histogram.num_values, histogram.minimum, histogram.maximum) == (2, 3, 2.0, 7.0)
    assert histogram.mean == pytest.approx(4.0)
    assert [row["prompt"] for row in read_samples(stage.path)] == ["p1", "q1", "p2", "q2", "p3", "q3"]
    assert "ppo/seconds_train" not in table.without_timing().names


def test_rows_are_on_disk_before_close(stage) -> None:
    writer = StageWriter(stage)
    writer.scalars(1, {"ppo/kl_nats": 0.5})
    assert read_stage(stage.path).last("ppo/kl_nats") == 0.5
    writer.close()


def test_unknown_names_are_refused_and_nothing_is_written(stage) -> None:
    with StageWriter(stage) as writer:
        with pytest.raises(ConfigError, match="did you mean 'ppo/kl_nats'"):
            writer.scalars(1, {"ppo/entropy_nats": 1.0, "ppo/kl_nat": 1.0})
        with pytest.raises(ConfigError, match="did you mean 'ppo/ratios'"):
            writer.histograms(1, {"ppo/ratio": [1.0]})
    assert read_stage(stage.path).names == []


def test_a_number_that_is_not_finite_becomes_null_with_a_warning(stage) -> None:
    with StageWriter(stage) as writer:
        writer.scalars(4, {"ppo/kl_nats": float("nan"), "ppo/ratio_max": math.inf, "ppo/ratio_mean": 1.0})
        writer.histograms(4, {"ppo/ratios": [1.0, math.nan, math.inf], "ppo/values": [math.nan]})
    row = json.loads(stage.metrics.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert row["ppo/kl_nats"] is None and row["ppo/ratio_max"] is None and row["ppo/ratio_mean"] == 1.0
    table = read_stage(stage.path)
    assert table.warnings == [(4, "ppo/kl_nats is nan"), (4, "ppo/ratio_max is inf")]
    assert math.isnan(table.column("ppo/kl_nats")[1][0]) and table.last("ppo/kl_nats") is None
    assert table.histogram("ppo/ratios")[0][1].num_nonfinite == 2
    assert table.histogram("ppo/values") == []


def test_steps_must_not_fall(stage) -> None:
    with StageWriter(stage) as writer:
        writer.scalars(2, {"ppo/kl_nats": 1.0})
        writer.scalars(2, {"ppo/gold_mean": 1.0})  # a second row of the same step is fine
        with pytest.raises(ConfigError, match="step 1 logged after step 2"):
            writer.scalars(1, {"ppo/kl_nats": 1.0})
    assert read_stage(stage.path).column("ppo/gold_mean") == ([2], [1.0])


def test_RES_07_a_resumed_stage_has_the_files_of_an_uninterrupted_one(stage, tmp_path) -> None:
    straight = StageFolder(tmp_path / "straight", "ppo", 3)
    with StageWriter(straight) as writer:
        for step in range(1, 7):
            log(writer, step)
    with StageWriter(stage) as writer:
        for step in range(1, 6):
            log(writer, step)
    with stage.metrics.open("ab") as file:
        file.write(b'{"step": 6, "ppo/kl_na')  # killed while it wrote
    with StageWriter(stage, resume_step=3) as writer:
        assert read_stage(stage.path).last_step == 3
        for step in range(4, 7):
            log(writer, step)
    for name in ("metrics", "histograms", "samples"):
        assert without_time(getattr(stage, name)) == without_time(getattr(straight, name)), name
    assert read_stage(stage.path).without_timing() == read_stage(straight.path).without_timing()
    events = EventAccumulator(str(stage.tensorboard), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("ppo/kl_nats")] == [1, 2, 3, 4, 5, 6]
    assert [e.value for e in events.Scalars("ppo/kl_nats")] == pytest.approx([s / 7 for s in range(1, 7)])
    assert [e.step for e in events.Histograms("ppo/scores")] == [1, 2, 3, 4, 5, 6]
    assert events.Histograms("ppo/scores")[0].histogram_value.num == 3


def test_starting_from_nothing_clears_a_killed_attempt(stage) -> None:
    with StageWriter(stage) as writer:
        log(writer, 1)
        log(writer, 2)
    with StageWriter(stage) as writer:
        log(writer, 1)
    assert read_stage(stage.path).last_step == 1 and len(read_samples(stage.path)) == 2


def test_a_finished_stage_is_not_written_over(stage) -> None:
    with StageWriter(stage) as writer:
        log(writer, 1)
    stage.finish({"steps": 1})
    with pytest.raises(CheckpointError, match="is finished"):
        StageWriter(stage)
    assert read_stage(stage.path).last_step == 1
