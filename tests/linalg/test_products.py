"""Products of a matrix with thin factors."""

import numpy as np
import pytest

from adapprox_jax.linalg.products import contract, contract_in_parts


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("length", "most", "parts"), [(1024, 64, 8), (1024, 2, 2), (1000, 64, 2), (1001, 64, 1)]
)
def test_parts_of_a_long_sum_add_up(length, most, parts, axis):
    rng = np.random.default_rng(0)
    matrix, factor = rng.normal(size=(length, 3)), rng.normal(size=(length, 2))
    matrix = (matrix if axis == 0 else matrix.T).astype(np.float32)
    found = contract_in_parts(matrix, factor.astype(np.float32), axis, most)
    assert found.shape == (parts, 3, 2)
    expected = contract(matrix, factor.astype(np.float32), axis)
    np.testing.assert_allclose(found.sum(axis=0), expected, atol=1e-3)  # sums of 32 in size
