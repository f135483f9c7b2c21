"""Text to token ids and back."""

from __future__ import annotations

import pathlib


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then one id that begins a text and one that ends it."""

    bos, eos, vocab_size = 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return [self.bos, *text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class CheckpointTokenizer:
    """The tokenizer in a checkpoint's folder, read by transformers."""

    def __init__(self, folder: pathlib.Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def read_prompts(path: pathlib.Path) -> list[str]:
    """The prompts of a text file, separated by lines that hold `---` and nothing else. Raises ValueError for none."""
    prompts, lines = [], []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got another byte at {error.start}") from None
    for line in [*text.splitlines(), "---"]:
        if line.strip() == "---":
            prompts.append("\n".join(lines).strip())
            lines = []
        else:
            lines.append(line)
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise ValueError(f"{path}: no prompt in it")
    return prompts
