"""state_shardings and state_specs: where each array of an optimizer state belongs on a mesh.

Under `jax.jit` with automatic axes an `init` makes zeros of which nothing says where they are to
lie, so all of them come to lie on one device. Where axes are explicit the state follows the
parameters by its types. So `init` is traced under a mesh of explicit axes, and the types are read.
"""

from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from adapprox_jax.argument_checks import require_transformation
from adapprox_jax.params.boxes import has_axes_for_states, is_box, named_axes, rebox, unbox
from adapprox_jax.params.leaves import Leaves, leaf_name
from adapprox_jax.sharding.axes import named_sharding


def state_shardings(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> Any:
    """Shardings of an optimizer's state that follow those of the parameters, without making it.

    Rows of q lie as the parameter's rows, and rows of u as its columns. Stacks, averages, and their
    codes and scales lie as the axes that they follow. What follows none is on all devices, and so
    is an axis that the devices do not divide evenly.

    Args:
      tx: Any Optax transformation, wrapped or not.
      params: Parameters with `NamedSharding`s of one mesh: arrays, or `jax.ShapeDtypeStruct`s.
        Leaves without one, say on a single device, count as replicated. Flax's boxes whose arrays
        have none, as from `jax.eval_shape`, lie as their metadata names their axes, on `mesh`.
        Where they name axes for the state, `optimizer_sharding`, it lies as these say.
      mesh: Needed where no array has a sharding, as of parameters on one device.

    Returns:
      A tree like `tx.init(params)` with a `NamedSharding` instead of each array: for
      `jax.jit(tx.init, out_shardings=...)`, `jax.device_put` and Orbax.

    Raises:
      ValueError: there is no mesh or more than one, a box names an axis that the mesh lacks, or
        `tx.init` has operations that JAX refuses under explicit axes.

    Examples:
      >>> import jax, jax.numpy as jnp, adapprox_jax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> columns = NamedSharding(mesh, PartitionSpec(None, "model"))
      >>> params = {"kernel": jax.device_put(jnp.ones((256, 512)), columns)}
      >>> tx = adapprox_jax.adapprox(1e-3)
      >>> shardings = adapprox_jax.state_shardings(tx, params)
      >>> tuple(shardings[0].u["kernel"].spec)
      ('model', None)
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    """
    require_transformation("tx", tx)
    used = _mesh_of(params, mesh)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, param: _spec_of(path, param, used), params, is_leaf=is_box
    )
    found = _specs_on(dict(zip(used.axis_names, used.axis_sizes, strict=True)), tx, params, specs)
    return jax.tree.map(lambda spec: NamedSharding(used, spec), found)


def state_specs(tx: optax.GradientTransformation, params: optax.Params, specs: Any) -> Any:
    """`state_shardings` without a mesh: the PartitionSpecs of a state from those of parameters.

    For frameworks that keep specs apart from meshes. Shapes and types are `jax.eval_shape(tx.init,
    params)`. An axis that the devices do not divide evenly cannot be known here.

    Args:
      tx: Any Optax transformation, wrapped or not.
      params: Parameters: arrays, or `jax.ShapeDtypeStruct`s.
      specs: A tree like the parameters, or a prefix of it, with a `PartitionSpec` for each.

    Returns:
      A tree like `tx.init(params)` with a `PartitionSpec` instead of each array.

    Raises:
      ValueError: `specs` does not fit the parameters, or `tx.init` has operations that JAX refuses
        under explicit axes.

    Examples:
      >>> import jax, jax.numpy as jnp, adapprox_jax
      >>> from jax.sharding import PartitionSpec
      >>> params = {"kernel": jax.ShapeDtypeStruct((256, 512), jnp.float32)}
      >>> specs = {"kernel": PartitionSpec("fsdp", "tensor")}
      >>> tx = adapprox_jax.adapprox(1e-3)
      >>> tuple(adapprox_jax.state_specs(tx, params, specs)[0].u["kernel"])
      ('tensor', None)
    """
    require_transformation("tx", tx)
    leaves = Leaves.of(params)
    allowed = "a tree of jax.sharding.PartitionSpecs that is a prefix of the parameters"
    spread = leaves.spread("specs", specs, _is_spec, allowed)
    if not all(map(_is_spec, spread)):
        raise ValueError(f"specs is {specs!r:.200}; allowed: {allowed}.")
    axes = dict.fromkeys(name for spec in spread for name in _names(spec))
    return _specs_on(dict.fromkeys(axes, 1), tx, params, leaves.structure.unflatten(spread))


