"""The doctor's try of vLLM's back end, in an environment that has vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from xla_gpu._doctor.report import REPORT_MARK


def probe(**environment: str) -> dict:
    command = [sys.executable, "-m", "xla_gpu._doctor.probe_vllm", "CPU"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PJRT_DEVICE": "CPU", **environment}
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(REPORT_MARK)]
    return json.loads(line.removeprefix(REPORT_MARK))


def test_it_works():
    assert "xla_gpu_paged_attention" in probe()["runtime"]["targets"]


def test_another_platform_is_named():
    error = probe(VLLM_PLUGINS="another")["error"]
    assert "vLLM chose" in error and "expected XlaGpuPlatform" in error and "VLLM_PLUGINS" in error
