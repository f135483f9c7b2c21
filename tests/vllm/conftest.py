"""vLLM's back end, in an environment of its own (`make test-vllm`); skipped with the reason where vLLM is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xla_gpu.vllm import versions

HERE = Path(__file__).parent

if versions.problem() is None:
    # Read when vLLM is imported. In one process, so that tests can look at the runner.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # For a length that is then refused by this back end.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")

# These need no vLLM.
WITHOUT_VLLM = {"test_versions.py"}


def pytest_ignore_collect(collection_path, config):
    """Modules that import vLLM at their top are not collected where it is missing; test_versions.py says why."""
    name = collection_path.name
    if collection_path.parent == HERE and name.startswith("test_") and name not in WITHOUT_VLLM and versions.problem():
        return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            # vLLM and what it imports warn of much that is not ours to change.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    """The folder of a tiny Llama with random weights and a tokenizer."""
    from tests.vllm import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def engine(llama):
    """An engine that most tests share."""
    from tests.vllm.engines import make

    return make(llama)
