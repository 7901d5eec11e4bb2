"Laws of grouped inference: the fast path gives what the reference gives, and a window's answer depends on nothing but itself and its route."
import numpy as np
import pytest
import torch

import soma.inference
from soma.core import Key, ModelConfig
from soma.inference import Ensemble
from soma.kernels import CpuObjective, expert_objective
from soma.models import ExpertObjective, init_params
from soma.routing import Router

if expert_objective(ModelConfig()).impl != "cpu": pytest.skip("no compiler here: there is only the reference", allow_module_level=True)


def windows(n, T, salt=0)->torch.Tensor: return Key(salt).below(256, "sample", torch.arange(n * (T + 1))).view(n, T + 1).to(torch.uint8)

def experts(cfg, N)->list:
    "Untrained experts with gains away from one and sharper heads."
    return [{n: t * 2 if n == "E" else t + 0.1 * torch.sin(torch.arange(t.numel()) + e).view_as(t) for n, t in init_params(cfg, seed=e).items()} for e in range(N)]

def routes_of(n, k, among, salt=0)->torch.Tensor:
    "k different experts for each window, in no order: int64 [n, k]."
    u = Key(salt).uniform("batch", torch.arange(n * len(among))).view(n, len(among))
    return torch.tensor(among)[u.argsort(1)[:, :k]]

def double(thetas): return [{n: t.double() for n, t in theta.items()} for theta in thetas]


SHAPES = [  # d, D, d_E, N, windows, T, k, experts that are in use
    (1, 1, 1, 2, 3, 4, 1, [0, 1]),
    (13, 2, 13, 5, 37, 9, 3, [4, 0, 2]),            # two experts without windows, one of them the second
    (20, 3, 8, 7, 50, 11, 1, [6]),                  # all windows to the last of seven
    (33, 4, 32, 3, 1, 7, 2, [2, 0]),                # one window
    (32, 2, 32, 9, 130, 6, 4, [1, 2, 3, 5, 7, 8]),  # more windows for an expert than its widest tile holds
    (8, 1, 8, 4, 65, 5, 4, [0, 1, 2, 3]),           # k = N
]

@pytest.mark.parametrize("d, D, d_E, N, n, T, k, among", SHAPES)
def test_grouped_losses_are_the_reference_s(d, D, d_E, N, n, T, k, among):
    cfg = ModelConfig(d, D, d_E)
    thetas, x, routes = experts(cfg, N), windows(n, T, d), routes_of(n, k, among, d)
    got, wanted = CpuObjective(cfg).routed_losses(thetas, x, routes), ExpertObjective(cfg).routed_losses(double(thetas), x, routes)
    assert got.shape == wanted.shape == (n, k, T) and (got - wanted).abs().max() < 4e-6
    if k > 1: assert (wanted[:, 0] - wanted[:, 1]).abs().max() > 0.1      # an exchange of experts would be seen

@pytest.mark.parametrize("k", range(1, 6))
def test_every_k(k):
    cfg = ModelConfig(9, 2, 5)
    thetas, x, routes = experts(cfg, 5), windows(23, 8), routes_of(23, k, range(5), k)
    got, wanted = CpuObjective(cfg).routed_losses(thetas, x, routes), ExpertObjective(cfg).routed_losses(double(thetas), x, routes)
    assert (got - wanted).abs().max() < 4e-6
    for j in range(k):
        alone = torch.stack([CpuObjective(cfg).token_losses(thetas[e], w[None])[0] for e, w in zip(routes[:, j], x)])
        assert torch.equal(got[:, j], alone)                             # expert by expert, window by window

@pytest.mark.parametrize("d, d_E", [(32, 32), (21, 8), (181, 32)])
def test_a_window_s_bits_do_not_depend_on_its_company(d, d_E, monkeypatch):
    cfg, n = ModelConfig(d, 1, d_E), 101
    ensemble, x, routes = Ensemble(experts(cfg, 3), cfg, impl="cpu"), windows(n, 12).numpy(), routes_of(n, 2, [2, 0, 1]).numpy()
    whole = ensemble.token_losses(x, routes)
    shuffled = np.random.default_rng(0).permutation(n)
    assert np.array_equal(ensemble.token_losses(x[shuffled], routes[shuffled]), whole[shuffled])
    for m in (1, 15, 16, 17, 33, 48, 65): assert np.array_equal(ensemble.token_losses(x[:m], routes[:m]), whole[:m]), m
    assert np.array_equal(ensemble.token_losses(x[::-1].copy()[:40], routes[::-1].copy()[:40]), whole[::-1][:40])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert np.array_equal(ensemble.token_losses(x, routes), whole), threads
    finally: torch.set_num_threads(before)
    for pairs, piece in ((2, 1), (38, 5), (64, 100)):
        monkeypatch.setattr(soma.inference, "PAIRS", pairs); monkeypatch.setattr(soma.inference, "PIECE", piece)
        assert np.array_equal(ensemble.token_losses(x, routes), whole), (pairs, piece)


