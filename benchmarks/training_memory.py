"""What a whole training step needs in memory: `python -m benchmarks.training_memory`.

Compiles loss, gradients and update of a Llama-shaped model for one device, with stacked layers
whose activations are computed again, and reads what the compiler plans. The device need not be
there: `make device-program` sets up the compilers. Results go to
`results/memory/training_<model>_<device>.json`.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import adapprox_jax
from adapprox_jax.state.report import tree_nbytes
from benchmarks import records
from benchmarks.contenders import CONTENDERS
from benchmarks.device_program import device_of
from benchmarks.scale import AXES, LLAMAS, Llama, parameters
from benchmarks.steps import placed, update_step

RESULTS = records.RESULTS / "memory"
_HEAD = 128  # numbers of a head


class Row(NamedTuple):
    """An optimizer, and the types of weights and of what the layers compute in."""

    make: Callable[[], optax.GradientTransformation]
    weights: jax.typing.DTypeLike
    compute: jax.typing.DTypeLike


def _split(name: str) -> Row:
    def make() -> optax.GradientTransformation:
        return adapprox_jax.split_weights(CONTENDERS[name]())

    return Row(make, jnp.bfloat16, jnp.bfloat16)


ROWS = {
    "AdamW, float32": Row(CONTENDERS["adamw"], jnp.float32, jnp.float32),
    "AdamW, float32 weights, layers in bfloat16": Row(
        CONTENDERS["adamw"], jnp.float32, jnp.bfloat16
    ),
    "AdamW, split weights": _split("adamw"),
    "adapprox 4 bits, split weights": _split("adapprox 4 bits"),
    "adapprox_muon 4 bits, split weights": _split("adapprox_muon 4 bits"),
}


def loss(
    params: dict[str, jax.Array], tokens: jax.Array, compute: jax.typing.DTypeLike
) -> jax.Array:
    """The mean loss of a model on a batch.

    Args:
      params: Of `scale.parameters`, in any type.
      tokens: (batch, length + 1).
      compute: What the layers compute in.
    """
    of_layers = {name: x for name, x in params.items() if name not in ("tokens", "head", "norm")}
    x = params["tokens"][tokens[:, :-1]].astype(compute)

    @jax.checkpoint
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: weight.astype(compute) for name, weight in weights.items()}
        h = _normalized(x, w["norm_1"])
        q, k, v = (_heads(h @ w[name]) for name in ("q", "k", "v"))
        attended = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + attended.reshape(*x.shape[:2], -1) @ w["o"]
        h = _normalized(x, w["norm_2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, of_layers)
    x = _normalized(x, params["norm"].astype(compute))
    head = params["head"].astype(compute)
    logits = jnp.einsum("bld,dv->blv", x, head, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-5).astype(x.dtype) * scale


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, _HEAD)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: the halves of a head turned by angles that grow with the position."""
    frequency = 5e5 ** (-jnp.arange(_HEAD // 2) / (_HEAD // 2))
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[None, :, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def record_of(row: Row, sizes: Llama, batch: tuple[int, int], mesh: Any) -> dict[str, float]:
    """MiB of a training step on one device, and bytes per parameter without activations.

    Args:
      row: The optimizer.
      sizes: Of the model.
      batch: Sequences, and tokens in each.
      mesh: Of one device, with the axes "fsdp" and "tensor".
    """
    tx = row.make()
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, row.weights), parameters(sizes, mesh)
    )
    tokens = jax.ShapeDtypeStruct((batch[0], batch[1] + 1), jnp.int32)
    shapes = params, jax.eval_shape(tx.init, params), tokens
    params, state, tokens = placed(shapes, mesh)
    gradient = jax.grad(functools.partial(loss, compute=row.compute))
    update = update_step(tx)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        return update(params, state, gradient(params, tokens))

    whole = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens)
    _, planned = records.compiled(whole)
    activations = records.compiled(jax.jit(gradient).lower(params, tokens))[1]["temporaries_mib"]
    count = sum(x.size for x in jax.tree.leaves(params))
    return {
        "weights_mib": tree_nbytes(params) / records.MIB,
        "state_mib": tree_nbytes(state) / records.MIB,
        **planned,
        "activations_mib": activations,
        "bytes_a_parameter": (planned["peak_mib"] - activations) * records.MIB / count,
    }


def main(
    device: Literal["cpu", "h100", "v5e", "v5p"] = "cpu",
    model: Literal["tiny", "160M", "8B"] = "160M",
    batch: int = 8,
    length: int = 1024,
    rows: tuple[str, ...] = tuple(ROWS),
    output: pathlib.Path | None = None,
) -> None:
    """Compiles the steps, prints a table and writes JSON.

    Args:
      device: What is compiled for.
      model: Of `scale.LLAMAS`.
      batch: Sequences in a step.
      length: Tokens of a sequence.
      rows: Names of `ROWS`.
      output: File for the JSON.
    """
    records.check_names("rows", rows, ROWS)
    path = output or RESULTS / f"training_{model}_{device}.json"
    result: dict[str, Any] = {**records.header(), "batch": [batch, length], "records": {}}
    if device != "cpu":
        result["device"] = f"{device}, from its description"
    mesh = device_of(device).mesh((1, 1), AXES)
    for name in tqdm(rows, unit="program"):
        try:
            record = record_of(ROWS[name], LLAMAS[model], (batch, length), mesh)
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
            record = {"refused": str(error).splitlines()[0][:200]}
        result["records"][name] = record
        records.write(path, result)
    records.finish(path, result, table({device: result["records"]}))


def table(of_devices: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each training step, with what each of some devices plans for it."""
    names = dict.fromkeys(name for rows in of_devices.values() for name in rows)
    cells = [
        [name, *(text for rows in of_devices.values() for text in _cells(rows.get(name)))]
        for name in names
    ]
    titles = [
        f"{device}: {what}"
        for device in of_devices
        for what in ("peak, GiB", "bytes per parameter")
    ]
    return records.table(["", *titles], cells)


def _cells(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    if "refused" in row:
        return "does not fit", ""
    return f"{row['peak_mib'] / 1024:.1f}", f"{row['bytes_a_parameter']:.1f}"


def draw(rows: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Bars of what each training step plans: weights, state, and all else."""
    rows = {name: row for name, row in rows.items() if "refused" not in row}
    names = list(rows)
    weights, state, peak = (
        [row[f"{part}_mib"] / 1024 for row in rows.values()]
        for part in ("weights", "state", "peak")
    )
    held = [one + other for one, other in zip(weights, state, strict=True)]
    rest = [one - other for one, other in zip(peak, held, strict=True)]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, weights, label="weights")
    axes.barh(names, state, left=weights, label="state, with remainders")
    axes.barh(names, rest, left=held, color="0.8", label="gradients, activations, update")
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