def _specs_on(
    axes: dict[str, int], tx: optax.GradientTransformation, params: optax.Params, specs: Any
) -> Any:
    """The specs of a state on a mesh with these axes and sizes."""
    kinds = (AxisType.Explicit,) * len(axes)
    explicit = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)

    def typed(path: Any, param: Any, spec: PartitionSpec) -> Any:
        leaf = unbox(param)
        if not hasattr(leaf, "shape"):
            kind = type(leaf).__name__
            raise ValueError(f"{leaf_name(path)} is a {kind}; allowed: an array or its shape.")
        if len(spec) > len(leaf.shape):
            axes_of = f"{leaf_name(path)} has {len(leaf.shape)} axes"
            raise ValueError(f"{axes_of} and the spec {spec}; allowed: at most one entry an axis.")
        sharding = NamedSharding(explicit, spec)
        return rebox(param, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))

    abstract = jax.tree_util.tree_map_with_path(typed, params, specs, is_leaf=is_box)
    try:
        with jax.sharding.use_abstract_mesh(explicit):
            state = jax.eval_shape(tx.init, abstract)
    except Exception as error:  # of JAX, where an operation is ambiguous there
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"tx.init cannot be traced with explicit axes: {reason}; allowed: transformations that"
            " can. Of others write the shardings by hand."
        ) from error
    return jax.tree.map(
        lambda leaf: PartitionSpec() if leaf.sharding is None else leaf.sharding.spec, state
    )


def _mesh_of(params: optax.Params, mesh: Mesh | None) -> Any:
    """The mesh that the parameters lie on or that is given: that of devices if one is known."""
    allowed = "parameters with NamedShardings of one mesh, or mesh= a jax.sharding.Mesh"
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh is {mesh!r}; allowed: a jax.sharding.Mesh, or None.")
    shardings = [named_sharding(leaf) for leaf in jax.tree.leaves(params)]
    found = [sharding.mesh for sharding in shardings if sharding is not None]
    found += [] if mesh is None else [mesh]
    concrete = {one for one in found if isinstance(one, Mesh)}
    abstract = {one.abstract_mesh for one in found}
    if len(abstract) != 1 or len(concrete) > 1:
        given = " and ".join(sorted(map(str, concrete or abstract))) or "no mesh"
        raise ValueError(f"params lie on {given}; allowed: {allowed}.")
    if concrete:
        return concrete.pop()
    in_use = jax.sharding.get_mesh()  # of abstract values under `jax.set_mesh`
    [known] = abstract
    same = isinstance(in_use, Mesh) and not in_use.empty and in_use.abstract_mesh == known
    return in_use if same else known


def _spec_of(path: Any, param: Any, mesh: Any) -> PartitionSpec:
    sharding = named_sharding(unbox(param))
    if sharding is not None and not has_axes_for_states(param):
        return sharding.spec
    spec = PartitionSpec(*named_axes(param)) if is_box(param) else PartitionSpec()
    unknown = [name for name in _names(spec) if name not in mesh.axis_names]
    if unknown:
        allowed = ", ".join(mesh.axis_names) + "; give arrays with shardings for names of rules"
        raise ValueError(f"{leaf_name(path)} names the axis {unknown[0]!r}; allowed: {allowed}.")
    return spec


def _names(spec: PartitionSpec) -> list[str]:
    """The axes of a mesh that a spec names."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [name for entry in entries for name in entry if name is not None]


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
