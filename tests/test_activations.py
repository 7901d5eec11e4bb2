"Laws of activation noise: what the estimate is on average and how it scatters, by enumeration and by counting; the same by any route; what is refused."
import itertools, json, math, platform
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import soma.activations, soma.models
from soma.activations import (TIERS, ControlVariate, DustConfig, ModuleDust, byte_forwards, cell_trace, credit, dust, gelu_slope, loss_changes, operations, outer, share, site_gradient,
                              site_lanes, through, top_gradient, top_lanes, trained, weight_gradients)
from soma.core import Key, ModelConfig, SomaError
from soma.estimators import delta_rule, exact_gradient, spsa
from soma.kernels import CpuObjective, kernel
from soma.models import MORE_SITES, ExpertObjective, Objective, init_params, ops_per_token, site_number, site_width, token_losses
from soma.probes import layout_of, site_noise
from soma.signals import Signals, token_gradients

def text(B, T, seed=0): return Key(seed).below(256, "sample", torch.arange(B * (T + 1))).view(B, T + 1).to(torch.uint8)

def moved(model, seed=1, dtype=torch.float64):
    "Parameters that are no longer fresh: gains differ from 1, weights are larger."
    key, theta = Key(seed, 9), init_params(model, seed, dtype)
    return {n: t * 1.5 + 0.2 * key.normal("sample", torch.arange(-(-t.numel() // 4)), row).flatten()[:t.numel()].view(t.shape).to(dtype) for row, (n, t) in enumerate(theta.items())}

def width(site, d): return site_width(ModelConfig(d, 2, d), site)

def signals(theta, windows, site, gamma)->torch.Tensor: "a[t, s] of one window: float64 [T, T, K], by differentiation."; return Signals(token_gradients(theta, windows, [site])[site], gamma).a[:, 0]

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
UNEVEN = ModelConfig(3, 2, 4)

def enumerated(every_sign, site, T, gamma, sigma, baseline="clean", guess=None, model=TINY):
    mask, all_draws = every_sign(T, site_width(model, site))
    theta, windows = moved(model), text(1, T)
    clean = ExpertObjective(model, chunk=1024).clean(theta, windows, Key(1))
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

@pytest.mark.parametrize("model, site, T", [(TINY, "blocks.1.norm1", 4), (TINY, "blocks.0.norm2", 4), (UNEVEN, "norm", 4), (UNEVEN, "embed", 3), (UNEVEN, "input", 4), (UNEVEN, "read", 3)])
def test_the_mean_at_sites_that_are_asked_for(every_sign, model, site, T):
    errors = []
    for sigma in (0.008, 0.004):
        found, want = enumerated(every_sign, site, T, 0.6, sigma, model=model)
        errors.append((found - want).norm().item())
    assert errors[-1] < 0.02 * want.norm() and all(abs(math.log2(a / b) - 2) < 0.1 for a, b in zip(errors, errors[1:])), errors

def test_full_credit_is_the_whole_gradient(every_sign):
    "γ = 1 against plain autograd of the summed loss, for a site of the first block."
    theta, windows, site = moved(TINY), text(1, 4), "blocks.0.hidden"
    mask, draws = every_sign(4, 3)
    a = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    at = lambda name, value, t=None: value + a[:, t] if name == site else value
    g, = torch.autograd.grad(token_losses({n: x if n == "E" else x[None] for n, x in theta.items()}, windows[None], at).sum(), a)
    errors = []
    for sigma in (0.008, 0.004, 0.002): errors.append((site_gradient(ExpertObjective(TINY, chunk=1024).clean(theta, windows, Key(1)), site, draws, sigma, 1.0)[0] - g[0]).norm().item())
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

def many_draws(site, gamma, noise, n=2000, B=48, sigma=3e-3):
    "(single-draw ‖ĝ_t‖² [n·B, T], what is left of the rewards by a guess [n·B, T], signals [t, s, K]) on one window of three bytes, copied."
    theta, windows = moved(TINY, dtype=torch.float32), text(1, 3)
    clean, draws = CpuObjective(TINY).clean(theta, windows.repeat(B, 1), Key(3), noise), torch.arange(n)
    a = signals({m: t.double() for m, t in theta.items()}, windows, site, gamma)
    z = site_noise(noise, Key(3), site_number(site, 2), draws, B, 3, 3, torch.float64)
    rewards = credit(loss_changes(clean, site, draws, sigma), gamma) / sigma
    told = credit((z * torch.stack([a[t, t] for t in range(3)])).sum(-1), gamma)
    return (rewards[..., None] * z).square().sum(-1).flatten(0, 1), (rewards - told).square().flatten(0, 1), a

@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
@pytest.mark.parametrize("site, gamma", [("blocks.0.hidden", 0.0), ("blocks.1.down", 0.5)])
def test_the_second_moment(noise, site, gamma):
    "E‖ĝ_t‖² = K Σ_s ‖a_ts‖², and 2‖a_tt‖² more for normal noise; one draw, 96,000 of them."
    square, _, a = many_draws(site, gamma, noise)
    a = a.square().sum(-1)                                                         # [t, s]
    mean, error, want = square.mean(0), square.std(0) / len(square)**0.5, 3 * a.sum(1) + (2 * a.diagonal() if noise == "gaussian" else 0)
    assert (error / mean).max() < 0.01, error / mean
    assert ((mean - want).abs() < 4 * error + 5e-3 * want).all(), (mean / want, error / want)
    if noise == "gaussian": assert ((3 * a.sum(1) - mean).abs() > 8 * error).any()   # the extra term is there to be seen

def test_a_good_guess_takes_the_noise_of_later_bytes_away():
    "With the true signal for a guess, what is left of the rewards is the past's noise alone, Σ_{s<t}: the terms of s ≥ t go with their own."
    square, left, a = many_draws("blocks.0.hidden", 0.7, "rademacher")
    a = a.square().sum(-1)
    want, error = torch.tril(a, -1).sum(1), left.std(0) / len(left)**0.5
    assert ((left.mean(0) - want).abs() < 4 * error + 0.01 * a.sum(1)).all() and (left.mean(0) < 0.02 * a.sum(1))[0] and want[2] > 0.02 * a[2].sum(), (left.mean(0), want, a.sum(1))

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
        scanned = weight_gradients(clean, {site: site_gradient(clean, site, draws, sigma, gamma)})
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

@pytest.mark.parametrize("B, d, target", [(3, 5, None), (16, 8, None), (70, 6, None), (37, 6, "-march=x86-64"), (37, 6, "-march=haswell")])
def test_the_kernel_s_trace_slope_and_dot(B, d, target):
    "Compiled and plain, on tiles that are full, partly full and several, for several widths of vectors."
    if target and platform.machine() != "x86_64": pytest.skip("builds for other x86 processors")
    class Target(CpuObjective): _kernel = staticmethod(lambda: kernel(*[target] * bool(target)))
    model = ModelConfig(d, 2, d)
    theta, windows = moved(model, dtype=torch.float32), text(B, 7)
    fast, plain = Target(model).clean(theta, windows, Key(5)), ExpertObjective(model).clean({n: t.double() for n, t in theta.items()}, windows, Key(5))
    dh = Key(2).normal("sample", torch.arange(-(-B*7*d // 4))).flatten()[:B*7*d].view(B, 7, d)
    for b in ("blocks.0", "blocks.1"):
        seen = [fast.lanes(f"{b}.{n}") for n in ("gates", "cell")]
        for trace in (True, False): assert torch.allclose(fast.lanes(dh).cell_trace(*seen, trace).rows().double(), cell_trace(dh, plain.activations[f"{b}.gates"], plain.activations[f"{b}.cell"], trace), atol=3e-5)
        assert torch.allclose(fast.lanes(f"{b}.up").gelu_slope().rows().double(), gelu_slope(plain.activations[f"{b}.up"]), atol=1e-5)
        for site in (f"{b}.hidden", f"{b}.up"):
            v = torch.cat([dh] * (width(site, d) // d), -1)
            assert torch.allclose(fast.site_dot(site, torch.tensor([0, 3]), v).double(), plain.site_dot(site, torch.tensor([0, 3]), v), atol=1e-4)
    x, slope, w = dh.flip(1)[..., :d - 1].contiguous(), dh.sin(), dh[0, :3]
    g, s, x_lanes = fast.lanes(dh), fast.lanes(slope), fast.lanes(x)
    assert torch.equal(g.rows(), dh.float())
    for lag in (0, 1): assert torch.allclose(outer(g, x_lanes, lag), outer(dh, x, lag), atol=1e-6)
    found, squares = g.outer(x_lanes, s)
    assert torch.allclose(found, outer(dh * slope, x), atol=1e-6) and torch.allclose(squares, slope.square().mean((0, 1)), atol=1e-6)
    three = fast.lanes(slope[..., :3].contiguous())
    assert torch.allclose(through(w, g).rows().double(), through(w, dh), atol=1e-5) and torch.allclose(through(w, g, three).rows().double(), through(w, dh, slope[..., :3]), atol=1e-5)

@pytest.mark.parametrize("B, T", [(3, 9), (70, 40)])
@pytest.mark.parametrize("model", [ModelConfig(6, 2, 6), ModelConfig(5, 1, 7)])
def test_the_kernel_s_top_and_estimates(model, B, T):
    "As in torch, with every baseline, with a guess and without; a guess that does harm is left out by both."
    theta, windows, draws = moved(model, dtype=torch.float32), text(B, T), torch.tensor([4, 0, 9])
    fast, plain = CpuObjective(model).clean(theta, windows, Key(5)), ExpertObjective(model).clean({n: t.double() for n, t in theta.items()}, windows, Key(5))
    near = lambda a, b: (a - b).norm() < 1e-3 * b.norm()
    top, want = top_lanes(fast), top_gradient(plain.theta, plain.activations, windows[:, 1:])
    assert top.grad.keys() == want.grad.keys() and all(near(top.grad[n], g) for n, g in want.grad.items()) and near(top.stream.rows(), want.stream)
    assert torch.equal(top_lanes(fast, False).grad["E"], top.grad["E"])
    for site, baseline in itertools.product((f"blocks.{model.D - 1}.down", "blocks.0.hidden"), ("clean", "loo", "antithetic")):
        for size in (None, 1.0, 1e3):
            guess, heard = None if size is None else want.stream * size, []
            def watch(power, left): heard.append((power, left)); return left < 2 * power
            a = site_lanes(fast, site, draws, 0.2, 0.7, baseline, None if guess is None else fast.lanes(guess), watch).rows()
            b = site_gradient(plain, site, draws, 0.2, 0.7, baseline, guess, watch)
            assert near(a, b) and len(heard) == 2 * (size is not None) and (size is None or torch.allclose(*torch.tensor(heard).double(), rtol=1e-3))
            if size == 1e3: assert heard[0][1] > 2 * heard[0][0] and near(a, site_gradient(plain, site, draws, 0.2, 0.7, baseline))

def test_passes_that_come_and_go_do_not_disturb_each_other():
    "Memory goes from a pass that is gone to the next one, never from one that is asked again."
    theta, windows, o = moved(MODEL, dtype=torch.float32), text(6, 9), CpuObjective(MODEL)
    ask = lambda c: (c.site_losses("blocks.1.up", torch.arange(2), 0.1), c.activations["blocks.0.gates"])
    first, want = o.clean(theta, windows, Key(1)), ask(CpuObjective(MODEL).clean(theta, windows, Key(1)))
    second = o.clean(theta, text(6, 9, 5), Key(2))
    acts = o.clean(theta, windows, Key(1)).activations   # outlives its pass
    for w in (windows, text(11, 4)): o.clean(theta, w, Key(3))
    assert all(torch.equal(a, b) for a, b in zip(ask(first), want)) and not torch.equal(ask(second)[1], want[1]) and torch.equal(acts["blocks.0.gates"], want[1])

# ---- whole updates

@pytest.mark.parametrize("tier", TIERS)
def test_full_credit_and_many_draws_approach_the_true_gradient(tier):
    model = ModelConfig(6, 2, 6)
    theta, windows = {n: t.float() for n, t in moved(model).items()}, text(16, 4)
    config = DustConfig(tier, n=2000, sigma=0.01, gamma=1.0)
    found, want = dust(CpuObjective(model), theta, [windows], Key(1), config), exact_gradient(ExpertObjective(model), theta, windows)
    assert list(found.grad) == trained(model, config) and found.grad.keys() - want.keys() == {"E"}
    for n in want.keys() & found.grad.keys(): assert F.cosine_similarity(found.grad[n].flatten(), want[n].flatten(), 0) > 0.97 and 0.9 < found.grad[n].norm() / want[n].norm() < 1.1, n

@pytest.mark.parametrize("model", [ModelConfig(6, 2, 6), ModelConfig(5, 1, 8)])
def test_every_parameter_has_an_estimate_without_a_derivative(model):
    "Tier A, all sites, full credit: it approaches the gradient of a tied embedding, both paths, of every gain and of both projections."
    theta, windows, config = moved(model, dtype=torch.float32), text(16, 4), DustConfig(n=2000, sigma=0.01, gamma=1.0, more=MORE_SITES)
    found = dust(CpuObjective(model), theta, [windows], Key(1), config).grad
    leaves = {m: t.double().requires_grad_() for m, t in theta.items()}
    token_losses({m: t if m == "E" else t[None] for m, t in leaves.items()}, windows[None]).mean().backward()
    assert list(found) == trained(model, config) == list(theta)
    for m, t in leaves.items(): assert F.cosine_similarity(found[m].double().flatten(), t.grad.flatten(), 0) > 0.97 and 0.9 < found[m].norm() / t.grad.norm() < 1.1, m
    exact = exact_gradient(ExpertObjective(model), theta, windows)["norm"]
    assert not torch.allclose(found["norm"], exact, rtol=1e-3)   # estimated here, and exact where the top is:
    assert torch.allclose(dust(CpuObjective(model), theta, [windows], Key(1), replace(config, tier="C", n=1)).grad["norm"], exact, rtol=1e-4, atol=1e-7)

@pytest.mark.parametrize("tier", TIERS)
def test_sites_that_are_asked_for_disturb_no_other(tier):
    theta, windows = moved(UNEVEN, dtype=torch.float32), text(9, 6)
    plain, all_ = (dust(CpuObjective(UNEVEN), theta, [windows], Key(1), DustConfig(tier, more=more)).grad for more in ((), MORE_SITES))
    assert list(all_) == list(theta) and plain.keys() < all_.keys()
    assert all(torch.equal(t, all_[n]) == (n != "E") for n, t in plain.items())

def test_sites_where_there_is_something_to_teach():
    sites = lambda projected=False, **more: [s for s in DustConfig(more=MORE_SITES, **more).sites(1, projected) if s.rsplit(".")[-1] in MORE_SITES]
    assert sites(True) == ["embed", "input", "blocks.0.norm1", "blocks.0.norm2", "norm", "read"] and sites() == ["embed", "blocks.0.norm1", "blocks.0.norm2", "norm"]
    assert sites(True, tier="B") == sites(True, cv=True) == ["embed", "input", "blocks.0.norm1", "blocks.0.norm2"] and sites(head="frozen", tier="C") == ["blocks.0.norm1", "blocks.0.norm2"]
    config = DustConfig(gamma={"norm1": 0.25, "blocks.1.norm1": 0.75, "embed": 1}, sigma=dict(read=0.5), more=("norm1",))
    assert [config.of("gamma", s) for s in ("blocks.0.norm1", "blocks.1.norm1", "embed", "input", "norm")] == [0.25, 0.75, 1, 0.5, 0] and config.of("sigma", "read") == 0.5

@pytest.mark.parametrize("tier, baseline, noise", [("A", "clean", "rademacher"), ("B", "loo", "gaussian"), ("C", "antithetic", "rademacher")])
@pytest.mark.parametrize("model", [ModelConfig(8, 2, 8), ModelConfig(6, 1, 4), ModelConfig(5, 3, 9)])
def test_kernel_and_reference_agree(tier, baseline, noise, model):
    theta, windows = moved(model, dtype=torch.float32), text(38, 7)
    config = DustConfig(tier, n=3, baseline=baseline, noise=noise, sigma=dict(up=0.2), gamma=dict(gates=0.9, down=0.1), more=() if model.d == 8 else MORE_SITES)
    a, b = dust(CpuObjective(model), theta, list(windows.split(19)), Key(6), config), dust(ExpertObjective(model), {n: t.double() for n, t in theta.items()}, list(windows.split(19)), Key(6), config)
    assert a.losses.shape == (2, 1, 1, 19) and torch.allclose(a.losses, b.losses, atol=1e-6)
    for n in trained(model, config): assert (a.grad[n] - b.grad[n]).norm() < 2e-4 * b.grad[n].norm(), n

# ---- the control variate's state

MODEL = ModelConfig(8, 2, 8)
SHORT = dict(cv=True, warmup=3, dense=6, n=1, ridge=1.0)   # so few updates teach little

def walk(steps, config, objective=None, state=None, theta=None, first=0, A=1):
    "A few plain steps downhill; (theta, state)."
    objective, state, theta = objective or CpuObjective(MODEL), state or ControlVariate(MODEL, config), theta or moved(MODEL, dtype=torch.float32)
    for u in range(first, first + steps):
        g = dust(objective, theta, list(text(16 * A, 12, u).split(16)), Key(7, u), config, state).grad
        theta = {n: t - 0.05 * g[n] if n in g else t for n, t in theta.items()}
    return theta, state

@pytest.mark.parametrize("more", [(), MORE_SITES])
@pytest.mark.parametrize("tier", TIERS)
def test_a_run_goes_on_to_the_same_bits(tier, more):
    config = DustConfig(tier, more=more, **SHORT)
    straight, _ = walk(14, config)
    half, saved = walk(7, config)
    after = ControlVariate(MODEL, config)
    after.restore({n: t.clone() for n, t in saved.tensors().items()}, json.loads(json.dumps(saved.state(), allow_nan=False)))
    resumed, state = walk(7, config, state=after, theta=half, first=7)
    assert all(torch.equal(straight[n], resumed[n]) for n in straight) and state.updates == 14
    assert set(state.explained) == set(config.sites(2)) and all(t.isfinite().all() for t in state.tensors().values())
    fresh, _ = walk(7, config, theta=half, first=7)
    assert any(not torch.equal(straight[n], fresh[n]) for n in straight)   # without its state it is another run

def same(run, other):
    (a, sa), (b, sb) = run, other
    return all(torch.equal(a[n], b[n]) for n in a) and all(torch.equal(x, sb.tensors()[n]) for n, x in sa.tensors().items()) and sa.state() == sb.state()

@pytest.mark.parametrize("tier", TIERS)
def test_chunks_change_no_bit(tier):
    config = DustConfig(tier, **SHORT | dict(n=3), more=MORE_SITES if tier == "A" else ())
    assert same(*(walk(4, config, ExpertObjective(MODEL, chunk=c)) for c in (1, 32)))

def test_threads_change_no_bit():
    model, config, found, before = ModelConfig(32, 2, 24), DustConfig("B", **SHORT, more=MORE_SITES), [], torch.get_num_threads()
    for threads in (1, 2):   # tensors large enough that torch does share them out
        torch.set_num_threads(threads)
        theta, state = moved(model, dtype=torch.float32), ControlVariate(model, config)
        try: grads = [dust(CpuObjective(model), theta, [text(48, 24, u)], Key(7, u), config, state).grad for u in range(5)]
        finally: torch.set_num_threads(before)
        found.append((grads[-1], state))
    assert same(*found) and found[0][1].explained

def test_wide_products_do_not_depend_on_threads():
    g, x, found = torch.randn(1100, 512, generator=torch.Generator().manual_seed(1)), torch.randn(1100, 128, generator=torch.Generator().manual_seed(2)), []
    for threads in (1, 2): torch.set_num_threads(threads); found.append(outer(g, x))
    torch.set_num_threads(1)
    assert torch.equal(*found) and torch.allclose(found[0], g.double().T @ x.double() / 1100, atol=1e-6)

def test_it_listens_first_then_learns_every_update_then_every_fourth():
    config, changed, before = DustConfig("B", **SHORT), [], None
    state, theta = ControlVariate(MODEL, config), moved(MODEL, dtype=torch.float32)
    for u in range(17):
        told = bool(state.explained)
        dust(CpuObjective(MODEL), theta, [text(16, 12, u)], Key(7, u), config, state)
        if before is not None and not torch.equal(before, state.second): changed.append(u)
        before = state.second.clone()
        assert bool(state.explained) == (u >= 3) and told == (u > 3)
    assert changed == [1, 2, 3, 4, 5, 7, 11, 15]

def test_what_it_learns_is_the_ridge_regression():
    config = DustConfig("A", cv=True, decay=0.5, ridge=0.1)
    state, clean = ControlVariate(MODEL, config), ExpertObjective(MODEL).clean(moved(MODEL), text(6, 10), Key(1))
    acts = clean.activations
    top = top_gradient(clean.theta, acts, clean.windows[:, 1:])
    truth = {s: Key(2).normal("sample", torch.arange(6*10*width(s, 8)), i).flatten()[:6*10*width(s, 8)].view(6, 10, -1) for i, s in enumerate(config.sites(2))}
    slopes = {s: gelu_slope(acts[s]) for s in truth if s.endswith("up")}
    state.learn([(truth, top.stream, slopes)])
    x = top.stream.flatten(0, 1)
    for s, y in truth.items():
        y, slope = y.flatten(0, 1), slopes[s].flatten(0, 1) if s in slopes else torch.ones(60, width(s, 8)).double()
        second = x.T @ x / 60
        want = torch.linalg.solve(second + 0.1 * second.diagonal().mean() * torch.eye(8), ((y*slope).T @ x / 60 / slope.square().mean(0)[:, None]).T).T
        assert torch.allclose(state.maps[s], want, rtol=1e-8, atol=1e-12)
    assert state.guess(config.sites(2)[0], top.stream) is None
    state.updates = 50
    assert torch.allclose(state.guess("blocks.0.up", top.stream, slopes["blocks.0.up"]), top.stream @ state.maps["blocks.0.up"].T * gelu_slope(acts["blocks.0.up"]))

@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_one_that_diverges_is_left_out_with_one_line(value, capsys):
    config = DustConfig("A", **SHORT)
    theta, state = walk(5, config)
    state.maps["blocks.1.up"].mul_(value)
    capsys.readouterr()
    there, state = walk(3, config, state=state, theta=theta, first=5)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("soma: update 5: the control variate diverges, at blocks.1.up") and "raise decay" in line
    assert state.off and json.loads(json.dumps(state.state(), allow_nan=False))["off"] == state.off and all(t.isfinite().all() for t in there.values())
    plain = dust(CpuObjective(MODEL), there, [text(16, 12)], Key(7, 99), replace(config, cv=False)).grad
    again = dust(CpuObjective(MODEL), there, [text(16, 12)], Key(7, 99), config, state).grad
    assert all(torch.equal(plain[n], again[n]) for n in plain) and "norm" in again

def test_a_guess_that_helps_makes_training_estimates_less_noisy():
    "With A learnt along a walk, estimates at fixed parameters scatter less about the same mean."
    config = DustConfig("B", **SHORT | dict(warmup=20, dense=200))
    theta, state = walk(60, config)
    windows, spread = text(16, 12, 3), {}
    for cv in (True, False):
        kept = []
        for s in range(60):
            copy = ControlVariate(MODEL, config); copy.restore(state.tensors(), state.state())
            kept.append(dust(CpuObjective(MODEL), theta, [windows], Key(1, s), replace(config, cv=cv), copy if cv else None).grad["blocks.0.w_up"].flatten())
        x = torch.stack(kept); spread[cv] = (x - x.mean(0)).square().sum(1).mean().item(); spread[cv, "mean"] = x.mean(0)
    assert spread[True] < 0.8 * spread[False]
    assert (spread[True, "mean"] - spread[False, "mean"]).square().sum() < 2.5 * (spread[True] + spread[False]) / 60

# ---- counts

def test_counts():
    paper = ModelConfig()
    assert [round(9 * share(paper, s), 9) for s in DustConfig().sites(2)] == [9, 8, 6, 6, 4, 2] and share(paper, "blocks.1.hidden") == 6 / 9
    assert byte_forwards(paper, DustConfig("A", n=3), 2, 5, 4) == pytest.approx(40 * (1 + 3 * 35 / 9)) and byte_forwards(paper, DustConfig("C", baseline="antithetic"), 1, 1) == pytest.approx(1 + 2 * 21 / 9)
    assert byte_forwards(paper, DustConfig("A", n=dict(gates=2)), 1, 1) == pytest.approx(1 + 35 / 9 + 15 / 9)
    wide = ModelConfig(64, 2, 32)
    assert share(wide, "blocks.1.down") == pytest.approx((256*32 + 64*32) / (28*64**2 + 256*32 + 64*32))
    assert [round(9 * share(paper, s), 9) for s in ("embed", "blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm")] == [10, 10, 8, 6, 4, 2]
    assert byte_forwards(paper, DustConfig(more=MORE_SITES), 1, 1) == pytest.approx(1 + (35 + 40) / 9)
    assert share(wide, "embed") == pytest.approx((32*64**2 + 256*32 + 2*64*32) / (28*64**2 + 256*32 + 64*32)) and share(wide, "read") == share(wide, "norm") == share(wide, "blocks.1.down")
    assert share(wide, "input") == share(wide, "blocks.0.norm1") == pytest.approx((32*64**2 + 256*32 + 64*32) / (28*64**2 + 256*32 + 64*32))
    assert operations(wide, DustConfig(more=MORE_SITES), 1, 1)["products"] - operations(wide, DustConfig(), 1, 1)["products"] == 2 * (32 + 2 * 64*32 + 5 * 64)
    parts = operations(paper, DustConfig("A"), 2, 3)
    assert parts["forwards"] == pytest.approx(6 * (1 + 35 / 9) * ops_per_token(paper)) and parts["products"] == 6 * 2 * 16 * 2 * 32**2 and parts["head"] == 6 * 2 * 2 * 256 * 32 and parts["cv"] == 0

# ---- what is refused

@pytest.mark.parametrize("wrong, says", [
    (dict(tier="AB"), "A, B, C"), (dict(noise="uniform"), "rademacher, gaussian"), (dict(baseline="none"), "clean, loo, antithetic"), (dict(head="full"), "delta, frozen"),
    (dict(sigma=0), "sigma = 0"), (dict(sigma=-0.1), "positive"), (dict(sigma=math.nan), "positive"), (dict(sigma=math.inf), "positive"), (dict(sigma=dict(up=0.0)), "at up"),
    (dict(gamma=-0.1), "between 0 and 1"), (dict(gamma=dict(gates=1.01)), "at gates"), (dict(gamma=math.nan), "between 0 and 1"), (dict(n=0), "at least 1"), (dict(n=1.5), "whole number"),
    (dict(n=1, baseline="loo"), "at least 2"), (dict(n=dict(up=3, down=1), baseline="loo"), "at down"), (dict(gamma=dict(cell=0.1)), "no site 'cell'"), (dict(n={"blocks.x.up": 1}), "no site"),
    (dict(more="embed"), "more = 'embed'"), (dict(more=["embed", "gates"]), "choose from embed, input"), (dict(sigma={"blocks.0.norm1": 0}), "at blocks.0.norm1"), (dict(decay=1.0), "decay"), (dict(ridge=0.0), "ridge"), (dict(warmup=0), "warmup")])
def test_settings_that_make_no_sense(wrong, says):
    with pytest.raises(SomaError, match=says) as e: DustConfig(**wrong)
    assert "\n" not in str(e.value)

def test_leaving_one_out_counts_the_default_of_the_sites_that_are_not_named():
    with pytest.raises(SomaError, match="at least 2"): dust(ExpertObjective(TINY), moved(TINY), [text(2, 3)], Key(1), DustConfig(n=dict(up=3), baseline="loo"))

def test_objectives_that_cannot():
    quadratic = Objective(layout_of(dict(w=torch.ones(3))), lambda s, b: s["w"].square().sum(-1))
    with pytest.raises(SomaError, match="no loss of every byte"): dust(quadratic, dict(w=torch.ones(3)), [None], Key(1))
    with pytest.raises(SomaError, match="ControlVariate"): dust(ExpertObjective(TINY), moved(TINY), [text(2, 3)], Key(1), DustConfig(cv=True))
    with pytest.raises(SomaError, match="these sites"): dust(ExpertObjective(TINY), moved(TINY), [text(2, 3)], Key(1), DustConfig("B", cv=True), ControlVariate(TINY, DustConfig(cv=True)))
    with pytest.raises(SomaError, match="blocks.0.embed"): dust(ExpertObjective(TINY), moved(TINY), [text(2, 3)], Key(1), DustConfig(sigma={"blocks.0.embed": 0.5}))
    with pytest.raises(SomaError, match="blocks.2.up"): dust(ExpertObjective(TINY), moved(TINY), [text(2, 3)], Key(1), DustConfig(gamma={"blocks.2.up": 0.5}))
    theta = moved(TINY) | {"blocks.1.w_up": torch.full((12, 3), math.inf, dtype=torch.float64)}
    with pytest.raises(SomaError, match="not finite"): dust(ExpertObjective(TINY), theta, [text(2, 3)], Key(1))

# ---- any module

class Reader(nn.Module):
    "Bytes through an LSTM and a small MLP."
    def __init__(self, d=6, dropout=0.0):
        super().__init__()
        self.embed, self.lstm, self.up, self.drop, self.score = nn.Embedding(256, 5), nn.LSTM(5, d, batch_first=True), nn.Linear(d, 8), nn.Dropout(dropout), nn.Linear(8, 256, bias=False)
    def forward(self, x): return self.score(self.drop(self.up(self.lstm(self.embed(x))[0]).tanh()))

def every_byte(m, windows): return F.cross_entropy(m(windows[:, :-1].long()).transpose(1, 2), windows[:, 1:].long(), reduction="none")

def reader(**more): torch.manual_seed(4); return Reader(**more).double()

def test_a_module_of_the_reader_s_own_approaches_autograd():
    module, windows = reader(), text(60, 4)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    found = ModuleDust(module, every_byte).dust([windows], Key(1), n=100, sigma=1e-3, gamma=1.0)
    loss = every_byte(module, windows).mean(); loss.backward()
    assert found.grad.keys() == {n for n, _ in module.named_parameters() if "embed" not in n} and found.loss == pytest.approx(loss.item(), abs=1e-12) and found.losses.shape == (1, 1, 1, 60)
    for n, g in found.grad.items():
        if n != "score.weight": assert F.cosine_similarity(g.flatten(), module.get_parameter(n).grad.flatten(), 0) > 0.9, n
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()) and not any(m._forward_hooks for m in module.modules())

def test_the_lstm_byte_by_byte_is_torch_s():
    module, x = reader(), torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h, (hn, cn) = module.lstm(x)
    again, gates, cell = soma.activations.lstm_steps(module.lstm, x)
    assert torch.allclose(h, again, atol=1e-12) and torch.allclose(cn[0], cell[:, -1], atol=1e-12)
    state = (torch.ones(1, 3, 6).double(), torch.ones(1, 3, 6).double() / 2)
    assert torch.allclose(module.lstm(x, state)[0], soma.activations.lstm_steps(module.lstm, x, state)[0], atol=1e-12)

def test_dropout_falls_on_the_same_units_in_every_forward():
    module, windows = reader(dropout=0.5).train(), text(4, 5)
    objective = ModuleDust(module, every_byte)
    clean = soma.activations.ModuleCleanPass(objective, objective.theta(), windows, Key(3), "rademacher")
    assert (clean.site_losses("up", torch.arange(2), 1e-6) - clean.losses).abs().max() < 1e-4
    a, b = (objective.dust([windows, windows], Key(3), n=2, gamma=0.5, noise="gaussian", baseline="antithetic").grad for _ in range(2))
    assert all(torch.equal(a[n], b[n]) for n in a)

def test_frozen_layers_and_named_sites():
    module = reader(); module.up.requires_grad_(False)
    assert list(ModuleDust(module, every_byte).sites) == ["lstm", "score"]
    assert ModuleDust(module, every_byte, ["lstm"]).dust([text(2, 4)], Key(1)).grad.keys() == {f"lstm.{n}" for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")}

class Twice(Reader):
    def forward(self, x): return self.score(self.up(self.lstm(self.embed(x))[0]) + self.up(self.lstm(self.embed(x))[0]))

@pytest.mark.parametrize("build, says", [
    (lambda: ModuleDust(reader(), every_byte, ["attention"]), "site 'attention'"),
    (lambda: ModuleDust(nn.Sequential(nn.Conv1d(2, 2, 1)), every_byte), "no nn.Linear"),
    (lambda: ModuleDust(nn.Sequential(nn.LSTM(4, 4, num_layers=2, batch_first=True)), every_byte), "one layer"),
    (lambda: ModuleDust(reader(), lambda m, w: every_byte(m, w).mean()).dust([text(2, 4)], Key(1)), r"\[B, T\]"),
    (lambda: ModuleDust(reader(), lambda m, w: every_byte(m, w).mean(1)).dust([text(2, 4)], Key(1)), r"\[B, T\]"),
    (lambda: ModuleDust(reader(), lambda m, w: every_byte(m, w)[:, 1:]).dust([text(2, 4)], Key(1)), "one row for every loss"),
    (lambda: ModuleDust(reader(), lambda m, w: m.embed(w[:, 1:].long()).sum(-1)).dust([text(2, 4)], Key(1)), "never came by"),
    (lambda: ModuleDust(Twice().double(), every_byte).dust([text(2, 4)], Key(1)), "more than once"),
    (lambda: ModuleDust(reader(), every_byte).dust([text(2, 4)], Key(1), sigma=0.0), "positive"),
    (lambda: ModuleDust(reader(), every_byte).dust([text(2, 4)], Key(1), gamma=2.0), "between 0 and 1"),
])
def test_modules_that_cannot(build, says):
    with pytest.raises(SomaError, match=says) as e: build()
    assert "\n" not in str(e.value)
