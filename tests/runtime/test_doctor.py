"""`python -m xla_gpu doctor`: it reports, whatever is missing, crashes or hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.common import machine, process
from xla_gpu.__main__ import main
from xla_gpu._doctor import report as doctor
from xla_gpu._doctor.architectures import code_for

LIBRARY = {
    "path": "/somewhere/libxla_gpu_ffi.so",
    "ffi_api": [0, 1],
    "cuda": "13.0",
    "cuda_architectures": ["80", "90a"],
    "host_isa": "avx2",
    "host_processors": 4,
    "compiler": "gcc",
    "targets": {"Host": ["xla_gpu_simple_add"]},
}
GPU = {"name": "a GPU", "compute_capability": "9.0", "memory_bytes": 2**37}
DEVICE = {"driver": "580.95", "driver_cuda": "13.0", "gpus": [GPU]}
RUNTIME = {"pjrt_api": "0.112", "ffi_api": "0.3", "plugin": None, "targets": ["xla_gpu_simple_add"]}


def frontend(name: str, device: str) -> doctor.Frontend:
    return next(frontend for frontend in doctor.FRONTENDS if (frontend.name, frontend.device) == (name, device))


def answers(report: dict, status: int | None = 0) -> doctor.Outcome:
    return doctor.Outcome(status, f"chatter\n{doctor.REPORT_MARK}{json.dumps(report)}\n", "", 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: command"),
        (["docter"], r"argument command: invalid choice: 'docter' \(choose from '?doctor'?\)"),
    ],
)
def test_other_commands(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(text, capsys.readouterr().err)


@pytest.fixture
def everything(monkeypatch):
    """A machine with all frameworks, the library and a GPU, on which every front end answers that it works."""
    monkeypatch.setattr(doctor, "installed", lambda module: True)
    monkeypatch.setattr(doctor, "_library_report", lambda: LIBRARY)
    monkeypatch.setattr(doctor, "_device_report", lambda: DEVICE)
    monkeypatch.setattr(doctor, "run_process", lambda *_: answers({"runtime": RUNTIME}))
    return monkeypatch


def test_all_is_well(everything, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.count(" works\n") == len(doctor.FRONTENDS) and "a GPU, compute capability 9.0, 128 GiB" in text
    assert "PJRT API 0.112; FFI API 0.3; all Host targets" in text


def test_some_targets_are_listed(everything, capsys):
    everything.setattr(doctor, "run_process", lambda *_: answers({"runtime": RUNTIME | {"targets": ["xla_gpu_other"]}}))
    main(["doctor"])
    assert "PJRT API 0.112; FFI API 0.3; targets xla_gpu_other" in capsys.readouterr().out


def test_json(everything, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ok", "versions", "library", "device", "frontends"}
    assert {(each["frontend"], each["device"], each["status"]) for each in report["frontends"]} == {
        (each.name, each.device, "works") for each in doctor.FRONTENDS
    }


def test_a_missing_framework_is_no_failure(everything, capsys):
    everything.setattr(doctor, "installed", lambda module: "jax" not in module)
    assert main(["doctor", "--json"]) == 0
    frontends = [each for each in json.loads(capsys.readouterr().out)["frontends"] if each["frontend"] == "JAX"]
    assert {each["status"] for each in frontends} == {"not installed"}
    assert all("jax" in each["reason"] and "pip install '.[" in each["remedy"] for each in frontends)


def test_a_machine_without_frameworks(everything, capsys):
    everything.setattr(doctor, "installed", lambda module: False)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("no front end works yet: install the framework of one\n")


def test_the_torchax_files_of_torch_xla_are_no_torchax(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda module: object())
    monkeypatch.setattr(doctor.metadata, "distributions", lambda name: iter(()))
    assert doctor.installed("torch") and not doctor.installed("torchax")
    monkeypatch.setattr(doctor.metadata, "distributions", lambda name: iter((name,)))
    assert doctor.installed("torchax")


def test_a_machine_without_gpu_is_no_failure(everything, capsys):
    everything.setattr(doctor, "_device_report", lambda: {"gpus": [], "error": "no NVIDIA driver: …"})
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no NVIDIA driver" in text and text.count("no device") == 5


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (doctor.Outcome(-11, "", "first\n\nlast words\n", 9), "the process died of SIGSEGV: first | last words"),
        (doctor.Outcome(None, "", "", 9), "no answer within 9 s"),
        (doctor.Outcome(3, "", "", 9), "the process ended with status 3"),
        (answers({"error": "ValueError: so it is"}), "ValueError: so it is"),
        # It worked, and crashed on its way out: a user's program would too.
        (answers({"runtime": RUNTIME}, status=-6), "the process died of SIGABRT"),
    ],
)
def test_a_frontend_that_fails(everything, outcome, reason, capsys):
    def run(command, *_):
        return outcome if command[2].endswith(".probe_torch") and command[3] == "CPU" else answers({"runtime": RUNTIME})

    everything.setattr(doctor, "run_process", run)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [each for each in report["frontends"] if each["status"] != "works"]
    assert [(each["frontend"], each["device"], each["reason"]) for each in failed] == [("eager PyTorch", "CPU", reason)]


def test_a_library_that_does_not_load(everything, capsys):
    everything.setattr(doctor, "_library_report", lambda: {"error": "it is truncated"})
    assert main(["doctor"]) == 1
    assert "it is truncated" in capsys.readouterr().out


def test_a_library_without_cuda(everything):
    result = doctor.try_frontend(frontend("JAX", "GPU"), {**LIBRARY, "cuda": None, "cuda_architectures": []}, DEVICE)
    assert result["status"] == "does not work" and "XLA_GPU_CUDA=ON" in result["remedy"]


def test_a_gpu_older_than_the_code(everything):
    everything.setattr(doctor, "run_process", lambda *_: answers({"error": "no kernel image"}))
    old = {**DEVICE, "gpus": [{**GPU, "compute_capability": "7.0"}]}
    remedy = doctor.try_frontend(frontend("JAX", "GPU"), LIBRARY, old)["remedy"]
    assert "no code for a GPU (compute capability 7.0)" in remedy and "CUDAARCHS=all" in remedy


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("8.0", "80"),
        ("8.7", "86"),  # of the same major version
        ("8.9", "89"),
        ("9.0", "90a"),
        ("10.3", "100"),
        ("11.0", None),  # PTX of a later version does not serve it
        ("12.1", "120"),
        ("13.0", "PTX of 120"),
        ("7.5", None),
    ],
)
def test_the_code_that_a_gpu_runs(capability, expected):
    assert code_for(capability, ["80-real", "86-real", "89-real", "90a-real", "100-real", "120"]) == expected


def test_code_and_ptx_of_an_architecture_or_a_family_alone():
    assert (
        code_for("9.0", ["90-virtual"]) == "PTX of 90" and code_for("10.0", ["90a-real", "90-virtual"]) == "PTX of 90"
    )
    assert code_for("10.0", ["90a"]) is None and code_for("9.0", ["80", "90a"]) == "90a"
    assert code_for("10.3", ["100f-real"]) == "100f" and code_for("12.0", ["100f"]) is None


def test_the_report_says_what_code_a_gpu_runs(everything, capsys):
    everything.setattr(
        doctor, "_device_report", lambda: {**DEVICE, "gpus": [GPU, {**GPU, "compute_capability": "12.0"}]}
    )
    main(["doctor"])
    text = capsys.readouterr().out
    assert "runs the library's 90a\n" in text
    assert "runs the library's PTX of 80, which the driver compiles when it is first used" in text


def test_processes_that_hang_are_ended():
    program = "import time; print('so far', flush=True); time.sleep(600)"
    outcome = doctor.run_process([sys.executable, "-c", program], {}, 2)
    assert outcome.status is None and outcome.failure() == "no answer within 2 s" and outcome.stdout == "so far\n"


def test_this_machine():
    """The real thing, in a process that shows that no framework is imported by it."""
    code = (
        "import json, sys; from xla_gpu._doctor import report; report = report.examine(); "
        "assert not {'torch', 'jax', 'torch_xla'} & set(sys.modules); print(json.dumps(report))"
    )
    report = json.loads(process.run(code))
    failed = [each for each in report["frontends"] if each["status"] == "does not work"]
    assert not failed, json.dumps(failed, indent=2)
    assert len(report["device"]["gpus"]) == machine.gpu_count()
    for each in report["frontends"]:
        if each["status"] == "works" and each["frontend"] != "eager PyTorch":
            platform = "Host" if each["device"] == "CPU" else "CUDA"
            assert each["runtime"]["targets"] == report["library"]["targets"][platform]


def test_the_version(capsys):
    import xla_gpu

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"xla_gpu {xla_gpu.__version__}\n"


def test_a_pipe_that_nobody_reads_any_more():
    """`python -m xla_gpu doctor | head` ends quietly."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        result = subprocess.run([sys.executable, "-m", "xla_gpu", "--version"], stdout=closed, stderr=subprocess.PIPE)
    assert result.returncode == -signal.SIGPIPE and result.stderr == b""
