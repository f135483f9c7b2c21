"""A client of the PJRT adapter in front of the fake plug-in, whose programs copy their arguments: what a process of its
own begins with, since a process has one adapter."""

from __future__ import annotations

import os
import subprocess
import sys

CLIENT = """
import ctypes as ct, os
import numpy as np
from xla_gpu._runtime import library

cdll = library.load().cdll
plugin = ct.CDLL(os.environ["FAKE"])
cdll.GetPjrtApi.restype = ct.c_void_p
assert cdll.xla_gpu_pjrt_use_plugin(os.environ["FAKE"].encode()) is None
table = cdll.GetPjrtApi()
MESSAGE, DESTROY_EXECUTABLE, EXECUTE, DESTROY, TO_HOST, POINTER = 1, 50, 55, 58, 70, 73

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

def from_host(*values, device=1):
    values = np.array(values, np.int32)
    dims = (ct.c_int64 * 1)(len(values))
    words = (ct.c_size_t * 15)(120, 0, 5, values.ctypes.data, 4, ct.addressof(dims), 1, 0, 0, 0, device, 0, 0, 0, 0)
    assert not call(22, words)
    return words[14]

def execute(executable, buffers, num_results):
    # As torch_xla does: options of an older API. None where the plug-in, or the adapter, refuses.
    options = (ct.c_size_t * 10)(80)
    arguments, results = (ct.c_void_p * len(buffers))(*buffers), (ct.c_void_p * num_results)()
    given, returned = (ct.c_void_p * 1)(ct.addressof(arguments)), (ct.c_void_p * 1)(ct.addressof(results))
    global refused
    events = (ct.c_void_p * 1)(1)
    error = call(EXECUTE, (ct.c_size_t * 10)(80, 0, executable, ct.addressof(options), ct.addressof(given), 1,
                                             len(buffers), ct.addressof(returned), ct.addressof(events), 0))
    refused = error and text_of(error)
    if not error and events[0] != 1:  # the adapter's
        ready = (ct.c_size_t * 4)(32, 0, events[0])
        assert not call(6, ready) and ready[3] & 1
    return None if error else list(results)

def text_of(error):
    text, code = (ct.c_size_t * 5)(40, 0, error), (ct.c_size_t * 4)(32, 0, error)
    call(MESSAGE, text)
    call(2, code)
    message = ct.string_at(text[3], text[4]).decode()
    call(0, (ct.c_size_t * 3)(24, 0, error))
    return f"{code[3] & 0xFFFFFFFF}: {message}"

def returning(num_results):
    plugin.fake_pjrt_set_results(ct.c_size_t(num_results))

def read(buffer):
    values = np.zeros(2, np.int32)
    error = call(TO_HOST, (ct.c_size_t * 15)(56, 0, buffer, 0, values.ctypes.data, values.nbytes))
    return text_of(error) if error else values.tolist()

def destroy(buffer):
    assert not call(DESTROY, (ct.c_size_t * 3)(24, 0, buffer))

def destroyed():
    counts = (ct.c_int64 * 6)()
    plugin.fake_pjrt_buffers(counts)
    return counts[1]
"""


def start(code, plugin, mode="", **environment) -> subprocess.CompletedProcess:
    """Runs the client and then ``code``, in front of a plug-in of this mode."""
    environment = {**os.environ, "FAKE": str(plugin), "FAKE_PJRT": mode, **environment}
    return subprocess.run(
        [sys.executable, "-c", CLIENT + code], env=environment, capture_output=True, text=True, timeout=120
    )


def run(code, plugin, mode=""):
    """The same, which has to succeed."""
    done = start(code, plugin, mode)
    assert done.returncode == 0, done.stderr
