"""A Llama served from a paged KV cache with continuous batching; ../serve_llama.py is the program."""
