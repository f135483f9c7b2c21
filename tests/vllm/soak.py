"""Thousands of requests through one engine whose cache is too small for them; run by hand.

    PJRT_DEVICE=CPU python -m tests.vllm.soak --requests 10000
    PJRT_DEVICE=GPU python -m tests.vllm.soak --requests 10000 --concurrency 256

Prompts and outputs have random lengths, some requests share prefixes, one in twenty is aborted at a random time, and
the sampling parameters are mixed. It ends with 1 unless every request was answered in full or aborted, all pages and
slots are free at the end, nothing was compiled after the start, memory stayed flat, and requests that ran in the crowd,
greedy or with a seed, have the tokens that they have alone. With --drafts K steps verify up to K drafts of a request,
of n-grams, or with --head of an EAGLE head or an MTP layer that computes what the model does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_MODEL_LEN = 256
ABORTED = 0.05
CHECKED = 60  # requests that run once more, alone
MAX_GROWTH_MIB = 64  # of resident memory and of the device's, from a third of the way on

PARAMETERS = [
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "seed": 7},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "allowed_token_ids": [70, 71, 72]},
    {"temperature": 0.9, "allowed_token_ids": [70, 71, 72], "seed": 8},
    {"temperature": 0, "min_tokens": 2, "logit_bias": {5: 1.0}},
]


class Soak:
    """The requests that were sent, and what became of them."""

    def __init__(self, llm, requests: int, concurrency: int, seed: int) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.total, self.concurrency = requests, concurrency
        self.random = random.Random(seed)
        self.vocab_size = self.engine.vllm_config.model_config.get_vocab_size()
        self.prefixes = [self.tokens(48) for _ in range(8)]
        self.sent: dict[str, tuple[list[int], dict, int]] = {}
        self.answered: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.live: list[str] = []
        self.problems: list[str] = []

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, self.vocab_size) for _ in range(count)]

    def send(self) -> None:
        from vllm import SamplingParams

        name = f"request-{len(self.sent)}"
        prompt = self.tokens(self.random.randrange(1, 100))
        if self.random.random() < 0.3:
            prompt = self.random.choice(self.prefixes) + prompt
        options, new = self.random.choice(PARAMETERS), self.random.randrange(2, 60)
        params = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, **options)
        self.sent[name] = prompt, options, new
        self.live.append(name)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished:
                continue
            name = output.request_id
            if name in self.answered or name in self.aborted:
                self.problems.append(f"{name} ended twice")
            self.answered[name] = list(output.outputs[0].token_ids)
            self.live.remove(name)

    def run(self) -> dict[str, list[int]]:
        """Sends and answers everything; returns resident memory and the device's in MiB at each thirtieth."""
        memory: dict[str, list[int]] = {"resident memory": [], "memory of the device": []}
        to_abort = 0.0
        while len(self.sent) < self.total or self.live:
            while len(self.sent) < self.total and len(self.live) < self.concurrency:
                self.send()
                to_abort += ABORTED
                if len(self.sent) % max(self.total // 30, 1) == 0:
                    memory["resident memory"].append(resident())
                    memory["memory of the device"].append(self.device_memory())
            while to_abort >= 1 and self.live:
                name = self.live.pop(self.random.randrange(len(self.live)))
                self.aborted.add(name)
                self.engine.abort_request([name])
                to_abort -= 1
            self.step()
        return memory

    def device_memory(self) -> int:
        """What is allocated on the device, in MiB; 0 where its client does not say."""
        import torch_xla.core.xla_model as xm

        try:
            return int(xm.get_memory_info(self.runner.device)["bytes_used"]) >> 20
        except RuntimeError:
            return 0

    def check(self) -> None:
        """What must hold when nothing is left to do."""
        for name, (_, _, new) in self.sent.items():
            if name in self.aborted:
                continue
            if name not in self.answered:
                self.problems.append(f"{name} was never answered")
            elif len(self.answered[name]) != new:
                self.problems.append(f"{name}: expected {new} tokens, got {len(self.answered[name])}")
        # The runner learns of the last requests' ends with the next step.
        for name in ("last-0", "last-1"):
            self.alone(name, [3], 1, {"temperature": 0})
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        state = {
            "pages in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests of the scheduler": len(scheduler.requests),
            "requests of the output processor": len(self.engine.output_processor.request_states),
            "requests of the runner": len(self.runner.requests) - 1,
            "slots in use": self.runner._max_seqs - self.runner.requests.free_slots - 1,
        }
        self.problems += [f"{name}: expected 0, got {count}" for name, count in state.items() if count > 0]

    def alone(self, name: str, prompt: list[int], new: int, options: dict) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, **options)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        found: list[int] = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found = list(output.outputs[0].token_ids)
        return found

    def check_tokens(self) -> None:
        sure = [name for name, (_, options, _) in self.sent.items() if options["temperature"] == 0 or "seed" in options]
        sure = [name for name in sure if name in self.answered]
        for name in self.random.sample(sure, min(CHECKED, len(sure))):
            prompt, options, new = self.sent[name]
            if (found := self.alone(f"{name}-alone", prompt, new, options)) != self.answered[name]:
                self.problems.append(f"{name}: {self.answered[name]} in the crowd, {found} alone")


