"""The programs of proxies: each is one of its own, and the executable cache has it in whichever order they are made."""

from __future__ import annotations

import collections
import itertools

import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

from tests.frontends.xla_tensors import on_device  # noqa: E402
from xla_gpu._torch_xla import proxy_programs  # noqa: E402
from xla_gpu._torch_xla.program import Program  # noqa: E402
from xla_gpu._torch_xla.proxy_programs import ProxyProgram  # noqa: E402


def proxies_of(monkeypatch, *arguments):
    """Hashes of the proxies of one program for each argument, as a process makes them that begins."""
    sizes = collections.defaultdict(lambda: itertools.count(2))
    monkeypatch.setattr(proxy_programs, "_sizes", sizes)
    made = [
        ProxyProgram(Program("test", lambda x, factor=factor: [x * factor], [x]), [x])
        for factor, x in enumerate(arguments, 2)
    ]
    return [proxy._proxy._hash for proxy in made]


def test_each_is_a_program_of_its_own(monkeypatch):
    one, two, integers = on_device([1.0], [1.0, 2.0], [1, 2])
    made = proxies_of(monkeypatch, one, two, two, integers, one.to(torch.bfloat16))
    assert len(set(made)) == 5


def test_the_order_does_not_matter_where_shapes_differ(monkeypatch):
    one, two = on_device([1.0], [1.0, 2.0])
    first, second = proxies_of(monkeypatch, one, two, two), proxies_of(monkeypatch, two, one, two)
    assert second == [first[1], first[0], first[2]]
