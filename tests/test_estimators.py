"Laws of the estimators: what they are on average, what they replay, and what they leave alone in a model of the user's own."
import copy, itertools, math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soma.core import Key, ModelConfig, SomaError, V
from soma.estimators import ModuleObjective, ZerothOrder, delta_rule, exact_gradient, forward_gradient, forward_slopes, slopes, spsa, spsa_summed
from soma.models import ExpertObjective, Objective, body_layout, body_shapes, forward, init_params
from soma.probes import PROBES, Layout, activity, layout_of

# ---- Philox4x32-10 and the probes once more, from the specification, in numpy

def philox(counter, key)->np.ndarray:
    "Salmon et al. 2011: counter uint64 [4, ...] of 32-bit words, key of two words -> uint64 [4, ...]."
    c, k, low = [np.asarray(x, np.uint64) for x in counter], [int(x) for x in key], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return np.stack(np.broadcast_arrays(*c))

def normals(n, direction, stream, key)->np.ndarray:
    "Box–Muller, four numbers a block: float64 [n]."
    w = (philox([np.arange(-(-n // 4)), direction, 0, stream], key).T + 0.5) / 2**32
    r, angle = np.sqrt(-2 * np.log(w[:, ::2])), 2 * np.pi * w[:, 1::2]
    return np.concatenate([r * np.cos(angle), r * np.sin(angle)], 1).ravel()[:n]

def numpy_probe(name, M, gains, key, direction)->np.ndarray:
    "One direction, float64 [M]: counter (block, direction, 0, stream), key (seed, step)."
    if name == "rank1":   # the numbers of one row after another: 7 and 9 of the first matrix, 70 gains, 11 and 13 of the second
        x = np.split(normals(110, direction, 7, key), [7, 16, 86, 97])
        return np.concatenate([np.outer(x[0], x[1]).ravel(), x[2], np.outer(x[3], x[4]).ravel()])
    if name == "gaussian": return normals(M, direction, 1, key)
    w = philox([np.arange(-(-M // 64)), direction, 0, 0], key)   # 64 coordinates a block: words 0, 1 the signs, words 2, 3 who is active
    bits = [((w[i:i+2].T[:, :, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)).ravel()[:M].astype(float) for i in (0, 2)]
    return (2*bits[0] - 1) * (np.maximum(bits[1], gains) if name == "sparse_rademacher" else 1)

LAYOUT = Layout(("a", "gain", "b"), ((7, 9), (70,), (11, 13)), frozenset(["gain"]))   # 276 coordinates; the gains cross a border of blocks
GAINS = LAYOUT.gain_mask().numpy()

@pytest.mark.parametrize("counter, key, words", [   # the known answers published with Random123
    ([0] * 4, [0] * 2, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
    ([0xffffffff] * 4, [0xffffffff] * 2, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
    ([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0], [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]),
])
def test_philox_known_answers(counter, key, words): assert philox(counter, key).tolist() == words

@pytest.mark.parametrize("key", [Key(0, 0), Key(1, 2), Key(2**32 - 1, 2**31)])
@pytest.mark.parametrize("name", PROBES)
def test_probes_are_the_specified_ones(name, key):
    directions = [5, 0, 2**20, 3]
    z = PROBES[name](LAYOUT, key, torch.tensor(directions), torch.float64)
    expected = np.stack([numpy_probe(name, LAYOUT.M, GAINS, (key.seed, key.step), j) for j in directions])
    assert np.abs(z.numpy() - expected).max() <= (1e-13 if name in ("gaussian", "rank1") else 0)   # logarithm and cosine may differ in the last bit
    single = PROBES[name](LAYOUT, key, torch.tensor(directions)).numpy()
    if name == "rank1": assert single.dtype == np.float32 and np.allclose(single, expected, rtol=3e-7, atol=0)   # the product of two factors that were rounded first
    else: assert np.array_equal(single, z.numpy().astype(np.float32))

@pytest.mark.parametrize("name", PROBES)
def test_probes_replay_in_any_order(name):
    key, all_of_them = Key(3, 4), torch.arange(50)
    z = PROBES[name](LAYOUT, key, all_of_them)
    order = torch.from_numpy(np.random.default_rng(0).permutation(50))
    assert torch.equal(PROBES[name](LAYOUT, key, order), z[order])
    for chunk in (1, 7, 49): assert torch.equal(torch.cat([PROBES[name](LAYOUT, key, part) for part in all_of_them.split(chunk)]), z)
    longer = Layout(("x",), ((LAYOUT.M + 1000,),))   # what comes after a coordinate does not change it; only being a gain does
    if name == "rank1": longer = Layout((*LAYOUT.names, "x"), (*LAYOUT.shapes, (40, 25)))   # and, of a rank-one probe, the shapes of what comes before
    kept = torch.tensor(GAINS) if name == "sparse_rademacher" else torch.zeros(LAYOUT.M, dtype=torch.bool)
    assert torch.equal(PROBES[name](longer, key, all_of_them)[:, :LAYOUT.M][:, ~kept], z[:, ~kept])
    others = [PROBES[name](LAYOUT, k, all_of_them) for k in (Key(3, 5), Key(4, 4))]
    assert len({row.numpy().tobytes() for rows in (z, *others) for row in rows}) == 150

@pytest.mark.parametrize("name", ["rademacher", "sparse_rademacher"])
def test_patterns_of_neighbours_are_as_likely_as_they_should_be(name):
    "Pearson's statistic of four coordinates drawn together (a gain and three weights, across a border of blocks)."
    layout, n = Layout(("a", "gain", "w"), ((62,), (1,), (3,)), frozenset(["gain"])), 20_000
    z = PROBES[name](layout, Key(11), torch.arange(n))[:, 62:].long()
    seen = torch.bincount(((z + 1) * torch.tensor([1, 3, 9, 27])).sum(1), minlength=81).double()
    weight = torch.tensor([1, 2, 1] if name == "sparse_rademacher" else [1, 0, 1]).double() / (4 if name == "sparse_rademacher" else 2)
    p = torch.stack([a * b * c * d for d, c, b, a in itertools.product(weight, weight, weight, torch.tensor([0.5, 0, 0.5]))])
    assert (seen[p == 0] == 0).all()
    statistic, freedom = ((seen - n*p)**2 / (n*p))[p > 0].sum().item(), int((p > 0).sum()) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom), (statistic, freedom)

# ---- the mean over all probes is activity · gradient, through the public contract

def listed(name, layout)->torch.Tensor:
    "Every probe of the family, as often as it is likely: [n, M]."
    values = [[-1., 1.] if name == "rademacher" or gain else [-1., 0., 0., 1.] for gain in layout.gain_mask().tolist()]
    return torch.tensor(list(itertools.product(*values)))

def quadratic(layout, seed):
    "A loss per sequence of a batch [B, M + 1] of slopes and offsets, with a common curvature; and its mean gradient at theta."
    M, numbers = layout.M, Key(seed).normal("sample", torch.arange(layout.M ** 2))[:, 0].view(layout.M, layout.M)
    H = numbers @ numbers.T
    def loss(stacked, batch):
        x = torch.cat([stacked[n].flatten(1) for n in layout.names], 1)
        return 0.5 * torch.einsum("ci,ij,cj->c", x, H, x)[:, None] + x @ batch[:, :M].T + batch[:, M]
    def gradient(theta, batches): return H @ layout.flatten(theta) + torch.cat(batches)[:, :M].mean(0)
    return loss, gradient

def batches_of(layout, A, B, seed): return list(Key(seed).normal("sample", torch.arange(A*B*(layout.M + 1)))[:, 0].view(A, B, -1))

SMALL = Layout(("gain", "w"), ((2,), (2, 2)), frozenset(["gain"]))
THETA = SMALL.unflatten(Key(5).normal("sample", torch.arange(2)).flatten()[:6])

@pytest.mark.parametrize("A", [1, 3])
@pytest.mark.parametrize("name", ["rademacher", "sparse_rademacher"])
def test_mean_over_all_probes(monkeypatch, name, A):
    "2^M dense probes, 3^M sparse ones by their likelihood, each with every one of A batches of 2 sequences."
    z = listed(name, SMALL)
    assert len(z) == (2**6 if name == "rademacher" else 2**2 * 4**4) and torch.allclose((z.double()**2).mean(0), activity(name, SMALL))
    monkeypatch.setitem(PROBES, "listed", lambda layout, key, directions, dtype: z[directions % len(z)].to(dtype))
    loss, gradient = quadratic(SMALL, 1)
    batches = batches_of(SMALL, A, 2, 2)
    estimate = spsa(Objective(SMALL, loss), THETA, batches, Key(0), 0.3, len(z), "listed")
    assert torch.allclose(SMALL.flatten(estimate.grad), activity(name, SMALL) * gradient(THETA, batches), rtol=1e-11)
    assert estimate.losses.shape == (A, 2, len(z), 2) and estimate.grad["w"].shape == (2, 2) and estimate.grad["w"].dtype == torch.float64
    if A == 3:   # one batch alone has another gradient: the average over batches is part of the law
        assert not torch.allclose(SMALL.flatten(estimate.grad), activity(name, SMALL) * gradient(THETA, batches[:1]), rtol=0.05)

@pytest.mark.parametrize("name", ["gaussian", "rank1"])
def test_mean_of_normal_probes(name):
    "Monte Carlo: within four standard errors in every coordinate, and these are as large as the theory says."
    loss, gradient = quadratic(SMALL, 1)
    batches, n = batches_of(SMALL, 2, 2, 2), 200
    runs = torch.stack([SMALL.flatten(spsa(Objective(SMALL, loss, chunk=100), THETA, batches, Key(9, step), 0.3, 50, name).grad) for step in range(n)])
    g, each = gradient(THETA, batches), torch.stack([gradient(THETA, [b]) for b in batches])
    error, standard = runs.mean(0) - g, runs.std(0) / math.sqrt(n)
    assert (error.abs() < 4 * standard).all() and (standard < 0.02 * g.norm()).all()
    def noise(g):   # of one direction: |g|² + g_i² for a normal coordinate; for one of a rank-one matrix more of its own row and column
        G, own = g[2:].view(2, 2)**2, g**2
        if name == "rank1": own = torch.cat([own[:2], (2*G.sum(1, keepdim=True) + 2*G.sum(0) + 3*G).flatten()])
        return (g**2).sum() + own
    predicted = sum(noise(g) for g in each) / (50 * 4)   # 50 directions of each batch, and two batches
    assert torch.allclose(runs.var(0), predicted, rtol=0.35)

@pytest.mark.parametrize("name", ["rademacher", "sparse_rademacher"])
def test_mean_of_the_summed_loss(monkeypatch, name):
    "Two experts over all pairs of their probes: the other's loss is noise that averages out."
    layout = Layout(("gain", "w"), ((1,), (2,)), frozenset(["gain"]))
    z, (lossA, gradA), (lossB, gradB) = listed(name, layout), quadratic(layout, 3), quadratic(layout, 4)
    n, thetas = len(z), [layout.unflatten(Key(s).normal("sample", 0)[:3]) for s in (6, 7)]
    monkeypatch.setitem(PROBES, "listed", lambda layout, key, directions, dtype: z[directions % n if key.seed == 0 else directions // n % n].to(dtype))
    batches = [batches_of(layout, 2, 2, s) for s in (8, 9)]
    found = spsa_summed([Objective(layout, lossA), Objective(layout, lossB)], thetas, batches, [Key(0), Key(1)], 0.3, n*n, "listed")
    for estimate, gradient, theta, b in zip(found, (gradA, gradB), thetas, batches): assert torch.allclose(layout.flatten(estimate.grad), activity(name, layout) * gradient(theta, b), rtol=1e-11)
    few = spsa_summed([Objective(layout, lossA), Objective(layout, lossB)], thetas, batches, [Key(0), Key(1)], 0.3, 5, "listed")
    shared = sum(torch.cat([slopes(l, 0.3) for l in e.losses]) for e in few)   # both batches' differences of both experts
    for e, z_e in zip(few, (z[torch.arange(10) % n], z[torch.arange(10) // n % n])): assert torch.allclose(layout.flatten(e.grad), (shared[:, None] * z_e).mean(0), rtol=1e-11)
    one, own = spsa_summed([Objective(layout, lossA)], thetas[:1], batches[:1], [Key(0)], 0.3, 5, "listed")[0], spsa(Objective(layout, lossA), thetas[0], batches[0], Key(0), 0.3, 5, "listed")
    assert torch.equal(one.grad["w"], own.grad["w"]) and not torch.allclose(few[0].grad["w"], own.grad["w"], rtol=0.01)   # alone, the sum is one's own

def test_every_family_has_its_law(): assert set(PROBES) == {"rademacher", "sparse_rademacher", "gaussian", "rank1"}   # a new one needs a test above

# ---- the expert against a single model written independently

def reference(theta, cfg, x)->tuple:
    "Hidden states [B, T, d_E] and nats [B, T] of one model, float64, from PyTorch's own layers."
    t, x = {n: p.double() for n, p in theta.items()}, x.long()
    h = F.embedding(x[:, :-1], t["E"])
    if cfg.projected: h = F.linear(h, t["proj_in"])
    for i in range(cfg.D):
        lstm = nn.LSTM(cfg.d, cfg.d, bias=False, batch_first=True, dtype=torch.float64)
        lstm.load_state_dict(dict(weight_ih_l0=t[f"blocks.{i}.w_ih"], weight_hh_l0=t[f"blocks.{i}.w_hh"]))
        h = h + lstm(F.layer_norm(h, (cfg.d,), t[f"blocks.{i}.norm1"]))[0]
        h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (cfg.d,), t[f"blocks.{i}.norm2"]), t[f"blocks.{i}.w_up"])), t[f"blocks.{i}.w_down"])
    h = F.layer_norm(h, (cfg.d,), t["norm"])
    if cfg.projected: h = F.linear(h, t["proj_out"])
    return h.detach(), F.cross_entropy(F.linear(h, t["E"]).transpose(1, 2), x[:, 1:], reduction="none").detach()

def random_theta(cfg, seed, dtype=torch.float64)->dict:
    "Parameters far from the initial ones: gains about one, no symmetry left."
    return {n: (t + 0.3 * Key(seed, i).normal("sample", torch.arange(t.numel()))[:, 0].view(t.shape)).to(dtype) for i, (n, t) in enumerate(init_params(cfg, seed, torch.float64).items())}

def random_windows(B, T, seed): return Key(seed).below(V, "sample", torch.arange(B * (T + 1))).view(B, T + 1).to(torch.uint8)

SHAPES = [(ModelConfig(d=13, D=1, d_E=13), 3, 21, 2), (ModelConfig(d=3, D=3, d_E=2), 2, 9, 5), (ModelConfig(d=31, D=2, d_E=7), 5, 33, 3), (ModelConfig(d=7, D=4, d_E=19), 4, 1, 4), (ModelConfig(d=64, D=2, d_E=64), 2, 70, 16)]

@pytest.mark.parametrize("case", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_expert_is_the_reference(case, dtype):
    cfg, B, T, tile = SHAPES[case]
    theta, x, tolerance = random_theta(cfg, case, dtype), random_windows(B, T, case), 1e-11 if dtype == torch.float64 else 1e-6
    hidden, nats = reference(theta, cfg, x)
    o = ExpertObjective(cfg, tile, chunk=2)
    def near(ours, theirs, times=1): return (ours.double() - theirs).norm() <= times * tolerance * theirs.norm()
    assert abs(o.mean_loss(theta, x) / nats.mean().item() - 1) < tolerance
    assert near(o.losses(theta, "rademacher", Key(0), torch.arange(1), 1., x, (0,))[0, 0], nats.mean(1)) and near(o.token_losses(theta, x), nats, 3) and near(o.hidden(theta, x), hidden, 3)
    layout, key = body_layout(cfg), Key(case, 1)
    losses = o.losses(theta, "sparse_rademacher", key, torch.tensor([2, 0]), 0.05, x, (1, -1, 0))   # and at perturbed parameters, made by hand
    for p, j in enumerate((2, 0)):
        z = torch.from_numpy(numpy_probe("sparse_rademacher", layout.M, layout.gain_mask().numpy(), (case, 1), j))
        for s, sign in enumerate((1, -1, 0)):
            moved = theta | layout.unflatten((layout.flatten(theta) + sign * (z.to(dtype) * 0.05)))
            assert near(losses[s, p], reference(moved, cfg, x)[1].mean(1)), (p, sign)
    assert (losses[0] - losses[1]).abs().min() > 1e-5   # the two signs are two models

@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_state_is_carried(case):
    "Reading in two parts gives what reading at once does, for three different models side by side."
    cfg, B, T, _ = SHAPES[case]
    if T < 2: T = 5
    thetas, x = [random_theta(cfg, s) for s in (1, 2, 3)], random_windows(B, T, case).long()
    stacked = {n: thetas[0]["E"] if n == "E" else torch.stack([t[n] for t in thetas]) for n in thetas[0]}
    whole, _ = forward(stacked, x[None, :, :-1])
    first, after = forward(stacked, x[None, :, :T//2])
    second, _ = forward(stacked, x[None, :, T//2:-1], after)
    assert torch.allclose(torch.cat([first, second], 2), whole, rtol=1e-11, atol=1e-12)
    for i, theta in enumerate(thetas): assert torch.allclose(whole[i], reference(theta | dict(E=thetas[0]["E"]), cfg, x)[0], rtol=1e-9, atol=1e-10)

@pytest.mark.parametrize("B, T, d_E, dtype", [(1, 1, 1, torch.float64), (3, 5, 2, torch.float64), (17, 9, 33, torch.float64), (5, 70, 8, torch.float32), (33, 3, 16, torch.float32)])
def test_delta_rule_is_the_decoder_gradient(B, T, d_E, dtype):
    "Against autograd in float64, with repeated targets and targets of every kind."
    hidden, E = (3 * Key(1).normal("sample", torch.arange(B*T*d_E))[:, 0].view(B, T, d_E)).to(dtype), Key(2).normal("sample", torch.arange(V*d_E))[:, 0].view(V, d_E).to(dtype)
    y = random_windows(B, T, 3)[:, 1:] // 4 * 4
    leaf = E.double().requires_grad_()
    F.cross_entropy((hidden.double() @ leaf.T).flatten(0, 1), y.flatten().long()).backward()
    ours = delta_rule(hidden, y, E)
    assert ours.dtype == torch.float64 and torch.allclose(ours, leaf.grad, rtol=1e-9, atol=1e-15)
    assert ours.sum(0).abs().max() < 1e-12 * T * ours.abs().max() * V   # the residuals of every position add up to nothing

def test_exact_gradient_and_its_estimate():
    "Against central differences of the independent model; and slopes along probes tend to it as ε falls, with an error ∝ ε²."
    cfg, x = ModelConfig(d=5, D=1, d_E=3), random_windows(2, 6, 1)
    theta = random_theta(cfg, 1)
    o = ExpertObjective(cfg, 2)
    exact = exact_gradient(o, theta, x)
    for name in body_shapes(cfg):   # central differences of the independent model, coordinate by coordinate
        for i in (0, theta[name].numel() - 1):
            def at(h): p = theta[name].clone(); p.view(-1)[i] += h; return reference(theta | {name: p}, cfg, x)[1].mean().item()
            assert exact[name].view(-1)[i].item() == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-6, abs=1e-9)
    z, g = PROBES["rademacher"](o.layout, Key(1), torch.arange(4), torch.float64), o.layout.flatten(exact)
    errors = [(slopes(o.losses(theta, "rademacher", Key(1), torch.arange(4), eps, x), eps) - z @ g).abs().max().item() for eps in (4e-3, 2e-3, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1) and errors[1] / errors[2] == pytest.approx(4, rel=0.1)

# ---- a model of the user's own

class Tied(nn.Module):
    "A tied embedding, a normalisation with running statistics, dropout, a counter that is reassigned, and a frozen bias."
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out, self.drop = nn.Embedding(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 10), nn.Dropout(0.3)
        self.out.weight = self.embed.weight
        self.out.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls = self.calls + 1
        return self.out(self.drop(self.norm(self.embed(x))))

X, Y = Key(1).below(10, "sample", torch.arange(24)), Key(2).below(10, "sample", torch.arange(24))
def fresh(seed=0): torch.manual_seed(seed); return Tied()
def cross_entropy(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def everything(model): return {n: t.clone() for n, t in model.state_dict().items()}
def unchanged(model, before): after = model.state_dict(); return after.keys() == before.keys() and all(torch.equal(t, before[n]) for n, t in after.items())

def by_hand(model, loss, key, directions, eps, batch, seed):
    "Losses [2, P] with the parameters really moved in a copy of the module, each under the same torch seed."
    found = []
    layout = layout_of({n: p for n, p in model.named_parameters() if p.requires_grad})
    for sign in (1, -1):
        for j in directions:
            moved = copy.deepcopy(model)
            z = layout.unflatten(PROBES["rademacher"](layout, key, torch.tensor([j]))[0])
            with torch.no_grad():
                for n, p in moved.named_parameters():
                    if n in z: p += sign * (z[n] * eps)
                torch.manual_seed(seed)
                found.append(float(loss(moved, batch)))
    return torch.tensor(found, dtype=torch.float64).view(2, -1)

def test_a_module_is_moved_as_if_by_hand():
    "Tied weights move once and together, frozen ones stay, every evaluation sees the same dropout, and nothing is left behind."
    model = fresh()
    before, objective = everything(model), ModuleObjective(model, cross_entropy)
    assert objective.layout.names == ("embed.weight", "norm.weight", "norm.bias") and objective.layout.gains == {"norm.weight"} and objective.layout.M == 72
    rng = torch.get_rng_state()
    found = objective.losses(objective.theta(), "rademacher", Key(4, 2), torch.tensor([3, 1]), 1e-2, (X, Y))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.allclose(found[..., 0], by_hand(model, cross_entropy, Key(4, 2), [3, 1], 1e-2, (X, Y), objective.rng), rtol=1e-6) and found.shape == (2, 2, 1)
    assert unchanged(model, before) and model.out.weight is model.embed.weight and model.calls == 0 and model.norm.num_batches_tracked == 0
    other = ModuleObjective(model, cross_entropy)
    other.losses(other.theta(), "rademacher", Key(4, 3), torch.tensor([0]), 1e-2, (X, Y))
    assert other.rng != objective.rng   # another update, another dropout

def test_a_loss_that_is_a_python_float():
    "Every digit of a float counts: the difference of two losses is divided by 2ε."
    model = nn.Linear(3, 1, dtype=torch.float64)
    x = Key(1).normal("sample", torch.arange(6))[:, :3]
    def loss(m, batch): return ((m(x)**2).mean() + 100).item()
    estimates = [spsa(o, o.theta(), [None], Key(1), 1e-6, 4) for o in (ModuleObjective(model, loss), ModuleObjective(model, lambda m, b: (m(x)**2).mean() + 100))]
    assert torch.equal(estimates[0].losses, estimates[1].losses)
    assert torch.equal(estimates[0].grad["weight"], estimates[1].grad["weight"]) and estimates[0].grad["weight"].abs().min() > 0
    counted = ModuleObjective(model, lambda m, b: int((m(x) > 0).sum()))   # a whole number is a loss, too
    assert counted.losses(counted.theta(), "rademacher", Key(1), torch.arange(3), 10., None).unique().numel() > 1

def test_vmap_equals_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3, bias=False))
    x, y = torch.randn(9, 5), torch.arange(9) % 3
    def each(m, b): return F.cross_entropy(m(x), y, reduction="none")
    loop, mapped = (ModuleObjective(model, each, vmap=v, chunk=c) for v, c in ((False, 3), (True, 4)))
    assert loop.layout.gains == {"1.weight"}
    a, b = (o.losses(o.theta(), "sparse_rademacher", Key(3, 1), torch.arange(7), 1e-2, None, (1, 0, -1)) for o in (loop, mapped))
    assert a.shape == b.shape == (3, 7, 9) and torch.allclose(a, b, rtol=1e-5) and (a[0] - a[2]).abs().max() > 1e-3
    g, h = (spsa(o, o.theta(), [None], Key(3), 1e-2, 7).grad for o in (loop, mapped))
    assert all(torch.allclose(g[n], h[n], rtol=1e-3, atol=1e-4) for n in g)

@pytest.mark.parametrize("calls_before", [0, 1, 5])
def test_an_exception_in_the_loss_leaves_everything_as_it_was(calls_before):
    model = fresh()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    zo, count = ZerothOrder(model, optimizer, P=4), itertools.count()
    zo.step(lambda: cross_entropy(model, (X, Y)))   # so that there is momentum
    before, rng, state = everything(model), torch.get_rng_state(), optimizer.state[model.embed.weight]["momentum_buffer"].clone()
    grad = model.embed.weight.grad.clone()
    def failing():
        out = cross_entropy(model, (X, Y))
        if next(count) == calls_before: raise ZeroDivisionError("mine")
        return out
    with pytest.raises(ZeroDivisionError, match="mine"): zo.step(failing)
    assert unchanged(model, before) and zo.steps == 1 and torch.equal(torch.get_rng_state(), rng) and model.out.weight is model.embed.weight
    assert torch.equal(optimizer.state[model.embed.weight]["momentum_buffer"], state) and torch.equal(model.embed.weight.grad, grad)
    with pytest.raises(SomaError, match="step 1: a perturbed loss is not finite"): zo.step(lambda: float("nan"))
    assert unchanged(model, before) and zo.steps == 1
    zo.step(lambda: cross_entropy(model, (X, Y)))
    twin = fresh()
    other = ZerothOrder(twin, torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1, momentum=0.9), P=4)
    for _ in range(2): other.step(lambda: cross_entropy(twin, (X, Y)))
    assert unchanged(twin, everything(model))   # as if nothing had happened

OPTIMIZERS = {"SGD": lambda p: torch.optim.SGD(p, lr=0.05), "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
              "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01)}

@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_the_estimate_as_its_gradient(name):
    model, twin = fresh(), fresh()
    bias = model.out.bias.clone()
    zo = ZerothOrder(model, OPTIMIZERS[name](model.parameters()), eps=1e-2, P=6, probes="gaussian", seed=3)
    by_hand, objective = OPTIMIZERS[name](twin.parameters()), ModuleObjective(twin, cross_entropy)
    for step in range(4):
        loss = zo.step(lambda: cross_entropy(model, (X, Y)))
        estimate = spsa(objective, objective.theta(), [(X, Y)], Key(3, step), 1e-2, 6, "gaussian")
        for n, g in estimate.grad.items(): dict(twin.named_parameters())[n].grad = g
        by_hand.step()
        assert loss == estimate.loss
    assert unchanged(twin, everything(model)) and torch.equal(model.out.bias, bias) and not torch.equal(model.embed.weight, fresh().embed.weight)

def test_it_learns_what_no_gradient_sees():
    "A step function of the outputs: zero gradient almost everywhere, and the error falls."
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(200, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    def errors(): return (model(x).argmax(1) != y).float().mean().item()
    zo, start = ZerothOrder(model, torch.optim.Adam(model.parameters(), lr=0.05), eps=0.3, P=8), errors()
    for _ in range(40): zo.step(errors)
    assert start > 0.4 and errors() < 0.15

def test_forward_slopes_are_the_exact_gradient_along_the_directions():
    model = ModelConfig(d=4, D=1, d_E=4)
    objective, theta = ExpertObjective(model, chunk=3), init_params(model, dtype=torch.float64)
    windows, layout, key, j = torch.arange(36, dtype=torch.uint8).view(4, 9), body_layout(model), Key(5, 2), torch.arange(2, 9)
    g = layout.flatten(exact_gradient(objective, theta, windows))
    for probes in ("gaussian", "rademacher"):
        found, losses = forward_slopes(objective, theta, windows, key, j, probes)
        assert torch.allclose(found, PROBES[probes](layout, key, j, torch.float64) @ g, rtol=1e-10, atol=1e-14)
    assert torch.allclose(losses, objective.loss({n: t if n == "E" else t[None] for n, t in theta.items()}, windows)[0])
    estimate = forward_gradient(objective, theta, windows.split(2), key, 3, "rademacher")
    by_hand = sum(forward_slopes(objective, theta, b, key, torch.arange(3*a, 3*a + 3), "rademacher")[0] @ PROBES["rademacher"](layout, key, torch.arange(3*a, 3*a + 3), torch.float64)
                  for a, b in enumerate(windows.split(2))) / 6
    assert torch.allclose(layout.flatten(estimate.grad), by_hand) and torch.equal(estimate.losses.flatten(), losses)

def test_forward_slopes_refuse_a_loss_that_tells_them_nothing():
    layout = layout_of(dict(x=torch.zeros(2)))
    flat = Objective(layout, lambda stacked, batch: stacked["x"].detach().sum(1))
    with pytest.raises(SomaError, match="no forward derivative .*estimate it with spsa"): forward_slopes(flat, dict(x=torch.zeros(2)), None, Key(1), torch.arange(2))
