"""Pages of the KV cache, handed out and taken back."""


class PageAllocator:
    """A free list of page numbers 0 … num_pages - 1.

    The page freed last is handed out first: it is the likeliest to be in a cache of the device still.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.peak_used = 0
        self.handed_out = 0  # over the allocator's life; above num_pages means that pages were used again
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` page numbers, or None, and takes nothing, where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        self.handed_out += count
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def free(self, pages: list[int]) -> None:
        """Takes pages back. Raises ValueError for a page that is free already or was never part of the cache."""
        for page in reversed(pages):
            if not 0 <= page < self.num_pages or self._is_free[page]:
                raise ValueError(f"page {page} is not in use (the cache has pages 0 to {self.num_pages - 1})")
            self._is_free[page] = True
            self._free.append(page)
