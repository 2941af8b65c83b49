"""Our server and our client: the scores that travel are those of the live model; bad requests harm nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from heedful.data.chat import TEMPLATES, answer_ids, answer_text, prompt_ids, set_template, written_ids
from heedful.errors import ConfigError, DataError, EngineError, ModelError
from heedful.models.load import load_tokenizer
from heedful.models.roles import build_reward
from heedful.pipeline.scorer import open_scorer
from heedful.records import Completion, Message, Prompt
from heedful.rollout.server import RewardServer, open_server
from heedful.rollout.sources import HTTPReward
from toy_parts import CPU, model_folder

CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Why?")],
    [("user", "a"), ("assistant", "b"), ("user", "c")],
    [("user", "a\n\nAssistant: b\n\n"), ("assistant", "c"), ("user", "d")],
    [("user", " spaces \n"), ("assistant", "\nyes \n"), ("user", "so"), ("assistant", ""), ("user", "Ünïcode 汉字 🙂")],
]
ANSWERS = ["ok", "two words", "", " Ünïcode\n\n汉字 ", "long " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("reward") / "judge", scalar=1)


@contextmanager
def serving(folder, **options):
    server = open_server(str(folder), device="cpu", dtype="float32", say=lambda line: None, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as server:
        yield server


def asked(tokenizer, *, cut=False, without=()):
    """Every answer to every conversation, as a policy with this tokenizer would have given it."""
    prompts, completions = [], []
    for n, turns in enumerate(CONVERSATIONS):
        if not {role for role, _ in turns}.isdisjoint(without):
            continue
        for k, answer in enumerate(ANSWERS):
            prompt = Prompt(f"p{n}", tuple(Message(*turn) for turn in turns))
            ids = answer_ids(tokenizer, answer)[: -1 if cut else None]
            text = answer_text(tokenizer, ids)
            prompts.append(prompt)
            asked_ids = prompt_ids(tokenizer, prompt.messages)
            completions.append(Completion(prompt.id, k, asked_ids, ids, [], "length" if cut else "stop", 0, text))
    return prompts, completions


@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut by the limit"])
def test_served_scores_are_the_live_ones(folder, server, cut):
    prompts, completions = asked(load_tokenizer(folder), cut=cut)
    live = build_reward(folder, device=CPU, dtype=torch.float32)
    expected = live.score_texts([p.messages for p in prompts], [c.text for c in completions], micro_batch_tokens=100)
    client = HTTPReward("judge", server.url, load_tokenizer(folder), retries=0)
    assert client(prompts, completions) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.1  # else anything would pass


def test_the_scorer_by_template_and_in_plain_text(folder, server):
    prompts = [Prompt("p", (Message("user", "Hi"),)), Prompt("q", (Message("user", "Why?"),))]
    expected = open_scorer(str(folder), device="cpu", dtype="float32")(prompts, ["Hello!", "So."])
    for template in (str(folder), None):
        found = open_scorer(server.url, template=template)(prompts, ["Hello!", "So."])
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_text_is_read_back_to_the_ids_that_made_it(folder, template):
    tokenizer = load_tokenizer(folder)
    set_template(tokenizer, template)
    for turns in CONVERSATIONS:
        prompt = prompt_ids(tokenizer, [Message(*turn) for turn in turns])
        for answer in ANSWERS:
            spoken = answer_ids(tokenizer, answer)
            text, head = (tokenizer.decode(x, skip_special_tokens=False) for x in (prompt + spoken, prompt))
            read = prompt + answer_ids(tokenizer, answer_text(tokenizer, spoken))  # as live
            assert read == prompt + spoken
            assert written_ids(tokenizer, text, head) == read
            assert written_ids(tokenizer, text.removesuffix(tokenizer.decode(spoken[-1:])), head) == read
            if template == "chatml":  # the other's header may stand in any text
                assert written_ids(tokenizer, text) == read


@pytest.mark.parametrize("query, prompt, said", [
    ("<|im_start|>user\nHi", "<|im_start|>user\nHi", "does not end with"),
    ("no header", None, "nothing tells where the answer begins"),
    ("abc", "b", "does not begin with its prompt"),
])  # fmt: skip
def test_text_that_cannot_be_read_is_refused(folder, query, prompt, said):
    with pytest.raises(DataError, match=said):
        written_ids(load_tokenizer(folder), query, prompt)


def test_a_tokenizer_that_loses_text_is_refused_at_the_start(tmp_path):
    """Here a mark: nothing in a text tells whether it was there."""
    path = model_folder(tmp_path / "judge", scalar=1)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    strip = {"type": "Strip", "content": "?", "start": 0, "stop": 1}
    content["decoder"] = {"type": "Sequence", "decoders": [strip, content["decoder"]]}
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="does not give texts back as they were"):
        open_server(str(path), device="cpu")


LLAMA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"
)


def llama_folder(path, template, *, byte_fallback):
    """A judge with a tokenizer of Llama 2's kind: a blank before every text, shown behind special tokens, and taken
    off the start; letters that it does not know are bytes, or else lost."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = [chr(c) for c in range(33, 127)] + ["\u2581", "\n"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256) if byte_fallback), *letters]
    vocabulary = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=byte_fallback))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = template
    model_folder(path, scalar=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    model.resize_token_embeddings(len(words), mean_resizing=False)
    model.config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, TEMPLATES["plain"]], ids=["llama", "plain"])
