"""adapprox_muon for one hidden matrix in plain NumPy float64, to be checked by eye.

Average, Nesterov's momentum, Newton-Schulz iteration; the second moment of the direction as in
`tests.reference`, exact or left out; then a root mean square of 0.2.
"""

from dataclasses import dataclass, replace

import numpy as np

from tests import reference

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(a, steps):
    if a.shape[0] > a.shape[1]:
        return newton_schulz(a.T, steps).T
    c0, c1, c2 = COEFFICIENTS
    x = a / np.linalg.norm(a) if np.any(a) else a
    for _ in range(steps):
        gram = x @ x.T
        x = c0 * x + (c1 * gram + c2 * gram @ gram) @ x
    return x


@dataclass(frozen=True)
class Settings:
    b1: float = 0.95
    b2: float = 0.95
    eps: float = 1e-8
    steps: int = 5
    nesterov: bool = True
    factored: reference.Settings | None = None
    exact: bool = False
    neurons: int | None = None  # axis of the outputs: one number for each, as in NorMuon


@dataclass(frozen=True)
class State:
    m: np.ndarray
    v: np.ndarray
    factors: reference.State | None
    t: int = 0


def init(shape, s):
    factors = reference.init(shape, s.factored) if s.factored else None
    return State(np.zeros(shape), np.zeros(shape), factors)


def step(g, state, gaussian, s):
    """The update before decay and rate, and the state."""
    t = state.t + 1
    m = s.b1 * state.m + (1 - s.b1) * g
    ahead = m
    if s.nesterov:
        ahead = s.b1 * m / (1 - s.b1 ** (t + 1)) + (1 - s.b1) * g / (1 - s.b1**t)
    direction = newton_schulz(ahead, s.steps) * np.sqrt(max(g.shape))
    v, factors = state.v, state.factors
    if s.exact or s.neurons is not None:
        squares = direction**2
        if s.neurons is not None:
            squares = np.mean(squares, axis=1 - s.neurons, keepdims=True)
        v = s.b2 * v + (1 - s.b2) * squares
        direction = direction / (np.sqrt(v) + s.eps)
    elif s.factored:
        direction, factors = reference.step(direction, 0.0, factors, gaussian, s.factored)
    else:
        return 0.2 * direction, replace(state, m=m, t=t)
    rms = np.sqrt(np.mean(direction**2))
    update = 0.2 * direction / rms if rms > 0 else direction
    return update, replace(state, m=m, v=v, factors=factors, t=t)
