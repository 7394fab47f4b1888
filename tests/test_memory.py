"""The calculator of training memory, and the shapes that it reads."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import adapprox_jax
from adapprox_jax.memory import DEVICES, main, training_memory
from adapprox_jax.params.model_shapes import KNOWN_MODELS, shapes_of

TREES = pathlib.Path(__file__).parent / "data" / "models"
SMALL = {"block/mlp/kernel": (256, 512), "block/mlp/bias": (512,), "embed/table": (1024, 256)}

# As published; of Gemma 3 without its encoder of images, SigLIP, and the projection behind it.
SIGLIP = 416_866_032
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - SIGLIP - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - SIGLIP - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - SIGLIP - 1152 * (5376 + 1),
}


def count(shapes):
    return sum(map(math.prod, shapes.values()))


def abstract(shapes, dtype="float32"):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def safetensors(header, length=None):
    """A file that ends where the weights would begin."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def tensor(*shape, dtype="BF16"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 2 * math.prod(shape)]}


def printed(capsys, *arguments):
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def small(tmp_path):
    (tmp_path / "shapes.json").write_text(json.dumps(SMALL))
    return str(tmp_path / "shapes.json")


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_have_their_published_numbers_of_parameters_and_hidden_matrices(name):
    sizes, shapes = KNOWN_MODELS[name], shapes_of(name)
    assert count(shapes) == PUBLISHED[name]
    report = adapprox_jax.muon_report(abstract(shapes))
    hidden = {path for path, what in report.items() if what.startswith("orthogonalized")}
    assert hidden == {path for path in report if "/kernel" in path and "lm_head" not in path}
    query = report["['layers/attention/query/kernel']"]
    matrix = f"{sizes.width} x {sizes.heads * sizes.head_size}"
    assert query == f"orthogonalized: {sizes.layers} of {matrix}"


def test_states_are_those_of_the_optimizers():
    found = training_memory(SMALL, "bfloat16", "float32")
    params = abstract(SMALL, jnp.bfloat16)
    for name, tx in {
        "AdamW": optax.adamw(1e-3),
        "Adafactor": optax.adafactor(1e-3, momentum=0.9),
        "adapprox": adapprox_jax.adapprox(1e-3),
        "adapprox, 4 bits": adapprox_jax.adapprox(1e-3, mu_dtype="int4"),
        "adapprox_muon, 8 bits": adapprox_jax.adapprox_muon(1e-3, mu_dtype="int8"),
    }.items():
        bytes_of_both = (2 * count(SMALL), 4 * count(SMALL))
        assert found[name] == (*bytes_of_both, adapprox_jax.state_nbytes(tx, params)), name
    kernel = math.prod(SMALL["block/mlp/kernel"])  # Muon has a momentum, all else is Adam's
    adam = 4 * (count(SMALL) - kernel)
    assert found["Muon"].state == pytest.approx(2 * kernel + adam, abs=32)


