"Laws of leakage, credit, bias and signal to noise: by enumeration, where bytes are alike, and against draws."
import itertools, math

import pytest
import torch

import soma.signals
from soma.activations import DustConfig, ModuleDust, credit, dust, loss_changes, site_gradient
from soma.core import Key, ModelConfig, SomaError
from soma.estimators import exact_gradient, spsa
from soma.kernels import CpuObjective
from soma.models import SITES, CleanPass, ExpertObjective, init_params, token_losses
from soma.signals import (GradientSample, Signals, bias, compare, curvature, flat_weights, future_of_equals, predicted_update, token_gradients)

MODEL = ModelConfig(6, 2, 6)
def text(B, T, seed=0): return Key(seed).below(256, "sample", torch.arange(B * (T + 1))).view(B, T + 1).to(torch.uint8)
def moved(model=MODEL, dtype=torch.float64): return {n: (1.6 * t.double()).to(dtype) for n, t in init_params(model, 3).items()}
def normal(*shape, seed=0): return Key(seed).normal("sample", torch.arange(-(-math.prod(shape) // 4))).flatten()[:math.prod(shape)].view(shape)

# ---- signals

@pytest.mark.parametrize("site", ["blocks.0.gates", "blocks.1.hidden", "blocks.0.down"])
def test_gradients_are_those_of_one_loss_at_a_time(site):
    theta, windows = moved(), text(3, 19)
    found = token_gradients(theta, windows, ["blocks.0.up", site])[site]
    u = 17   # in the second group of rows
    a = torch.zeros(3, 19, found.shape[-1], dtype=torch.float64, requires_grad=True)
    at = lambda name, value, t=None: value + (a if t is None else a[:, t]) if name == site else value
    want, = torch.autograd.grad(token_losses({n: t if n == "E" else t[None] for n, t in theta.items()}, windows[None], at)[0, :, u].sum(), a)
    assert torch.allclose(found[u], want, atol=1e-14) and want[:, 18].abs().max() == 0 and want[:, 3].abs().max() > 0
    some = token_gradients(theta, windows, [site], torch.tensor([0.9]).double() ** torch.arange(19)[None])[site]   # a row of weights: a_0s of credit .9
    assert torch.allclose(some[0], Signals(found, 0.9).a[0], atol=1e-12)

@pytest.mark.parametrize("gamma", [0.0, 0.6, 1.0])
def test_signals_are_their_definition(gamma):
    g = normal(5, 2, 5, 3) * (torch.arange(5)[:, None] >= torch.arange(5))[:, None, :, None]
    a = Signals(g, gamma)
    for t, s in itertools.product(range(5), range(5)):
        want = sum(gamma**(u - t) * g[u, :, s] for u in range(max(t, s), 5))
        assert torch.allclose(a.a[t, :, s], want) and torch.allclose(a.power[:, t, s], want.square().sum(-1))
    assert torch.allclose(a.signal + a.past + a.future, a.power.sum(-1)) and torch.allclose(a.own.square().sum(-1), a.signal)
    assert a.kappa() == pytest.approx(a.kappa("past") + a.kappa("future")) and a.kappa("past") > 0 and (a.kappa("future") > 0) == (gamma > 0)

@pytest.mark.parametrize("T, gamma, first, mean", [(64, 0.98, 22.35, 15.4), (64, 0.99, 35.37, 21.3), (2048, 0.98, 24.25, 24.0), (2048, 0.99, 49.25, 48.0)])
def test_the_future_s_part_where_all_bytes_are_alike(T, gamma, first, mean):
    a = Signals(torch.eye(T, dtype=torch.float64)[:, None, :, None] * 0.3, gamma)
    found, want = (a.future / a.signal)[0], torch.tensor([sum(gamma**(2*k) for k in range(1, T - t)) for t in range(T)], dtype=torch.float64)
    assert torch.allclose(found, want, atol=1e-9) and a.past.abs().max() == 0 and a.kappa("past") == 0
    assert [future_of_equals(gamma, T - 1 - t) for t in (0, T // 2, T - 1)] == pytest.approx([found[t].item() for t in (0, T // 2, T - 1)])
    assert found[0].item() == pytest.approx(first, abs=0.01) and a.kappa("future") == pytest.approx(mean, abs=0.06) and found[-1] == 0

def test_full_credit_has_no_bias_and_own_bytes_have_some():
    theta, windows = moved(), text(4, 12)
    clean, sites = ExpertObjective(MODEL).clean(theta, windows, Key(1)), [f"blocks.{i}.{k}" for i in range(2) for k in SITES]
    exact, gradients = exact_gradient(ExpertObjective(MODEL), theta, windows), token_gradients(theta, windows, sites)
    for s in sites:
        block, kind = s.rsplit(".", 1)
        want = torch.cat([exact[f"{block}.{w}"].flatten() for w in dict(up=["w_up"], down=["w_down"]).get(kind, ["w_ih", "w_hh"])])
        assert torch.allclose(flat_weights(clean, s, Signals(gradients[s], 1.0).own), want, rtol=1e-8, atol=1e-12), s
        cosines = [bias(clean, s, gradients[s], g)[1].cosine for g in (0.0, 0.5, 0.9, 1.0)]
        assert cosines[-1] == pytest.approx(1) and (min(cosines[:2]) > 1 - 1e-12 if s in ("blocks.1.up", "blocks.1.down") else cosines[0] < cosines[1] < cosines[2] < 1)
    assert compare(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 4.0])) == pytest.approx((0.5**0.5, 3 / 32**0.5))

# ---- one draw, counted

class EverySign(CleanPass):
    "Draw j has the j-th of all patterns of signs."
    def pattern(self, site, draws): K = self._site(site)[1]; return 2.0 * ((draws[:, None] >> torch.arange(self.T * K)) & 1).double().view(-1, 1, self.T, K) - 1
    def site_losses(self, site, draws, sigma):
        a = sigma * self.pattern(site, draws)
        return self._losses(len(draws), lambda name, value, t=None: value + (a if t is None else a[:, :, t]) if name == site else value)

@pytest.mark.parametrize("site, T, trace", [("blocks.0.hidden", 3, True), ("blocks.1.hidden", 3, False), ("blocks.0.down", 3, True), ("blocks.0.up", 1, True)])
@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_an_update_s_variance_is_the_formula(site, T, trace, gamma):
    "All patterns of signs, at a σ whose square is below the tolerance."
    model = ModelConfig(3, 2, 3)
    theta, windows = moved(model), text(1, T, 5)
    every = EverySign(ExpertObjective(model), theta, windows, Key(1))
    draws = torch.arange(2**(T * every._site(site)[1]))
    rewards = credit(loss_changes(every, site, draws, 3e-6), gamma) / 3e-6
    x = torch.stack([flat_weights(every, site, r[..., None] * z, trace) for r, z in zip(rewards, every.pattern(site, draws))])
    told = predicted_update(every, site, Signals(token_gradients(theta, windows, [site])[site], gamma), trace=trace)
    assert float(x.mean(0).square().sum()) == pytest.approx(told.signal, rel=1e-6) and float((x - x.mean(0)).square().sum(1).mean()) == pytest.approx(told.covariance, rel=1e-6)
    if T > 1 and gamma: assert abs(told.crosswise) > 2e-5
    else: assert told.crosswise == 0

@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
@pytest.mark.parametrize("site, gamma", [("blocks.0.up", 0.0), ("blocks.0.hidden", 0.7)])
def test_predicted_is_measured(noise, site, gamma):
    theta, windows = moved(dtype=torch.float32), text(3, 8)
    clean = CpuObjective(MODEL).clean(theta, windows, Key(2), noise)
    exact = ExpertObjective(MODEL).clean({n: t.double() for n, t in theta.items()}, windows, Key(2))
    a = Signals(token_gradients(theta, windows, [site])[site], gamma)
    told, byte = predicted_update(exact, site, a, noise), GradientSample(lambda j: site_gradient(clean, site, torch.tensor([j]), 5e-3, gamma), 900)
    x = GradientSample(lambda j: flat_weights(clean, site, byte._rows[j].view(3, 8, -1)), 900)
    assert abs(byte.square().value - float(a.a.shape[-1] * a.power.sum() + (noise == "gaussian") * 2 * a.signal.sum())) < 4 * byte.square().se
    assert abs(x.covariance().value - told.covariance) < 4 * x.covariance().se and x.covariance().se < 0.06 * told.covariance
    assert abs(x.signal().value - told.signal) < 4 * x.signal().se and abs(x.snr().value - told.snr) < 4 * x.snr().se
    direction = x.direction(flat_weights(exact, site, a.own))
    assert abs(direction.value - 1) < 4 * direction.se + 0.01 and direction.se < 0.15

def test_bytes_that_agree_and_bytes_that_do_not():
    class Given:
        def __init__(self, x): self.activations = {"blocks.0.norm2": x[None]}
    def both(own, x):
        a = Signals(torch.eye(64, dtype=torch.float64)[:, None, :, None] * own)
        return a.snr(), predicted_update(Given(x), "blocks.0.up", a)
    one, whole = both(normal(1, 16).expand(64, 16), normal(1, 24, seed=1).expand(64, 24))
    assert one == pytest.approx(1 / 15) and whole.snr == pytest.approx(64 / 15) and whole.coherence == pytest.approx(64)
    found = [both(normal(64, 16, seed=s), normal(64, 24, seed=s + 50))[1] for s in range(20)]
    assert sum(u.snr for u in found) / 20 == pytest.approx(1 / 15, rel=0.1) and sum(u.coherence for u in found) / 20 == pytest.approx(1, rel=0.1)

# ---- curvature

def test_even_and_odd_have_their_orders():
    theta, windows, site = moved(), text(2, 8), "blocks.0.hidden"
    clean, g = ExpertObjective(MODEL).clean(theta, windows, Key(2)), token_gradients(theta, windows, [site])[site]
    found = [curvature(clean, site, torch.arange(12), s, g, 0.5) for s in (0.004, 0.002, 0.001)]
    for a, b in zip(found, found[1:]): assert [math.log2(x.value / y.value) for x, y in ((a.even, b.even), (a.odd, b.odd), (a.scatter, b.scatter))] == pytest.approx([2, 4, 2], abs=0.15) and a.scatter.value < a.even.value
    assert math.log2((1 - found[0].along.value) / (1 - found[1].along.value)) == pytest.approx(2, abs=0.15)

def test_the_best_linear_fit_leaves_what_even_says(monkeypatch):
    "All patterns of signs: the population's fit itself. η lies between even and even + odd, and a reward against its clean-point gradient is another thing."
    model, T, site, sigma = ModelConfig(3, 2, 3), 3, "blocks.0.hidden", 0.03
    theta, windows = moved(model), text(1, T, 5)
    every, g = EverySign(ExpertObjective(model), theta, windows, Key(1)), token_gradients(theta, windows, [site])[site]
    draws = torch.arange(512)
    z, a = every.pattern(site, draws), Signals(g, 0.5)
    monkeypatch.setattr(soma.signals, "site_noise", lambda noise, key, number, draws, *shape: every.pattern(site, draws))
    rewards = credit(loss_changes(every, site, draws, sigma), 0.5)[:, 0] / sigma                          # [512, T]
    fit = (rewards[:, :, None, None] * z).mean(0)                                                       # [T, s, K]: the best linear coefficients
    eta = float((rewards - torch.einsum("tsk,nsk->nt", fit, z[:, 0])).square().mean(0).sum() / a.signal.sum())
    found = curvature(every, site, draws, sigma, g, 0.5)
    assert found.even.value <= eta * (1 + 1e-9) and eta <= found.even.value + found.odd.value and eta == pytest.approx(found.even.value, rel=0.1) and eta > 1e-3
    assert float((fit.diagonal(dim1=0, dim2=1).T * a.own[0]).sum() / a.signal.sum()) == pytest.approx(found.along.value, abs=0.05)

# ---- samples of any estimator

def test_samples_of_any_estimator_and_their_parts(monkeypatch):
    theta, windows = moved(dtype=torch.float32), text(3, 8)
    o, exact = CpuObjective(MODEL), {n: g for n, g in exact_gradient(ExpertObjective(MODEL), theta, windows).items() if n != "E"}
    def by_dust(j): return dust(o, theta, [windows], Key(5, j), DustConfig("A", n=4, head="frozen"))
    def by_spsa(j): return spsa(o, theta, [windows], Key(5, j), 1e-3, 4, "rademacher")
    a, b = GradientSample(by_dust, 40, ["blocks.0.w_up", "blocks.1.w_down"]), GradientSample(by_spsa, 40)
    assert a.layout.names == ("blocks.0.w_up", "blocks.1.w_down") and a.direction(exact).value > 0.9 and set(b.layout.names) == set(exact)
    assert a.snr().value > 5 * b.snr().value and b.snr().value == pytest.approx(4 / (b.layout.M - 1), rel=2.5)
    rows = torch.stack([torch.cat([by_dust(j).grad[n].flatten() for n in a.layout.names]) for j in range(40)]).double()
    assert a.covariance().value == pytest.approx(rows.var(0).sum().item()) and a.square().value == pytest.approx(rows.square().sum(1).mean().item())
    assert a.covariance(4).value == pytest.approx(rows.view(10, 4, -1).mean(1).var(0).sum().item())
    part = a.part("blocks.1.w_down")
    assert part.covariance().value == pytest.approx(rows[:, -part.layout.M:].var(0).sum().item())
    monkeypatch.setattr(soma.signals, "KEPT", 10)       # made again instead of kept: the same numbers
    again = GradientSample(by_dust, 40, ["blocks.0.w_up", "blocks.1.w_down"])
    assert again._rows is None and again.snr().value == pytest.approx(a.snr().value) and again.covariance(4).value == pytest.approx(a.covariance(4).value)
    assert again.part("blocks.1.w_down").covariance().value == pytest.approx(part.covariance().value)

def test_a_module_of_the_reader_s_own():
    torch.manual_seed(1)
    m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    x = normal(2, 5, 3)
    loss = lambda module, batch: module(batch)[..., 0].square()
    found = GradientSample(lambda j: ModuleDust(m, loss).dust([x], Key(1, j), sigma=1e-3), 60)
    loss(m, x).mean().backward()
    assert found.direction({n: p.grad for n, p in m.named_parameters()}).value == pytest.approx(1, abs=0.1)

def test_direction_without_a_signal_is_not_a_number():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert math.isnan(GradientSample(lambda j: x[j], 4).direction(torch.tensor([1.0, 0.0])).value)

# ---- what is refused

@pytest.mark.parametrize("wrong, says", [
    (lambda: token_gradients(moved(), text(1, 3), ["blocks.2.up"]), "unknown; choose one of"), (lambda: Signals(torch.zeros(3, 1, 3, 2), 1.1), "gamma = 1.1"), (lambda: Signals(torch.zeros(3, 1, 3, 2), math.nan), "between 0 and 1"),
    (lambda: Signals(torch.zeros(3, 1, 4, 2)), "every loss by every byte"), (lambda: Signals(torch.ones(3, 1, 3, 2)).kappa("later"), "past or future"), (lambda: future_of_equals(-0.1, 3), "gamma"),
    (lambda: compare(torch.ones(2), torch.zeros(2)), "not zero"), (lambda: GradientSample(lambda j: torch.ones(2), 2), "at least 3"), (lambda: GradientSample(lambda j: dict(a=torch.ones(2)), 4, ["b"]), "no part 'b'"),
    (lambda: GradientSample(lambda j: dict(a=torch.ones(2)), 4).part("b"), "no part 'b'"), (lambda: GradientSample(lambda j: torch.tensor([math.inf]), 4), "not finite"), (lambda: GradientSample(lambda j: torch.ones(2), 4).covariance(3), "divide"),
    (lambda: curvature(ExpertObjective(MODEL).clean(moved(), text(1, 3), Key(1)), "blocks.0.up", torch.arange(3), -0.1, torch.ones(3, 1, 3, 24).double()), "sigma = -0.1")])
def test_nonsense(wrong, says):
    with pytest.raises(SomaError, match=says) as e: wrong()
    assert "\n" not in str(e.value)
