"""GPT-2 in the form in which Hugging Face's `transformers` keeps it: a folder, read and written.

`config.json` has the sizes, `model.safetensors`, or shards with an index, the parameters. Nothing
is ever unpickled.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from examples.gpt2.model import ACTIVATIONS, GPT, GPTConfig
from examples.gpt2.records import quoted, read_json

CONFIG, TENSORS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PREFIX = "transformer."  # of all but the head, where the model was saved with one
_HEAD = "lm_head.weight"
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # constants of older versions
_LARGEST = 2**24  # size that a configuration may have
_FLOATS = ("F64", "F32", "F16", "BF16")

# Hugging Face's names of a block's and of the model's own parts; all kernels are (in, out) in both.
_BLOCK = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "projection": "attn.c_proj",
    "norm_2": "ln_2",
    "expand": "mlp.c_fc",
    "contract": "mlp.c_proj",
}
_MODEL = {"tokens": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"}
_KIND = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}

# What `GPT` computes; another value in `config.json` asks for another model.
_EXPECTED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


class CheckpointError(ValueError):
    """A folder cannot be read or written; the message is one line: which file, why, what may be."""


def read_hugging_face(folder: str | pathlib.Path, dtype: str = "float32") -> GPT:
    """Reads a GPT-2 that `transformers` saved.

    Args:
      folder: With `config.json` and `model.safetensors`, or shards and their index. Names may have
        the prefix "transformer." or not; a head of its own is read where the configuration unties
        it.
      dtype: What the layers compute in.

    Returns:
      The model; its parameters are float32. A call on tokens (batch, length) gives the logits.

    Raises:
      CheckpointError: A file is missing or damaged, the model is of another architecture, or its
        parameters are not those that the configuration asks for.
    """
    folder = pathlib.Path(folder)
    config, files = dataclasses.replace(read_config(folder), dtype=dtype), _find_tensors(folder)
    last = f"h.{config.layers - 1}.ln_1.weight"  # first: there may be any number of layers to ask
    if last not in files:
        raise CheckpointError(f"{folder}: {last} is missing; {CONFIG} asks for it")
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    expected = nnx.to_pure_dict(state)
    names = {_name(path): path for path, _ in jax.tree_util.tree_leaves_with_path(expected)}
    missing = sorted(names.keys() - files.keys())
    if missing:
        raise CheckpointError(
            f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more of"
            f" {len(names)} parameters that {CONFIG} asks for"
        )
    left = [n for n in files.keys() - names.keys() if not _BUFFERS.fullmatch(n) and n != _HEAD]
    if left:
        raise CheckpointError(
            f"{files[min(left)]}: has {quoted(min(left))}, which a GPT-2 with the sizes of {CONFIG}"
            " has not"
        )
    arrays = {}
    shapes = {_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    for file in sorted({files[name] for name in names}):
        with _opened(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                name = stored.removeprefix(_PREFIX)
                if name in names and files[name] == file:
                    arrays[name] = _tensor(tensors, stored, shapes[name], file)
    for name in names.keys() - arrays.keys():
        raise CheckpointError(f"{files[name]}: has no {name}; {INDEX} says that it has")
    filled = jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], expected)
    nnx.replace_by_pure_dict(state, filled)
    return nnx.merge(graphdef, state)


def read_config(folder: pathlib.Path) -> GPTConfig:
    """The sizes in a folder's `config.json`.

    Raises:
      CheckpointError: There is none, or it is of a model that `GPT` is not.
    """
    file = folder / CONFIG
    given = _read_object(file)
    for name, value in _EXPECTED.items():
        if given.get(name, value) != value:
            allowed = f"{name} is {quoted(given[name])}; allowed: {value!r}"
            raise CheckpointError(f"{file}: {allowed}, as in GPT-2")
    if "model_type" not in given:
        raise CheckpointError(f"{file}: has no model_type; allowed: 'gpt2'")
    activation = given.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        found = quoted(activation)
        raise CheckpointError(f"{file}: activation_function is {found}; allowed: {allowed}")
    inner = given.get("n_inner")
    tied = given.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        found = quoted(tied)
        raise CheckpointError(f"{file}: tie_word_embeddings is {found}; allowed: true, false")
    # The defaults are those of `transformers`, which writes what differs from them alone.
    sizes = {
        name: size_in(file, key, given.get(key, default))
        for name, key, default in (
            ("layers", "n_layer", 12),
            ("width", "n_embd", 768),
            ("heads", "n_head", 12),
            ("context", "n_positions", 1024),
            ("vocabulary", "vocab_size", 50257),
        )
    }
    if sizes["width"] % sizes["heads"]:
        raise CheckpointError(
            f"{file}: n_head {sizes['heads']} does not divide n_embd {sizes['width']}, and must"
        )
    epsilon = given.get("layer_norm_epsilon", 1e-5)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        found = quoted(epsilon)
        raise CheckpointError(f"{file}: layer_norm_epsilon is {found}; allowed: in (0, 1)")
    return GPTConfig(
        **sizes,
        inner=None if inner is None else size_in(file, "n_inner", inner),
        activation=activation,
        epsilon=epsilon,
        tied=tied,
    )


def write_hugging_face(
    folder: str | pathlib.Path, model: GPT, *, end_token: int | None = None
) -> None:
    """Writes a model so that `transformers.GPT2LMHeadModel.from_pretrained(folder)` reads it.

    Args:
      folder: Is made where it is not there; other files in it, a tokenizer's, are left alone.
      model: The model.
      end_token: The token that ends a text, for `generate`; None for none.

    Raises:
      CheckpointError: The folder has a model already.
    """
    folder = pathlib.Path(folder)
    for name in (CONFIG, TENSORS, INDEX):
        if (folder / name).exists():
            raise CheckpointError(f"{folder / name}: is there already; give an empty folder")
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tensors = {}
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        name = _name(path)
        tensors[name if name == _HEAD else _PREFIX + name] = np.ascontiguousarray(value)
    sizes = model.config
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **_EXPECTED,
        "n_layer": sizes.layers,
        "n_embd": sizes.width,
        "n_head": sizes.heads,
        "n_positions": sizes.context,
        "n_inner": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "activation_function": sizes.activation,
        "layer_norm_epsilon": sizes.epsilon,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".partial.", dir=folder))
    try:
        save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name in (TENSORS, CONFIG):
            os.replace(partial / name, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _name(path: tuple[Any, ...]) -> str:
    """Hugging Face's name, without prefix, of the leaf at a path of `GPT`'s parameters."""
    keys = [key.key for key in path]
    if keys[0] == "blocks":
        _, layer, part, kind = keys
        return f"h.{layer}.{_BLOCK[part]}.{_KIND[kind]}"
    part, kind = keys
    return f"{_MODEL[part]}.{_KIND[kind]}"


def size_in(file: pathlib.Path, key: str, value: Any) -> int:
    """A size that a file gives.

    Raises:
      CheckpointError: It is none.
    """
    if type(value) is not int or not 1 <= value <= _LARGEST:
        allowed = f"integers from 1 to {_LARGEST}"
        raise CheckpointError(f"{file}: {key} is {quoted(value)}; allowed: {allowed}")
    return value


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    content = read_json(file, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds {type(content).__name__}; allowed: a JSON object")
    return content


def _find_tensors(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each tensor, by its name without prefix; one file goes before shards."""
    file = folder / TENSORS
    if file.exists():
        with _opened(file) as tensors:
            return _without_prefix(file, dict.fromkeys(tensors.keys(), file))
    if (folder / INDEX).exists():
        index = _read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map")
        for name, shard in index.items():
            named = isinstance(shard, str) and pathlib.PurePath(shard).name == shard
            if not (named and shard.isprintable()):
                given = f"{quoted(name)} is in {quoted(shard)}"
                raise CheckpointError(f"{folder / INDEX}: {given}; allowed: names of files")
        shards = {name: folder / shard for name, shard in index.items()}
        return _without_prefix(folder / INDEX, shards)
    hint = ""
    if (folder / "pytorch_model.bin").exists():
        hint = "; pytorch_model.bin is a pickle, which may run any code, so it is not read"
    raise CheckpointError(f"{folder}: has neither {TENSORS} nor {INDEX}{hint}")


