"""What sanitize.py makes of compute-sanitizer's reports."""

from __future__ import annotations

import sys

import pytest

from tests.robustness import sanitize

REPORT = """\
========= Uninitialized __global__ memory read of size {size} bytes
=========     at void xla_gpu::{kernel}<float>(xla_gpu::Args)+0x4110
=========     by thread ({thread},0,0) in block (8,0,0)
=========     Address 0x7f3742843e08
"""
COUNTER = {"size": 8, "kernel": "linear::LinearKernel", "thread": 32}


@pytest.mark.parametrize(
    ("changes", "errors"), [({}, 0), ({"thread": 0}, 0), ({"thread": 1}, 1), ({"size": 4}, 1), ({"kernel": "Other"}, 1)]
)
def test_counters_that_nobody_clears_are_no_errors(changes, errors):
    text = "calls: 3 of 3\n" + REPORT.format(**(COUNTER | changes)) + "========= ERROR SUMMARY: 1 error\n"
    outcome = sanitize.under_tool([sys.executable, "-c", f"print({text!r})"], limit=60)
    assert (outcome.errors, outcome.done, outcome.calls) == (errors, 3, 3)


def test_reports_that_were_not_printed_are_errors():
    text = REPORT.format(**COUNTER) + (
        "========= ERROR SUMMARY: 3 errors\n"
        "========= ERROR SUMMARY: 2 errors were not printed. Use --print-limit option to adjust the number\n"
    )
    assert sanitize.under_tool([sys.executable, "-c", f"print({text!r})"], limit=60).errors == 2
