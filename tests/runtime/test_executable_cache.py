"""The cache of compiled executables behind the PJRT adapter, against a plug-in whose executables are texts.

Each case runs in processes of its own: a process has one adapter, and the cache is there for the next process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xla_gpu._runtime import executable_cache

VARIABLE = "XLA_GPU_EXECUTABLE_CACHE"

PROCESS = """
import ctypes as ct, json, os, sys, time
from xla_gpu._runtime import library

cdll = library.load().cdll
plugin = ct.CDLL(os.environ["FAKE"])
cdll.GetPjrtApi.restype = ct.c_void_p
plugin.fake_pjrt_executable_text.restype = ct.c_char_p
plugin.fake_pjrt_executable_text.argtypes = [ct.c_void_p]
assert cdll.xla_gpu_pjrt_use_plugin(os.environ["FAKE"].encode()) is None
table = cdll.GetPjrtApi()

def entry(slot):
    return ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)(ct.c_void_p.from_address(table + 40 + 8 * slot).value)

def compile(code, options=b"options", client=1):
    form = b"hlo"
    address = lambda text: ct.cast(text, ct.c_void_p).value
    program = (ct.c_size_t * 6)(48, 0, address(code), len(code), address(form), len(form))
    args = (ct.c_size_t * 7)(56, 0, client, ct.addressof(program), address(options), len(options), 0)
    error = entry(20)(ct.addressof(args))
    if not error:
        return plugin.fake_pjrt_executable_text(args[6]).decode()
    words = (ct.c_size_t * 5)(40, 0, error, 0, 0)
    entry(1)(ct.addressof(words))
    return "error: " + ct.string_at(words[3], words[4]).decode()

def counts():
    numbers = (ct.c_int64 * 4)()
    cdll.xla_gpu_executable_cache_counts(numbers)
    return dict(zip(("loaded", "compiled", "stored", "unusable"), numbers))

appended = os.environ.get("APPEND", "").encode()
assert cdll.xla_gpu_append_compile_options(appended, len(appended)) is None
if os.environ.get("RECORD"):
    cdll.xla_gpu_record_programs(1)
    waiting = ct.c_int64()
    threads = int(os.environ.get("THREADS", "4"))
    if os.environ.get("START_FIRST"):
        assert cdll.xla_gpu_compile_recorded(threads, ct.byref(waiting)) is None and waiting.value == 0
    recorded = [compile(part.encode()) for part in os.environ["RECORD"]]
    cdll.xla_gpu_record_programs(0)
    if not os.environ.get("START_FIRST") and not os.environ.get("DROP"):
        assert plugin.fake_pjrt_compilations() == 0
        assert cdll.xla_gpu_compile_recorded(threads, ct.byref(waiting)) is None
    if os.environ.get("AT_ONCE"):  # the executables are fetched while others are being compiled
        texts = [compile(part.encode()) for part in os.environ["AT_ONCE"]]
        print(json.dumps({"at_once": texts}))
    assert cdll.xla_gpu_finish_recorded(bool(os.environ.get("DROP")), ct.byref(waiting)) is None
    print(json.dumps({"recorded": recorded, "waiting": waiting.value, "together": plugin.fake_pjrt_compilations()}))
if os.environ.get("PRELOAD"):
    compile(b"first")  # the client is known then
    names = "\\n".join([*os.listdir(os.environ["XLA_GPU_EXECUTABLE_CACHE"]), "missing", "../elsewhere"]).encode()
    assert cdll.xla_gpu_preload_executables(names, int(os.environ["PRELOAD"])) is None
    ahead = int(os.environ.get("LOADED_AHEAD", "0"))
    deadline = time.monotonic() + 60
    while plugin.fake_pjrt_loads() < ahead and time.monotonic() < deadline:
        time.sleep(0.001)
    if os.environ.get("NONE_IS_TAKEN"):
        assert cdll.xla_gpu_preload_executables(None, 0) is None
        assert plugin.fake_pjrt_destroyed() == ahead - 1  # all but the first, which was compiled
if os.environ.get("PROGRAMS_WITHOUT"):
    assert cdll.xla_gpu_append_compile_options(None, 0) is None