def _without_prefix(file: pathlib.Path, found: dict[str, pathlib.Path]) -> dict[str, pathlib.Path]:
    """The files by the tensors' names without prefix.

    Raises:
      CheckpointError: Two names are then equal.
    """
    short = {name.removeprefix(_PREFIX): of for name, of in found.items()}
    for name in found:
        if _PREFIX + name in found:
            given = f"has both {quoted(name)} and {quoted(_PREFIX + name)}"
            raise CheckpointError(f"{file}: {given}; allowed: one of them")
    return short


def _opened(file: pathlib.Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from None


def _tensor(tensors: Any, name: str, shape: tuple[int, ...], file: pathlib.Path) -> jax.Array:
    """One tensor in float32; its shape and type are looked at before it is read."""
    known = tensors.get_slice(name)
    if tuple(known.get_shape()) != shape:
        given = f"{name} has shape {tuple(known.get_shape())}"
        raise CheckpointError(f"{file}: {given}; {CONFIG} asks for {shape}")
    if known.get_dtype() not in _FLOATS:
        allowed = ", ".join(_FLOATS)
        raise CheckpointError(f"{file}: {name} has type {known.get_dtype()}; allowed: {allowed}")
    with np.errstate(over="ignore"):  # is said below
        values = tensors.get_tensor(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{file}: {name} has numbers that are not finite in float32")
    return jnp.asarray(values)
