"""What fine-tuning begins with: a model with its tokenizer, from whichever program saved it."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import adapprox_jax
from examples.finetune.hugging_face import CONFIG, read_hugging_face
from examples.finetune.tokens import Tokenizer, byte_tokenizer, read_sentencepiece, read_tokenizer
from examples.gpt2.command import InputError, one_line
from examples.gpt2.data import TOKENIZER
from examples.gpt2.model import GPT, GPTConfig

_SIZES = ("layers", "width", "heads", "context", "vocabulary")


def read_checkpoint(folder: pathlib.Path, dtype: str = "float32") -> tuple[GPT, Tokenizer]:
    """Reads a folder of `transformers`, or of a run of `examples.gpt2.train`.

    Args:
      folder: The one with `config.json` and a tokenizer, the other with `settings.json` and
        `checkpoints`, the last of which is read.
      dtype: What the layers compute in.

    Returns:
      The model, with float32 parameters, and its tokenizer.

    Raises:
      InputError: If the folder is neither, or something in it is missing or damaged.
    """
    if (folder / CONFIG).exists():
        model, tokenizer = read_hugging_face(folder, dtype), read_tokenizer(folder)
    elif (folder / "settings.json").exists():
        model, tokenizer = _of_a_run(folder, dtype)
    else:
        allowed = f"{CONFIG} of transformers, or settings.json of a run of examples.gpt2.train"
        raise InputError(f"{folder}: no checkpoint here; allowed: a folder with {allowed}")
    if tokenizer.size > model.config.vocabulary:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.size} tokens, the model's vocabulary"
            f" {model.config.vocabulary}; allowed: at most as many"
        )
    return model, tokenizer


def _of_a_run(folder: pathlib.Path, dtype: str) -> tuple[GPT, Tokenizer]:
    file = folder / "settings.json"
    try:
        used = json.loads(file.read_text(encoding="utf-8"))
        config = GPTConfig(**{name: used[name] for name in _SIZES}, dtype=dtype)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
        of_bytes = used["tokenizer"] == "bytes"
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError):
        raise InputError(f"{file}: not the settings of a run of examples.gpt2.train") from None
    tokenizer = byte_tokenizer() if of_bytes else read_sentencepiece(folder / TOKENIZER)
    try:
        is_split = used.get("weights") == "split"
        params = _restored(folder / "checkpoints", nnx.to_pure_dict(state), is_split)
    except Exception as error:  # of Orbax or TensorStore, as the damage has it
        reason = one_line(error)
        raise InputError(f"{folder / 'checkpoints'}: cannot be read: {reason}") from None
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state), tokenizer


def _restored(folder: pathlib.Path, like: Any, is_split: bool) -> Any:
    """The parameters of the last checkpoint in float32, whatever devices saved them."""
    # Orbax keeps the numbers of layers as text.
    keyed = {**like, "blocks": {str(k): block for k, block in like["blocks"].items()}}
    options = ocp.CheckpointManagerOptions(read_only=True)
    handlers = {"state": ocp.PyTreeCheckpointHandler()}
    wanted = {"params": keyed}
    if is_split:
        wanted["opt_state"] = {"remainder": keyed}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    with ocp.CheckpointManager(
        folder.absolute(), options=options, item_handlers=handlers
    ) as manager:
        arguments = ocp.args.PyTreeRestore(wanted, restore_args=as_numpy, partial_restore=True)
        step = manager.latest_step()
        restored = manager.restore(step, args=ocp.args.Composite(state=arguments)).state
    saved = restored["params"]
    if is_split:
        zero = np.zeros([], jax.tree.leaves(saved)[0].dtype)
        state = adapprox_jax.SplitWeightsState(restored["opt_state"]["remainder"], zero, ())
        saved = jax.tree.map(np.asarray, adapprox_jax.join_weights(saved, state))
    params = {**saved, "blocks": {int(k): block for k, block in saved["blocks"].items()}}

    def checked(path: Any, expected: Any, found: Any) -> Any:
        if not isinstance(found, np.ndarray) or found.shape != expected.shape:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"it has no {name} of shape {expected.shape}, as settings.json has it")
        return found.astype(np.float32)

    return jax.tree_util.tree_map_with_path(checked, like, params)
