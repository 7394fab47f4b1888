import numpy as np

from examples.gpt2.batches import Windows, validation_batches
from examples.gpt2.batches import batches as training_batches

TOKENS = np.arange(101, dtype=np.uint16)


def test_windows_share_their_end_with_the_next_start():
    windows = Windows(TOKENS, 10)
    assert len(windows) == 10
    assert [int(w[0]) for w in map(windows.__getitem__, range(10))] == list(range(0, 100, 10))
    np.testing.assert_array_equal(windows[9], np.arange(90, 101))


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_each_epoch_has_every_window_in_a_new_order():
    drawn = np.array(take(training_batches(TOKENS, 10, 5, seed=0), 4))[:, :, 0].reshape(2, 10)
    np.testing.assert_array_equal(np.sort(drawn), [range(0, 100, 10)] * 2)
    assert (drawn[0] != drawn[1]).any()


def test_validation_batches_are_spread_and_fixed():
    batches = validation_batches(TOKENS, 10, 2, 3)
    assert batches.shape == (3, 2, 11)
    assert batches[0, 0, 0] == 0
    assert batches[-1, -1, 0] == 90
    assert validation_batches(TOKENS, 10, 2, 100).shape == (5, 2, 11)
    assert validation_batches(TOKENS, 10, 64, 100).shape == (1, 10, 11)
