"""What fine-tuning begins with: a model with its tokenizer, from whichever program saved it."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx

from examples.gpt2.hugging_face import CONFIG, CheckpointError, read_hugging_face
from examples.gpt2.model import GPT, GPTConfig
from examples.gpt2.tokens import Tokenizer, byte_tokenizer, read_sentencepiece, read_tokenizer


class Pretrained(NamedTuple):
    """A model, its tokenizer, and AdamW's moments where it was trained with AdamW here."""

    model: GPT
    tokenizer: Tokenizer
    adam: optax.ScaleByAdamState | None


def read_pretrained(
    folder: pathlib.Path, dtype: str = "float32", cache: pathlib.Path = pathlib.Path("runs/data")
) -> Pretrained:
    """Reads a folder of `transformers`, or of a run of `examples.gpt2.train`.

    Args:
      folder: The one with `config.json` and a tokenizer, the other with `settings.json` and
        `checkpoints`, the last of which is read.
      dtype: What the layers compute in.
      cache: Where runs keep their tokenizers.

    Returns:
      The model, with float32 parameters, and its tokenizer.

    Raises:
      CheckpointError: The folder is neither, or something in it is missing or damaged.
      TokenizerError: The tokenizer cannot be read.
    """
    adam = None
    if (folder / CONFIG).exists():
        model, tokenizer = read_hugging_face(folder, dtype), read_tokenizer(folder)
    elif (folder / "settings.json").exists():
        used = json.loads((folder / "settings.json").read_text())
        sizes = {name: used[name] for name in ("layers", "width", "heads", "context", "vocabulary")}
        model, adam = _restored(folder, GPTConfig(**sizes, dtype=dtype), used["optimizer"])
        if used["tokenizer"] == "bytes":
            tokenizer = byte_tokenizer()
        else:
            file = cache / used["data"] / "tokenizer.model"
            if not file.exists():
                raise CheckpointError(f"{file}: no such file; {folder} was trained with it")
            tokenizer = read_sentencepiece(file)
    else:
        allowed = f"{CONFIG} of transformers, or settings.json of a run of examples.gpt2.train"
        raise CheckpointError(f"{folder}: no checkpoint here; allowed: a folder with {allowed}")
    if tokenizer.size > model.config.vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.size} tokens, the model's vocabulary"
            f" {model.config.vocabulary}; allowed: at most as many"
        )
    return Pretrained(model, tokenizer, adam)


def _restored(
    folder: pathlib.Path, config: GPTConfig, optimizer: str
) -> tuple[GPT, optax.ScaleByAdamState | None]:
    """The model in a run's last checkpoint, and the moments of AdamW where that trained it."""
    path = (folder / "checkpoints").absolute()
    with ocp.CheckpointManager(path) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise CheckpointError(f"{folder}: has no checkpoint")
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore())
        saved: dict[str, Any] = checkpoints.restore(step, args=arguments).state
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    like = nnx.to_pure_dict(state)
    params = _as(like, saved["params"])
    nnx.replace_by_pure_dict(state, params)
    if optimizer != "adamw":
        return nnx.merge(graphdef, state), None
    moments = next(part for part in _parts(saved["opt_state"]) if "nu" in part)
    adam = optax.ScaleByAdamState(
        moments["count"], _as(like, moments["mu"]), _as(like, moments["nu"])
    )
    return nnx.merge(graphdef, state), adam


def _parts(state: Any) -> list[dict[str, Any]]:
    """The states of a chain, as a checkpoint that is read without its types has them."""
    parts = state.values() if isinstance(state, dict) else state
    return [part for part in parts if isinstance(part, dict)]


def _as(like: Any, saved: Any) -> Any:
    """What was saved, with the keys of `like`: numbers of layers come back as text."""

    def at(path: tuple[Any, ...], _: Any) -> jax.Array:
        node = saved
        for key in path:
            node = node[key.key] if key.key in node else node[str(key.key)]
        return jax.numpy.asarray(node)

    return jax.tree_util.tree_map_with_path(at, like)
