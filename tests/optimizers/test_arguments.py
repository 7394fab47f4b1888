"""Arguments out of range give one line: what was given, what is allowed, and where."""

import dataclasses
import math
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax.params.model_shapes import shapes_of

PARAMS = {"w": jnp.ones((256, 512)), "b": jnp.ones(512)}


@dataclasses.dataclass
class Decaying:
    """A schedule as a configuration has it. One with fields that may change has no hash."""

    first: float

    def __call__(self, step):
        return self.first / (1 + step)


def raises(call, *words, error=ValueError):
    """The call raises an error of one line that has all of the words."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    for word in (*words, "allowed" if error is ValueError else ""):
        assert word in message, message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("b2", value)
            for value in (1.0, 1.5, jnp.array(1.5), np.array(1.5), "0.9", True, np.nan)
        ),
        *(("b1", value) for value in (1.0, -0.1, jnp.array(1.0), lambda: 0.9)),
        *(("eps", value) for value in (-1.0, jnp.array(-1.0), jnp.ones(2), None)),
        ("b2", lambda: 0.9),
        *(("eps_root", value) for value in (-1.0, jnp.array(np.nan))),
        *((name, np.inf) for name in ("learning_rate", "weight_decay", "eps", "error_threshold")),
        *(("learning_rate", x) for x in (None, jnp.array(np.nan), lambda step, other: 1e-3)),
        *(("weight_decay", value) for value in (-0.1, jnp.array(-0.1))),
        *(("clipping_threshold", value) for value in (0.0, jnp.array(0.0))),
        *(("guidance_max_scale", value) for value in (0.5, jnp.array(0.5))),
        *(("error_threshold", value) for value in (-0.1, jnp.array(-1.0), lambda: 0.1)),
        *((name, "no") for name in ("cosine_guidance", "bias_correction", "rotate", "warm_start")),
        ("cautious_weight_decay", 1),
        ("cosine_guidance", np.ones(2)),
        *(("mask", value) for value in ("w", {"w": "yes"}, {"w": 1}, 0.5)),
        *((name, 1) for name in ("cosine_guidance", "bias_correction", "rotate", "warm_start")),
        ("rank_growth", lambda: 1),
        ("rank_growth", 3),
        *(("rank_interval", value) for value in (0, 2.5, jnp.array(3), 2**31)),
        *(("max_rank", value) for value in (0, 0.0, 1.5)),
        *((name, 0) for name in ("initial_rank", "power_iterations", "min_dim_size_to_factor")),
        ("oversampling", -1),
        *(("mu_dtype", value) for value in (jnp.int16, jnp.float8_e4m3fn, "int3")),
        ("approximate", "cube"),
        ("approximate", jnp.ones(2)),
        ("orthogonalization", "svd"),
        ("factor_dtype", "banana"),
        ("factor_dtype", jnp.float16),
        *((name, x) for name in ("factor_dtype", "mu_dtype") for x in (jnp.ones(2), np.ones(2))),
        *(("weight_dimension_numbers", value) for value in ("a", 5, {"w": 5}, (0, 1))),
        ("weight_dimension_numbers", lambda: None),
        *(("key", value) for value in (2**70, -(2**64), 1.5, True, "a", jnp.ones(2))),
    ],
)
def test_an_argument_out_of_range_is_named(name, value):
    arguments = {"learning_rate": 1e-3, name: value}
    raises(lambda: adapprox_jax.adapprox(**arguments), name)


@pytest.mark.parametrize("numbers", [("a", 1), (0, 2.5), (0, 7), (0, 0), ((), ())])
def test_dimension_numbers_that_name_no_axes_are_named(numbers):
    tx = adapprox_jax.adapprox(
        1e-3, weight_dimension_numbers=adapprox_jax.MatrixDimensionNumbers(*numbers)
    )
    with pytest.raises(ValueError, match="weight_dimension_numbers names"):
        tx.init(jnp.ones((256, 512)))


def test_without_a_clip_a_decay_begins_at_zero_or_may_as_a_traced_one():
    adapprox_jax.adapprox(1e-3, b2=adapprox_jax.increasing_decay(), clipping_threshold=None)

    @jax.jit
    def with_a_traced_decay(x):
        tx = adapprox_jax.adapprox(1e-3, b2=lambda t: 1 - x / t, clipping_threshold=None)
        return tx.init(PARAMS)

    with_a_traced_decay(1.0)


def test_leaves_that_are_no_arrays_of_floats_are_named():
    tx = adapprox_jax.adapprox(1e-3)
    for leaf, words in [
        (1.0, "['w']: the parameter is a Python float; allowed: arrays"),
        (jnp.ones(3, jnp.float8_e4m3fn), "['w']: the parameter has type float8_e4m3fn; allowed"),
        *(
            (jnp.ones(3, name), f"['w']: the parameter has type {name}; allowed")
            for name in ("int32", "complex64", "bool")
        ),
    ]:
        raises(lambda leaf=leaf: tx.init({"w": leaf}), words, error=TypeError)


A, CODED = jnp.ones((6, 4)), adapprox_jax.quantize(jnp.ones(40))
TX, MUON = partial(adapprox_jax.adapprox, 1e-3), partial(adapprox_jax.adapprox_muon, 1e-3)
STATE = TX().init(PARAMS)
ADAM = optax.adam(1e-3)
ADAM_STATE = ADAM.init(PARAMS)
SRSI = partial(adapprox_jax.srsi, A, 2, 0)
FROM_ADAM = partial(adapprox_jax.from_adam, TX())
SEVERAL = optax.partition({"matrix": TX(), "rest": TX()}, {"w": "matrix", "b": "rest"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TX(initial_rank=8, max_rank=4), "max_rank is 4; allowed"),
        (lambda: TX(cosine_guidance=True, b1=0.0), "above 0 where cosine_guidance is on"),
        (lambda: TX(mu_dtype="int3", b1=0.0), "mu_dtype is 'int3'"),
        (lambda: TX(b2=lambda t: 0.9, bias_correction=True), "True and b2 a function; allowed"),
        (lambda: TX(clipping_threshold=None), "None and bias_correction is False; allowed"),
        (
            lambda: TX(b2=lambda t: 0.9, clipping_threshold=None),
            "clipping_threshold is None and bias_correction is False; allowed: a threshold or",
        ),
        (lambda: TX(rank_growth=Decaying(0.1)), "allowed: what can be hashed"),
        (lambda: TX(key=jnp.zeros(3, jnp.uint32)), "allowed: an integer seed or a JAX"),
        (lambda: MUON(b1=1.0), "b1 is 1.0"),
        (lambda: MUON(adapprox_b1=1.5), "adapprox_b1 is 1.5"),
        (lambda: MUON(b2=lambda t: 0.9), "b2 is a function and second_moment 'neurons'; allowed"),
        (lambda: MUON(nesterov="no"), "nesterov is 'no'"),
        (lambda: MUON(newton_schulz_steps=0), "newton_schulz_steps is 0"),
        (lambda: MUON(second_moment=8), "second_moment is 8"),
        (lambda: MUON(orthogonalized={"v": True}).init(PARAMS), "orthogonalized is {'v': True};"),
        (lambda: MUON(orthogonalized=True).init(PARAMS), "orthogonalized names ['b'] of shape"),
        (lambda: adapprox_jax.orthogonalize().update(PARAMS, None), "['b']: got shape (512,);"),
        (lambda: MUON(adapprox_learning_rate_scale=0.0), "adapprox_learning_rate_scale is 0.0"),
        (lambda: adapprox_jax.guided_ema(max_scale=0.9), "max_scale is 0.9; allowed: a number of"),
        (
            lambda: adapprox_jax.guided_ema(cosine_guidance=True, nesterov=True),
            "cosine_guidance and nesterov are True; allowed: one of them",
        ),
        (lambda: adapprox_jax.clip_by_matrix_rms(None), "threshold is None; allowed: a number"),
        *(
            (lambda x=x: adapprox_jax.scale_by_neuron_moment(matrix_rms=x), f"matrix_rms is {x}")
            for x in (0, -1.0, np.nan)
        ),
        (lambda: adapprox_jax.add_cautious_weight_decay(-1), "weight_decay is -1; allowed: a fin"),
        (lambda: TX(weight_decay=lambda: 0.1), "at least 0, or a function from the step"),
        (lambda: adapprox_jax.stochastic_rounding(optax.sgd(1.0), seed=-1), "seed is -1"),
        # NumPy holds float64 to be equal to None.
        *(
            (lambda x=x: adapprox_jax.split_weights(optax.sgd(0.1), dtype=x), f"dtype is {name};")
            for x, name in [
                *((np.dtype("float64"), "float64"), (None, "None")),
                *((jnp.float32, "float32"), ("bf16", "'bf16'")),
            ]
        ),
        (lambda: adapprox_jax.muon_report(PARAMS, True, 5), "weight_dimension_numbers has 5;"),
        # S-RSI and codes.
        (lambda: adapprox_jax.srsi(A.astype(jnp.complex64), 2, 0), "matrix is of type complex64"),
        (lambda: adapprox_jax.srsi([[1.0, 2.0], [3.0, 4.0]], 2, 0), "matrix is of type list"),
        (lambda: adapprox_jax.srsi(jnp.ones(4), 2, 0), "shape (4,)"),
        *(
            (lambda x=x: adapprox_jax.srsi(A, x, 0), f"rank is {x}; allowed: an integer from 1 to")
            for x in (0, 2.5, 5)
        ),
        *((lambda x=x: adapprox_jax.srsi(A, 2, x), "key is ") for x in ("key", jnp.ones(2))),
        (lambda: SRSI(power_iterations=0), "power_iterations is 0"),
        (lambda: SRSI(oversampling=-1), "oversampling is -1"),
        (lambda: SRSI(orthogonalization="svd"), "orthogonalization is 'svd'"),
        (lambda: adapprox_jax.quantize([1.0, 2.0]), "array has type list"),
        (lambda: adapprox_jax.quantize(A.astype(jnp.complex64)), "array has type complex64"),
        (lambda: adapprox_jax.quantize(jnp.ones(4), 8, jnp.ones(3)), "noise has shape (3,)"),
        (lambda: adapprox_jax.quantize(jnp.ones(4), 8, 0.5), "noise has shape float"),
        (lambda: adapprox_jax.quantize(jnp.ones(3), bits=6), "bits is 6; allowed: 8, 5, 4"),
        (lambda: adapprox_jax.quantize(jnp.ones(())), "array.ndim is 0; allowed: at least 1"),
        (lambda: adapprox_jax.dequantize(*CODED, 4), "shape is 4; allowed"),
        (lambda: adapprox_jax.dequantize([1], [1.0], (1,)), "codes is a list; allowed"),
        (lambda: adapprox_jax.dequantize(*CODED, (100,)), "int8 (40,), (2,); allowed for shape"),
        (lambda: adapprox_jax.dequantize(*CODED[::-1], (40,)), "codes.dtype is dtype(bfloat16);"),
        # Functions of the host.
        (
            lambda: jax.jit(lambda s: adapprox_jax.rank_report(s, PARAMS))(STATE),
            "Call rank_report between two steps",
        ),
        (lambda: jax.jit(lambda s: adapprox_jax.resize(s, 4))(STATE), "Call resize between two"),
        (
            lambda: jax.jit(lambda s: adapprox_jax.grow(s, PARAMS, (8, 16)))(STATE),
            "Call grow between two steps",
        ),
        (lambda: jax.jit(lambda s: FROM_ADAM(s, PARAMS))(ADAM_STATE), "Call from_adam between two"),
        (lambda: adapprox_jax.rank_report(PARAMS, STATE), "rank_report(state, params)"),
        (lambda: adapprox_jax.grow(STATE, PARAMS, 8), "sizes is 8; allowed: a sequence"),
        (lambda: adapprox_jax.grow(STATE, PARAMS, (8,), error_threshold="a"), "error_threshold"),
        (lambda: adapprox_jax.resize(STATE, 8, truncate="no"), "truncate is 'no'"),
        (lambda: adapprox_jax.state_nbytes(PARAMS, optax.sgd(1.0)), "tx is a dict"),
        (lambda: adapprox_jax.from_adam("a", None, PARAMS), "tx is a str"),
        (lambda: adapprox_jax.from_adam(ADAM, ADAM_STATE, PARAMS), "tx keeps no state of Adapprox"),
        (lambda: adapprox_jax.from_adam(SEVERAL, ADAM_STATE, PARAMS), "several second moments;"),
        (lambda: FROM_ADAM(STATE, PARAMS), "adam_state holds 0 states of Adam; allowed"),
        *(
            (lambda x=x: FROM_ADAM(ADAM_STATE, PARAMS, **x), f"{next(iter(x))} ")
            for x in [
                *({"clipping_threshold": 0.0}, {"bias_correction": "no"}),
                *({"weight_dimension_numbers": "a"}, {"b1": 1.0}, {"b2": jnp.array(2.0)}),
                {"approximate": "r"},
            ]
        ),
    ],
)
def test_what_cannot_be_is_named(call, words):
    raises(call, words)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": PARAMS["w"]}, r"\['b'\]: adam_state has no such leaf"),
        ({**PARAMS, "b": jnp.ones(3)}, r"\['b'\]: .* in adam_state have shape \(3,\)"),
    ],
)
def test_from_adam_names_leaves_that_do_not_fit(other, words):
    with pytest.raises(ValueError, match=words):
        FROM_ADAM(ADAM.init(other), PARAMS)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(
            (name, value, f"gave {given}; allowed: one real number")
            for name in ("error_threshold", "b2", "learning_rate", "weight_decay")
            for value, given in ((jnp.ones(3), "float32[3]"), ("x", "'x'"), (None, "None"))
        ),
        *((name, x, f"is {x}; allowed") for name in ("b1", "b2") for x in (1.5, -0.1, np.nan)),
        *(
            (name, x, f"is {x}; allowed")
            for name in ("error_threshold", "weight_decay")
            for x in (-0.1, np.nan)
        ),
        ("learning_rate", np.nan, "is nan; allowed: a finite number at every step"),
    ],
)
def test_functions_give_one_number_in_range_at_every_step(name, value, words):
    tx = adapprox_jax.adapprox(**{"learning_rate": 1e-3, name: lambda step: value})
    state = jax.eval_shape(tx.init, PARAMS)
    raises(lambda: jax.eval_shape(tx.update, PARAMS, state, PARAMS), f"{name} {words}")


def test_low_precision_and_array_scalars_are_numbers():
    for b2 in (jnp.array(0.9), np.float32(0.9), jnp.bfloat16(0.9), np.array(0.9), 0.9):
        adapprox_jax.adapprox(1e-3, b2=b2)


def test_without_an_average_no_bytes_are_kept_for_it_under_inject_hyperparams():
    """b1 is static there: 0 decides the shape of the state."""
    inject = optax.inject_hyperparams(adapprox_jax.adapprox, adapprox_jax.STATIC_ARGS)
    plain = adapprox_jax.state_nbytes(adapprox_jax.adapprox(1e-3, b1=0.0), PARAMS)
    injected = adapprox_jax.state_nbytes(inject(1e-3, b1=0.0), PARAMS)
    assert injected <= plain + 64 < PARAMS["w"].nbytes / 10  # the hyperparameters


@pytest.mark.parametrize(
    ("name", "arguments", "nbytes"),
    [
        ("adapprox", {}, 4.06),
        *(("adapprox", {"mu_dtype": f"int{n}"}, x) for n, x in ((8, 1.12), (5, 0.75), (4, 0.62))),
        ("adapprox_muon", {"mu_dtype": "int4"}, 0.58),
        ("adapprox_muon", {"b1": 0.0, "adapprox_b1": 0.0}, 0.02),
    ],
)
def test_bytes_of_gpt2_117m(name, arguments, nbytes):
    """What README says, but for layers that are stacked here."""
    shapes = shapes_of("gpt2") | {"embedder/embedding": (50304, 768)}
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    count = sum(map(math.prod, shapes.values()))
    total = adapprox_jax.state_nbytes(getattr(adapprox_jax, name)(1e-3, **arguments), params)
    assert abs(total / count - nbytes) < 0.005


@pytest.mark.parametrize("make", [adapprox_jax.adapprox, adapprox_jax.adapprox_muon])
def test_a_decay_that_is_one_in_bfloat16_is_refused(make):
    """Optax casts hyperparameters to the type of the parameters."""
    muon = make is adapprox_jax.adapprox_muon
    static = adapprox_jax.MUON_STATIC_ARGS if muon else adapprox_jax.STATIC_ARGS
    params = {"w": jnp.ones((64, 96), jnp.bfloat16)}
    tx = optax.inject_hyperparams(make, static_args=static)(1e-3)
    said = r"b2 is an array of type bfloat16; allowed: .*give hyperparam_dtype=jnp.float32"
    with pytest.raises(ValueError, match=said):
        jax.jit(tx.init)(params)
    if not muon:  # whose default is 0.95
        with pytest.raises(ValueError, match=said):
            tx.init(params)
    wide = optax.inject_hyperparams(make, static_args=static, hyperparam_dtype=jnp.float32)(1e-3)
    state = wide.init(params)
    assert state.hyperparams["b2"] == jnp.float32(0.95 if muon else 0.999)
    jax.eval_shape(wide.update, params, state, params)


def test_an_average_whose_decay_is_one_in_bfloat16_is_refused():
    params = jnp.ones(4, jnp.bfloat16)
    tx = optax.inject_hyperparams(adapprox_jax.guided_ema)(b1=0.999)
    with pytest.raises(ValueError, match=r"b1 is an array of type bfloat16; .*hyperparam_dtype"):
        jax.jit(tx.init)(params)
    tx = adapprox_jax.guided_ema(0.999, nesterov=True)
    state = tx.init(params)
    with pytest.raises(ValueError, match="state's left has type bfloat16; allowed: float32"):
        tx.update(params, state._replace(left=state.left.astype(jnp.bfloat16)))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("learning_rate", lambda step: 1e-3, "learning_rate is a function of the step, and"),
        ("weight_decay", lambda step: 0.1, "weight_decay is a function of the step, and"),
        ("mask", {"w": True}, "a mask is given, and the state was made without one"),
    ],
)
def test_a_state_without_a_count_or_a_mask_does_not_go_on_with_one(name, value, words):
    params = {"w": jnp.ones((8, 8))}
    plain = adapprox_jax.adapprox(1e-3)
    changed = adapprox_jax.adapprox(**{"learning_rate": 1e-3, name: value})
    with pytest.raises(ValueError, match=words):
        changed.update(params, plain.init(params), params)
    plain.update(params, changed.init(params), params)  # the other way round it does


@pytest.mark.parametrize("typed", [False, True])
def test_random_keys_are_of_any_generator(typed):
    key = jax.random.key(0, impl="rbg")
    tx = adapprox_jax.scale_by_adapprox(key=key if typed else jax.random.key_data(key))
    assert tx.init({"w": jnp.ones(3)}).key.shape == (4,)  # numbers, where the default has two


def test_an_import_leaves_jax_to_be_set_up():
    """Devices, and the processes of a cluster, can be asked for until the first computation."""
    code = (
        "import adapprox_jax, jax; jax.config.update('jax_num_cpu_devices', 3);"
        " assert jax.device_count() == 3"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_hyperparameters_of_a_wider_type_change_no_type():
    """Under x64, NumPy and JAX scalars of float64 beside float32 parameters."""
    with jax.enable_x64(True):
        params = jnp.ones((64, 80), jnp.float32)
        results = []
        for b2 in (0.9, np.float64(0.9), jnp.float64(0.9)):
            tx = adapprox_jax.scale_by_adapprox(b2, initial_rank=1, max_rank=4)
            updates, state = jax.jit(tx.update)(params, tx.init(params))
            assert updates.dtype == state.q.dtype == jnp.float32
            results.append(updates)
        np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
        np.testing.assert_allclose(results[2], results[0], rtol=1e-5)


def test_codes_of_no_numbers_are_read():
    codes, scales = adapprox_jax.quantize(jnp.ones((0, 40)))
    assert adapprox_jax.dequantize(codes, scales, (0, 40)).shape == (0, 40)


def test_restored_states_of_numpy_are_resized():
    state = adapprox_jax.adapprox(1e-3).init(PARAMS)
    restored = jax.tree.map(np.asarray, state)
    assert adapprox_jax.resize(restored, 4, truncate=True)[0].q["w"].shape == (256, 4)


@pytest.mark.parametrize(
    "tx",
    [
        adapprox_jax.guided_ema(),
        adapprox_jax.clip_by_matrix_rms(0.5),
        adapprox_jax.scale_to_matrix_rms(0.25),
        adapprox_jax.orthogonalize(),
        adapprox_jax.scale_by_neuron_moment(),
        adapprox_jax.scale_by_adapprox(),
    ],
)
def test_integer_updates_are_refused(tx):
    state = tx.init({"w": jnp.ones((8, 8))})
    with pytest.raises(TypeError, match=r"\['w'\]: the (update|gradient) has type int32; allowed"):
        tx.update({"w": jnp.ones((8, 8), jnp.int32)}, state)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            lambda params: {"w": "no"},
            r"^mask\(params\) has 'no' at \['w'\]; allowed: None, a tree of booleans",
        ),
        (lambda params: None, r"^mask\(params\) is None; allowed: None, a tree"),
        (lambda path, param: True, "^mask is <function .*>; allowed: None, a tree"),
        ({"w": np.array([True, False])}, "mask has array"),
        ({"v": True}, "mask is {'v': True}; allowed: None, a tree of booleans that is a prefix"),
        ({"w": True, "v": True}, "mask is .*; allowed: None, a tree of booleans that is a prefix"),
    ],
)
def test_masks_that_do_not_fit_are_named(mask, words):
    params = {"w": jnp.ones((8, 8))}
    for cautious in (False, True):
        with pytest.raises(ValueError, match=words):
            adapprox_jax.adapprox(1e-3, mask=mask, cautious_weight_decay=cautious).init(params)


def test_a_largest_rank_of_one_as_a_fraction_is_no_rank_of_one():
    tx = adapprox_jax.scale_by_adapprox(initial_rank=1, max_rank=1.0)
    assert int(tx.init(jnp.ones((64, 96))).rank[0]) == 1


def test_a_schedule_may_be_an_object_without_a_hash():
    schedules = dict(b1=Decaying(0.9), b2=Decaying(0.9), weight_decay=Decaying(0.1))
    tx = adapprox_jax.adapprox(Decaying(0.1), **schedules)
    updates, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))
