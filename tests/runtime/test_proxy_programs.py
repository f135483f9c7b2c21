"""Programs that the PJRT adapter executes in the place of others, against a plug-in whose programs copy their
arguments.

Each case runs in a process of its own, which has one adapter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROCESS = """
import ctypes as ct, os
import numpy as np
from xla_gpu._runtime import library

cdll = library.load().cdll
plugin = ct.CDLL(os.environ["FAKE"])
cdll.GetPjrtApi.restype = ct.c_void_p
assert cdll.xla_gpu_pjrt_use_plugin(os.environ["FAKE"].encode()) is None
table = cdll.GetPjrtApi()
DESTROY_EXECUTABLE, EXECUTE, DESTROY, TO_HOST, POINTER = 50, 55, 58, 70, 73

def call(slot, words):
    entry = ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)(ct.c_void_p.from_address(table + 40 + 8 * slot).value)
    return entry(ct.addressof(words))

def address(text):
    return ct.cast(text, ct.c_void_p).value

def compile(name):
    program = (ct.c_size_t * 6)(48, 0, address(name), len(name), address(b"hlo"), 3)
    words = (ct.c_size_t * 7)(56, 0, 5, ct.addressof(program), 0, 0, 0)
    assert not call(20, words)
    return words[6]

def from_host(*values):
    values = np.array(values, np.int32)
    dims = (ct.c_int64 * 1)(len(values))
    words = (ct.c_size_t * 15)(120, 0, 5, values.ctypes.data, 4, ct.addressof(dims), 1, 0, 0, 0, 1, 0, 0, 0, 0)
    assert not call(22, words)
    return words[14]

def execute(executable, buffers, num_results):
    # As torch_xla does: options of an older API. None where the plug-in, or the adapter, refuses.
    options = (ct.c_size_t * 10)(80)
    arguments, results = (ct.c_void_p * len(buffers))(*buffers), (ct.c_void_p * num_results)()
    given, returned = (ct.c_void_p * 1)(ct.addressof(arguments)), (ct.c_void_p * 1)(ct.addressof(results))
    error = call(EXECUTE, (ct.c_size_t * 10)(80, 0, executable, ct.addressof(options), ct.addressof(given), 1,
                                             len(buffers), ct.addressof(returned), 0, 0))
    return None if error else list(results)

def returning(num_results):
    plugin.fake_pjrt_set_results(ct.c_size_t(num_results))

def read(buffer):
    values = np.zeros(2, np.int32)
    assert not call(TO_HOST, (ct.c_size_t * 15)(56, 0, buffer, 0, values.ctypes.data, values.nbytes))
    return values.tolist()

def destroy(buffer):
    assert not call(DESTROY, (ct.c_size_t * 3)(24, 0, buffer))

def destroyed():
    counts = (ct.c_int64 * 6)()
    plugin.fake_pjrt_buffers(counts)
    return counts[1]

def record(executable, buffers, num_results, seen=None):
    cdll.xla_gpu_execution_note()
    for buffer in buffers:
        assert not call(POINTER, (ct.c_size_t * 4)(32, 0, buffer, 0))
    assert cdll.xla_gpu_execution_record(num_results) is None
    returning(num_results)
    results = execute(executable, buffers if seen is None else seen, num_results)
    return cdll.xla_gpu_execution_take(), results

def make(places, results):
    handle = ct.c_void_p()
    error = cdll.xla_gpu_proxy_make(proxy, program, (ct.c_int32 * len(places))(*places),
                                    (ct.c_int32 * len(results))(*results), ct.byref(handle))
    return handle, error

# The program has an input, a captured array and a cache. It returns the first two: the input is the cache's new value,
# the captured array its result. The proxy takes the cache and the input.
returning(1)
x, captured, first = from_host(1, 2), from_host(7, 8), from_host(0, 0)
behind, small = compile(b"program"), compile(b"proxy")
proxy, (unused,) = record(small, [first, x], 1)
program, (cache, result) = record(behind, [x, captured, first], 2)
assert proxy and program
PLACES, RESULTS = [1, -1, 0], [~0, 0]
"""

ENDS = {
    "transfers": """
before = cdll.xla_gpu_host_transfers()
from_host(1, 2), from_host(3, 4)
assert cdll.xla_gpu_host_transfers() == before + 2
""",
    "updates": """
