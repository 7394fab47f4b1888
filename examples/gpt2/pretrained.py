"""What fine-tuning begins with: a model with its tokenizer, from whichever program saved it."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from examples.gpt2.checkpoints import damage_of
from examples.gpt2.hugging_face import CONFIG, CheckpointError, read_hugging_face, size_in
from examples.gpt2.model import GPT, GPTConfig
from examples.gpt2.tokens import Tokenizer, byte_tokenizer, read_sentencepiece, read_tokenizer

_PADDING = 1024  # rows of a vocabulary that no token needs: fewer, to make it a round number
_SIZES = ("layers", "width", "heads", "context", "vocabulary")


class AdamMoments(NamedTuple):
    """The state of the AdamW that trained a model, on the host, and what that was made with."""

    state: optax.ScaleByAdamState
    b1: float
    b2: float
    eps: float


class Pretrained(NamedTuple):
    """A model and its tokenizer."""

    model: GPT
    tokenizer: Tokenizer
    adam: AdamMoments | None  # where they were asked for


def read_pretrained(
    folder: pathlib.Path,
    dtype: str = "float32",
    cache: pathlib.Path = pathlib.Path("runs/data"),
    *,
    moments: bool = False,
) -> Pretrained:
    """Reads a folder of `transformers`, or of a run of `examples.gpt2.train`.

    Args:
      folder: The one with `config.json` and a tokenizer, the other with `settings.json` and
        `checkpoints`, the last of which is read.
      dtype: What the layers compute in.
      cache: Where runs keep their tokenizers.
      moments: Whether to read the state of the AdamW that trained the model, too.

    Returns:
      The model, with float32 parameters, and its tokenizer.

    Raises:
      CheckpointError: The folder is neither, or something in it is missing or damaged.
      TokenizerError: The tokenizer cannot be read.
    """
    if (folder / CONFIG).exists():
        if moments:
            raise CheckpointError(f"{folder}: transformers keeps no state of AdamW")
        model, tokenizer, adam = read_hugging_face(folder, dtype), read_tokenizer(folder), None
        unused = model.config.vocabulary - tokenizer.size
        if unused >= _PADDING:
            raise CheckpointError(
                f"{folder}: the tokenizer has {tokenizer.size} tokens, {unused} fewer than the"
                f" model's vocabulary; allowed: less than {_PADDING}"
            )
    elif (folder / "settings.json").exists():
        model, tokenizer, adam = _of_a_run(folder, dtype, cache, moments)
    else:
        allowed = f"{CONFIG} of transformers, or settings.json of a run of examples.gpt2.train"
        raise CheckpointError(f"{folder}: no checkpoint here; allowed: a folder with {allowed}")
    if tokenizer.size > model.config.vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.size} tokens, the model's vocabulary"
            f" {model.config.vocabulary}; allowed: at most as many"
        )
    return Pretrained(model, tokenizer, adam)


def _of_a_run(
    folder: pathlib.Path, dtype: str, cache: pathlib.Path, moments: bool
) -> tuple[GPT, Tokenizer, AdamMoments | None]:
    file = folder / "settings.json"
    try:
        used = json.loads(file.read_text(encoding="utf-8"))
        sizes = {name: used[name] for name in _SIZES}
        kind, key = used["tokenizer"], str(used["data"])
        optimizer, given = used["optimizer"], used["optimizer_settings"]
    except (ValueError, KeyError, TypeError, OSError):
        raise CheckpointError(f"{file}: not the settings of a run of examples.gpt2.train") from None
    config = GPTConfig(**{k: size_in(file, k, v) for k, v in sizes.items()}, dtype=dtype)
    if config.width % config.heads:
        given = f"heads {config.heads} does not divide width {config.width}"
        raise CheckpointError(f"{file}: {given}, and must")
    if moments and optimizer != "adamw":
        raise CheckpointError(f"{folder}: was trained with {optimizer}, and has no state of AdamW")
    if kind == "bytes":
        tokenizer = byte_tokenizer()
    else:
        model_file = cache / key / "tokenizer.model"
        if not model_file.exists():
            raise CheckpointError(f"{model_file}: no such file; {folder} was trained with it")
        tokenizer = read_sentencepiece(model_file)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    like = nnx.to_pure_dict(state)
    wanted = ("params", "count", "mu", "nu") if moments else ("params",)
    try:
        saved = _restored(folder / "checkpoints", wanted)
        layers = len(saved["params"]["blocks"])
        if layers != config.layers:
            raise ValueError(f"has {layers} layers; settings.json: {config.layers}")
        nnx.replace_by_pure_dict(state, _as(like, saved["params"]))
        adam = None
        if moments:
            # Wherever in the chain: clipping comes before it.
            [part] = filter(_of_adam, jax.tree.leaves(saved["opt_state"], is_leaf=_of_adam))
            kept = optax.ScaleByAdamState(
                part["count"], _as(like, part["mu"]), _as(like, part["nu"])
            )
            adam = AdamMoments(kept, **{name: given[name] for name in ("b1", "b2", "eps")})
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder / 'checkpoints'}: cannot be read: {reason}") from None
    return nnx.merge(graphdef, state), tokenizer, adam


def _of_adam(node: Any) -> bool:
    return isinstance(node, dict) and "nu" in node


def _restored(folder: pathlib.Path, wanted: tuple[str, ...]) -> Any:
    """The last checkpoint of a run as NumPy arrays, whatever device saved it; only what is wanted.

    Args:
      folder: The checkpoints.
      wanted: Keys; what none of them leads to is not read.
    """
    options = ocp.CheckpointManagerOptions(read_only=True)
    handlers = {"state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(
        folder.absolute(), options=options, item_handlers=handlers
    ) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError("it has no checkpoint")
        damage = damage_of(folder / str(step))
        if damage is not None:
            raise ValueError(f"{step}: {damage}")
        known = checkpoints.item_metadata(step).state
        known = getattr(known, "tree", known)

        def target(path: tuple[Any, ...], leaf: Any) -> Any:
            keys = {str(getattr(key, "key", key)) for key in path}
            return np.zeros((), leaf.dtype) if keys & set(wanted) else ocp.PLACEHOLDER

        targets = jax.tree_util.tree_map_with_path(
            target, known, is_leaf=lambda x: hasattr(x, "shape")
        )
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), targets)
        arguments = ocp.args.PyTreeRestore(targets, restore_args=as_numpy)
        return checkpoints.restore(step, args=ocp.args.Composite(state=arguments)).state


def _as(like: Any, saved: Any) -> Any:
    """What was saved, with the keys of `like`: numbers of layers come back as text."""

    def at(path: tuple[Any, ...], expected: Any) -> np.ndarray:
        node = saved
        for key in path:
            node = node[key.key] if key.key in node else node[str(key.key)]
        if node.shape != expected.shape:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"{name} has shape {node.shape}; settings.json: {expected.shape}")
        return node

    return jax.tree_util.tree_map_with_path(at, like)
