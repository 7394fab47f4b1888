"""Checkpoints of `transformers`. tests/data/gpt2_transformers is one."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors
from flax import nnx

from examples.finetune.hugging_face import read_hugging_face
from examples.gpt2.command import InputError

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "gpt2_transformers"


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture."""
    return pathlib.Path(shutil.copytree(FIXTURE, tmp_path / "model"))


def check_logits(folder, atol=1e-5):
    expected = np.load(FIXTURE / "logits.npz")
    forward = nnx.jit(lambda model, tokens: model(tokens))
    actual = forward(read_hugging_face(folder), jnp.asarray(expected["tokens"]))
    np.testing.assert_allclose(actual, expected["logits"], atol=atol)


def tensors_of(folder):
    return safetensors.load_file(folder / "model.safetensors")


def store(folder, tensors, name="model.safetensors"):
    safetensors.save_file(tensors, folder / name, metadata={"format": "pt"})


def test_logits_are_those_of_pytorch_without_a_prefix_and_with_old_buffers(folder):
    tensors = {name.removeprefix("transformer."): x for name, x in tensors_of(folder).items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 24, 24), np.float32)
    tensors["h.0.attn.masked_bias"] = np.full((), -1e4, np.float32)
    store(folder, tensors)
    check_logits(folder)


def test_shards_with_an_index(folder):
    tensors, shards, index = tensors_of(folder), {}, {}
    for i, (name, tensor) in enumerate(tensors.items()):
        shard = f"model-{i % 3 + 1:05}-of-00003.safetensors"
        shards.setdefault(shard, {})[name] = tensor
        index[name] = shard
    (folder / "model.safetensors").unlink()
    for shard, part in shards.items():
        store(folder, part, shard)
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    check_logits(folder)
    name = min(name for name, shard in index.items() if shard.startswith("model-00002"))
    elsewhere = index | {name: "model-00003-of-00003.safetensors"}
    file.write_text(json.dumps({"weight_map": elsewhere}))
    with pytest.raises(InputError, match=r"index\.json says that it has"):
        read_hugging_face(folder)
    file.write_text(json.dumps({"weight_map": index}))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003\.safetensors: not a whole"):
        read_hugging_face(folder)
    file.write_text(json.dumps({"weight_map": dict.fromkeys(index, "../model.safetensors")}))
    with pytest.raises(InputError, match="is no name of a file beside it"):
        read_hugging_face(folder)


def test_half_precision_is_read_as_float32(folder):
    tensors = tensors_of(folder)
    store(folder, {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    model = read_hugging_face(folder)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.float32)}
    # Each parameter is off by 2^-9 of itself; some hundred of them, of 0.1 or 1, meet in a logit.
    check_logits(folder, atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"config\.json: model_type is 'bert'; allowed: 'gpt2'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True; allowed: False"),
        ({"model_type": "b\n" * 999}, r"model_type is 'b\\nb[^\n]{70,80}; allowed: 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'; allowed: 'gelu_new'"),
        ({"n_layer": 0}, "n_layer is 0; allowed: integers from 1 to 2\\^24"),
        ({"n_positions": 10**30}, "n_positions is 1000000000000000000000000000000; allowed"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; allowed: True"),
        ({"n_layer": 1}, r"has 'h\.1\.attn\.c_attn\.bias', which config\.json has not"),
        ({"n_head": 5}, "n_head 5 does not divide n_embd 32, and must"),
        ({"vocab_size": "70"}, "vocab_size is '70'; allowed: integers from 1 to 2\\^24"),
        ({"vocab_size": 71}, r"wte\.weight has shape \(70, 32\); config\.json asks for \(71, 32\)"),
        ({"layer_norm_epsilon": 0.0}, r"layer_norm_epsilon is 0\.0; allowed: in \(0, 1\)"),
        ('{"model_type": "gpt2",\n', r"config\.json: cannot be read as JSON: .*line 2"),
        ("[]", "holds list; allowed: a JSON object"),
        ("{}", "model_type is None; allowed: 'gpt2'"),
        pytest.param(f'{{"n_layer": {"9" * 5000}}}', "cannot be read as JSON", id="long"),
        pytest.param("[" * 100_000, "cannot be read as JSON", id="deep"),
    ],
)
def test_configurations_that_are_damaged_or_of_other_models(folder, change, message):
    file = folder / "config.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.write_text(change)
    with pytest.raises(InputError, match=message):
        read_hugging_face(folder)


def test_damaged_files(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole[:100], b"", (2**62).to_bytes(8, "little") + whole[8:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="not a whole safetensors file"):
            read_hugging_face(folder)
    tensors, bias = safetensors.load(whole), "transformer.ln_f.bias"
    for changed, message in [
        ({"transformer.h.0.ln_2.bias": None}, r"h\.0\.ln_2\.bias is missing, and 0 more of 28"),
        ({bias: np.zeros(32, np.int32)}, r"ln_f\.bias has type I32; allowed: floating"),
        ({bias: np.full(32, np.nan)}, r"ln_f\.bias has numbers that are not finite"),
        ({"evil\nname": np.zeros(32)}, r"has 'evil\\nname', which config"),
    ]:
        store(folder, {name: x for name, x in (tensors | changed).items() if x is not None})
        with pytest.raises(InputError, match=message):
            read_hugging_face(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="is a pickle, which may run any code"):
        read_hugging_face(folder)
    with pytest.raises(InputError, match=r"config\.json: cannot be read as JSON: .*No such file"):
        read_hugging_face(folder / "nowhere")
