"""The operators in the frameworks' own operations and in their own dtype: the baseline of compare.assert_close.

It is PyTorch where that is installed, else NumPy with the same roundings, for environments that hold JAX alone.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    from tests.common.baseline_torch import linear, merge_attention_states, paged_attention
else:
    from tests.common.baseline_numpy import linear, merge_attention_states, paged_attention

__all__ = ["linear", "merge_attention_states", "paged_attention"]