handle, error = make(PLACES, RESULTS)
assert error is None and read(cache) == [1, 2]
before = destroyed()
for i in range(1, 4):
    y = from_host(i, 10 * i)
    returning(2)
    (result,) = execute(small, [cache, y], 1)
    assert read(cache) == [i, 10 * i] and read(result) == [7, 8]
assert destroyed() == before + 2  # what the cache was, but for the client's own buffer
returning(1)
(copy,) = execute(compile(b"other"), [cache], 1)
assert read(copy) == [3, 30]
again = from_host(4, 40)
returning(2)
execute(behind, [again, captured, cache], 2)  # the program itself
assert read(cache) == [3, 30]
destroy(cache)
assert destroyed() == before + 4
cdll.xla_gpu_proxy_destroy(handle)
returning(1)
other = from_host(5, 5)
(result,) = execute(small, [other, x], 1)  # a program as any other
assert read(result) == [5, 5]
""",
    "results of proxies": """
handle, _ = make(PLACES, RESULTS)
returning(2)
(result,) = execute(small, [cache, from_host(3, 3)], 1)
(next_result,) = execute(small, [result, from_host(4, 4)], 1)  # which may be updated in place, too
assert read(result) == [4, 4] and read(cache) == [3, 3] and read(next_result) == [7, 8]
""",
    "memory of others": """
handle, _ = make(PLACES, RESULTS)
mine = from_host(9, 9)
returning(2)
assert execute(small, [mine, x], 1) is None
assert read(mine) == [9, 9]
destroy(cache)
assert execute(small, [first, x], 1) is None
""",
    "twice": """
handle, error = make([1, -1, 0], [~0, ~1])
assert b"each result of the proxy once" in error
proxy, _ = record(small, [first, x], 0)
handle, error = make([1, -1, 0], [~0, ~1])
assert error is None, error
returning(2)
assert execute(small, [cache, cache], 0) is None
assert execute(small, [cache, result], 0) == []
assert read(cache) == [7, 8] or read(cache) == [1, 2]
""",
    "executables": """
handle, _ = make(PLACES, RESULTS)
assert b"another one's" in make(PLACES, RESULTS)[1]
assert not call(DESTROY_EXECUTABLE, (ct.c_size_t * 3)(24, 0, behind))
returning(2)
(result,) = execute(small, [cache, from_host(6, 6)], 1)  # the program's executable stays
assert read(cache) == [6, 6]
assert not call(DESTROY_EXECUTABLE, (ct.c_size_t * 3)(24, 0, small))
cdll.xla_gpu_proxy_destroy(handle)
""",
    "wrong": """
for places, results, expected in (([2, -1, 0], RESULTS, b"no argument 2"), (PLACES, [~2, 0], b"no result -3"),
                                  (PLACES, [0, 1], b"no result 1"), (PLACES, [0, 0], b"once")):
    assert expected in make(places, results)[1]
handle, _ = make(PLACES, RESULTS)
returning(2)
assert execute(small, [cache], 1) is None
assert execute(small, [cache, x, x], 1) is None
""",
    "destroyed meanwhile": """
import threading, time
handle, _ = make(PLACES, RESULTS)
returning(2)
execute(small, [cache, from_host(3, 3)], 1)
before = destroyed()
results, y = [], from_host(4, 4)
os.environ["FAKE_PJRT"] = "slow"
thread = threading.Thread(target=lambda: results.append(execute(small, [cache, y], 1)))
thread.start()
time.sleep(0.1)
destroy(cache)
thread.join()
# The client's, the one behind it that the execution read, and what would be there next. On a busy machine the buffer
# may have gone before the execution began, which was refused then.
assert destroyed() == before + (3 if results[0] else 2)
""",
    "another execution": """
assert record(behind, [x, captured, first], 2, seen=[x, captured, cache])[0] is None
assert record(behind, [x, captured, first], 2, seen=[x, captured])[0] is None
cdll.xla_gpu_execution_destroy(program)
""",
}


@pytest.mark.parametrize("case", ENDS)
def test_proxies(case, fake_plugin):
    environment = {**os.environ, "FAKE": str(fake_plugin), "FAKE_PJRT": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS + ENDS[case]], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
