"""The OpenAI server over HTTP on 127.0.0.1: concurrent streams, bad requests, aborts, metrics."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.vllm import heads, tiny, tiny_encoders, tiny_images
from xla_gpu._runtime import cuda_driver

START_SECONDS = 300


class Server:
    def __init__(self, folder: str, log, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        common = "--dtype float32 --max-model-len 256 --max-num-seqs 8 --max-num-batched-tokens 64"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *common.split()]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--additional-config", '{"token_buckets": [8, 64]}', *options]
        # As users start it: the engine in a process of its own.
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait(self) -> bool:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return True
            except OSError:
                time.sleep(1)
        return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself: then its log says why
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def open(self, body: dict, timeout: float = 120, path: str = "/v1/completions"):
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps({"model": "tiny", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def complete(self, **body) -> dict:
        with self.open(body) as response:
            return json.load(response)["choices"][0]

    def stream(self, **body) -> list[int]:
        tokens = []
        with self.open({"stream": True, **body}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return tokens

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.split()[-1]) for line in lines)


@contextlib.contextmanager
def running(folder: str, path: Path, *options: str):
    with path.open("wb") as log:
        server = Server(folder, log, *options)
        try:
            assert server.wait(), path.read_text()[-20000:]
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    with running(llama, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_concurrent_streams(server, llama):
    """Eight at once, tokens as transformers'."""
    prompts = tiny.prompts((5, 17, 33, 1, 70, 12, 100, 60))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda prompt: server.stream(prompt=prompt, max_tokens=16, **GREEDY), prompts))
    reference = tiny.Reference(llama)
    assert got == [reference.greedy(prompt, 16) for prompt in prompts]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5], "temperature": -1},
        {"prompt": [5], "top_p": 2},
        {"prompt": [5], "max_tokens": 0},
        {"prompt": list(range(3, 303)), "max_tokens": 1},  # longer than the model takes
        {"prompt": [100000], "max_tokens": 1},
        {"prompt": [[-1]], "max_tokens": 1},
        {"prompt": [5], "temperature": math.nan},
        {"prompt": [5], "temperature": 1e39},  # float32 has no such number
        {"prompt": [5], "top_p": 1e-50},
        {"prompt": [5], "repetition_penalty": math.inf},
        {"prompt": [5], "top_k": 1 << 70},  # int64 has no such number
        {"prompt": [5], "stop_token_ids": [1 << 70]},
        {"prompt": [5], "allowed_token_ids": [100000]},
        {"prompt": [5], "logprobs": 1000},
        {"prompt": [5], "structured_outputs": {"regex": "("}},
        # vLLM would give these to the engine's xgrammar, which ends it or ignores a part.
        {"prompt": [5], "structured_outputs": {"grammar": "root ::= "}},
        {"prompt": [5], "structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        {"prompt": [5], "model": "another"},
    ],
)
def test_bad_requests(server, body):
    with pytest.raises(urllib.error.HTTPError) as failure:
        server.complete(**body)
    with failure.value:
        assert 400 <= failure.value.code < 500, failure.value.read()
    assert server.complete(prompt=[5], max_tokens=2, **GREEDY)["token_ids"]  # and it lives
    assert server.complete(prompt=[5], structured_outputs={"choice": ["a", "b"]}, temperature=0)["text"] in "ab"


def test_structured_output_and_logprobs(server):
    body = {"prompt": "Hello", "temperature": 1.0, "max_tokens": 20}
    assert server.complete(**body, structured_outputs={"regex": "[0-9]{3}"})["text"].isdigit()
    logprobs = server.complete(**body, logprobs=3)["logprobs"]
    # By text, which several tokens of this tokenizer share.
    assert all(1 <= len(top) <= 4 and max(top.values()) <= 0 for top in logprobs["top_logprobs"])


