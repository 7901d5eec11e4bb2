"Laws of the EGGROLL control: what it computes, what its bits depend on, and that its perturbations are never multiplied out."
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from soma.core import Key, ModelConfig, SomaError, V
from soma.estimators import exact_gradient, slopes, spsa
from soma.gru import GruConfig, GruObjective, LowRank, Stacked, gru_count, gru_init, gru_layout, gru_nearest_width, gru_ops_per_token, gru_probe_ops_per_token, gru_shapes, gru_token_losses, gru_zero_state
from soma.models import Objective, count_ensemble, ordered_sum
from soma.probes import PROBES, rank1_factors

def numbers(n, seed): return Key(seed).normal("sample", torch.arange(n))[:, 0]
def windows(B, T, seed=1): return Key(seed).below(V, "sample", torch.arange(B * (T + 1))).view(B, T + 1).to(torch.uint8)
def random_theta(cfg, seed, dtype=torch.float64)->dict:
    "Far from the initial values: gains about one, biases about zero, no symmetry left."
    return {n: (t + 0.2 * numbers(t.numel(), seed + i).view(t.shape)).to(dtype) for i, (n, t) in enumerate(gru_init(cfg, seed, torch.float64).items())}
def random_state(cfg, B, seed, dtype=torch.float64): return numbers(cfg.D * B * cfg.d, seed).view(cfg.D, B, cfg.d).tanh().to(dtype)

def reference(theta, x, state=None)->tuple:
    "Nats [B, T] and last state [D, B, d] of one model, from its equations, layer by layer over the whole window."
    t, x, after = theta, x.long(), []
    h = t["embed"][x[:, :-1]]
    for i in range(sum(n.endswith("norm1") for n in t)):
        p = {n.split(".")[-1]: w for n, w in t.items() if n.startswith(f"blocks.{i}.")}
        y, out = F.layer_norm(h, h.shape[-1:], p["norm1"]), []
        s = torch.zeros_like(h[:, 0]) if state is None else state[i]
        for k in range(h.shape[1]):
            f = 1 / (1 + torch.exp(-(F.linear(y[:, k], p["w_f"], p["b_f"]) + F.linear(s, p["u_f"]))))
            proposal = torch.tanh(F.linear(y[:, k], p["w_h"], p["b_h"]) + F.linear(f * s, p["u_h"]))
            s = (1 - f) * s + f * proposal
            out.append(s)
        h = h + torch.stack(out, 1)
        h = h + F.linear(F.relu(F.linear(F.layer_norm(h, h.shape[-1:], p["norm2"]), p["w_up"])), p["w_down"])
        after.append(s)
    scores = F.linear(F.layer_norm(h, h.shape[-1:], t["norm"]), t["head"])
    return F.cross_entropy(scores.transpose(1, 2), x[:, 1:], reduction="none"), torch.stack(after)

