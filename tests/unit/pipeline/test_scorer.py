"""A scorer from a name: folder, server, function; what is not one number per answer is refused."""

import json
import math
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from heedful.errors import ConfigError, EngineError, ModelError
from heedful.models.roles import build_reward
from heedful.pipeline.scorer import open_scorer
from heedful.records import Message, Prompt
from toy_parts import model_folder

PROMPTS = [Prompt("p1", (Message("user", "Hi"),), info={"label": "x"}), Prompt("p2", (Message("user", "Why?"),))]
ANSWERS = ["Hello!", "Because it is so."]


def by_length(prompts, answers):
    return [len(a) for a in answers]


def with_nan(prompts, answers):
    return [math.nan for _ in answers]


def too_few(prompts, answers):
    return [1.0]


def words(prompts, answers):
    return ["good" for _ in answers]


def broken(prompts, answers):
    raise KeyError("no")


HERE = f"{__name__}:"


def test_function():
    assert open_scorer(HERE + "by_length")(PROMPTS, ANSWERS) == [6.0, 17.0]
    assert open_scorer(HERE + "by_length")([], []) == []


@pytest.mark.parametrize("name, said", [("with_nan", "'p1'"), ("too_few", "1 scores for 2"), ("words", "one number"),
                                        ("broken", "KeyError")])  # fmt: skip
def test_bad_scores_are_one_sentence(name, said):
    with pytest.raises(EngineError, match=said):
        open_scorer(HERE + name)(PROMPTS, ANSWERS)


def test_not_finite_passes_where_it_is_counted():
    assert all(math.isnan(v) for v in open_scorer(HERE + "with_nan", finite=False)(PROMPTS, ANSWERS))


def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(ConfigError, match="no function"):
        open_scorer(HERE + "missing")
    with pytest.raises(ConfigError, match="http"):
        open_scorer("http:/x")
    with pytest.raises(ModelError):
        open_scorer(str(tmp_path / "none"))


def test_folder_scores_as_the_live_model(tmp_path):
    path = model_folder(tmp_path / "reward", scalar=1)
    live = build_reward(path, device=torch.device("cpu"), dtype=torch.float32)
    expected = live.score_texts([p.messages for p in PROMPTS], ANSWERS, micro_batch_tokens=64)
    found = open_scorer(str(path), device="cpu", dtype="float32")(PROMPTS, ANSWERS)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def server():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            answer = json.dumps({"rewards": [float(len(q)) for q in body["query"]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", asked
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_server_plain_and_by_template(server, tmp_path):
    url, asked = server
    assert open_scorer(url)(PROMPTS, ANSWERS) == [10.0, 23.0]
    assert asked[-1] == {
        "query": ["Hi\n\nHello!", "Why?\n\nBecause it is so."], "prompts": ["Hi", "Why?"], "labels": ["x", ""]
    }  # fmt: skip
    path = model_folder(tmp_path / "policy")
    open_scorer(url, template=str(path))(PROMPTS, ANSWERS)
    assert asked[-1]["query"][0] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>"


def test_functions_and_servers_need_no_torch():
    code = (
        "import sys; from heedful.pipeline.scorer import open_scorer\n"
        "open_scorer('operator:add'); open_scorer('http://h:1')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