def test_on_a_mesh_each_device_holds_its_part(capsys):
    found = training_memory({"w": (256, 512), "odd": (3,)}, mesh={"fsdp": 8, "tensor": 2})
    assert found["AdamW"] == (*2 * [4 * (256 * 512 // 16 + 3)], 8 * (256 * 512 // 16 + 3) + 4)
    # The first axis is along 512, the second along 256, and factors have one of the two.
    without, rank = training_memory({"w": (256, 512)})["adapprox"].state, 8
    factors, average = 4 * rank * (256 + 512), 4 * 256 * 512
    parts = 4 * rank * (256 // 2 + 512 // 8) + average // 16
    state = training_memory({"w": (256, 512)}, mesh={"fsdp": 8, "tensor": 2})["adapprox"]
    assert state.state == without - factors - average + parts
    row = printed(capsys, "llama3-70b", "--mesh", "fsdp=8,tensor=2")["optimizers"]["AdamW"]
    assert row["state"] == pytest.approx(8 * PUBLISHED["llama3-70b"] / 16, rel=1e-4)
    assert row["state_bytes_per_parameter"] == pytest.approx(8, rel=1e-4)


def test_headers_are_read_without_weights(tmp_path, capsys):
    query = {"model.layers.0.self_attn.q_proj.weight": tensor(256, 256)}
    ids = {"position_ids": tensor(1, 512, dtype="I64"), "h.0.attn.bias": tensor(1, 1, 9, 9)}
    for name, header in {
        "model-1": {"__metadata__": {"format": "pt"}, **query},
        "model-2": {"lm_head.weight": tensor(1000, 256), **ids},
        "other": {"again": tensor(1000, 256)},
    }.items():
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(header))
    assert shapes_of(str(tmp_path / "model-1.safetensors")) == dict.fromkeys(query, (256, 256))
    assert printed(capsys, str(tmp_path))["parameters"] == 1256 * 256


def test_json_of_shapes_and_of_records(small, capsys):
    found = printed(capsys, small, "--weights", "bfloat16")
    assert found["parameters"] == count(SMALL)
    assert found["gradients"] == "bfloat16"
    assert found["optimizers"]["Adafactor"]["gradients"] == 2 * count(SMALL)
    path = TREES / "transformers_gpt2.json"
    leaves = json.loads(path.read_text())["leaves"]
    assert shapes_of(str(path)) == {name: tuple(x["shape"]) for name, x in leaves.items()}


@pytest.fixture
def checkpoint(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {"mlp": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16, jnp.bfloat16)}}
    state = {"params": params, "opt_state": [jnp.ones(16)], "step": jnp.zeros([], jnp.int32)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3" / "state", state)
    return tmp_path / "3"


def test_parameters_of_a_checkpoint(checkpoint):
    expected = {"mlp/kernel": (8, 16), "mlp/bias": (16,)}
    assert shapes_of(str(checkpoint)) == shapes_of(str(checkpoint / "state")) == expected


def test_split_weights_have_a_byte_more_in_the_state(small, capsys):
    found, whole = (printed(capsys, small, *extra) for extra in (("--weights", "split"), ()))
    for name, row in found["optimizers"].items():
        size, of_whole = found["parameters"], whole["optimizers"][name]
        assert row["weights"] == row["gradients"] == 2 * size
        assert row["state"] == of_whole["state"] + size + 2
        assert row["sum"] == 4 * size + row["state"]


def test_a_device_is_full_at_its_size(capsys, tmp_path):
    (tmp_path / "shapes.json").write_text(json.dumps({"w": [10**9]}))  # 16 GB and a count
    fits = printed(capsys, str(tmp_path / "shapes.json"))["optimizers"]["AdamW"]["fits"]
    assert list(fits.values()) == [size > 16 for size in DEVICES]


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpt3"], ["'gpt3' is neither a known model nor", "allowed: gpt2, gpt2-medium"]),
        ([str(TREES)], [f"{str(TREES)!r} holds no weights"]),
        (["gpt2", "--mesh", "8"], ["--mesh", "'8'", "fsdp=8,tensor=2"]),
        (["gpt2", "--mesh", "fsdp=0"], ["'fsdp=0'"]),
        (["gpt2", "--mesh", "fsdp=2,fsdp=2"], ["'fsdp=2,fsdp=2'", "each once"]),
        (["gpt2", "--mesh", "fsdp=2,"], ["'fsdp=2,'"]),
        (["gpt2", "--mesh", "fsdp=8,tensor=7"], ["tensor=7", "allowed"]),
        (["gpt2", "--weights", "int8"], ["--weights", "'int8'", "float32"]),
    ],
)
def test_arguments_that_are_refused(capsys, arguments, expected):
    message = refused(capsys, *arguments)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x07\0\0", "has 7 bytes, and 0 follow"),
        (safetensors(b""), "header has 0 bytes"),
        (safetensors({"w": tensor(2, 2)}, 10**6), "header has 1,000,000 bytes, and"),
        (safetensors(b"w: 2 x 2"), "b'w: 2 x 2' and is no whole object"),
        (safetensors(b"\xff\xfe{}"), "no whole object"),
        (safetensors({"w": {"dtype": "F32"}}), "'w' has the shape None"),
        (safetensors({"w": {"shape": [2, 2]}}), "'w' has the dtype None"),
        (safetensors({"w": tensor(2, -2)}), "'w' has the shape [2, -2]; allowed: a list of int"),
        (safetensors({"w": tensor(2, dtype="I8")}), "no floating-point parameters"),
        ("[3, 4]", "no whole object"),
        ('{"w": "3 x 4"}', "'w' has the shape None"),
        ('{"w": [3, true]}', "'w' has the shape [3, True]"),
        ('{"leaves": 3}', "'leaves' has the shape None"),
    ],
)
def test_files_that_are_refused(tmp_path, capsys, content, expected):
    path = tmp_path / ("model.safetensors" if isinstance(content, bytes) else "shapes.json")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(capsys, str(path))
    assert str(path) in message
    assert expected in message


def test_a_damaged_checkpoint_and_one_without_orbax(checkpoint, capsys, monkeypatch):
    (checkpoint / "state" / "_METADATA").write_text("{")
    assert "Orbax cannot read" in refused(capsys, str(checkpoint))
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "pip install orbax-checkpoint" in refused(capsys, str(checkpoint))


def test_bars(small, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    main([small, "--plot", str(tmp_path / "bars.png")])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for path in ("missing/bars.png", "bars.text"):
        assert f"--plot is {path!r}" in refused(capsys, small, "--plot", path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refused(capsys, small, "--plot", "bars.png")


def test_the_library_does_without_the_program_which_runs_by_its_name():
    code = (
        "import runpy, sys, adapprox_jax; assert 'adapprox_jax.memory' not in sys.modules;"
        " sys.argv = ['', 'gpt2']; runpy.run_module('adapprox_jax.memory', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "adapprox_muon, 4 bits" in done.stdout
