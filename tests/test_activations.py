"Laws of activation noise: what the estimate is on average and how it scatters, by enumeration and by counting; the same by any route; what is refused."
import itertools, json, math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import soma.activations, soma.models
from soma.activations import (TIERS, ControlVariate, DustConfig, ModuleDust, byte_forwards, cell_trace, credit, dust, gelu_slope, loss_changes, operations, outer, share, site_gradient,
                              top_gradient, trained, weight_gradients)
from soma.core import Key, ModelConfig, SomaError
from soma.estimators import delta_rule, exact_gradient, spsa
from soma.kernels import CpuObjective
from soma.models import SITES, ExpertObjective, Objective, init_params, ops_per_token, site_number, token_losses
from soma.probes import layout_of, site_noise

def text(B, T, seed=0): return Key(seed).below(256, "sample", torch.arange(B * (T + 1))).view(B, T + 1).to(torch.uint8)

def moved(model, seed=1, dtype=torch.float64):
    "Parameters that are no longer fresh: gains differ from 1, weights are larger."
    key, theta = Key(seed, 9), init_params(model, seed, dtype)
    return {n: t * 1.5 + 0.2 * key.normal("sample", torch.arange(-(-t.numel() // 4)), row).flatten()[:t.numel()].view(t.shape).to(dtype) for row, (n, t) in enumerate(theta.items())}

def width(site, d): return d if site.endswith(("hidden", "down")) else 4*d

def signals(theta, windows, site, gamma)->torch.Tensor:
    "a[t, s] = Σ_{u ≥ max(t, s)} γ^{u−t} ∇_s L_u for one window: float64 [T, T, K], by differentiation."
    T, K = windows.shape[1] - 1, width(site, len(theta["norm"]))
    a = torch.zeros(1, T, K, dtype=torch.float64, requires_grad=True)
    def at(name, value, t=None): return value + (a if t is None else a[:, t]) if name == site else value
    losses = token_losses({n: x if n == "E" else x[None] for n, x in theta.items()}, windows[None], at)[0, 0]
    g = torch.stack([torch.autograd.grad(losses[u], a, retain_graph=True)[0][0] for u in range(T)])   # [u, s, K]
    return torch.stack([torch.stack([sum(gamma**(u - t) * g[u, s] for u in range(max(t, s), T)) for s in range(T)]) for t in range(T)])

@pytest.fixture
def every_sign(monkeypatch):
    "Draw j is the j-th of all sign patterns on 12 units of the site (all of them, or some at every byte); elsewhere there is no noise."
    def use(T, K):
        chosen = [(t, k) for t in range(T) for k in range(0, K, max(1, T*K // 12))][:12]
        mask = torch.zeros(T, K, dtype=torch.bool)
        for t, k in chosen: mask[t, k] = True
        table = torch.zeros(2**int(mask.sum()), 1, T, K, dtype=torch.float64)
        table[:, 0, mask] = torch.tensor(list(itertools.product((1.0, -1.0), repeat=int(mask.sum()))), dtype=torch.float64)
        for room in (soma.models, soma.activations): monkeypatch.setattr(room, "site_noise", lambda noise, key, site, draws, *shape, dtype=None: table[draws].clone() if len(draws) > 1 or shape[2] == K else torch.ones(1, *shape[:3]))
        return mask, torch.arange(len(table))
    return use

TINY = ModelConfig(3, 2, 3)   # a norm over two numbers knows only their order

def enumerated(every_sign, site, T, gamma, sigma, baseline="clean", guess=None):
    mask, all_draws = every_sign(T, width(site, 3))
    theta, windows = moved(TINY), text(1, T)
    clean = ExpertObjective(TINY, chunk=4096).clean(theta, windows, Key(1))
    found = site_gradient(clean, site, all_draws, sigma, gamma, baseline, guess)[0]
    want = torch.stack([a[t] for t, a in enumerate(signals(theta, windows, site, gamma))])
    return found[mask], want[mask]

@pytest.mark.parametrize("site, T", [("blocks.0.hidden", 4), ("blocks.0.gates", 2), ("blocks.0.up", 3), ("blocks.1.down", 4), ("blocks.0.down", 4)])
@pytest.mark.parametrize("gamma", [0.0, 0.6])
def test_the_mean_is_the_credited_gradient_up_to_sigma_squared(every_sign, site, T, gamma):
    errors = []
    for sigma in (0.008, 0.004, 0.002):
        found, want = enumerated(every_sign, site, T, gamma, sigma)
        errors.append((found - want).norm().item())
    slopes = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    assert errors[-1] < 0.02 * want.norm() and all(abs(s - 2) < 0.1 for s in slopes), (errors, slopes)

def test_full_credit_is_the_whole_gradient(every_sign):
    "γ = 1 against plain autograd of the summed loss, for a site of the first block."
    theta, windows, site = moved(TINY), text(1, 4), "blocks.0.hidden"
    mask, draws = every_sign(4, 3)
    a = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    at = lambda name, value, t=None: value + a[:, t] if name == site else value
    g, = torch.autograd.grad(token_losses({n: x if n == "E" else x[None] for n, x in theta.items()}, windows[None], at).sum(), a)
    errors = []
    for sigma in (0.02, 0.01, 0.005): errors.append((site_gradient(ExpertObjective(TINY, chunk=4096).clean(theta, windows, Key(1)), site, draws, sigma, 1.0)[0] - g[0]).norm().item())
    assert all(abs(math.log2(x / y) - 2) < 0.1 for x, y in zip(errors, errors[1:])) and errors[-1] < 1e-3 * g.norm()

@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("site, T", [("blocks.0.hidden", 4), ("blocks.1.down", 4), ("blocks.0.up", 1)])
def test_a_control_variate_leaves_the_mean_alone(every_sign, site, T, gamma):
    K = width(site, 3)
    guess = Key(5).normal("sample", torch.arange(T * K)).flatten()[:T * K].view(1, T, K) * 3
    plain, _ = enumerated(every_sign, site, T, gamma, 0.1)
    told, _ = enumerated(every_sign, site, T, gamma, 0.1, guess=guess)
    assert (plain - told).abs().max() < 1e-10 * max(1, guess.abs().max()) and len(plain) == 12

def test_opposite_draws_have_the_same_mean_and_a_clean_pass_is_not_needed(every_sign):
    found, want = enumerated(every_sign, "blocks.0.hidden", 4, 0.5, 0.01, "antithetic")
    assert torch.allclose(found, enumerated(every_sign, "blocks.0.hidden", 4, 0.5, 0.01)[0], atol=1e-10) and (found - want).norm() < 0.01 * want.norm()

def test_leave_one_out_is_each_draw_against_the_others():
    theta, windows = moved(TINY), text(3, 4)
    clean = ExpertObjective(TINY).clean(theta, windows, Key(1))
    up, x = clean.site_losses("blocks.0.up", torch.arange(5), 0.1), loss_changes(clean, "blocks.0.up", torch.arange(5), 0.1, "loo")
    for j in range(5): assert torch.allclose(x[j], up[j] - up[[i for i in range(5) if i != j]].mean(0), atol=1e-12)

@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
@pytest.mark.parametrize("site, gamma", [("blocks.0.hidden", 0.0), ("blocks.0.hidden", 0.7), ("blocks.1.down", 0.5)])
def test_the_second_moment(noise, site, gamma):
    "E‖ĝ_t‖² = K Σ_s ‖a_ts‖², and 2‖a_tt‖² more for normal noise; one draw, 60,000 of them."
    theta, windows, T, K, sigma = moved(TINY), text(1, 3), 3, 3, 1e-3
    clean, draws = ExpertObjective(TINY, chunk=4000).clean(theta, windows, Key(3), noise), torch.arange(60_000)
    rewards = credit(loss_changes(clean, site, draws, sigma), gamma)[:, 0]
    z = torch.cat([site_noise(noise, Key(3), site_number(site, 2), part, 1, T, K, torch.float64)[:, 0] for part in draws.split(10_000)])
    square = (rewards[..., None] * z / sigma).square().sum(-1)                     # [draws, T]
    a = signals(theta, windows, site, gamma).square().sum(-1)                      # [t, s]
    want = K * a.sum(1) + (2 * a.diagonal() if noise == "gaussian" else 0)
    mean, error = square.mean(0), square.std(0) / len(draws)**0.5
    assert (error / mean).max() < 0.02 and (error[0] / mean[0]) < 0.0125, error / mean
    assert ((mean - want).abs() < 4 * error + 1e-3 * want).all(), (mean / want, error / want)
    if noise == "gaussian": assert ((K * a.sum(1) - mean).abs() > 4 * error).any()   # the extra term is there to be seen

def test_a_good_guess_takes_the_noise_away():
    "With the true signal for a guess, what is left is the past's noise: Σ_{s<t} alone, the terms of later bytes gone with their own."
    theta, windows, site, gamma, sigma = moved(TINY), text(1, 3), "blocks.0.down", 0.7, 1e-3
    a = signals(theta, windows, site, gamma)
    guess = torch.stack([a[t, t] for t in range(3)])[None]
    clean, draws = ExpertObjective(TINY, chunk=4000).clean(theta, windows, Key(3)), torch.arange(20_000)
    told = credit(sigma * soma.activations.site_dot(clean, site, draws, guess), gamma)
    left = ((credit(loss_changes(clean, site, draws, sigma), gamma) - told) / sigma)[:, 0].square()
    want = torch.stack([sum((a[t, s].square().sum() for s in range(t)), torch.tensor(0.0)) for t in range(3)])
    error = left.std(0) / len(draws)**0.5
    assert ((left.mean(0) - want).abs() < 4 * error + 1e-4).all() and left.mean(0)[0] < 1e-4

# ---- the same by another route

def test_the_cell_trace_is_autograd_with_w_hh_detached():
    B, T, d = 3, 7, 4
    draw = lambda row, *shape: Key(8).normal("sample", torch.arange(-(-math.prod(shape) // 4)), row).flatten()[:math.prod(shape)].view(shape)
    x, w_ih, w_hh, dh = draw(0, B, T, d), draw(1, 4*d, d).requires_grad_(), draw(2, 4*d, d), draw(3, B, T, d)
    h, c, total, kept = torch.zeros(B, d).double(), torch.zeros(B, d).double(), 0, []
    for t in range(T):
        gates = x[:, t] @ w_ih.T + h.detach() @ w_hh.T
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid()*c + i.sigmoid()*g.tanh()
        h = o.sigmoid()*c.tanh()
        total = total + (dh[:, t] * h).sum()
        kept.append((gates.detach(), c.detach()))
    gates, cell = (torch.stack(k, 1) for k in zip(*kept))
    want, = torch.autograd.grad(total, w_ih)
    assert torch.allclose(outer(cell_trace(dh, gates, cell), x) * B*T, want, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(outer(cell_trace(dh, gates, cell, trace=False), x) * B*T, want, rtol=0.1)

@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_scans_and_online_traces_give_the_same_gradient(gamma):
    "e_u = γ e_{u−1} + z_u x_uᵀ for a matrix; for the cell a trace for every weight that decays by f, and one of γ over it. Both hear each byte's change once, and never look back."
    model, sigma = ModelConfig(4, 2, 4), 0.1
    theta, windows = moved(model), text(2, 9)
    clean, draws = ExpertObjective(model).clean(theta, windows, Key(2)), torch.arange(1)
    acts = clean.activations
    for site in ("blocks.1.up", "blocks.0.hidden"):
        scanned = weight_gradients(acts, {site: site_gradient(clean, site, draws, sigma, gamma)})
        change = loss_changes(clean, site, draws, sigma)[0] / sigma                                  # [B, T]
        z = site_noise("rademacher", Key(2), site_number(site, 2), draws, 2, 9, width(site, 4), torch.float64)[0]
        online = torch.zeros(16, 4, dtype=torch.float64)
        for b in range(2):
            e, cell = torch.zeros(16, 4).double(), torch.zeros(3, 4, 4).double()                      # of i, f, g by unit and input
            for u in range(9):
                if site.endswith("up"): e = gamma*e + z[b, u][:, None] * acts["blocks.1.norm2"][b, u]
                else:
                    x, c, before = acts["blocks.0.norm1"][b, u], acts["blocks.0.cell"][b, u], acts["blocks.0.cell"][b, u - 1] if u else torch.zeros(4).double()
                    i, f, g, o = acts["blocks.0.gates"][b, u].chunk(4)
                    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
                    cell = f[:, None]*cell + torch.stack([g*i*(1-i), before*f*(1-f), i*(1-g**2)])[..., None] * x
                    now = torch.cat([*((z[b, u]*o*(1-c.tanh()**2))[:, None] * cell), (z[b, u]*c.tanh()*o*(1-o))[:, None] * x])
                    e = gamma*e + now
                online += change[b, u] * e
        name = "blocks.1.w_up" if site.endswith("up") else "blocks.0.w_ih"
        assert torch.allclose(online / 18, scanned[name], rtol=1e-10, atol=1e-13)

@pytest.mark.parametrize("kind, weight, read", [("up", "w_up", "norm2"), ("down", "w_down", "active")])
def test_a_nudge_of_each_byte_s_weights_is_a_nudge_of_its_activation(kind, weight, read):
    "σ z xᵀ/‖x‖² added to the weights for one byte alone moves that byte's output by σ z."
    model, sigma, name = ModelConfig(6, 2, 6), 0.3, f"blocks.0.{kind}"
    theta, windows = moved(model, dtype=torch.float32), text(3, 8)
    clean, K = ExpertObjective(model).clean(theta, windows, Key(4)), width(name, 6)
    z = site_noise("rademacher", Key(4), site_number(name, 2), torch.arange(1), 3, 8, K)[0]
    seen = {}
    def at(n, value, t=None):
        if n == f"blocks.0.{read}": seen["x"] = value[0]
        if n != name: return value
        x = seen["x"]
        W = theta[f"blocks.0.{weight}"] + sigma * z[..., None] * x[:, :, None] / x.square().sum(-1)[..., None, None]    # [B, T, K, I]: weights of each byte's own
        return torch.einsum("btki,bti->btk", W, x)[None]
    losses = token_losses({n: t if n == "E" else t[None] for n, t in theta.items()}, windows[None], at)[0]
    replay = clean.site_losses(name, torch.arange(1), sigma)[0]
    assert (losses - replay).abs().max() < 1e-6 * replay.abs().max() and (replay - clean.losses).abs().max() > 0.01

def test_the_top_is_exact_with_projections_and_without():
    for model in (ModelConfig(6, 2, 6), ModelConfig(5, 1, 7)):
        theta, windows = moved(model), text(3, 9)
        acts = ExpertObjective(model).clean(theta, windows, Key(1)).activations
        top, want = top_gradient(theta, acts, windows[:, 1:]), exact_gradient(ExpertObjective(model), theta, windows)
        for n in top.grad.keys() - {"E"}: assert torch.allclose(top.grad[n], want[n], rtol=1e-9, atol=1e-13)
        assert torch.allclose(top.grad["E"], delta_rule(acts["read"], windows[:, 1:], theta["E"]), rtol=1e-9, atol=1e-13) and ("proj_out" in top.grad) == model.projected
        last = outer(top.stream, acts[f"blocks.{model.D - 1}.active"])
        assert torch.allclose(last, want[f"blocks.{model.D - 1}.w_down"], rtol=1e-9, atol=1e-13)

def test_gelu_slope(): x = torch.linspace(-4, 4, 33).double().requires_grad_(); assert torch.allclose(gelu_slope(x.detach()), torch.autograd.grad(F.gelu(x).sum(), x)[0], atol=1e-14)

# ---- whole updates

@pytest.mark.parametrize("tier", TIERS)
def test_full_credit_and_many_draws_approach_the_true_gradient(tier):
    model = ModelConfig(6, 2, 6)
    theta, windows = {n: t.float() for n, t in moved(model).items()}, text(16, 4)
    config = DustConfig(tier, n=2000, sigma=0.03, gamma=1.0)
    found, want = dust(CpuObjective(model), theta, [windows], Key(1), config), exact_gradient(ExpertObjective(model), theta, windows)
    assert list(found.grad) == trained(model, config) and found.grad.keys() - want.keys() == {"E"}
    for n in want.keys() & found.grad.keys(): assert F.cosine_similarity(found.grad[n].flatten(), want[n].flatten(), 0) > 0.97 and 0.9 < found.grad[n].norm() / want[n].norm() < 1.1, n

@pytest.mark.parametrize("tier, baseline, noise", [("A", "clean", "rademacher"), ("B", "loo", "gaussian"), ("C", "antithetic", "rademacher")])
@pytest.mark.parametrize("model", [ModelConfig(8, 2, 8), ModelConfig(6, 1, 4)])
def test_kernel_and_reference_agree(tier, baseline, noise, model):
    theta, windows = moved(model, dtype=torch.float32), text(38, 7)
    config = DustConfig(tier, n=3, baseline=baseline, noise=noise, sigma=dict(up=0.2), gamma=dict(gates=0.9, down=0.1))
    a, b = dust(CpuObjective(model), theta, list(windows.split(19)), Key(6), config), dust(ExpertObjective(model), {n: t.double() for n, t in theta.items()}, list(windows.split(19)), Key(6), config)
    assert a.losses.shape == (2, 1, 1, 19) and torch.allclose(a.losses, b.losses, atol=1e-6)
    for n in trained(model, config): assert (a.grad[n] - b.grad[n]).norm() < 2e-4 * b.grad[n].norm(), n
