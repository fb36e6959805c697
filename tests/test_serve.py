"""qfuse serve over a real socket: what clients get is what the same server gives without anything fused."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from qfuse import serve

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QUESTIONS = ["Who is he?", "In those days the king of Assyria said to his servants, who stood before him"]


@contextmanager
def running(*arguments, **options):
    """A server on a free port, and its provider: (url, provider)."""
    reports, up = [], threading.Event()
    provider = serve.FusedProvider(serve.arguments(["--port", "0", *arguments]), options, reports.append)
    provider.load_default()
    found = []

    def listening(url, httpd):
        found.extend((url, httpd))
        up.set()

    thread = threading.Thread(target=serve.serve, args=(provider, listening))
    thread.start()
    assert up.wait(60)
    url, httpd = found
    try:
        yield url, provider
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def post(url, path, **body):
    return urlopen(Request(f"{url}/v1/{path}", json.dumps(body).encode()), timeout=120)


def chat(url, content, tokens=12, **more):
    """The text of a streamed chat completion, and how many pieces it came in."""
    with post(url, "chat/completions", messages=[{"role": "user", "content": content}],
              max_tokens=tokens, stream=True, **more) as answer:  # fmt: skip
        lines = [line.decode().strip() for line in answer if line.startswith(b"data: ")]
    assert lines.pop() == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines]
    return "".join(pieces), len(pieces)


def everything(url):
    """What two clients are streamed at once, what one is given after them, and what follows a text."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda i: chat(url, QUESTIONS[i], tokens=(18, 9)[i]), (0, 1)))
    again, _ = chat(url, QUESTIONS[0], tokens=6)  # the prompt's cache is the first client's
    with post(url, "completions", prompt="Once upon a time", max_tokens=8) as answer:
        whole = json.load(answer)["choices"][0]["text"]
    with post(url, "completions", prompt="Once upon a time", max_tokens=8, seed=1, temperature=0) as answer:
        alone = json.load(answer)["choices"][0]["text"]  # a seed is served by itself, without a batch
    assert alone == whole
    return both, again, whole


@pytest.fixture(scope="module")
def unfused():
    with running("--chat-template", TEMPLATE, mode=0) as (url, _):
        return everything(url)


@pytest.mark.parametrize("options", [{}, {"mode": 1}, {"segments": True}], ids=["layers", "moe", "segments"])
def test_clients_get_what_the_unfused_server_gives(unfused, options):
    with running("--chat-template", TEMPLATE, **options) as (url, provider):
        got = everything(url)
        report = provider.fusion.report()
    assert got == unfused
    (text, pieces), _ = got[0]
    assert len(text.split()) > 5
    assert pieces > 5
    assert min(layer.calls["fused"] for layer in report.layers) > 30
    assert report.chain.get("fused", 0) > 30 or "segments" not in options
    assert provider.fusion is None  # the layers were given back at the end


def test_a_quantised_kv_cache_is_served_as_by_the_unfused_server(checkpoint):
    got = []
    for mode in (0, 2):
        with running("--model", str(checkpoint), "--kv-bits", "8", "--quantized-kv-start", "9", mode=mode) as (
            url,
            provider,
        ):
            got.append(chat(url, "abc"))
            layers = provider.fusion.report().layers
    assert got[0] == got[1]
    assert layers[3].calls["MoE alone: QuantizedKVCache is not fused"] > 5


def test_without_a_template_a_chat_is_written_out(checkpoint):
    texts = []
    for mode in (0, 2):
        with running("--model", str(checkpoint), mode=mode) as (url, _):
            texts.append(chat(url, "abc")[0])
    assert texts[0] == texts[1] == ";<=>?@ABCDEF"


def test_what_cannot_be_fused_is_an_answer_with_the_reason_and_the_server_goes_on(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with running("--model", str(checkpoint)) as (url, provider):
        with pytest.raises(HTTPError) as refused:
            chat(url, "abc", model=str(tmp_path))
        assert "[model] wants model_type" in json.load(refused.value)["error"]
        assert chat(url, "abc")[0] == ";<=>?@ABCDEF"
        assert provider.fusion.report().fused == 4


def test_the_command_serves_and_says_at_the_end_what_was_fused(checkpoint):
    command = [sys.executable, "-m", "qfuse", "serve", "--model", str(checkpoint), "--port", "0", "--segments"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("listening on "):
                    break
            url = said[-1].split()[-1]
            assert "4 of 4 layers fused, mode 2" in "".join(said)
            assert chat(url, "abc")[0] == ";<=>?@ABCDEF"
            with urlopen(f"{url}/health") as health:
                assert json.load(health) == {"status": "ok"}
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert re.search(r"│ 1\d fused; \d+ prefill, S > 1", rest)


def test_an_address_that_is_taken_is_one_line(capfd, monkeypatch, checkpoint):
    from qfuse import cli

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = ["qfuse", "serve", "--model", str(checkpoint), "--port", str(taken.getsockname()[1])]
        monkeypatch.setattr(sys, "argv", command)
        threads = threading.active_count()
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 2
    assert re.fullmatch(r"qfuse: \[Errno \d+\] Address already in use\n", capfd.readouterr().err)
    assert threading.active_count() == threads
