"""Programs that the PJRT adapter executes in the place of others, against a plug-in whose programs copy their
arguments."""

from __future__ import annotations

import pytest

from tests.runtime.adapter_client import run

# The program has an input, a captured array and a cache. It returns the first two. The proxy takes the cache and the
# input.
BEGIN = """
def note(buffers):
    cdll.xla_gpu_execution_note()
    for buffer in buffers:
        assert not call(POINTER, (ct.c_size_t * 4)(32, 0, buffer, 0))

def record(executable, buffers, seen=None):
    note(buffers)
    assert cdll.xla_gpu_execution_record() is None
    results = execute(executable, buffers if seen is None else seen, 2)
    return cdll.xla_gpu_execution_take(), results

def put(executable, buffers, places=(1, -1, 0), seen=None):
    note(buffers)
    error = cdll.xla_gpu_proxy_expect(program, (ct.c_int32 * len(places))(*places), len(places))
    results = execute(executable, buffers if seen is None else seen, 2)
    return cdll.xla_gpu_proxy_take(), error, results

returning(2)
x, captured, cache = from_host(1, 2), from_host(7, 8), from_host(0, 0)
behind, small, other = compile(b"program"), compile(b"proxy"), compile(b"other")
program, (first, second) = record(behind, [x, captured, cache])
assert program and read(first) == [1, 2] and read(second) == [7, 8]
"""

CASES = {
    "in its place": """
y = from_host(3, 4)
proxy, error, results = put(small, [cache, y])
assert proxy and error is None and [read(result) for result in results] == [[3, 4], [7, 8]]
for i in range(1, 4):
    y = from_host(i, 10 * i)
    results = execute(small, [cache, y], 2)
    assert [read(result) for result in results] == [[i, 10 * i], [7, 8]]
results = execute(other, [cache, y], 2)
assert [read(result) for result in results] == [[0, 0], [3, 30]]
results = execute(behind, [y, x, cache], 2)  # the program itself
assert [read(result) for result in results] == [[3, 30], [1, 2]]
cdll.xla_gpu_proxy_destroy(proxy)
results = execute(small, [cache, y], 2)  # a program as any other
assert [read(result) for result in results] == [[0, 0], [3, 30]]
""",
    "another execution": """
assert record(behind, [x, captured, cache], seen=[x, captured, x])[0] is None
assert record(behind, [x, captured, cache], seen=[x, captured])[0] is None
proxy, error, results = put(small, [cache, x], seen=[x, cache])
assert proxy is None and error is None and read(results[0]) == [1, 2]
assert read(execute(small, [cache, x], 2)[0]) == [0, 0]  # nothing is expected any more
cdll.xla_gpu_execution_destroy(program)
""",
    "executables": """
proxy, _, _ = put(small, [cache, x])
assert put(small, [cache, x])[0] is None and not refused  # it is one already
assert put(behind, [x, captured])[0] is None and "another program's" in refused
assert not call(DESTROY_EXECUTABLE, (ct.c_size_t * 3)(24, 0, behind))
assert read(execute(small, [cache, from_host(6, 6)], 2)[0]) == [6, 6]  # the program's executable stays
assert not call(DESTROY_EXECUTABLE, (ct.c_size_t * 3)(24, 0, small))
cdll.xla_gpu_proxy_destroy(proxy)
""",
    "wrong": """
proxy, error, results = put(small, [cache, x], places=(2, -1, 0))
assert b"no argument 2" in error and proxy is None
assert b"expected 3 places, got 2" in put(small, [cache, x], places=(1, 0))[1]
proxy, error, results = put(compile(b"float"), [cache, x])
assert proxy is None and results is None and "other dtypes or shapes" in refused
proxy, error, results = put(small, [cache, x])
assert proxy and execute(small, [cache], 2) is None and "2 arguments" in refused
assert execute(small, [cache, x, x], 2) is None
""",
}


@pytest.mark.parametrize("case", CASES)
def test_proxies(case, fake_plugin):
    run(BEGIN + CASES[case], fake_plugin, "errorless")
