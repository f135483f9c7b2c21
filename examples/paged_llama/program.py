"""The serving programs' command line, progress bar, comparison and report: the same for every framework."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import textwrap
import time
from typing import Any, Protocol

import numpy as np

from .config import SHAPES, LlamaConfig
from .options import BLOCKS, OPERATORS, USUAL, StepOptions, is_quantized, usual
from .scheduler import Request, Scheduler
from .tokens import ByteTokenizer, CheckpointTokenizer, read_prompts


class Backend(Protocol):
    """What a framework brings to the program."""

    name: str  # of the program, for messages

    def start(self, arguments: argparse.Namespace) -> None:
        """Selects the device. Comes before anything else that imports the framework."""

    def engine(
        self, arguments: argparse.Namespace, config: LlamaConfig, theirs: Any, scheduler: Scheduler, max_tokens: int
    ) -> Any:
        """The engine, with its weights: of a checkpoint, of transformers' model ``theirs``, or random ones."""

    def compilations(self) -> int:
        """How many programs XLA has compiled in this process."""


def parse_arguments(description: str, argv: list[str] | None) -> argparse.Namespace:
    parser = _parser(description)
    arguments = parser.parse_args(argv)
    if error := _refusal(arguments):
        parser.error(error)
    if arguments.operators is None:
        quantized = has_quantized_weights(arguments)
        operators = frozenset(usual(arguments.dtype, arguments.tensor_parallel, arguments.max_seqs, quantized))
    else:
        operators = frozenset() if arguments.operators == "none" else frozenset(arguments.operators.split(","))
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    try:
        arguments.options = StepOptions(operators, **sampling)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    source = model.add_mutually_exclusive_group()
    source.add_argument("--model", type=pathlib.Path, metavar="DIR", help="a Hugging Face Llama checkpoint's folder")
    source.add_argument(
        "--shape", default="small", metavar="NAME", help="random weights: small, llama3-1b, llama3-8b, llama3-70b"
    )
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default %(default)s)"
    )
    model.add_argument(
        "--weights",
        choices=("bfloat16", "float8", "int8", "int4"),
        help="quantise the layers' matrices at load (serve_llama.py; default: as the checkpoint has them)",
    )
    model.add_argument(
        "--head-weights", choices=("float8", "int8", "int4"), help="quantise the matrix of the logits at load, too"
    )
    model.add_argument("--seed", type=int, default=0, help="of random weights and of sampling (default %(default)s)")

    work = parser.add_argument_group("work")
    here = pathlib.Path(__file__).parents[1]
    work.add_argument("--prompts", type=pathlib.Path, default=here / "prompts.txt", metavar="FILE", help="a text file")
    work.add_argument("--random-prompts", metavar="NxLENGTH", help="instead, N prompts of LENGTH random tokens")
    work.add_argument("--max-new-tokens", type=int, default=64, help="of each prompt (default %(default)s)")
    work.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")

    choice = parser.add_argument_group("sampling, on the device")
    choice.add_argument("--temperature", type=float, default=0.0, help="0, the default: the most likely token")
    choice.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K most likely tokens; 0: of all")
    choice.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of as few as have this probability")
    choice.add_argument("--min-p", type=float, default=0.0, metavar="P", help="of those with this part of the largest")

    batch = parser.add_argument_group("batching")
    batch.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default %(default)s")
    batch.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share the model")
    batch.add_argument("--max-seqs", type=int, default=8, help="requests running at once (default %(default)s)")
    batch.add_argument("--chunk", type=int, default=128, help="rows of a step that reads prompts (default %(default)s)")
    batch.add_argument("--page-size", type=int, default=16, help="tokens of a page (default %(default)s)")
    batch.add_argument("--num-pages", type=int, default=256, help="pages of the cache (default %(default)s)")

    batch.add_argument(
        "--operators",
        help=f"of {', '.join(OPERATORS)}, with commas, or none: the rest is the framework's own (default: "
        f"{','.join(usual('float32', 1, 1))}; over several devices {','.join(USUAL)}; in bfloat16 on "
        f"one, with quantised weights or up to 64 --max-seqs, also {','.join(BLOCKS)})",
    )

    result = parser.add_argument_group("result")
    result.add_argument("--check", action="store_true", help="compare token for token with transformers' generate")
    result.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there")
    result.add_argument("--quiet", action="store_true", help="no progress bar and no texts")

    return parser