def by_hand(theta, window)->np.ndarray:
    "Next-byte probabilities [T, 256] of one expert, in numpy and float64, a byte at a time (Appendix C)."
    w = {n: t.double().numpy() for n, t in theta.items()}
    erf = lambda a: torch.erf(torch.from_numpy(a)).numpy()
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    norm = lambda a, gain: (a - a.mean()) / np.sqrt(a.var() + 1e-5) * gain
    d, out = len(w["norm"]), []
    blocks = sorted({int(n.split(".")[1]) for n in w if n.startswith("blocks")})
    h, c = ({b: np.zeros(d) for b in blocks} for _ in range(2))
    for byte in window[:-1]:
        x = w["proj_in"] @ w["E"][byte] if "proj_in" in w else w["E"][byte]
        for b in blocks:
            p = {n.split(".")[2]: t for n, t in w.items() if n.startswith(f"blocks.{b}.")}
            i, f, g, o = (p["w_ih"] @ norm(x, p["norm1"]) + p["w_hh"] @ h[b]).reshape(4, d)
            c[b] = sigmoid(f) * c[b] + sigmoid(i) * np.tanh(g)
            h[b] = sigmoid(o) * np.tanh(c[b])
            x = x + h[b]
            u = p["w_up"] @ norm(x, p["norm2"])
            x = x + p["w_down"] @ (u * (1 + erf(u / np.sqrt(2))) / 2)
        y = norm(x, w["norm"])
        z = w["E"] @ (w["proj_out"] @ y if "proj_out" in w else y)
        out.append(np.exp(z - z.max()) / np.exp(z - z.max()).sum())
    return np.array(out)

@pytest.mark.parametrize("d, D, d_E", [(12, 2, 12), (7, 3, 5)])
def test_the_average_is_that_of_equation_1(d, D, d_E):
    cfg, n, T = ModelConfig(d, D, d_E), 9, 30
    thetas, x = experts(cfg, 6), windows(n, T).numpy()
    routes = routes_of(n, 4, [5, 3, 2, 0]).numpy()
    got = Ensemble(thetas, cfg, impl="cpu").token_losses(x, routes)
    p = np.stack([sum(by_hand(thetas[e], w) for e in r) / 4 for w, r in zip(x, routes)])
    wanted = -np.log(np.take_along_axis(p, x[:, 1:, None].astype(int), 2)[..., 0])
    assert got.dtype == np.float64 and abs(np.exp(-got) - np.exp(-wanted)).max() < 1e-6 and abs(got - wanted).max() < 5e-6 and abs(got.mean() - wanted.mean()) < 2e-7
    one_expert = Ensemble(thetas, cfg, impl="cpu").token_losses(x, routes[:, :1])
    assert abs(one_expert - wanted).max() > 0.05                          # four are not one

def test_best_first_is_a_stable_sort_s_beginning():
    "Rows with equal cosines, centroids that stand twice, and rows without words."
    words = [f"w{i}" for i in range(6)]
    centroids = np.eye(6, dtype=np.float32)[[2, 0, 2, 5, 1, 0, 3, 4, 2]]
    router = Router(words, np.ones(6), np.eye(6, dtype=np.float32), np.zeros(6, np.float32), centroids, np.array([1, 4, 1, 9, 0, 4, 2, 2, 1]), dict(sequences=24))
    texts = [b"w0 w1", b"w2", b"w5 w5 w3", b"nothing known", b"w0 w1 w2 w3 w4 w5", b""]
    wanted = np.argsort(-router.similarity(texts), axis=1, kind="stable")
    wanted[[3, 5]] = [3, 1, 5, 6, 7, 0, 2, 8, 4]                          # without words: largest first
    for k in range(1, 10): assert np.array_equal(router.top_k(texts, k), wanted[:, :k])
