"""The PJRT adapter and registration through a plug-in, against a plug-in without a device.

Each case runs in a process of its own: a process has one adapter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.common import process

PRELUDE = """
import ctypes as ct, os
from xla_gpu._runtime import abi, library

library = library.load()
fake = os.environ["FAKE"]
plugin = ct.CDLL(fake)
plugin.GetPjrtApi.restype = library.cdll.GetPjrtApi.restype = ct.c_void_p
plugin.fake_pjrt_registered_target.restype = ct.c_char_p
execute = next(h.execute for h in library.handlers() if h.platform == "Host")
stages = abi.Stages(None, None, None, execute)

def use(path=fake):
    error = library.cdll.xla_gpu_pjrt_use_plugin(path.encode())
    return None if error is None else error.decode()

def entry(table, slot):
    return ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)(ct.c_void_p.from_address(table + 40 + 8 * slot).value)

def message(table, error):
    words = (ct.c_size_t * 5)(40, 0, error, 0, 0)
    entry(table, 1)(ct.addressof(words))
    return ct.string_at(words[3], words[4]).decode()

def register(name, table):
    error = library.cdll.xla_gpu_register_pjrt(table, name.encode(), ct.byref(stages))
    return None if error is None else error.decode()
"""


def run(fake: Path, code: str, mode: str = "", **environment: str) -> str:
    return process.run(PRELUDE + code, FAKE=str(fake), FAKE_PJRT=mode, **environment)


def test_only_what_must_is_replaced(fake_plugin):
    code = """
assert use() is None and use() is None
real, adapter = plugin.GetPjrtApi(), library.cdll.GetPjrtApi()
words = ct.c_size_t.from_address(real).value // 8
pair = [(ct.c_size_t * words).from_address(table) for table in (real, adapter)]
print([i - 5 for i in range(words) if pair[0][i] != pair[1][i]])
"""
    # Errors, events, Client_Create, PlatformName, Compile, BufferFromHostBuffer, OptimizedProgram,
    # LoadedExecutable_Destroy, Execute, DeserializeAndLoad, Buffer_Destroy, what takes a buffer's memory,
    # GetCompiledMemoryStats
    of_memory = [64, 69, 70, 73, 74, 75, 76, 92, 100, 120, 125]
    replaced = [0, 1, 2, 5, 6, 7, 8, 9, 10, 12, 20, 22, 48, 50, 55, 56, 58, *of_memory]
    replaced = sorted([*replaced, 96])
    assert run(fake_plugin, code) == str(replaced)


def test_the_platform_is_gpu(fake_plugin):
    code = """
assert use() is None
words = (ct.c_size_t * 5)(40)
entry(library.cdll.GetPjrtApi(), 12)(ct.addressof(words))
print(ct.string_at(words[3], words[4]).decode())
"""
    assert run(fake_plugin, code) == "gpu"


def test_execute_options_grow(fake_plugin):
    code = """
assert use() is None
for table in plugin.GetPjrtApi(), library.cdll.GetPjrtApi():
    options = (ct.c_size_t * 10)(80)
    args = (ct.c_size_t * 10)(80, 0, 0, ct.addressof(options))
    error = entry(table, 55)(ct.addressof(args))
    print(message(table, error) if error else "taken")
    assert args[3] == ct.addressof(options) and options[0] == 80
"""
    assert run(fake_plugin, code).splitlines() == ["Unexpected PJRT_ExecuteOptions size: expected 112, got 80", "taken"]


def test_execute_options_of_a_newer_framework_are_passed_on(fake_plugin):
    code = """
assert use() is None
options = (ct.c_size_t * 100)(800)
args = (ct.c_size_t * 10)(80, 0, 0, ct.addressof(options))
assert not entry(library.cdll.GetPjrtApi(), 55)(ct.addressof(args))
plugin.fake_pjrt_options_size.restype = ct.c_size_t
print(plugin.fake_pjrt_options_size())
"""
    assert run(fake_plugin, code) == "800"


def test_outputs_of_grown_arguments_come_back(fake_plugin):
    code = """
assert use() is None
args = (ct.c_size_t * 14)(112)
assert not entry(library.cdll.GetPjrtApi(), 96)(ct.addressof(args))
print(args[0], args[3])
"""
    assert run(fake_plugin, code) == "112 7"


@pytest.mark.parametrize(
    ("mode", "fragments"),
    [
        ("old", ["PJRT API 0.50", "0.57 on", "jax-cuda13-pjrt"]),
        ("major", ["PJRT API 1.112", "0.x from 0.57"]),
        ("short", ["PJRT_Api has 200 bytes"]),
        ("null", ["GetPjrtApi returned null"]),
    ],
)
def test_a_plugin_that_does_not_fit(fake_plugin, mode, fragments):
    text = run(fake_plugin, "print(use())", mode)
    assert all(fragment in text for fragment in [str(fake_plugin), *fragments]), text


def test_what_is_no_plugin(fake_plugin):
    text = run(fake_plugin, "print(use(os.environ['OTHER']))", OTHER=os.environ["XLA_GPU_TEST_HANDLERS"])
    assert "has no function GetPjrtApi" in text
    assert "is this library itself" in run(fake_plugin, "print(use(str(library.path)))")
    assert "nowhere.so" in run(fake_plugin, "print(use('/nowhere.so'))")
    assert "null or empty" in run(fake_plugin, "print(use(''))")


def test_one_plugin_for_a_process(fake_plugin):
    text = run(fake_plugin, "assert use() is None; print(use('/nowhere.so'))")
    assert str(fake_plugin) in text and "already in use" in text


def test_without_a_plugin_every_call_says_so(fake_plugin):
    code = """
table = library.cdll.GetPjrtApi()
for slot in 3, 10, 55, 150:
    print(message(table, entry(table, slot)((ct.c_size_t * 100)())))
"""
    lines = run(fake_plugin, code, XLA_GPU_PJRT_PLUGIN="").splitlines()
    assert len(set(lines)) == 1 and "XLA_GPU_PJRT_PLUGIN" in lines[0]


def test_the_plugin_of_the_environment(fake_plugin):
    code = "print(ct.c_int.from_address(library.cdll.GetPjrtApi() + 36).value)"
    assert run(fake_plugin, code, XLA_GPU_PJRT_PLUGIN=str(fake_plugin)) == "112"


def test_registration(fake_plugin):
    code = "print(register('some_target', plugin.GetPjrtApi()), plugin.fake_pjrt_registered_target().decode())"
    assert run(fake_plugin, code) == "None some_target"


@pytest.mark.parametrize("mode", ["bare", "circle"])
def test_registration_without_the_extension(fake_plugin, mode):
    text = run(fake_plugin, "print(register('some_target', plugin.GetPjrtApi()))", mode)
    assert all(part in text for part in ("some_target", "PJRT API 0.112", "PJRT_Gpu_Custom_Call", "jax-cuda12-pjrt"))


def test_registration_that_is_refused(fake_plugin):
    text = run(fake_plugin, "print(register('refuse_me', plugin.GetPjrtApi()))")
    assert text == "registering refuse_me on CUDA: the fake plug-in refuses this name"


def test_registration_without_a_table(fake_plugin):
    assert run(fake_plugin, "print(register('x', None))") == "registering x on CUDA: pjrt_api is null"
