"""Sampling on the device: every sampling parameter of vLLM, computed from the logits where they are."""
