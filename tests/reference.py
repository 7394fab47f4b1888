"""Adapprox for one matrix in plain NumPy float64, written from the paper, to be checked by eye.

Line by line: Algorithm 1 (`srsi`), Algorithm 2 (`adaptive_srsi`), Algorithm 3 (`step`), each with
the deviations of docs/algorithm.md where a comment names their number. Nothing is masked, nothing
is shared between ranks, every factorization is done anew at its own width.
"""

from dataclasses import dataclass, replace

import numpy as np


def growth(xi, eta, omega, phi, tau):
    return max(int(np.floor(eta / (1 + np.exp(omega * xi - phi)) + tau)), 0)  # 1


def srsi(a, k, start, l, p, rotate):
    """Algorithm 1 from a start with at least k + p columns."""
    width = min(k + p, *a.shape)  # 7
    u = start[:, :width]
    for _ in range(l):
        q, _ = np.linalg.qr(a @ u)
        u = a.T @ q
    if rotate:  # 7
        _, _, turn = np.linalg.svd(u, full_matrices=False)
        q, u = q @ turn.T, u @ turn.T
    return q[:, :k], u[:, :k]


def relative_error(a, q, u):
    norm = np.linalg.norm(a)
    return np.linalg.norm(a - q @ u.T) / norm if norm > 0 else 0.0  # 6


@dataclass(frozen=True)
class Settings:
    k_init: int = 1
    k_max: int = 8
    xi_thresh: float = 0.01
    interval: int = 10
    growth: tuple = (200.0, -10.0, -2.5, -9.0)  # eta, omega, phi, tau
    l: int = 5
    p: int = 5
    rotate: bool = True
    warm_start: bool = False
    root: bool = False
    b1: float = 0.9
    b2: float = 0.999
    exponent: float | None = None  # of 1 - t^-exponent, in place of b2
    eps: float = 1e-8
    eps_root: float = 0.0
    clip: float | None = 1.0
    nesterov: bool = False
    guidance: bool = False
    max_scale: float = 3.0
    bias_correction: bool = False
    weight_decay: float = 0.0
    cautious: bool = False


@dataclass(frozen=True)
class State:
    q: np.ndarray
    u: np.ndarray
    k: int
    m: np.ndarray
    t: int = 0
    xi: float = 0.0
    tried: tuple = ()  # the errors that the choice of the rank looked at


def init(shape, s):
    m, n = shape
    return State(np.zeros((m, s.k_init)), np.zeros((n, s.k_init)), s.k_init, np.zeros(shape))


def adaptive_srsi(a, k, t, start, s):
    """Algorithm 2."""
    if s.k_init >= s.k_max:
        # The basis of p more columns is turned, and the next step starts from it.
        return *srsi(a, s.k_max, start, s.l, s.p, s.rotate and s.p > 0), s.k_max, ()
    if (t - 1) % s.interval != 0:  # 2: the rank stays, and 7: so do the directions
        return *srsi(a, k, start, s.l, 0, False), k, ()
    k, tried = s.k_init, []
    while True:
        # 7: every rank is cut from as many columns as the largest rank has, and p more
        q, u = srsi(a, k, start, s.l, s.k_max - k + s.p, s.rotate)
        xi = relative_error(a, q, u)
        tried.append(xi)
        if xi <= s.xi_thresh or k == s.k_max:  # 2
            return q, u, k, tuple(tried)
        k = min(k + max(growth(xi, *s.growth), 1), s.k_max)  # 2


def reconstruct(state, s):
    v = np.maximum(state.q @ state.u.T, 0)  # 3
    return v**2 if s.root else v


def step(g, w, state, gaussian, s):
    """Algorithm 3 and the guidance; returns the update before the learning rate, and the state."""
    t = state.t + 1
    b2 = s.b2 if s.exponent is None else 1 - t**-s.exponent
    v = b2 * reconstruct(state, s) + (1 - b2) * g**2
    start = gaussian.copy()
    if s.warm_start:
        for j, u in enumerate(state.u.T):
            if np.any(u):
                start[:, j] = u + 1e-3 * u[np.argmax(abs(u))] * gaussian[:, j]
    a = np.sqrt(v) if s.root else v
    q, u, k, tried = adaptive_srsi(a, state.k, t, start, s)
    v_hat = v / (1 - b2**t) if s.bias_correction else v  # 5
    update = g / (np.sqrt(v_hat + s.eps_root) + s.eps)
    if s.clip is not None:
        update = update / max(1, np.sqrt(np.mean(update**2)) / s.clip)
    m = s.b1 * state.m + (1 - s.b1) * update
    emitted = m
    if s.nesterov:
        emitted = s.b1 * m / (1 - s.b1 ** (t + 1)) + (1 - s.b1) * update / (1 - s.b1**t)
    if s.guidance:
        norms = np.linalg.norm(update) * np.linalg.norm(m)
        theta = np.clip(np.sum(update * m) / norms, -1, 1) if norms > 0 else 0.0  # 4, 6
        emitted = m * min(1 / (1 - theta + s.eps), s.max_scale)  # 4
    new = replace(state, q=q, u=u, k=k, m=m, t=t, xi=relative_error(a, q, u), tried=tried)
    decay = s.weight_decay * w
    if s.cautious:
        decay = np.where(emitted * w >= 0, decay, 0)
    return emitted + decay, new