def _refusal(arguments: argparse.Namespace) -> str | None:
    """What is wrong with options that argparse takes, if anything."""
    if arguments.tensor_parallel < 1:
        return f"--tensor-parallel: expected at least 1, got {arguments.tensor_parallel}"
    if arguments.random_prompts and not re.fullmatch(r"0*[1-9]\d*x0*[1-9]\d*", arguments.random_prompts):
        return f"--random-prompts: expected 64x2048, for example, got {arguments.random_prompts}"
    if not -(2**63) <= arguments.seed < 2**63:
        return f"--seed: expected an integer of 64 bits, got {arguments.seed}"
    if arguments.json and not arguments.json.parent.is_dir():
        return f"--json: expected a file in a folder that is there, got {arguments.json}"
    if arguments.check and arguments.temperature > 0:
        return "--check compares the most likely tokens: it needs --temperature 0"
    if arguments.check and arguments.dtype != "float32":
        return "--check compares tokens in float32: two correct programs may differ in bfloat16"
    if arguments.check and not arguments.model and arguments.shape != "small":
        return "--check needs --model or --shape small: the weights of other shapes exist on the device only"
    return None


def has_quantized_weights(arguments: argparse.Namespace) -> bool:
    if arguments.weights is not None or arguments.model is None:
        return arguments.weights not in (None, "bfloat16")
    try:
        return is_quantized(arguments.model)
    except (OSError, ValueError):  # prepare names what is wrong
        return False


def prepare(arguments: argparse.Namespace):
    """Returns the model's configuration, its tokenizer, and transformers' model, where there is one at hand."""
    if arguments.model:
        return LlamaConfig.from_folder(arguments.model), CheckpointTokenizer(arguments.model), None
    if arguments.shape == "small":
        from . import reference

        theirs = reference.small_model(arguments.seed)
        return LlamaConfig.from_hugging_face(theirs.config.to_dict()), ByteTokenizer(), theirs
    if arguments.shape not in SHAPES:
        raise ValueError(f"--shape: expected small, {', '.join(SHAPES)}, got {arguments.shape!r}")
    return SHAPES[arguments.shape], ByteTokenizer(), None


def check_tensor_parallel(devices: int, config) -> None:
    """Raises ValueError where the model cannot be divided over so many devices."""
    for name in ("num_kv_heads", "intermediate_size"):
        if getattr(config, name) % devices:
            raise ValueError(
                f"--tensor-parallel: expected a number that divides {name} = {getattr(config, name)}, got {devices}"
            )


def make_requests(arguments: argparse.Namespace, config, tokenizer):
    if arguments.random_prompts:
        count, length = (int(number) for number in arguments.random_prompts.split("x"))
        prompts = np.random.default_rng(arguments.seed).integers(config.vocab_size, size=(count, length)).tolist()
    else:
        prompts = [tokenizer.encode(text) for text in read_prompts(arguments.prompts)]
    eos = frozenset() if arguments.ignore_eos else config.eos_token_ids
    requests = [Request(prompt, arguments.max_new_tokens, eos) for prompt in prompts]
    longest = max(request.most_tokens for request in requests)
    if longest > (most := config.max_position_embeddings):
        raise ValueError(f"a prompt and its new tokens are {longest} tokens, the model's longest text is {most}")
    return requests, longest


def serve(arguments: argparse.Namespace, engine, requests):
    from tqdm import tqdm

    most = sum(len(request.prompt) + request.max_new_tokens for request in requests)
    with tqdm(total=most, unit="token", disable=arguments.quiet) as bar:
        ended = set()

        def advance(prompt: int, new: int) -> None:
            bar.update(prompt + new)
            for request in requests:
                if request.finished and id(request) not in ended:
                    ended.add(id(request))
                    bar.update(request.max_new_tokens - len(request.generated))  # what will not come any more
            running = len(engine.scheduler.running)
            bar.set_postfix_str(f"{running} running, {len(engine.scheduler.waiting)} waiting", refresh=False)

        return engine.run(advance)


