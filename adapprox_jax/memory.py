"""Bytes that training a model takes with each optimizer: `python -m adapprox_jax.memory MODEL`.

States are those that `tx.init` makes, traced for abstract parameters: nothing is allocated.
"""

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import optax
import optax.contrib
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from adapprox_jax.argument_checks import require_choice
from adapprox_jax.optimizers.adapprox import adapprox
from adapprox_jax.optimizers.adapprox_muon import adapprox_muon
from adapprox_jax.params.hidden_matrices import hidden_matrices
from adapprox_jax.params.model_shapes import KNOWN_MODELS, Shapes, shapes_of
from adapprox_jax.sharding.state_shardings import state_shardings
from adapprox_jax.state.report import shaped_nbytes
from adapprox_jax.transforms.split_weights import split_weights

DEVICES = (16, 24, 80, 95)  # GB of their memory, of 10^9 bytes each
NOTE = f"""\
Of devices with {", ".join(map(str, DEVICES))} GB (10^9 bytes). Activations are not counted.
--help says how each optimizer is set."""
EPILOG = """\
All have their defaults, so that averages have the type of the weights where no bits are named, and
float32 with split weights.
Adafactor is optax.adafactor(rate, momentum=0.9), whose momentum is in float32; it does not factor
attention kernels with heads of fewer than 128 numbers. Muon is optax.contrib.muon(rate) for the
matrices that adapprox_muon orthogonalizes, with its AdamW for all other parameters. On a mesh the
first axis divides each parameter along its longest side that it divides, the next one along the
next. State per parameter is that of all devices."""
_RATE = 1e-3
_TYPES = ("float32", "bfloat16")
_SPLIT = "split"  # bfloat16 with remainders in the state


def _muon() -> optax.GradientTransformation:
    def numbers(params: optax.Params) -> Any:
        hidden = hidden_matrices(params)
        last = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return jax.tree.map(lambda x: last if x else None, hidden)

    return optax.contrib.muon(_RATE, muon_weight_dimension_numbers=numbers)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": functools.partial(optax.adamw, _RATE),
    "Adafactor": functools.partial(optax.adafactor, _RATE, momentum=0.9),
    "Muon": _muon,
    **{
        f"{make.__name__}{bits}": functools.partial(make, _RATE, mu_dtype=dtype)
        for make in (adapprox, adapprox_muon)
        for bits, dtype in {"": None, ", 8 bits": "int8", ", 4 bits": "int4"}.items()
    },
}


class Memory(NamedTuple):
    """Bytes on each device."""

    weights: int
    gradients: int
    state: int


def training_memory(
    shapes: Shapes,
    weights: str = "float32",
    gradients: str | None = None,
    mesh: dict[str, int] | None = None,
) -> dict[str, Memory]:
    """Bytes of weights, gradients and state on each device, with each of `OPTIMIZERS`.

    Args:
      shapes: The shape of each parameter, by its path.
      weights: Type of the parameters; "split" for those of `split_weights`.
      gradients: Type of the gradients; None for that of the parameters.
      mesh: Axes and their numbers of devices; None for one device. The first axis divides each
        parameter along the longest side that it divides evenly, the next one along the longest of
        the others. The state lies as `state_shardings` says.

    Returns:
      A dict from the name of an optimizer to its `Memory`.

    Raises:
      ValueError: an axis of the mesh divides no parameter, or a type is another one.

    Examples:
      >>> from adapprox_jax.memory import training_memory
      >>> training_memory({"kernel": (1024, 4096)}, mesh={"fsdp": 8})["AdamW"]
      Memory(weights=2097152, gradients=2097152, state=4194308)
    """
    require_choice("weights", weights, (*_TYPES, _SPLIT))
    require_choice("gradients", gradients, (None, *_TYPES))
    sizes = mesh or {"device": 1}
    on = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shardings = {path: NamedSharding(on, _spec(shape, sizes)) for path, shape in shapes.items()}
    for axis, size in sizes.items():
        if size > 1 and not any(axis in sharding.spec for sharding in shardings.values()):
            raise ValueError(
                f"the mesh has {axis}={size}, and no parameter has a side left that {size} divides;"
                " allowed: numbers of devices that divide one."
            )

    def abstract(dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            path: jax.ShapeDtypeStruct(shapes[path], dtype, sharding=sharding)
            for path, sharding in shardings.items()
        }

    dtype = "bfloat16" if weights == _SPLIT else weights
    params, grads = abstract(dtype), abstract(gradients or dtype)
    found = {}
    for name, make in OPTIMIZERS.items():
        tx = split_weights(make()) if weights == _SPLIT else make()
        state = jax.eval_shape(tx.init, params)
        of_state = _nbytes(state, state_shardings(tx, params))
        found[name] = Memory(_nbytes(params, shardings), _nbytes(grads, shardings), of_state)
    return found