def by_hand(layout, key, direction)->dict:
    "One rank-one probe written out, number by number from its address: for each matrix its A, then its B; each vector as it is."
    numbers, at, z = [], 0, {}
    total = sum(sum(s) for s in layout.shapes)
    for i in range(-(-total // 4)): numbers += key.normal("lowrank", i, direction).tolist()
    for name, shape in zip(layout.names, layout.shapes):
        parts = [torch.tensor(numbers[at + sum(shape[:k]):at + sum(shape[:k + 1])], dtype=torch.float64) for k in range(len(shape))]
        z[name], at = parts[0] if len(shape) == 1 else parts[0][:, None] * parts[1], at + sum(shape)
    return z

# ---- counts

def test_counts_of_the_paper():
    "The two counts known, the five widths, and every formula against tensors really made."
    assert gru_count(GruConfig()) == 8_456_355 and gru_count(GruConfig(20)) == 39_540
    totals = [count_ensemble(ModelConfig(), N) for N in (1, 2, 8, 32, 256)]
    assert totals == [41_120, 74_048, 271_616, 1_061_888, 8_437_760] and [gru_nearest_width(t) for t in totals] == [20, 29, 58, 118, 339]
    for d, D in ((1, 1), (5, 3), (20, 6), (33, 2)):
        cfg = GruConfig(d, D)
        theta, matrices = gru_init(cfg), {n: s for n, s in gru_shapes(cfg).items() if len(s) == 2}
        assert gru_count(cfg) == gru_layout(cfg).M == sum(t.numel() for t in theta.values()) and tuple(theta) == gru_layout(cfg).names
        assert gru_count(cfg) == 12*D*d*d + 512*d + (2*D + 1)*d + 2*D*d and len(gru_layout(cfg).gains) == 2*D + 1
        assert gru_ops_per_token(cfg) == 2*sum(math.prod(s) for n, s in matrices.items() if n != "embed")
        assert gru_probe_ops_per_token(cfg) == 2*sum(sum(s) for n, s in matrices.items() if n != "embed") + 2*d
        assert all(abs(gru_count(GruConfig(near, D)) - t) <= abs(gru_count(GruConfig(near + step, D)) - t) for t in (3_000, 99_999) for near in [gru_nearest_width(t, D)] for step in (-1, 1) if near + step)
    for bad in (dict(d=0), dict(D=-1)):
        with pytest.raises(SomaError, match=f"control {[*bad][0]} = .*: must be at least 1"): GruConfig(**bad)

@pytest.mark.parametrize("d", [20, 29, 58])
def test_a_fresh_model_knows_nothing(d):
    loss = GruObjective(GruConfig(d)).mean_loss(gru_init(GruConfig(d)), windows(4, 100))
    assert math.log(V) < loss < math.log(V) + 0.3
    a, b = gru_init(GruConfig(d, 1), 1), gru_init(GruConfig(d, 1), 2)
    assert all(torch.equal(t, b[n]) == (n.endswith(("norm1", "norm2", "norm", "b_f", "b_h"))) for n, t in a.items())

# ---- the same numbers in three ways

SHAPES = [(GruConfig(2, 1), 1, 1, 1, 1), (GruConfig(7, 2), 3, 17, 2, 3), (GruConfig(13, 6), 2, 33, 5, 2), (GruConfig(33, 1), 5, 9, 3, 5)]   # model, sequences, bytes, tile, members

@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_factors_equal_written_out_probes(case, carried):
    "Losses from factors, from stacked written-out probes, and from the equations with probes made by hand: float64 to 1e-10."
    cfg, B, T, tile, members = SHAPES[case]
    theta, x, key, directions, eps = random_theta(cfg, case), windows(B, T, case), Key(case, 3), torch.tensor([5, 0, 2]), 2**-4
    state = random_state(cfg, B, case) if carried else None
    batch, o = (x, state) if carried else x, GruObjective(cfg, tile, members, chunk=2)
    low, stacked = (f(theta, "rank1", key, directions, eps, batch, (0, -1, 1)) for f in (o.losses, super(GruObjective, o).losses))
    assert low.shape == (3, 3, B) and low.dtype == torch.float64 and (low - stacked).abs().max() < 1e-10
    for p, j in enumerate(directions.tolist()):
        z = by_hand(o.layout, key, j)
        for s, sign in enumerate((0, -1, 1)):
            expected = reference({n: t + sign*eps*z[n] for n, t in theta.items()}, x, state)[0].mean(1)
            assert (low[s, p] - expected).abs().max() < 1e-10, (p, sign)
    assert (low[1] - low[2]).abs().min() > 1e-5 and (low[0] - low[1]).abs().min() > 1e-6   # the signs are different models
    single = o.losses({n: t.float() for n, t in theta.items()}, "rank1", key, directions, eps, (x, state.float()) if carried else x)
    assert (single - low[[2, 1]]).abs().max() < 1e-5   # and in float32
    nats, after = reference(theta, x, state)
    assert (o.token_losses(theta, batch) - nats).abs().max() < 1e-10 and (o.advance(theta, batch) - after).abs().max() < 1e-10
    assert o.mean_loss(theta, batch) == pytest.approx(nats.mean().item(), abs=1e-11)

def test_members_may_have_windows_and_states_of_their_own():
    "The forward pass beneath the objective: C windows for C members, and the states they end in, as a later recipe may want them."
    cfg, C, B, T = GruConfig(9, 2), 3, 2, 19
    theta, x, state = random_theta(cfg, 1), windows(C*B, T).view(C, B, T + 1), random_state(cfg, C*B, 2).view(2, C, B, 9)
    factors, key = rank1_factors(gru_layout(cfg), Key(1), torch.arange(C), torch.float64), Key(1)
    nats, after = gru_token_losses(LowRank(theta, factors, 0.1), x, state)
    for c in range(C):
        z = by_hand(gru_layout(cfg), key, c)
        expected, end = reference({n: t + 0.1*z[n] for n, t in theta.items()}, x[c], state[:, c])
        assert torch.allclose(nats[c], expected, atol=1e-10) and torch.allclose(after[:, c], end, atol=1e-10)

def test_nothing_is_multiplied_out(monkeypatch):
    "With the written-out family taken away, losses and the weighted sum are what they were."
    cfg = GruConfig(6, 2)
    theta, x, o, directions, c = random_theta(cfg, 1), windows(3, 9), GruObjective(cfg, 2, 4), torch.arange(70), numbers(70, 2)
    z = PROBES["rank1"](o.layout, Key(5), directions, torch.float64)
    losses = o.losses(theta, "rank1", Key(5), directions[:6], 0.1, x)
    def refuse(*_): raise AssertionError("A·Bᵀ was formed")
    monkeypatch.setitem(PROBES, "rank1", refuse)
    with pytest.raises(AssertionError): super(GruObjective, o).losses(theta, "rank1", Key(5), directions[:2], 0.1, x)
    assert torch.equal(o.losses(theta, "rank1", Key(5), directions[:6], 0.1, x), losses)
    assert torch.allclose(o.combine(c, "rank1", Key(5), directions, torch.float64), c @ z, rtol=1e-10, atol=1e-12)
    estimate = spsa(o, theta, [x, (x, random_state(cfg, 3, 4))], Key(5), 0.1, 35, "rank1")   # two batches, one of which brings its state
    slope = torch.cat([slopes(l, 0.1) for l in estimate.losses])
    assert torch.allclose(o.layout.flatten(estimate.grad), slope @ z / 70, rtol=1e-10, atol=1e-12)
    assert torch.equal(estimate.losses[0, :, :6], losses) and not torch.allclose(estimate.losses[1], estimate.losses[0], atol=1e-3)

# ---- what the bits depend on

@pytest.mark.parametrize("d, D, tile, members", [(20, 3, 4, 4), (7, 2, 3, 5), (29, 1, 1, 8)])   # d = 7: numbers left over by every vector; tile = 1: products of one row
def test_bits(d, D, tile, members):
    "Not on chunk, threads, the order of directions, other directions, other signs, or other windows than the tile's own."
    cfg = GruConfig(d, D)
    theta, x, all_of_them = random_theta(cfg, 1, torch.float32), windows(2*tile + 1, 18), torch.arange(members + 1)
    def ask(directions=all_of_them, signs=(1, -1), n=2*tile + 1, chunk=32, probes="rank1"):
        return GruObjective(cfg, tile, members, chunk).losses(theta, probes, Key(1, 2), directions, 0.05, x[:n], signs)
    whole, order = ask(), torch.from_numpy(np.random.default_rng(0).permutation(len(all_of_them)))
    assert len(whole.unique()) == whole.numel()
    assert torch.equal(ask(order, chunk=1), whole[:, order])
    for j in (0, members - 1, members): assert torch.equal(ask(torch.tensor([j]), (-1,)), whole[1:, j:j + 1])
    assert torch.equal(ask(signs=(0, 1))[1], whole[0]) and torch.equal(ask(n=tile + 1), whole[..., :tile + 1])
    dense = ask(probes="gaussian", signs=(1, 0, -1))
    for chunk in (1, 3, 5): assert torch.equal(ask(probes="gaussian", signs=(1, 0, -1), chunk=chunk), dense)
    ones = [(o.token_losses(theta, x), o.advance(theta, x)) for o in (GruObjective(cfg, tile, members, chunk) for chunk in (1, 2, 32))]
    assert all(torch.equal(a, b) for one in ones for a, b in zip(one, ones[0]))
    assert torch.allclose(ask(signs=(0,))[0, 0], ordered_sum(ones[0][0]) / 18, rtol=1e-6)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try: assert torch.equal(ask(all_of_them[:2], n=1), whole[:, :2, :1]) and torch.equal(ask(all_of_them[:1], n=1, probes="gaussian", signs=(1, 0)), dense[:2, :1, :1])
    finally: torch.set_num_threads(before)

# ---- streams

@pytest.mark.parametrize("T, cut", [(33, 16), (20, 1), (40, 39), (9, 4)])
def test_state_is_carried(T, cut):
    "A window read in two parts gives the nats and the state of one reading, for the clean model and for members; where a block of bytes ends, bit for bit."
    cfg, B = GruConfig(11, 3), 3
    theta, x, factors = random_theta(cfg, 1), windows(B, T), rank1_factors(gru_layout(cfg), Key(1), torch.arange(4), torch.float64)
    for w in (Stacked({n: t[None] for n, t in theta.items()}), LowRank(theta, factors, 0.05)):
        whole, end = gru_token_losses(w, x[None], gru_zero_state(theta, w.C, B))
        first, state = gru_token_losses(w, x[None, :, :cut + 1], gru_zero_state(theta, w.C, B))
        second, last = gru_token_losses(w, x[None, :, cut:], state)
        assert torch.allclose(torch.cat([first, second], -1), whole, atol=1e-11) and torch.allclose(last, end, atol=1e-11)
        if cut == 16: assert torch.equal(torch.cat([first, second], -1), whole) and torch.equal(last, end)
        forgotten = gru_token_losses(w, x[None, :, cut:], gru_zero_state(theta, w.C, B))[0]
        assert (forgotten[..., 0] - second[..., 0]).abs().min() > 1e-4
    o = GruObjective(cfg, 2)
    with pytest.raises(SomaError, match=r"state of shape \[3, 1, 11\]: must be \[3, 3, 11\]"): o.losses(theta, "rank1", Key(1), torch.arange(2), 0.1, (x, random_state(cfg, 1, 1)))

# ---- gradients

@pytest.mark.parametrize("carried", [False, True])
def test_exact_gradient(carried):
    "Autograd through the stacked forward against central differences of the equations, in every tensor; and slopes along rank-one probes, so near that no rectifier changes sides."
    cfg, B = GruConfig(5, 2), 2
    theta, x, state = random_theta(cfg, 1), windows(B, 18), random_state(cfg, B, 3) if carried else None
    o, batch = GruObjective(cfg, 2, 4), (x, state) if carried else x
    exact = exact_gradient(o, theta, batch)
    seen = [int(x[0, 0]) * 5, int(x[0, 1]) * 5]   # rows of embedding and head that are used
    for name in theta:
        for i in (seen if name in ("embed", "head") else (0, theta[name].numel() - 1)):
            def at(h): p = theta[name].clone(); p.view(-1)[i] += h; return reference(theta | {name: p}, x, state)[0].mean().item()
            assert exact[name].reshape(-1)[i].item() == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-5, abs=1e-8), (name, i)
    z, g = PROBES["rank1"](o.layout, Key(1), torch.arange(4), torch.float64), o.layout.flatten(exact)
    found = slopes(o.losses(theta, "rank1", Key(1), torch.arange(4), 1e-6, batch), 1e-6)
    assert torch.allclose(found, z @ g, rtol=1e-6, atol=1e-7) and found.abs().min() > 1e-3

def test_mean_of_the_estimate_on_the_control():
    "Monte Carlo through spsa at a small radius: the mean is the gradient in the norm of every tensor, within its standard error, and the noise is the closed form's."
    cfg, n, P = GruConfig(3, 1), 40, 64
    theta, x = random_theta(cfg, 1), windows(1, 8)
    o = GruObjective(cfg, 1, 64)
    exact = exact_gradient(o, theta, x)
    runs = [spsa(o, theta, [x], Key(9, step), 1e-3, P, "rank1").grad for step in range(n)]
    total = sum((g**2).sum() for g in exact.values())
    for name, g in exact.items():
        along = torch.stack([(r[name] * g).sum() / (g**2).sum() for r in runs])   # 1 in the mean
        assert abs(along.mean() - 1) < 4 * along.std() / math.sqrt(n), name
        G, measured = g.reshape(len(g), -1)**2, sum(((r[name] - g)**2).sum() for r in runs) / n * P
        own = 2*G.shape[0] + 2*G.shape[1] + 3 if g.dim() == 2 else 1
        predicted = g.numel() * total + own * G.sum()
        assert measured == pytest.approx(predicted.item(), rel=0.3), name

def test_the_compiled_control_asks_for_a_state_that_fits():
    from soma.kernels import CpuGruObjective
    cfg, windows = GruConfig(4, 2), torch.zeros(3, 5, dtype=torch.uint8)
    with pytest.raises(SomaError, match=r"must be \[2, 3, 4\]"): CpuGruObjective(cfg).losses(gru_init(cfg), "rank1", Key(1), torch.arange(2), 0.1, (windows, torch.zeros(2, 3, 5)))
