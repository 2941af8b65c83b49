import json

from heedful.runs import environment


def test_snapshot_is_plain_and_names_versions_and_machine(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr("sys.argv", ["heedful", "run", "x.yaml", "--hub.token", "hf_verysecret", "--max_tokens", "64"])
    snapshot = environment.snapshot()
    text = json.dumps(snapshot)
    assert "hf_verysecret" not in text
    assert snapshot["command_line"][-2:] == ["--max_tokens", "64"]
    assert snapshot["packages"]["torch"] and snapshot["packages"]["transformers"]
    assert snapshot["num_cores"] >= 1 and snapshot["memory_bytes"] > 2**28 and snapshot["cpu"]


def test_redact() -> None:
    arguments = [
        "--api_key=abc",
        "--token",
        "abc",
        "--password",
        "--dry",
        "--tokenizer",
        "t",
        "--key.size",
        "3",
        "secret",
    ]
    shown = ["--api_key=***", "--token", "***", "--password", "--dry", "--tokenizer", "t", "--key.size", "3", "secret"]
    assert environment.redact(arguments) == shown
