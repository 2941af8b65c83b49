import json
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.errors import CheckpointError
from heedful.runs.folder import RunFolder


def test_create_open_and_read_back(tmp_path) -> None:
    recipe = {"model": {"path": "smollm2-135m"}, "ppo": {"learning_rate": 1e-5}, "note": "中文: yes"}
    with RunFolder.create(tmp_path / "a", recipe) as run:
        stage = run.stage("sft", 1)
        assert stage.path == tmp_path / "a" / "stages" / "01-sft" and stage.path.is_dir()
        assert not stage.is_finished and stage.results == {}
        stage.finish({"heldout_loss_nats": 1.5, "broken": float("inf")})
        run.set_status("finished")
    opened = RunFolder.open(tmp_path / "a")
    assert opened.recipe == recipe
    assert opened.status["state"] == "finished"
    assert opened.environment["packages"]["numpy"]
    (stage,) = opened.stages()
    assert (stage.name, stage.index, stage.is_finished) == ("sft", 1, True)
    assert stage.results == {"heldout_loss_nats": 1.5, "broken": None}


def test_stages_come_in_order_and_strangers_are_passed_over(tmp_path) -> None:
    with RunFolder.create(tmp_path / "a", {}) as run:
        for index, name in ((10, "report"), (2, "reward"), (1, "sft")):
            run.stage(name, index)
        (tmp_path / "a" / "stages" / "notes").mkdir()
        (tmp_path / "a" / "stages" / "03-file").write_text("")
        assert [s.name for s in run.stages()] == ["sft", "reward", "report"]


def test_creating_over_a_run_says_what_to_do(tmp_path) -> None:
    RunFolder.create(tmp_path / "a", {"seed": 1}).close()
    with pytest.raises(CheckpointError, match="--resume .* --new"):
        RunFolder.create(tmp_path / "a", {"seed": 2})
    assert RunFolder.open(tmp_path / "a").recipe == {"seed": 1}


def test_a_folder_with_other_things_is_left_alone(tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("meow")
    with pytest.raises(CheckpointError, match="not empty and holds no run"):
        RunFolder.create(tmp_path / "photos", {})
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        RunFolder.create(tmp_path / "file", {})


def test_a_create_killed_before_its_end_can_be_repeated(tmp_path) -> None:
    run = RunFolder.create(tmp_path / "a", {"seed": 1})
    run.close()
    (tmp_path / "a" / "recipe.yaml").unlink()  # its last act
    with pytest.raises(CheckpointError, match="not a run folder"):
        RunFolder.open(tmp_path / "a")
    with RunFolder.create(tmp_path / "a", {"seed": 2}) as again:
        assert again.recipe == {"seed": 2}


def test_next_free(tmp_path) -> None:
    assert RunFolder.next_free(tmp_path / "a") == tmp_path / "a"
    RunFolder.create(tmp_path / "a", {}).close()
    (tmp_path / "a-2").mkdir()
    assert RunFolder.next_free(tmp_path / "a") == tmp_path / "a-3"


HOLD = """
import sys
from heedful.runs.folder import RunFolder
run = RunFolder.open(sys.argv[1], write=True)
run.set_status("running", "ppo")
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_write_one_run_and_a_dead_one_is_taken_over(tmp_path) -> None:
    RunFolder.create(tmp_path / "a", {}).close()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=f"written by process {process.pid}"):
            RunFolder.open(tmp_path / "a", write=True)
        assert RunFolder.open(tmp_path / "a").status["state"] == "running"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    # the killed process left its lock file and "running" behind
    assert json.loads((tmp_path / "a" / "lock").read_text())["pid"] == process.pid
    status = RunFolder.open(tmp_path / "a").status
    assert (status["state"], status["stage"]) == ("interrupted", "ppo")
    with RunFolder.open(tmp_path / "a", write=True) as run:
        assert run.status["state"] == "running"


def test_the_same_process_cannot_lock_twice_and_reading_keeps_the_lock(tmp_path) -> None:
    with RunFolder.create(tmp_path / "a", {}) as run:
        with pytest.raises(CheckpointError, match="this process"):
            RunFolder.open(tmp_path / "a", write=True)
        assert RunFolder.open(tmp_path / "a").status["state"] == "running"  # must not let go of the lock
        probe = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path / "a")], input=b"", capture_output=True, check=False
        )
        assert b"CheckpointError" in probe.stderr
        run.set_status("finished")
    RunFolder.open(tmp_path / "a", write=True).close()


def test_reading_changes_nothing(tmp_path) -> None:
    RunFolder.create(tmp_path / "a", {}).close()
    before = {p: p.read_bytes() for p in Path(tmp_path / "a").rglob("*") if p.is_file()}
    run = RunFolder.open(tmp_path / "a")
    run.stage("sft", 1)
    with pytest.raises(CheckpointError, match="reading only"):
        run.set_status("finished")
    assert {p: p.read_bytes() for p in Path(tmp_path / "a").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "interrupted"), (ValueError("bad"), "failed")])
def test_status_tells_how_the_work_ended(tmp_path, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), RunFolder.create(tmp_path / "a", {}) as run:
        run.set_status("running", "reward")
        raise error
    status = RunFolder.open(tmp_path / "a").status
    assert (status["state"], status["stage"], status["message"]) == (state, "reward", str(error))
