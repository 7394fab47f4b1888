"""shapes_of: the shapes of a model's parameters, by its name or from files, without its weights."""

import json
import pathlib
import re
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Shapes: TypeAlias = dict[str, tuple[int, ...]]


class _Sizes(NamedTuple):
    family: Literal["gpt2", "llama", "gemma3"]
    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int  # width of the MLP
    vocabulary: int
    is_tied: bool = True  # the head is the embedding again


KNOWN_MODELS = {
    "gpt2": _Sizes("gpt2", 12, 768, 12, 12, 64, 3072, 50_257),
    "gpt2-medium": _Sizes("gpt2", 24, 1024, 16, 16, 64, 4096, 50_257),
    "gpt2-large": _Sizes("gpt2", 36, 1280, 20, 20, 64, 5120, 50_257),
    "gpt2-xl": _Sizes("gpt2", 48, 1600, 25, 25, 64, 6400, 50_257),
    "llama3-8b": _Sizes("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, is_tied=False),
    "llama3-70b": _Sizes("llama", 80, 8192, 64, 8, 128, 28_672, 128_256, is_tied=False),
    "llama3.2-1b": _Sizes("llama", 16, 2048, 32, 8, 64, 8192, 128_256),
    "llama3.2-3b": _Sizes("llama", 28, 3072, 24, 8, 128, 8192, 128_256),
    # Of Gemma 3 the text decoders, without the model that reads images.
    "gemma3-1b": _Sizes("gemma3", 26, 1152, 4, 1, 256, 6912, 262_144),
    "gemma3-4b": _Sizes("gemma3", 34, 2560, 8, 4, 256, 10_240, 262_208),
    "gemma3-12b": _Sizes("gemma3", 48, 3840, 16, 8, 256, 15_360, 262_208),
    "gemma3-27b": _Sizes("gemma3", 62, 5376, 32, 16, 128, 21_504, 262_208),
}
_GPT2_POSITIONS = 1024
_LONGEST_HEADER = 10**8  # bytes, as safetensors allows
_LONGEST_SIDE = 2**31 - 1
# Masks and frequencies of positions, which older files keep beside the parameters.
_CONSTANTS = re.compile(r"(^|\.)(attn\.(masked_)?bias|inv_freq)$")


def shapes_of(model: str) -> Shapes:
    """The shape of each parameter of a model.

    Layers of known models are stacked along the first axis, as for `jax.lax.scan`. Of files only
    headers and metadata are read. Integers are left out, and so is what a checkpoint of Orbax has
    beside "params".

    Args:
      model: One of `KNOWN_MODELS`, or a path: of a .safetensors file, a folder of these, an Orbax
        checkpoint, or a .json file that maps the paths of parameters to shapes.

    Returns:
      A dict from the path of each parameter to its shape.

    Raises:
      ValueError: there is no such model or path, or a file cannot be understood.
      OSError: a file cannot be read.

    Examples:
      >>> from adapprox_jax.params.model_shapes import shapes_of
      >>> shapes_of("llama3-8b")["layers/attention/query/kernel"]
      (32, 4096, 32, 128)
    """
    if model in KNOWN_MODELS:
        return _decoder(KNOWN_MODELS[model])
    path = pathlib.Path(model)
    # Beside the files of a model others may lie with the same numbers under other names.
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    # Orbax's managers save each item one folder deeper.
    trees = sorted(file.parent for file in (*path.glob("_METADATA"), *path.glob("*/_METADATA")))
    shapes: Shapes
    if path.is_file() and path.suffix == ".json":
        shapes = _of_json(path)
    elif path.is_file() and path.suffix == ".safetensors":
        shapes = _of_safetensors(path)
    elif files:
        shapes = {name: shape for file in files for name, shape in _of_safetensors(file).items()}
    elif len(trees) == 1:
        shapes = _of_orbax(trees[0])
    else:
        found = f"holds {len(trees)} Orbax checkpoints" if trees else "holds no weights"
        found = found if path.exists() else "is neither a known model nor a path"
        raise ValueError(
            f"{model!r} {found}; allowed: {', '.join(KNOWN_MODELS)}, or the path of a"
            " .safetensors file, of a folder of such files or of one Orbax checkpoint, or of a"
            " .json file of shapes."
        )
    if not shapes:
        raise ValueError(f"{path} has no floating-point parameters; allowed: one or more.")
    return shapes


def _decoder(sizes: _Sizes) -> Shapes:
    width, heads, head, inner = sizes.width, sizes.heads, sizes.head_size, sizes.inner
    is_gpt2, is_gemma = sizes.family == "gpt2", sizes.family == "gemma3"
    gate: Shapes = {} if is_gpt2 else {"mlp/gate": (width, inner)}
    kernels: Shapes = gate | {
        "attention/query": (width, heads, head),
        "attention/key": (width, sizes.key_value_heads, head),
        "attention/value": (width, sizes.key_value_heads, head),
        "attention/out": (heads, head, width),
        "mlp/up": (width, inner),
        "mlp/down": (inner, width),
    }
    norms: Shapes = {"attention_norm": (width,), "mlp_norm": (width,)}
    if is_gemma:
        norms |= {"post_attention_norm": (width,), "post_mlp_norm": (width,)}
        norms |= {"attention/query_norm": (head,), "attention/key_norm": (head,)}
    layer = {f"{name}/kernel": shape for name, shape in kernels.items()}
    layer |= {f"{name}/scale": shape for name, shape in norms.items()}
    outer: Shapes = {"embedder/embedding": (sizes.vocabulary, width), "norm/scale": (width,)}
    if is_gpt2:
        outputs = {name: shape[1:] for name, shape in kernels.items()} | {"attention/out": (width,)}
        layer |= {f"{name}/bias": shape for name, shape in (outputs | norms).items()}
        outer |= {"position_embedder/embedding": (_GPT2_POSITIONS, width), "norm/bias": (width,)}
    if not sizes.is_tied:
        outer["lm_head/kernel"] = (width, sizes.vocabulary)
    return outer | {f"layers/{name}": (sizes.layers, *shape) for name, shape in layer.items()}


def _of_safetensors(file: pathlib.Path) -> Shapes:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        most = min(max(file.stat().st_size - 8, 0), _LONGEST_HEADER)
        if not 0 < length <= most:
            raise ValueError(
                f"{file} is no whole file of safetensors: by its first 8 bytes its header has"
                f" {length:,} bytes, and {most:,} follow; allowed: whole files."
            )
        header = _parsed(opened.read(length), file)
    header.pop("__metadata__", None)
    shapes = {}
    for name, entry in header.items():
        dtype, shape = _field(entry, "dtype"), _shape(_field(entry, "shape"), name, file)
        if not isinstance(dtype, str):
            raise ValueError(f"{file}: {name!r} has the dtype {dtype!r:.60}; allowed: a name.")
        if dtype.startswith(("F", "BF")) and not _CONSTANTS.search(name):
            shapes[name] = shape
    return shapes


def _of_json(file: pathlib.Path) -> Shapes:
    """Paths with shapes, or with records that have a "shape": by themselves or in "leaves"."""
    parsed = _parsed(file.read_bytes(), file)
    leaves = parsed["leaves"] if isinstance(parsed.get("leaves"), dict) else parsed
    shapes = {name: x if isinstance(x, list) else _field(x, "shape") for name, x in leaves.items()}
    return {name: _shape(shape, name, file) for name, shape in shapes.items()}


def _parsed(text: bytes, file: pathlib.Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        found = f"its JSON begins with {text[:20]!r} and is no whole object"
        raise ValueError(f"{file}: {found}; allowed: names with their shapes.")
    return parsed


def _field(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else None


def _shape(given: Any, name: str, file: pathlib.Path) -> tuple[int, ...]:
    sides = given if isinstance(given, list) else [None]
    if not all(type(side) is int and 1 <= side <= _LONGEST_SIDE for side in sides):
        allowed = f"a list of integers from 1 to {_LONGEST_SIDE}"
        raise ValueError(f"{file}: {name!r} has the shape {given!r:.60}; allowed: {allowed}.")
    return tuple(sides)


def _of_orbax(folder: pathlib.Path) -> Shapes:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(
            f"{folder} is a checkpoint of Orbax, which is not installed; allowed: such a path after"
            " `pip install orbax-checkpoint`."
        ) from error
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(folder.absolute()).tree
    except Exception as error:  # of Orbax, TensorStore or JSON, as the damage has it
        found = f"Orbax cannot read its metadata: {str(error)[:200]}"
        raise ValueError(f"{folder}: {found}; allowed: a whole checkpoint.") from error
    params = tree.get("params", tree) if isinstance(tree, dict) else tree
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
        if jnp.issubdtype(getattr(leaf, "dtype", None) or int, jnp.floating)
    }
