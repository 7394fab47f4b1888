"""Checkpoints of `transformers`, read and written. tests/data/gpt2_transformers is one."""

import dataclasses
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

from examples.gpt2.hugging_face import (
    CheckpointError,
    read_hugging_face,
    write_hugging_face,
)
from examples.gpt2.model import ACTIVATIONS, GPT, GPTConfig

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "gpt2_transformers"
SMALL = GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=24, inner=40)


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture."""
    return pathlib.Path(shutil.copytree(FIXTURE, tmp_path / "model"))


def logits_of(model, tokens):
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))


def check_logits(folder, atol=1e-5):
    expected = np.load(FIXTURE / "logits.npz")
    actual = logits_of(read_hugging_face(folder), expected["tokens"])
    np.testing.assert_allclose(actual, expected["logits"], atol=atol)


def tensors_of(folder):
    return safetensors.load_file(folder / "model.safetensors")


def store(folder, tensors, name="model.safetensors"):
    safetensors.save_file(tensors, folder / name, metadata={"format": "pt"})


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_logits_are_those_of_pytorch(folder):
    check_logits(folder)


def test_names_without_prefix_and_old_buffers(folder):
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
    with pytest.raises(CheckpointError, match=r"index\.json says that it has"):
        read_hugging_face(folder)
    file.write_text(json.dumps({"weight_map": index}))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: no such file"):
        read_hugging_face(folder)
    file.write_text(json.dumps({"weight_map": dict.fromkeys(index, "../model.safetensors")}))
    with pytest.raises(CheckpointError, match="allowed: names of files"):
        read_hugging_face(folder)


def test_half_precision_is_read_as_float32(folder):
    tensors = tensors_of(folder)
    store(folder, {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    model = read_hugging_face(folder)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.float32)}
    # Each parameter is off by 2^-9 of itself; some hundred of them, of 0.1 or 1, meet in a logit.
    check_logits(folder, atol=0.1)


def test_head_of_its_own(folder):
    tensors = tensors_of(folder)
    head = np.random.default_rng(0).normal(size=(70, 32)).astype(np.float32)
    store(folder, tensors | {"lm_head.weight": head})
    check_logits(folder)  # tied: the head in the file is passed over, as `transformers` does
    configure(folder, tie_word_embeddings=False)
    tokens = np.load(FIXTURE / "logits.npz")["tokens"]
    model = read_hugging_face(folder)
    stream = nnx.jit(lambda model, tokens: model.stream(tokens))(model, jnp.asarray(tokens))
    np.testing.assert_allclose(logits_of(model, tokens), stream @ head.T, atol=1e-4)
    store(folder, tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, and 0 more of 29"):
        read_hugging_face(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_written_models_are_read_back(tmp_path, tied):
    model = GPT(dataclasses.replace(SMALL, tied=tied, activation="relu"), rngs=nnx.Rngs(3))
    write_hugging_face(tmp_path / "new", model, end_token=1)
    back = read_hugging_face(tmp_path / "new")
    assert back.config == model.config
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(back, nnx.Param), nnx.state(model, nnx.Param)
    )
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["config.json", "model.safetensors"]
    before = (tmp_path / "new" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"config\.json: is there already"):
        write_hugging_face(tmp_path / "new", model)
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"config\.json: model_type is 'bert'; allowed: 'gpt2'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True; allowed: False"),
        ({"model_type": "b\n" * 999}, r"model_type is 'b\\nb[^\n]{70,80}\.\.\.; allowed: 'gpt2'"),
        ({"activation_function": "mish"}, "activation_function is 'mish'; allowed: gelu_new, "),
        ({"activation_function": ["gelu"]}, r"activation_function is \['gelu'\]; allowed: gelu"),
        ({"n_layer": 0}, "n_layer is 0; allowed: integers from 1 to 16777216"),
        ({"n_layer": 10**7}, r"h\.9999999\.ln_1\.weight is missing; config\.json asks for it"),
        ({"n_positions": 10**30}, "n_positions is 1000000000000000000000000000000; allowed"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; allowed: true, false"),
        ({"n_layer": 1}, r"has 'h\.1\.attn\.c_attn\.bias', which a GPT-2 with the sizes"),
        ({"n_head": 5}, "n_head 5 does not divide n_embd 32, and must"),
        ({"vocab_size": "70"}, "vocab_size is '70'; allowed: integers from 1 to 16777216"),
        ({"vocab_size": 71}, r"wte\.weight has shape \(70, 32\); config\.json asks for \(71, 32\)"),
        ({"layer_norm_epsilon": 0.0}, r"layer_norm_epsilon is 0\.0; allowed: in \(0, 1\)"),
    ],
)
def test_configurations_of_other_models(folder, change, message):
    configure(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read_hugging_face(folder)


def test_damaged_files(folder):
    file, config = folder / "model.safetensors", (folder / "config.json").read_text()
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole[:100], b"", (2**62).to_bytes(8, "little") + whole[8:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            read_hugging_face(folder)
    tensors = safetensors.load(whole)
    store(folder, {name: x for name, x in tensors.items() if "h.0.ln_2" not in name})
    with pytest.raises(CheckpointError, match=r"h\.0\.ln_2\.bias is missing, and 1 more of 28"):
        read_hugging_face(folder)
    store(folder, tensors | {"transformer.ln_f.bias": np.zeros(32, np.int32)})
    with pytest.raises(CheckpointError, match=r"ln_f\.bias has type I32; allowed: F64, F32"):
        read_hugging_face(folder)
    bias = np.zeros(32, np.float32)
    store(folder, tensors | {"transformer.ln_f.bias": bias + np.nan})
    with pytest.raises(CheckpointError, match=r"ln_f\.bias has numbers that are not finite"):
        read_hugging_face(folder)
    store(folder, tensors | {"ln_f.bias": bias})
    with pytest.raises(CheckpointError, match=r"has both 'ln_f\.bias' and 'transformer\.ln_f\.bia"):
        read_hugging_face(folder)
    store(folder, tensors | {"evil\nname": bias})
    with pytest.raises(CheckpointError, match=r"has 'evil\\nname', which a GPT-2"):
        read_hugging_face(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle, which may run any code"):
        read_hugging_face(folder)
    for text, message in [
        (config[:-40], "line 29, column 3: not JSON"),
        ("[]", "holds list; allowed: a JSON object"),
        ("{}", "has no model_type; allowed: 'gpt2'"),
        (f'{{"n_layer": {"9" * 5000}}}', "numbers or brackets beyond all measure"),
        ("[" * 100_000, "numbers or brackets beyond all measure"),
    ]:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_hugging_face(folder)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        read_hugging_face(folder / "nowhere")


def test_a_model_is_written_as_it_was_read(folder, tmp_path):
    write_hugging_face(tmp_path / "new", read_hugging_face(folder), end_token=1)
    old, new = tensors_of(folder), tensors_of(tmp_path / "new")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        np.testing.assert_array_equal(tensor, new[name])
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "new"))
    sizes = {name for name in old if name.startswith("n_")}
    assert sizes | {"vocab_size", "activation_function", "layer_norm_epsilon"} <= new.keys()
    for name in old.keys() & new.keys():
        assert new[name] == old[name]


@pytest.mark.slow
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_is_written(tmp_path, activation, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = GPT(dataclasses.replace(SMALL, tied=tied, activation=activation), rngs=nnx.Rngs(3))
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.3 * noise.normal(size=x.shape).astype(np.float32),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )
    nnx.update(model, params)
    write_hugging_face(tmp_path, model)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = noise.integers(0, SMALL.vocabulary, (2, SMALL.context))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=1e-4)