programs = [tuple(part.encode() for part in program) for program in json.loads(os.environ["PROGRAMS"])]
texts = [compile(*program, client=int(os.environ.get("CLIENT", "1"))) for program in programs]
loads = plugin.fake_pjrt_loads()
compilations = plugin.fake_pjrt_compilations()
assert cdll.xla_gpu_preload_executables(None, 0) is None
assert plugin.fake_pjrt_live_executables() == 0
used = cdll.xla_gpu_used_executables().decode().splitlines()
folder = os.environ["XLA_GPU_EXECUTABLE_CACHE"]
print(json.dumps({"used": len(set(used)), "exist": all(os.path.isfile(os.path.join(folder, name)) for name in used)}))
print(json.dumps({"texts": texts, "compilations": compilations, "loads": loads, **counts()}))
"""


@pytest.fixture
def start(fake_plugin, tmp_path):
    """Starts a process that compiles programs (code, or code and options), and returns what it says."""

    def run(*programs, plugin: Path = fake_plugin, **environment: str) -> dict:
        made = {"FAKE": str(plugin), VARIABLE: str(tmp_path / "cache"), "FAKE_PJRT": "", **environment}
        listed = [[program] if isinstance(program, str) else list(program) for program in programs]
        result = subprocess.run(
            [sys.executable, "-c", PROCESS],
            capture_output=True,
            text=True,
            env={**os.environ, "PROGRAMS": json.dumps(listed), **made},
        )
        assert result.returncode == 0, result.stderr
        found = {"stderr": result.stderr}
        for line in result.stdout.splitlines():
            found |= json.loads(line)
        return found

    return run


@pytest.mark.parametrize("threads", ["1", "3"])
def test_kept_executables_are_loaded_before_they_are_needed(start, tmp_path, threads):
    first = start("first", "a", "b", "c")
    assert first["used"] == 4 and first["exist"]
    (tmp_path / "cache" / "damaged").write_bytes(b"damaged")
    # "first" is loaded where it is compiled, and all four ahead: no compilation loads another one.
    second = start("a", "b", "new", PRELOAD=threads, LOADED_AHEAD="5")
    assert second["texts"] == ["stored compiled a loaded", "stored compiled b loaded", "compiled new"]
    assert second["loads"] == 5
    assert second["used"] == 4 and second["loaded"] == 3 and second["compiled"] == 1
    at_once = start("a", "b", "c", PRELOAD=threads)  # compilations beside the threads
    assert at_once["texts"] == [f"stored compiled {name} loaded" for name in "abc"]
    freed = start("a", PRELOAD=threads, LOADED_AHEAD="6", NONE_IS_TAKEN="yes")  # "new" is kept now
    assert freed["texts"] == ["stored compiled a loaded"] and freed["loads"] == 7
    refused = start("a", PRELOAD=threads, FAKE_PJRT="refusing")
    assert refused["texts"] == ["compiled a"] and refused["compilations"] == 2
    assert start("a", PRELOAD=threads, FAKE_KIND="another GPU")["texts"] == ["compiled a"]


def test_executables_that_are_loaded_ahead_are_of_one_client(start):
    start("first", "a")
    found = start("a", PRELOAD="1", LOADED_AHEAD="3", CLIENT="2")
    assert found["texts"] == ["stored compiled a loaded for another client"] and found["loads"] == 4


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_the_next_process_loads_what_the_first_compiled(start, tmp_path):
    first = start("a", "b", "a")
    assert first["texts"] == ["compiled a", "compiled b", "stored compiled a loaded"]
    assert (first["loaded"], first["compiled"], first["stored"], first["unusable"]) == (1, 2, 2, 0)
    assert len(files(tmp_path)) == 2
    second = start("b", "a", "c")
    assert second["texts"] == ["stored compiled b loaded", "stored compiled a loaded", "compiled c"]
    assert second["compilations"] == 1 and second["unusable"] == 0


def test_without_the_variable_nothing_is_kept(start, tmp_path):
    for _ in range(2):
        found = start("a", **{VARIABLE: ""})
        assert found["texts"] == ["compiled a"] and found["compiled"] == 0
    assert not (tmp_path / "cache").exists()


def test_whatever_the_executable_depends_on_is_compared(start, fake_plugin, tmp_path):
    other_plugin = tmp_path / "plugin.so"
    shutil.copy(fake_plugin, other_plugin)  # another time of its file
    os.utime(other_plugin, (1, 1))
    start(("a", "options"))
    assert start(("a", "options"))["loaded"] == 1
    for difference in (
        {"programs": [("a", "other options")]},
        {"programs": [("ao", "ptions")]},
        {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
        {"NVIDIA_TF32_OVERRIDE": "0"},
        {"FAKE_KIND": "another GPU"},
        {"plugin": other_plugin},
    ):
        programs = difference.pop("programs", [("a", "options")])
        assert start(*programs, **difference)["loaded"] == 0, difference
        assert start(*programs, **difference)["loaded"] == 1, difference


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "byte", "magic", "other program"])
def test_a_damaged_file_is_compiled_again_and_replaced(start, tmp_path, damage):
    start("a")
    (file,) = files(tmp_path)
    contents = bytearray(file.read_bytes())
    if damage == "empty":
        contents = bytearray()
    elif damage == "cut":
        del contents[-5:]
    elif damage == "longer":
        contents += b"12345678"
    elif damage == "byte":
        contents[-3] ^= 1
    elif damage == "magic":
        contents[0] ^= 1
    else:  # its key is compared, not the name of the file alone
        start("b", **{VARIABLE: str(tmp_path / "others")})
        (other,) = (tmp_path / "others").iterdir()
        contents = bytearray(other.read_bytes())
    file.write_bytes(contents)
    found = start("a")
    assert found["texts"] == ["compiled a"] and found["stored"] == 1
    assert found["unusable"] == (damage != "other program")
    assert start("a")["loaded"] == 1
    assert files(tmp_path) == [file]


def test_a_plugin_that_loads_nothing_compiles(start):
    start("a")
    found = start("a", FAKE_PJRT="refusing")
    assert found["texts"] == ["compiled a"] and found["unusable"] == 1


def test_a_plugin_that_serialises_nothing_compiles(start, tmp_path):
    found = start("a", FAKE_PJRT="unserialisable")
    assert found["texts"] == ["compiled a"] and (found["compiled"], found["stored"]) == (1, 0)


def test_errors_of_the_compiler_are_the_plugins(start, tmp_path):
    assert start("wrong")["texts"] == ["error: the fake plug-in cannot compile this"]
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_made_is_said_once(start, tmp_path):
    (tmp_path / "file").touch()
    found = start("a", "b", **{VARIABLE: str(tmp_path / "file" / "cache")})
    assert found["texts"] == ["compiled a", "compiled b"] and found["stored"] == 0
    assert found["stderr"].count(f"{VARIABLE}: cannot write") == 1


def test_processes_that_store_the_same_at_once(start, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(start("a", "b"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(result["unusable"] == 0 for result in found)
    assert len(files(tmp_path)) == 2
    assert start("a", "b")["loaded"] == 2


@pytest.mark.parametrize("first", ["", "1"])
@pytest.mark.parametrize("threads", [1, 3])
def test_executables_are_fetched_while_others_are_compiled(start, threads, first):
    programs = "abcdefgh"
    found = start("i", RECORD=programs, AT_ONCE=programs[::-1], THREADS=str(threads), START_FIRST=first)
    assert found["at_once"] == [f"compiled {name}" for name in programs[::-1]]
    assert found["waiting"] == 0 and found["together"] == len(programs)


def test_options_are_appended(start):
    start(("a", "options"))
    assert start(("a", "opt"), APPEND="ions")["loaded"] == 1
    assert start(("a", "options"), APPEND="s")["loaded"] == 0
    # Recorded programs are compiled with the options that they were recorded with.
    found = start(("a", "options"), RECORD="b", APPEND="t", PROGRAMS_WITHOUT="1")
    assert found["waiting"] == 1 and found["loaded"] == 1


def test_xlas_options_are_those_of_its_protocol_buffer():
    jaxlib = pytest.importorskip("jaxlib.xla_client")
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 300, "x" * 200: -1, "y": True}
    override = executable_cache._override  # the encoding alone: what uses it needs a GPU
    entries = b"".join(override(name, value) for name, value in options.items())
    plain = jaxlib.CompileOptions().SerializeAsString()
    got = jaxlib.CompileOptions.ParseFromString(plain + entries).env_option_overrides
    assert dict(got) == options and {name: type(value) for name, value in got} == {
        name: type(value) for name, value in options.items()
    }


@pytest.mark.parametrize("kept", [True, False])
def test_recorded_programs_are_compiled_together(start, tmp_path, kept):
    folder = {} if kept else {VARIABLE: ""}
    found = start("a", "b", "c", "a", RECORD="abcdea", **folder)
    assert found["recorded"] == ["error: unknown format"] * 6
    assert found["together"] == found["waiting"] == 5  # one of them is the same twice
    again = "stored compiled a loaded" if kept else "compiled a"
    assert found["texts"] == ["compiled a", "compiled b", "compiled c", again]
    assert found["compilations"] == (5 if kept else 6)
    if kept:  # and nothing is recorded that a file has
        found = start("a", RECORD="a")
        assert found["recorded"] == ["stored compiled a loaded"] and found["waiting"] == found["compilations"] == 0


def test_programs_that_are_dropped_are_compiled_where_they_are_needed(start):
    found = start("a", RECORD="abc", DROP="1", **{VARIABLE: ""})
    assert found["waiting"] == found["together"] == 0
    assert found["texts"] == ["compiled a"] and found["compilations"] == 1