def test_a_client_that_goes_away_is_aborted(server):
    response = server.open({"prompt": [5], "max_tokens": 200, "stream": True, **GREEDY})
    response.readline()
    response.close()
    end = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < end:
        time.sleep(0.2)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_drafts(server, llama, tmp_path):
    """Speculative decoding where the engine is a process of its own; vLLM counts what was accepted."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    body = {"prompt": [70, 71] * 4, "max_tokens": 24, "allowed_token_ids": [70, 71, 72], **GREEDY}
    with running(llama, tmp_path / "log", "--speculative-config", json.dumps(drafts)) as drafting:
        assert drafting.stream(**body) == server.stream(**body)
        counts = [drafting.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")]
    assert counts[0] >= counts[1] > 0


def test_drafts_of_a_head(tmp_path):
    """Which the engine's process reads beside the model."""
    folder, head = heads.save_copy("eagle3", tmp_path)
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    prompts = tiny.prompts((5, 30))
    with running(folder, tmp_path / "log", "--speculative-config", json.dumps(drafts)) as drafting:
        got = [drafting.stream(prompt=prompt, max_tokens=24, **GREEDY) for prompt in prompts]
        counts = [drafting.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")]
    reference = tiny.Reference(folder)
    assert got == [reference.greedy(prompt, 24) for prompt in prompts]
    assert counts[0] >= counts[1] > 0.5 * counts[0]


def test_data_parallel_engines(llama, tmp_path):
    """Two engines behind one server, each with requests of its own."""
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU" and len(cuda_driver.driver().gpus) < 2:
        pytest.skip("needs two GPUs, one for each engine")
    prompts = tiny.prompts((5, 17, 33, 1, 70, 12, 100, 60))
    with running(llama, tmp_path / "log", "--data-parallel-size", "2") as server, ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda prompt: server.stream(prompt=prompt, max_tokens=16, **GREEDY), prompts))
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            lines = [line for line in response.read().decode().splitlines() if "generation_tokens_total{" in line]
    reference = tiny.Reference(llama)
    assert got == [reference.greedy(prompt, 16) for prompt in prompts]
    assert len(lines) == 2 and all(float(line.split()[-1]) > 0 for line in lines), lines


def test_embeddings(llama, tmp_path):
    """A pooling model: the engine's process hands over tensors, several requests at a time."""
    prompts = tiny.prompts((5, 17, 33, 1, 70, 12, 100, 60))
    reference = tiny.Reference(llama).model.model
    with running(llama, tmp_path / "log", "--runner", "pooling") as server, ThreadPoolExecutor(8) as pool:

        def embed(prompt):
            with server.open({"input": prompt}, path="/v1/embeddings") as response:
                return json.load(response)["data"][0]["embedding"]

        for prompt, embedding in zip(prompts, pool.map(embed, prompts), strict=True):
            with torch.no_grad():
                last = reference(torch.tensor([prompt])).last_hidden_state[0, -1]
            expected = torch.nn.functional.normalize(last, dim=0)
            torch.testing.assert_close(torch.tensor(embedding), expected, rtol=0, atol=2e-5)
        for body in (
            {"input": [100000]},
            {"input": list(range(3, 303))},
            {"input": [5], "dimensions": 8},  # of a model that was not trained for it
        ):
            with pytest.raises(urllib.error.HTTPError) as failure:
                server.open(body, path="/v1/embeddings")
            with failure.value:
                assert 400 <= failure.value.code < 500, failure.value.read()
        assert len(embed(prompts[0])) == 64  # and it lives