def resident() -> int:
    """Resident memory of the process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=48, help="requests in the engine at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drafts", type=int, default=0, metavar="K", help="tokens that a draft has (default: no drafts)"
    )
    parser.add_argument("--head", choices=("eagle", "eagle3", "mtp"), help="which drafts (default: n-grams)")
    arguments = parser.parse_args()

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tests.vllm import engines, heads, mtp_heads
    from vllm import LLM
    from xla_gpu.vllm.program import compilations
    from xla_gpu.vllm.speculation import take_drafts

    drafts = {"method": "ngram", "num_speculative_tokens": arguments.drafts, "prompt_lookup_min": 1}
    drafts["prompt_lookup_max"] = 3
    max_seqs = max(arguments.concurrency * 2 // 3, 1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.head is None:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
        elif arguments.head == "mtp":
            model = mtp_heads.save_copy("mimo", Path(folder))
            drafts = {"method": "mtp", "num_speculative_tokens": arguments.drafts}
        else:
            model, head = heads.save_copy(arguments.head, Path(folder))
            drafts = {"method": arguments.head, "model": head, "num_speculative_tokens": arguments.drafts}
        llm = LLM(
            model=folder if arguments.head is None else model,
            load_format="dummy" if arguments.head is None else "auto",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=256,
            # Of 16 tokens, where requests have 80 on average and up to 208. Large batches are close to the average.
            num_gpu_blocks_override=max(max_seqs * 4, 64),
            disable_log_stats=False,
            additional_config={"token_buckets": [8, max_seqs, 256]},
            **({"speculative_config": drafts} if arguments.drafts else {}),
        )
    engines.count(llm)
    if arguments.drafts:
        take_drafts(llm)
    soak = Soak(llm, arguments.requests, arguments.concurrency, arguments.seed)
    compiled, start = compilations(), time.perf_counter()
    memory = soak.run()
    seconds = time.perf_counter() - start
    soak.check()
    soak.check_tokens()
    if compilations() != compiled:
        soak.problems.append(f"{compilations() - compiled} programs were compiled after the start")
    for name, sizes in memory.items():
        later = sizes[len(sizes) // 3 :]
        if later and (growth := max(later) - later[0]) > MAX_GROWTH_MIB:
            soak.problems.append(f"{name} grew by {growth} MiB: {sizes}")
    preemptions = engines.metric(llm, "vllm:num_preemptions")
    if not preemptions:
        soak.problems.append("no request was preempted: the cache was not full")
    for problem in soak.problems[:20]:
        print(problem)
    print(
        json.dumps(
            {
                "requests": len(soak.sent),
                "answered": len(soak.answered),
                "aborted": len(soak.aborted),
                "preemptions": preemptions,
                "drafted": engines.metric(llm, "vllm:spec_decode_num_draft_tokens"),
                "accepted": engines.metric(llm, "vllm:spec_decode_num_accepted_tokens"),
                "tokens": sum(map(len, soak.answered.values())),
                "seconds": round(seconds, 1),
                **{f"{name}, MiB": sizes[:: max(len(sizes) // 6, 1)] for name, sizes in memory.items()},
                "problems": len(soak.problems),
            }
        )
    )
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
