"""axlearn: `partitioned(adapprox_jax.adapprox(...))` has axlearn's own interface.

It asks for shapes, types and PartitionSpecs of the state, too. axlearn's newest package, of 2024,
does not install beside today's JAX: the tests run this file against stand-ins of its types.
"""

from typing import Any

import jax
import optax
from axlearn.common.optimizer_base import (
    OptParam,
    OptStateSpec,
    PartitionedGradientTransformation,
)
from jax.sharding import PartitionSpec

import adapprox_jax


def partitioned(tx: optax.GradientTransformation) -> PartitionedGradientTransformation:
    """An Optax transformation for axlearn. Masks see parameters, not `weight_decay_scale`."""

    def arrays(params: Any) -> Any:
        is_param = lambda x: isinstance(x, OptParam)  # noqa: E731
        return jax.tree.map(lambda param: param.value, params, is_leaf=is_param)

    def partition(specs: Any) -> Any:
        leaves, structure = jax.tree.flatten(specs, is_leaf=lambda x: hasattr(x, "mesh_axes"))
        params, axes = (
            structure.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]),
            structure.unflatten([PartitionSpec(*(x.mesh_axes or ())) for x in leaves]),
        )
        return jax.tree.map(
            lambda array, spec: OptStateSpec(array.shape, array.dtype, spec),
            jax.eval_shape(tx.init, params),
            adapprox_jax.state_specs(tx, params, axes),
        )

    return PartitionedGradientTransformation(
        init=lambda params: tx.init(arrays(params)),
        update=lambda updates, state, params: tx.update(updates, state, arrays(params)),
        partition=partition,
    )
