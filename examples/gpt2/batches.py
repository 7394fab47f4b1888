"""Tokens to batches by Grain: windows in an order that the seed fixes, or spread evenly."""

import dataclasses

import grain
import numpy as np


@dataclasses.dataclass(frozen=True)
class Windows:
    """Tokens seen as consecutive windows of `context` inputs and the target after the last one."""

    tokens: np.ndarray
    context: int

    def __len__(self) -> int:
        """Number of whole windows."""
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`: `context + 1` tokens, the last of which begins the next window."""
        start = int(index) * self.context
        return np.asarray(self.tokens[start : start + self.context + 1], np.int32)


def batches(
    tokens: np.ndarray, context: int, batch_size: int, seed: int
) -> grain.DatasetIterator[np.ndarray]:
    """Endless batches of shape (batch_size, context + 1), each epoch in a new order.

    The order depends on the seed alone. The iterator's `get_state` and `set_state` keep and restore
    the position in it.
    """
    dataset = grain.MapDataset.source(Windows(tokens, context)).seed(seed).shuffle().repeat()
    return prefetched(dataset.batch(batch_size, drop_remainder=True))


def prefetched(dataset: grain.MapDataset) -> grain.DatasetIterator:
    """An iterator that reads a little ahead of the training."""
    # Reading is a copy out of the system's cache: one thread is plenty.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def validation_batches(tokens: np.ndarray, context: int, batch_size: int, count: int) -> np.ndarray:
    """At most `count` batches spread evenly over a split: the same for every run and seed.

    Returns:
      An array of shape (batches, batch, context + 1); one smaller batch where there are too few
      windows for a whole one.
    """
    windows = Windows(tokens, context)
    batch_size = min(batch_size, len(windows))
    count = min(count, len(windows) // batch_size)
    indices = np.linspace(0, len(windows) - 1, count * batch_size).round().astype(int)
    return np.stack([windows[i] for i in indices]).reshape(count, batch_size, context + 1)