def test_a_tokenizer_that_moves_blanks_is_served_with_the_live_scores(tmp_path, template):
    folder = llama_folder(tmp_path / "judge", template, byte_fallback=True)
    prompts, completions = asked(load_tokenizer(folder), without=["system"] if template == LLAMA_TEMPLATE else [])
    live = build_reward(folder, device=CPU, dtype=torch.float32)
    expected = live.score_texts([p.messages for p in prompts], [c.text for c in completions], micro_batch_tokens=100)
    with serving(folder) as server:
        found = HTTPReward("judge", server.url, load_tokenizer(folder), retries=0)(prompts, completions)
    assert found == pytest.approx(expected, abs=1e-4) and max(expected) - min(expected) > 0.1


def test_a_query_that_the_tokenizer_does_not_give_back_is_refused_by_itself(tmp_path):
    folder = llama_folder(tmp_path / "judge", LLAMA_TEMPLATE, byte_fallback=False)
    live = build_reward(folder, device=CPU, dtype=torch.float32)

    def text(question, answer=None):
        said = [] if answer is None else answer_ids(live.part.tokenizer, answer)
        return live.part.tokenizer.decode(prompt_ids(live.part.tokenizer, [Message("user", question)]) + said)

    questions = ["Hi", "Why 汉 now?"]
    with serving(folder) as server:
        both = {"query": [text(q, "ok") for q in questions], "prompts": [text(q) for q in questions]}
        status, found = post(server.url, both)
        assert status == 400 and "query 1: " in found["error"] and "<unk>" in found["error"]
        status, found = post(server.url, {"query": [text("Hi", "o汉k")], "prompts": [text("Hi")]})  # as live reads it
    expected = live.score_texts([[Message("user", "Hi")]], ["ok"], micro_batch_tokens=100)
    assert status == 200 and found["rewards"] == pytest.approx(expected, abs=1e-4)


def post(url, body, path="/get_reward", headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers or {}), timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_openrlhfs_request_and_answer(server):
    header = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    request = {"query": [header + "a", header + "b<|im_end|>"], "prompts": [header] * 2, "labels": ["", ""]}
    status, found = post(server.url, request)
    assert status == 200 and found.keys() == {"rewards", "scores", "extra_logs"}
    assert found["rewards"] == found["scores"] and len(found["rewards"]) == 2
    expected = pytest.approx(found["rewards"], abs=1e-5)
    assert post(server.url, {"query": request["query"]})[1]["rewards"] == expected
    assert post(server.url, {"query": request["query"][1]}, "/")[1]["rewards"] == pytest.approx([found["rewards"][1]])


@pytest.mark.parametrize("body, status, said", [
    (b"{", 400, "no JSON"), (b"[" * 200_000, 400, "no JSON"),
    (b"\xff\xfe", 400, "no JSON"), ([1], 400, "query"), ({}, 400, "query"),
    ({"query": []}, 400, "query"), ({"query": [1]}, 400, "list of texts"), ({"query": {"a": 1}}, 400, "list of texts"),
    ({"query": ["a", "b"], "prompts": ["a"]}, 400, "1 prompts for 2 queries"),
    ({"query": ["x", "a"], "prompts": ["x", "b"]}, 400, "query 1: "),
    ({"query": ["x " * 400], "prompts": ["x"]}, 400, "256 positions"),
])  # fmt: skip
def test_bad_requests_are_told_why_and_the_server_lives(server, body, status, said):
    found = post(server.url, body)
    assert found[0] == status and said in found[1]["error"]
    assert json.loads(urllib.request.urlopen(server.url + "/health").read())["status"] == "ok"


def test_limits_and_paths(folder):
    with serving(folder, max_body_bytes=100) as server:
        status, found = post(server.url, b"x" * 101)
        assert status == 413 and "the limit is 100" in found["error"]
        assert post(server.url, b"{}", "/other")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "/other")
        with socket.create_connection(server._http.server_address, timeout=5) as connection:
            connection.sendall(b"POST /get_reward HTTP/1.0\r\n\r\n")
            assert b"411" in connection.recv(100)
        with socket.create_connection(server._http.server_address) as connection:  # goes away in the middle
            connection.sendall(b"POST /get_reward HTTP/1.0\r\nContent-Length: 50\r\n\r\n{")
        health = json.loads(urllib.request.urlopen(server.url + "/health").read())
        assert health == {"status": "ok", "model": "judge", "num_requests": 0, "num_scored": 0}
        with pytest.raises(ConfigError, match="cannot serve on"):
            open_server(str(folder), device="cpu", port=server._http.server_address[1])


def test_the_clients_sentence_names_the_refusal(folder, server):
    client = HTTPReward("judge", server.url, None, retries=0)
    with pytest.raises(EngineError, match="'judge'.*HTTP 400.*query 0: the query does not begin with its prompt"):
        client.score_texts(["a"], ["b"], [Prompt("p", (Message("user", "b"),))])


def test_a_score_that_is_not_finite_is_refused_not_sent(folder):
    reward = build_reward(folder, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        reward.part.model.score.weight.fill_(torch.nan)
    server = RewardServer(reward.part, "judge", say=lambda line: None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    status, found = post(server.url, {"query": "Hi there", "prompts": "Hi"})
    server.stop()
    thread.join()
    assert status == 422 and "not finite" in found["error"]


def test_many_clients_at_once_get_their_own_scores(folder, server):
    texts = [f"Say {n}" * (1 + n % 3) for n in range(24)]

    def ask(text):
        return post(server.url, {"query": [text + " ok"], "prompts": [text]})[1]["rewards"][0]

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(ask, texts))
    assert at_once == alone and len(set(alone)) == 24


def test_the_command_serves_until_it_is_told(folder):
    command = [sys.executable, "-m", "heedful.cli.main", "serve-reward", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/get_reward")
        assert post(url.removesuffix("/get_reward"), {"query": "Hi there", "prompts": "Hi"})[0] == 200
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in said
    finally:
        process.kill()