def _spec(shape: tuple[int, ...], sizes: dict[str, int]) -> PartitionSpec:
    spec: list[str | None] = [None] * len(shape)
    for axis, devices in sizes.items():
        free = [i for i, taken in enumerate(spec) if taken is None and shape[i] % devices == 0]
        if free and devices > 1:
            spec[max(free, key=lambda i: shape[i])] = axis
    return PartitionSpec(*spec)


def _nbytes(tree: Any, shardings: Any) -> int:
    """Bytes of a tree of abstract arrays on each device."""

    def nbytes(leaf: Any, sharding: NamedSharding) -> int:
        return shaped_nbytes(sharding.shard_shape(leaf.shape), leaf.dtype)

    return sum(jax.tree.leaves(jax.tree.map(nbytes, tree, shardings)))


def _record(memory: Memory, parameters: int, devices: int) -> dict[str, Any]:
    total = sum(memory)
    return {
        **memory._asdict(),
        "sum": total,
        "state_bytes_per_parameter": memory.state * devices / parameters,
        "fits": {f"{size} GB": total <= size * 10**9 for size in DEVICES},
    }


def _unit(records: dict[str, dict[str, Any]]) -> tuple[str, int]:
    largest = max(record["sum"] for record in records.values())
    return ("GB", 10**9) if largest >= 10**9 else ("MB", 10**6)


def _table(records: dict[str, dict[str, Any]]) -> str:
    (unit, size), parts = _unit(records), (*Memory._fields, "sum")
    rows = [[unit, *parts, "state per parameter", "fits in"]]
    for name, record in records.items():
        sizes = [f"{record[part] / size:.2f}" for part in parts]
        fits = ", ".join(on.removesuffix(" GB") for on, fits in record["fits"].items() if fits)
        rows.append([name, *sizes, f"{record['state_bytes_per_parameter']:.2f} bytes", fits or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _plot(records: dict[str, dict[str, Any]], title: str, file: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: `pip install matplotlib`.") from error
    (unit, size), left = _unit(records), [0.0] * len(records)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for part in Memory._fields:
        widths = [record[part] / size for record in records.values()]
        axes.barh(list(records), widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend()
    figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        allowed = "the path of an image that can be written"
        raise ValueError(f"--plot is {file!r}: {error}; allowed: {allowed}.") from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without the usage before it."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _mesh(text: str) -> dict[str, int]:
    pairs = re.findall(r"([A-Za-z_]\w*)=([1-9]\d{0,5})(?:,|$)", text)
    if not pairs or ",".join(map("=".join, pairs)) != text or len(dict(pairs)) < len(pairs):
        allowed = "axes with their numbers of devices, each once, such as fsdp=8,tensor=2"
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; allowed: {allowed}.")
    return {axis: int(size) for axis, size in pairs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or JSON.

    Args:
      arguments: Those of the command line; None for the ones that the program was given.

    Raises:
      SystemExit: an argument is not allowed. The code is 2, with one line on stderr.

    Examples:
      >>> from adapprox_jax.memory import main
      >>> main(["gpt2", "--mesh", "fsdp=8"])  # doctest: +ELLIPSIS
      gpt2: 124,439,808 parameters, ...
    """
    parser = _Parser(prog="python -m adapprox_jax.memory", description=__doc__, epilog=EPILOG)
    paths = "the path of .safetensors, of a folder of them or of Orbax, or of a .json of shapes"
    parser.add_argument(
        "model", help=f"{', '.join(KNOWN_MODELS)} (of Gemma its text decoder), or {paths}"
    )
    parser.add_argument(
        "--weights",
        choices=(*_TYPES, _SPLIT),
        default="float32",
        help="type of the weights (float32); split: bfloat16, and 8 bits more in the state",
    )
    parser.add_argument(
        "--gradients", choices=_TYPES, help="type of the gradients (that of the weights)"
    )
    parser.add_argument("--mesh", type=_mesh, default={}, help="devices: fsdp=8,tensor=2")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a bar for each optimizer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(arguments)
    of_weights = "bfloat16" if options.weights == _SPLIT else options.weights
    gradients, devices = options.gradients or of_weights, math.prod(options.mesh.values())
    try:
        shapes = shapes_of(options.model)
        memories = training_memory(shapes, options.weights, gradients, options.mesh)
        count = sum(map(math.prod, shapes.values()))
        words = "split weights" if options.weights == _SPLIT else f"weights in {of_weights}"
        title = f"{options.model}: {count:,} parameters, {words},"
        title += f" gradients in {gradients}" + f", on each of {devices} devices" * (devices > 1)
        records = {name: _record(one, count, devices) for name, one in memories.items()}
        if options.plot:
            _plot(records, title, options.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        given = {"weights": options.weights, "gradients": gradients, "mesh": options.mesh}
        found = {"parameters": count, "optimizers": records}
        print(json.dumps({"model": options.model, **given, **found}, indent=2))
    else:
        print(f"{title}\n\n{_table(records)}\n\n{NOTE}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and accelerators may be in use
    main()