def check(arguments: argparse.Namespace, requests, theirs) -> int:
    """Returns how many of the requests differ from transformers' tokens, and prints where."""
    from tqdm import tqdm

    from . import reference

    theirs = theirs or reference.load_model(arguments.model)
    wrong = 0
    for index, request in enumerate(tqdm(requests, unit="prompt", desc="transformers", disable=arguments.quiet)):
        expected = reference.generate(theirs, request.prompt, request.max_new_tokens, request.eos_token_ids)
        mismatch = reference.compare(theirs, request.prompt, request.generated, expected)
        if mismatch:
            wrong += 1
            print(f"prompt {index}: {mismatch}", file=sys.stderr)
    return wrong


def print_texts(requests, tokenizer) -> None:
    for index, request in enumerate(requests):
        prompt = textwrap.shorten(tokenizer.decode(request.prompt), 100, placeholder=" …")
        print(f"[{index}] {prompt}\n    → {tokenizer.decode(request.generated)!r}")


def report(arguments: argparse.Namespace, figures, allocator, seconds: dict[str, float], compiled: int) -> dict:
    """Prints the figures; returns them for --json."""
    rates, mixed, decode = figures.rates(), figures.mixed, figures.decode
    print(
        f"{figures.seconds:.2f} s of serving after {seconds['load_seconds']:.1f} s of loading and "
        f"{seconds['compile_seconds']:.1f} s of compiling\n"
        f"prefill: {mixed.prompt_tokens} tokens, {rates['prefill_tokens_per_second']:.1f} tokens/s in {mixed.steps} "
        f"mixed steps, which decoded {mixed.new_tokens} tokens besides\n"
        f"decode: {decode.new_tokens} tokens, {rates['decode_tokens_per_second']:.1f} tokens/s in {decode.steps} "
        f"decoding steps\n"
        f"pages: {allocator.handed_out} handed out of {allocator.num_pages}, at most {allocator.peak_used} in use"
    )
    settings = ("device", "tensor_parallel", "dtype", "max_seqs", "chunk", "page_size", "num_pages")
    return {
        **{name: getattr(arguments, name) for name in settings},
        "model": str(arguments.model or arguments.shape),
        **dataclasses.asdict(figures),
        **rates,
        **seconds,
        "prompt_tokens": figures.prompt_tokens,
        "new_tokens": figures.new_tokens,
        "pages_handed_out": allocator.handed_out,
        "most_pages_in_use": allocator.peak_used,
        "compilations": compiled,
    }


def main(backend: Backend, description: str, argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = parse_arguments(description, argv)
    began = time.perf_counter()
    try:
        backend.start(arguments)
        config, tokenizer, theirs = prepare(arguments)
        check_tensor_parallel(arguments.tensor_parallel, config)
        requests, longest = make_requests(arguments, config, tokenizer)
        scheduler = Scheduler(
            num_pages=arguments.num_pages,
            page_size=arguments.page_size,
            max_seqs=arguments.max_seqs,
            chunk=arguments.chunk,
            max_tokens=longest,
        )
        scheduler.add(requests)
        engine = backend.engine(arguments, config, theirs, scheduler, longest)
    except (ValueError, OSError) as error:
        print(f"{backend.name}: {error}", file=sys.stderr)
        return 2
    loaded = time.perf_counter()
    engine.warm_up()
    warm = time.perf_counter()
    figures = serve(arguments, engine, requests)

    if not arguments.quiet and not arguments.random_prompts:
        print_texts(requests, tokenizer)
    seconds = {"load_seconds": loaded - began, "compile_seconds": warm - loaded}
    record = report(arguments, figures, scheduler.allocator, seconds, backend.compilations())
    record["requests"] = len(requests)
    wrong = 0
    if arguments.check:
        wrong = record["requests_unlike_transformers"] = check(arguments, requests, theirs)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if wrong:
        print(f"demo: FAILED, {wrong} of {len(requests)} texts differ from transformers", file=sys.stderr)
        return 1
    if arguments.check:
        print(
            f"demo: OK, {figures.new_tokens} tokens identical to transformers, "
            f"{record['tokens_per_second']:.1f} tokens/s, {record['compilations']} compilations"
        )
    return 0
