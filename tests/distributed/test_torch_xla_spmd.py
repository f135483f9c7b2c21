"""torch_xla's SPMD: the cache's annotation divides the call; the optimised HLO holds no collective and no copy."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.common import machine
from tests.common.machine import ROOT
from tests.distributed.test_sharding import COLLECTIVES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")


# Of one device's cache: half of the heads.
SHAPES = [("combined", r"f32\[\d+,8,4,64\]"), ("split", r"f32\[2,\d+,8,2,64\]")]


@pytest.mark.parametrize(("layout", "shape"), SHAPES)
def test_by_the_annotation_of_the_cache(layout, shape, tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_DEVICE")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.distributed.spmd_program", layout],
        cwd=ROOT,
        env=environment | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("same bits: True") == 3, result.stdout
    refused = re.findall(r"refused: (.*)", result.stdout)
    assert "kv_cache: expected no shards of an axis that every device needs whole, got axis 0" in refused[0]
    assert "kv_cache: expected a number of shards that divides kv_heads = 2, got axis 2" in refused[1]

    texts = [p.read_text() for p in sorted(tmp_path.glob("*after_optimizations.txt"))]
    steps = [text for text in texts if "xla_gpu_paged_attention" in text]
    assert steps
    for text in steps:
        assert not re.findall(COLLECTIVES, text.replace("xla_gpu", ""))
        assert "input_output_alias={" in text
        assert re.search(rf"= {shape}\S* custom-call\(.*output_to_operand_aliasing=", text)
        assert not re.findall(rf"= {shape}\S* (copy|fusion|dynamic-slice)\(", text)


@pytest.mark.parametrize(
    ("platform", "devices"), [("cpu", 2), ("cpu", 4), pytest.param("gpu", 2, marks=pytest.mark.gpu)]
)
def test_sums_over_a_device_group(platform, devices):
    if platform == "gpu" and (machine.default_pjrt_device() != "GPU" or machine.gpu_count() < devices):
        pytest.skip(f"needs {devices} GPUs and JAX's CUDA plug-in")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_DEVICE")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.distributed.spmd_all_reduce"],
        cwd=ROOT,
        env=environment | {"PJRT_DEVICE": platform.upper(), "CPU_NUM_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and "OK" in result.stdout, result.stdout + result.stderr[-3000:]
    assert result.stdout.count("refused: all_reduce: x: expected") == 2


@pytest.mark.parametrize(
    ("text", "shape", "devices"),
    [
        ("{devices=[1,4]0,1,2,3}", (1, 4), [[0, 1, 2, 3]]),
        ("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", (2, 1, 2), [[[0, 2]], [[1, 3]]]),
        ("{devices=[4]<=[4]}", (4,), [0, 1, 2, 3]),
        ("{devices=[2,2]<=[2,2]T(1,0)}", (2, 2), [[0, 2], [1, 3]]),
        ("{replicated}", None, None),
        ("", None, None),
        ("{manual}", None, None),
    ],
)
def test_shardings_are_read(text, shape, devices):
    from xla_gpu._torch_xla import spmd

    tiles = spmd.parse(text)
    assert (tiles and tiles.shape) == shape
    if tiles:
        np.testing.assert_array_equal(tiles.devices, devices)
