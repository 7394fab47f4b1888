import itertools

import numpy as np

from examples.gpt2.batches import batches as training_batches
from examples.gpt2.batches import validation_batches

TOKENS = np.arange(101, dtype=np.uint16)


def test_each_epoch_has_every_window_in_a_new_order():
    of_two = np.array(list(itertools.islice(training_batches(TOKENS, 10, 5, seed=0), 4)))
    assert (np.diff(of_two) == 1).all()
    drawn = of_two[:, :, 0].reshape(2, 10)
    np.testing.assert_array_equal(np.sort(drawn), [range(0, 100, 10)] * 2)
    assert (drawn[0] != drawn[1]).any()


def test_validation_batches_are_spread_and_fixed():
    batches = validation_batches(TOKENS, 10, 2, 3)
    assert batches.shape == (3, 2, 11)
    assert batches[0, 0, 0] == 0
    assert batches[-1, -1, 0] == 90
    assert validation_batches(TOKENS, 10, 2, 100).shape == (5, 2, 11)
    assert validation_batches(TOKENS, 10, 64, 100).shape == (1, 10, 11)
