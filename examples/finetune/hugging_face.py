"""GPT-2 in the form in which Hugging Face's `transformers` saves it.

`config.json` has the sizes, `model.safetensors`, or shards with an index, the parameters. Nothing
is ever unpickled.
"""

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from examples.gpt2.command import InputError, one_line
from examples.gpt2.model import GPT, GPTConfig

CONFIG, TENSORS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PREFIX = "transformer."  # of all names, where the model was saved with a head
# Constants of older versions, and the head, which is the embedding again.
_PASSED_OVER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")

# Hugging Face's names of a block's and of the model's own parts; all kernels are (in, out) in both.
_BLOCK = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "projection": "attn.c_proj",
    "norm_2": "ln_2",
    "expand": "mlp.c_fc",
    "contract": "mlp.c_proj",
}
_MODEL = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_KIND = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}

# What `GPT` computes; another value in `config.json` asks for another model.
_EXPECTED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Names, and the defaults of `transformers`, which writes only what differs from them.
_SIZES = {
    "layers": ("n_layer", 12),
    "width": ("n_embd", 768),
    "heads": ("n_head", 12),
    "context": ("n_positions", 1024),
    "vocabulary": ("vocab_size", 50257),
}


def read_hugging_face(folder: pathlib.Path, dtype: str = "float32") -> GPT:
    """Reads a GPT-2 that `transformers` saved.

    Args:
      folder: With `config.json` and `model.safetensors`, or shards and their index. Names may have
        the prefix "transformer." or not.
      dtype: What the layers compute in.

    Returns:
      The model; its parameters are float32. A call on tokens (batch, length) gives the logits.

    Raises:
      InputError: If a file is missing or damaged, the model is of another architecture, or its
        parameters are not those that the configuration asks for.
    """
    config, files = read_config(folder, dtype), _find_tensors(folder)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    expected = nnx.to_pure_dict(state)
    shapes = {_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    missing = sorted(shapes.keys() - files.keys())
    if missing:
        raise InputError(
            f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more of"
            f" {len(shapes)} parameters that {CONFIG} asks for"
        )
    left = [n for n in files.keys() - shapes.keys() if not _PASSED_OVER.fullmatch(n)]
    if left:
        raise InputError(f"{files[min(left)]}: has {min(left)!r:.80}, which {CONFIG} has not")
    arrays = {}
    for file in sorted({files[name] for name in shapes}):
        with _opened(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                name = stored.removeprefix(_PREFIX)
                if name in shapes and files[name] == file:
                    arrays[name] = _tensor(tensors, stored, shapes[name], file)
    for name in shapes.keys() - arrays.keys():
        raise InputError(f"{files[name]}: has no {name}; {INDEX} says that it has")
    filled = jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], expected)
    nnx.replace_by_pure_dict(state, filled)
    return nnx.merge(graphdef, state)


def read_config(folder: pathlib.Path, dtype: str) -> GPTConfig:
    """The sizes in a folder's `config.json`.

    Raises:
      InputError: If there is none, or it is of a model that `GPT` is not.
    """
    file = folder / CONFIG
    given = _read_object(file)
    for name, value in _EXPECTED.items():
        if given.get(name, None if name == "model_type" else value) != value:
            found = f"{given.get(name)!r:.80}"
            raise InputError(f"{file}: {name} is {found}; allowed: {value!r}, as in GPT-2")
    sizes = {name: given.get(key, default) for name, (key, default) in _SIZES.items()}
    inner = given.get("n_inner") or 4 * sizes["width"]
    for key, value in (*((_SIZES[name][0], x) for name, x in sizes.items()), ("n_inner", inner)):
        if type(value) is not int or not 1 <= value <= 2**24:
            raise InputError(f"{file}: {key} is {value!r:.80}; allowed: integers from 1 to 2^24")
    if sizes["width"] % sizes["heads"]:
        given = f"n_head {sizes['heads']} does not divide n_embd {sizes['width']}"
        raise InputError(f"{file}: {given}, and must")
    epsilon = given.get("layer_norm_epsilon", 1e-5)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise InputError(f"{file}: layer_norm_epsilon is {epsilon!r:.80}; allowed: in (0, 1)")
    return GPTConfig(**sizes, dtype=dtype, inner=inner, epsilon=epsilon)


def _name(path: tuple[Any, ...]) -> str:
    """Hugging Face's name, without prefix, of the leaf at a path of `GPT`'s parameters."""
    keys = [key.key for key in path]
    if keys[0] == "blocks":
        _, layer, part, kind = keys
        return f"h.{layer}.{_BLOCK[part]}.{_KIND[kind]}"
    part, kind = keys
    return f"{_MODEL[part]}.{_KIND[kind]}"


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds {type(content).__name__}; allowed: a JSON object")
    return content


def _find_tensors(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each tensor, by its name without prefix; one file goes before shards."""
    file = folder / TENSORS
    if file.exists():
        with _opened(file) as tensors:
            return {name.removeprefix(_PREFIX): file for name in tensors.keys()}  # noqa: SIM118
    if (folder / INDEX).exists():
        index = _read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise InputError(f"{folder / INDEX}: has no weight_map")
        for shard in index.values():
            if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
                raise InputError(f"{folder / INDEX}: {shard!r:.80} is no name of a file beside it")
        return {name.removeprefix(_PREFIX): folder / shard for name, shard in index.items()}
    hint = ""
    if (folder / "pytorch_model.bin").exists():
        hint = "; pytorch_model.bin is a pickle, which may run any code, so it is not read"
    raise InputError(f"{folder}: has neither {TENSORS} nor {INDEX}{hint}")


def _opened(file: pathlib.Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: not a whole safetensors file: {one_line(error)}") from None


def _tensor(tensors: Any, name: str, shape: tuple[int, ...], file: pathlib.Path) -> jax.Array:
    """One tensor in float32; its shape and type are looked at before it is read."""
    known = tensors.get_slice(name)
    if tuple(known.get_shape()) != shape:
        given = f"{name} has shape {tuple(known.get_shape())}"
        raise InputError(f"{file}: {given}; {CONFIG} asks for {shape}")
    if known.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise InputError(f"{file}: {name} has type {known.get_dtype()}; allowed: floating point")
    values = tensors.get_tensor(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{file}: {name} has numbers that are not finite in float32")
    return jnp.asarray(values)
