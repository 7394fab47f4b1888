"""Parameters with named axes, as haliax has them: names in the state fit its axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax


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


try:
    import haliax  # `pip install --pre marin-haliax`: its version 1.3 does not fit today's JAX
except (ImportError, AttributeError):
    haliax = None
KINDS = [
    (Axis, NamedArray),
    pytest.param(
        *(getattr(haliax, name, None) for name in ("Axis", "NamedArray")),
        marks=[pytest.mark.slow, pytest.mark.skipif(haliax is None, reason="no haliax")],
    ),
]


def axes_of(axis):
    layers, model, hidden = axis("layers", 3), axis("model", 64), axis("hidden", 128)
    return {"up": (model, hidden), "down": (layers, hidden, model), "bias": (hidden,)}


AXES = axes_of(Axis)


def is_named(x, named_array=NamedArray):
    return isinstance(x, named_array)


SETTINGS = {
    "adapprox": lambda: adapprox_jax.adapprox(1e-2),
    "ranks": lambda: adapprox_jax.adapprox(1e-2, initial_rank=1),
    "8 bits": lambda: adapprox_jax.adapprox(1e-2, mu_dtype="int8"),
    "4 bits": lambda: adapprox_jax.adapprox(1e-2, mu_dtype="int4"),
    "muon": lambda: adapprox_jax.adapprox_muon(1e-2),
    "muon 4 bits": lambda: adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4"),
    "muon with factors": lambda: adapprox_jax.adapprox_muon(1e-2, second_moment=True),
}


@pytest.mark.parametrize(("axis", "named_array"), KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_axes_of_the_state_have_names_and_sizes(name, axis, named_array):
    tx, all_axes = SETTINGS[name](), axes_of(axis)
    arrays = {
        leaf: jax.random.normal(jax.random.key(i), [axis.size for axis in axes])
        for i, (leaf, axes) in enumerate(all_axes.items())
    }
    params = {leaf: named_array(array, all_axes[leaf]) for leaf, array in arrays.items()}
    state = jax.eval_shape(tx.init, params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    leaves = jax.tree.leaves(new, is_leaf=lambda x: is_named(x, named_array))
    named = [x for x in leaves if is_named(x, named_array)]
    assert len(named) >= len(params)
    for x in named:
        assert x.array.shape == tuple(axis.size for axis in x.axes)
    for leaf in arrays:
        assert updates[leaf].axes == all_axes[leaf]
    plain = jax.eval_shape(tx.init, arrays)
    assert list(map(jnp.shape, jax.tree.leaves(new))) == list(
        map(jnp.shape, jax.tree.leaves(plain))
    )
    if name in ("adapprox", "muon"):  # of each way the values
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        expected, _ = jax.jit(tx.update)(arrays, tx.init(arrays), arrays)
        for leaf, array in expected.items():
            np.testing.assert_array_equal(updates[leaf].array, array)


@pytest.mark.parametrize(("axis", "named_array"), KINDS)
def test_factors_follow_the_axes_that_they_belong_to(axis, named_array):
    layers, hidden, model = axes = axes_of(axis)["down"]
    params = {"down": named_array(jnp.zeros((3, 128, 64)), axes)}
    state = adapprox_jax.adapprox(1e-2).init(params)[0]
    assert state.q["down"].axes == (layers, model, axis("adapprox_2", 8))
    assert state.u["down"].axes == (layers, hidden, axis("adapprox_2", 8))
    assert [rank.shape for rank in state.rank] == [(3,)]