def test_pairs_of_an_encoder(tmp_path):
    """Scores of pairs that are told by token types, through the engine's process."""
    folder, model = tiny_encoders.save(
        "bert", tmp_path / "model", transformers.AutoModelForSequenceClassification, num_labels=1
    )
    options = ("--runner", "pooling", "--max-num-batched-tokens", "256")
    query, documents = "which of them", ["the second one", "not this one, which is a longer one", "x"]
    with running(folder, tmp_path / "log", *options) as server:
        body = {"query": query, "documents": documents}
        with server.open(body, path="/rerank") as response:
            results = {entry["index"]: entry["relevance_score"] for entry in json.load(response)["results"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for index, document in enumerate(documents):
        with torch.no_grad():
            expected = model(**tokenizer(query, document, return_tensors="pt")).logits.sigmoid().item()
        assert results[index] == pytest.approx(expected, abs=2e-5)


def test_chat_with_images(tmp_path):
    """Images in a chat's messages, as addresses that hold them; and requests that are refused, of the same images."""
    folder = tiny_images.save("llava", tmp_path / "model")
    options = ("--limit-mm-per-prompt", '{"image": 2}')
    pictures = tiny_images.pictures(6)

    def message(*shown, text="What is it?"):
        parts = [{"type": "image_url", "image_url": {"url": tiny_images.data_url(picture)}} for picture in shown]
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}

    with running(folder, tmp_path / "log", *options) as server, ThreadPoolExecutor(6) as pool:

        def chat(body, **others):
            with server.open({**body, "max_tokens": 12, **GREEDY, **others}, path="/v1/chat/completions") as response:
                return json.load(response)["choices"][0]["token_ids"]

        refused = [
            message(*pictures[:3]),  # more than two
            message(pictures[0], text="too long " * 60),
            {**message(pictures[1]), "temperature": 1e39},
            {**message(pictures[2]), "mm_processor_kwargs": {"do_rescale": True}},
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                    }
                ]
            },
        ]
        for body in refused:
            with pytest.raises(urllib.error.HTTPError) as failure:
                chat(body, **({"temperature": body["temperature"]} if "temperature" in body else {}))
            with failure.value:
                assert 400 <= failure.value.code < 500, failure.value.read()
        shown = [[picture] for picture in pictures] + [[pictures[0], pictures[1]], [pictures[1]]]
        got = list(pool.map(lambda images: chat(message(*images)), shown))
    reference = tiny_images.Reference(folder)
    assert got == [reference.greedy(f"{tiny_images.IMAGE * len(images)}What is it?", images, 12) for images in shown]


def test_chat_with_images_of_any_size(tmp_path):
    """Of Qwen 2.5 VL, eight requests at a time, and a video; images that are too long are refused."""
    pytest.importorskip("torchvision", reason="the processor of this model")
    from tests.vllm import tiny_qwen_vl

    folder = tiny_qwen_vl.save("qwen2_5_vl", tmp_path / "model")
    sizes = [(60, 60), (230, 70), (28, 400), (300, 300), (150, 130), (90, 400)]
    pictures = [picture.resize(size) for picture, size in zip(tiny_images.pictures(6), sizes, strict=True)]

    def of_parts(*parts):
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]}

    def message(*shown):
        return of_parts(*({"type": "image_url", "image_url": {"url": tiny_images.data_url(one)}} for one in shown))

    frames = [picture.resize((90, 60)) for picture in pictures[:4]]
    together = ",".join(tiny_images.data_url(frame).partition(",")[2] for frame in frames)
    video = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{together}"}}
    options = ("--limit-mm-per-prompt", '{"image": 2, "video": 1}')
    with running(folder, tmp_path / "log", *options) as server, ThreadPoolExecutor(8) as pool:

        def chat(body):
            with server.open({**body, "max_tokens": 12, **GREEDY}, path="/v1/chat/completions") as response:
                return json.load(response)["choices"][0]["token_ids"]

        refused = {
            "at most 40 tokens": message(pictures[0].resize((2000, 20))),
            "At most 1 video": of_parts(video, video),
            "mm_processor_kwargs": {**message(pictures[1]), "mm_processor_kwargs": {"max_pixels": 10000}},
        }
        for text, body in refused.items():
            with pytest.raises(urllib.error.HTTPError) as failure:
                chat(body)
            with failure.value:
                assert failure.value.code == 400 and text in failure.value.read().decode()
        shown = [[picture] for picture in pictures] + [[pictures[0], pictures[3]], [pictures[1]], []]
        got = list(pool.map(lambda images: chat(message(*images)), shown))
        of_video = chat(of_parts(video))
    reference = tiny_images.Reference(folder)
    assert got == [reference.greedy(f"{tiny_qwen_vl.IMAGE * len(images)}What is it?", images, 12) for images in shown]
    played = np.stack([np.asarray(frame) for frame in frames])
    assert of_video == reference.greedy(f"{tiny_qwen_vl.VIDEO}What is it?", [], 12, videos=[played])
