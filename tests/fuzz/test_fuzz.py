"""The bounded run of the fuzzer. XLA_GPU_FUZZ_SEED takes other inputs than the usual ones; a failure says which seed it
was, and the smallest input that shows it, to be kept in regressions.py. For hours: python -m tests.fuzz."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.common import frontends
from tests.fuzz import checks, regressions
from xla_gpu.ops import COMPOSITES, OPERATORS

SEED = int(os.environ.get("XLA_GPU_FUZZ_SEED", "2026"))
# Numbers of inputs: with eager tensors, where one takes a millisecond, and through all front ends, which compile each.
EAGER = {"attention": 220, "hostile": 500, "update": 500, "merge": 300, "add": 300}
EAGER |= {"grouped_linear": 100}
EAGER |= {"linear": 150, "rms_norm": 200, "gated": 100, "sample": 100, "rotary": 200, "all_reduce": 100}
EAGER |= {"gated_mlp": 60, "attention_block": 60, "large_attention": 12}
EAGER |= {"large_linear": 6, "large_gated_mlp": 4}
EAGER |= {"latents": 40, "large_latents": 8, "hostile_latents": 150, "latent_update": 200}
EAGER |= {"bidirectional": 60, "hostile_bidirectional": 150, "experts": 80, "hostile_experts": 80}
ALL_FRONTENDS = {"attention": 25, "hostile": 40, "update": 25, "merge": 15, "add": 15}
ALL_FRONTENDS |= {"grouped_linear": 6}
ALL_FRONTENDS |= {"linear": 8, "rms_norm": 8, "gated": 5, "sample": 5, "rotary": 12, "all_reduce": 6}
ALL_FRONTENDS |= {"gated_mlp": 4, "attention_block": 5}
ALL_FRONTENDS |= {"latents": 6, "hostile_latents": 8, "latent_update": 8}
ALL_FRONTENDS |= {"bidirectional": 3, "hostile_bidirectional": 4, "experts": 4, "hostile_experts": 4}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the overflows that inputs ask for


def available(platform: str) -> list[frontends.Frontend]:
    found = [
        frontend for frontend in frontends.ALL.values() if frontend.platform == platform and not frontend.unavailable()
    ]
    return found or pytest.skip(f"no {platform} frontend can be opened")


PLATFORMS = [pytest.param("host"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", regressions.CASES)
def test_what_once_failed(platform, name):
    checks.check(regressions.CASES[name], available(platform))


@pytest.mark.parametrize("kind", EAGER)
@pytest.mark.frontends("eager", "eager-cuda")
def test_eager(frontend, kind):
    run = pytest.importorskip("tests.fuzz.run")  # needs hypothesis
    run.run(kind, SEED, EAGER[kind], [frontend])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", ALL_FRONTENDS)
def test_all_frontends(platform, kind):
    run = pytest.importorskip("tests.fuzz.run")
    run.run(kind, SEED + 1, ALL_FRONTENDS[kind], available(platform))


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_instruction_sets(isa):
    """The host kernels that this processor would not choose, which attention alone has, over latents too, in a process
    of its own, and with one thread."""
    pytest.importorskip("tests.fuzz.run")
    if reason := frontends.ALL["eager"].unavailable():
        pytest.skip(reason)
    kinds = ["--kind=attention", "--kind=attention_block", "--kind=latents"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--frontend=eager", f"--seed={SEED + 2}", "--examples=60", *kinds],
        env=os.environ | {"XLA_GPU_HOST_ISA": isa, "XLA_GPU_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]


def test_a_fault_is_found_and_made_small(monkeypatch):
    """The fuzzer itself: an operator that takes windows of over 3 keys for windows of 2."""
    run = pytest.importorskip("tests.fuzz.run")
    frontend = frontends.ALL["eager"]
    if reason := frontend.unavailable():
        pytest.skip(reason)
    right = checks.program

    def wrong(frontend, operator, options):
        window = options["sliding_window"]
        return right(frontend, operator, options | {"sliding_window": 2 if (window or 0) > 3 else window})

    monkeypatch.setattr(checks, "program", wrong)
    with pytest.raises(run.Failure, match=r"attention, seed 1: [^\n]* error .*\n.*\n.*sliding_window=4\b") as caught:
        run.run("attention", 1, 200, [frontend])
    (batch,) = caught.value.input.batches
    assert len(batch) == 1


def of_program(monkeypatch, change):
    """Every program gets the options that ``change`` makes of its own."""
    right = checks.program
    monkeypatch.setattr(checks, "program", lambda frontend, name, options=None: right(frontend, name, change(options)))


def eager_or_skip():
    frontend = frontends.ALL["eager"]
    if reason := frontend.unavailable():
        pytest.skip(reason)
    return frontend


def test_a_fault_of_bidirectional_attention_is_found_and_made_small(monkeypatch):
    """Windows of over 3 keys that are one key wider."""
    run, frontend = pytest.importorskip("tests.fuzz.run"), eager_or_skip()

    def wider(options):
        window = options["sliding_window"]
        return options | {"sliding_window": window + 1 if (window or 0) > 3 else window}

    of_program(monkeypatch, wider)
    with pytest.raises(run.Failure, match=r"bidirectional, seed 1: [^\n]* error ") as caught:
        run.run("bidirectional", 1, 200, [frontend])
    found = caught.value.input
    assert found.program.sliding_window == 4
    assert len(found.batches) == 1 and sum(found.batches[0]) <= 6


def test_a_fault_of_experts_mlp_is_found_and_made_small(monkeypatch):
    """The other gelu."""
    run, frontend = pytest.importorskip("tests.fuzz.run"), eager_or_skip()
    of_program(monkeypatch, lambda options: {"activation": options["activation"].replace("gelu", "silu")})
    with pytest.raises(run.Failure, match=r"experts, seed 1: [^\n]* error ") as caught:
        run.run("experts", 1, 200, [frontend])
    found = caught.value.input
    assert (found.activation, found.rows, found.num_experts, found.top_k) == ("gelu_and_mul", 1, 1, 1)


def test_a_missing_error_is_found_and_made_small(monkeypatch):
    """A front end that calls too many sequences as many as there may be."""
    run, frontend = pytest.importorskip("tests.fuzz.run"), eager_or_skip()

    class Lenient(type(frontend)):
        def call(self, operator, arrays, **options):
            most = len(arrays["query_start_loc"]) - 1
            return super().call(operator, arrays | {"num_seqs": arrays["num_seqs"].clip(None, most)}, **options)

    with pytest.raises(run.Failure, match="no error, where one must name 'bidirectional_attention: num_seqs") as caught:
        run.run("hostile_bidirectional", 1, 200, [Lenient()])
    ((argument, _, number),) = caught.value.input.damage
    assert argument == "num_seqs" and number > 0


def test_every_kind_and_every_operator_is_drawn(monkeypatch):
    run, frontend = pytest.importorskip("tests.fuzz.run"), eager_or_skip()
    assert set(EAGER) == set(run.KINDS) == set(run.WEIGHTS)
    assert set(ALL_FRONTENDS) == {kind for kind in run.KINDS if not kind.startswith("large_")}
    monkeypatch.setattr(checks, "inputs", Counter())
    for kind in ALL_FRONTENDS:
        run.run(kind, SEED, 12, [frontend])
    wrong = {"wrong metadata", "wrong values of bidirectional_attention", "wrong values of mla_attention_with_lse"}
    wrong |= {f"wrong values of {operator.name}" for operator in COMPOSITES}
    assert set(checks.inputs) == {operator.name for operator in (*OPERATORS, *COMPOSITES)} | wrong
