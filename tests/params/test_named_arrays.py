"""Parameters with named axes, as haliax has them: names in the state fit its axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from tests.common import normal


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    """Stands in for haliax' class: it checks sizes unless JAX puts it together."""

    array: object
    axes: tuple

    def __post_init__(self):
        assert self.array.shape == tuple(axis.size for axis in self.axes)
        assert len({axis.name for axis in self.axes}) == len(self.axes)

    def resolve_axis(self, name):
        return next(axis for axis in self.axes if axis.name == name)

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, arrays):
        made = object.__new__(cls)
        object.__setattr__(made, "array", arrays[0])
        object.__setattr__(made, "axes", axes)
        return made


LAYERS, MODEL, HIDDEN = Axis("layers", 3), Axis("model", 64), Axis("hidden", 128)
AXES = {"up": (MODEL, HIDDEN), "down": (LAYERS, HIDDEN, MODEL), "bias": (HIDDEN,)}


def is_named(x):
    return isinstance(x, NamedArray)


SETTINGS = {
    "adapprox": lambda: adapprox_jax.adapprox(1e-2),
    "ranks": lambda: adapprox_jax.adapprox(1e-2, initial_rank=1),
    "8 bits": lambda: adapprox_jax.adapprox(1e-2, mu_dtype="int8"),
    "4 bits": lambda: adapprox_jax.adapprox(1e-2, mu_dtype="int4"),
    "muon": lambda: adapprox_jax.adapprox_muon(1e-2),
    "muon 4 bits": lambda: adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4"),
    "muon with factors": lambda: adapprox_jax.adapprox_muon(1e-2, second_moment=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_axes_of_the_state_have_names_and_sizes(name):
    tx = SETTINGS[name]()
    arrays = normal({leaf: tuple(axis.size for axis in axes) for leaf, axes in AXES.items()})
    params = {leaf: NamedArray(array, AXES[leaf]) for leaf, array in arrays.items()}
    state = jax.eval_shape(tx.init, params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    named = list(filter(is_named, jax.tree.leaves(new, is_leaf=is_named)))
    assert len(named) >= len(params)
    for x in named:
        assert x.array.shape == tuple(axis.size for axis in x.axes)
    for leaf in arrays:
        assert updates[leaf].axes == AXES[leaf]
    plain = jax.eval_shape(tx.init, arrays)
    assert list(map(jnp.shape, jax.tree.leaves(new))) == list(
        map(jnp.shape, jax.tree.leaves(plain))
    )
    if name in ("adapprox", "muon"):  # of each way the values
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        expected, _ = jax.jit(tx.update)(arrays, tx.init(arrays), arrays)
        for leaf, array in expected.items():
            np.testing.assert_array_equal(updates[leaf].array, array)


def test_factors_follow_the_axes_that_they_belong_to():
    params = {"down": NamedArray(jnp.zeros((3, 128, 64)), AXES["down"])}
    state = adapprox_jax.adapprox(1e-2).init(params)[0]
    assert state.q["down"].axes == (LAYERS, MODEL, Axis("adapprox_2", 8))
    assert state.u["down"].axes == (LAYERS, HIDDEN, Axis("adapprox_2", 8))
    assert [rank.shape for rank in state.rank] == [(3,)]
