"Laws of room 12: closed forms against every probe there is, measurements against the plain definition, standard errors against the spread they claim."
import itertools, math

import pytest
import torch

import soma.variance as variance
from soma.core import Key, ModelConfig, SomaError
from soma.estimators import exact_gradient, one_sided, spsa
from soma.kernels import expert_objective
from soma.models import ExpertObjective, Objective, init_params
from soma.probes import Layout
from soma.variance import (Measured, ProbeSample, accumulated, best_batch, best_pair, dense_variance, enumerate_probes, enumerated, error_variance, jackknife, largest_step, multiplier,
                           noise_scale, one_sided_excess, one_sided_variance, probe_moments, probe_sample, probe_variance, relative_error, relative_variance, restrict, sharding_ratio,
                           stationarity_bound, total, two_stage)

def normals(*shape, seed=0): n = math.prod(shape); return Key(seed).normal("sample", torch.arange(-(-n // 4))).flatten()[:n].view(shape)

def bowl(M, gains=0, seed=0):
    "A quadratic whose batch [B, M] adds slopes: objective, theta."
    H = normals(M, M, seed=seed)
    H = (H + H.T) / 2
    layout = Layout(*zip(*(("weights", (M - gains,)), ("gains", (gains,)))[:1 + (gains > 0)]), frozenset(["gains"]) if gains else frozenset())
    def loss(stacked, batch):
        x = torch.cat([stacked[n] for n in layout.names], 1)
        return 0.5 * torch.einsum("ci,ij,cj->c", x, H, x)[:, None] + x @ batch.T
    return Objective(layout, loss), layout.unflatten(normals(M, seed=seed + 1))

def gradient(objective, theta, batch): return objective.layout.flatten(exact_gradient(objective, theta, batch))

# ---- closed forms against every probe

@pytest.mark.parametrize("probes, M, gains", [("rademacher", 12, 0), ("rademacher", 1, 0), ("rademacher", 7, 2), ("sparse_rademacher", 8, 0), ("sparse_rademacher", 8, 3), ("sparse_rademacher", 2, 1)])
@pytest.mark.parametrize("eps", [1e-2, 1.0])
def test_closed_forms_on_a_quadratic(probes, M, gains, eps):
    objective, theta = bowl(M, gains)
    batch = normals(3, M, seed=5)
    g, moments = gradient(objective, theta, batch), probe_moments(probes, objective.layout)
    z, weight = enumerate_probes(probes, objective.layout)
    assert len(z) == (2**M if probes == "rademacher" else 2**gains * 3**(M - gains)) and math.isclose(weight.sum(), 1) and torch.allclose(weight @ z**2, moments[0])
    every = enumerated(objective, theta, batch, eps, probes)
    assert torch.allclose(every.mean, moments[0] * g, rtol=1e-10, atol=1e-10 * g.norm())
    assert math.isclose(every.covariance / (g @ g), probe_variance([g], [moments]), rel_tol=1e-10, abs_tol=1e-10)
    if probes == "rademacher": assert math.isclose(every.covariance / (g @ g), dense_variance(M), rel_tol=1e-10, abs_tol=1e-10)

@pytest.mark.parametrize("probes", ["rademacher", "sparse_rademacher"])
def test_summed_losses_by_enumerating_all_experts_at_once(probes):
    layout = Layout(("weights", "gains"), ((2,), (1,)), frozenset(["gains"]))
    z, weight = enumerate_probes(probes, layout)
    grads, moments = [normals(3, seed=e) for e in (1, 2)], [probe_moments(probes, layout)] * 2
    mean, square = torch.zeros(6).double(), 0.
    for i, j in itertools.product(range(len(z)), repeat=2):
        heard, w = z[i] @ grads[0] + z[j] @ grads[1], weight[i] * weight[j]
        x = heard * torch.cat([z[i], z[j]])
        mean, square = mean + w * x, square + w * (x @ x)
    found = float(square - mean @ mean) / sum(float(g @ g) for g in grads)
    assert math.isclose(found, probe_variance(grads, moments, summed=True), rel_tol=1e-12) and found > 1.3 * probe_variance(grads, moments)

@pytest.mark.parametrize("N", [2, 4, 256])
def test_what_summing_costs(N):
    def ratio(q, g): return probe_variance([g] * N, [(q, q)] * N, summed=True) / probe_variance([g] * N, [(q, q)] * N)
    half, gains = torch.full((10,), 0.5).double(), torch.arange(10) < 3
    q = torch.where(gains, 1., 0.5).double()
    s = float(q.sum())
    assert math.isclose(ratio(half, normals(10)), N, rel_tol=1e-12)
    assert math.isclose(ratio(q, normals(10) * gains), (N*s - 1) / (s - 1), rel_tol=1e-12) and math.isclose(ratio(q, normals(10) * ~gains), N, rel_tol=1e-12)
    assert math.isclose(1 / sharding_ratio(10*N, N), ratio(torch.ones(10).double(), normals(10)), rel_tol=1e-12)

CFG = ModelConfig(d=8, d_E=8)
WINDOWS = (Key(4).words("sample", torch.arange(3*8))[0] % 96 + 32).to(torch.uint8).view(3, 8)

@pytest.mark.parametrize("probes, index", [("rademacher", [0, 5, 8, 70, 300, 520, 700, 900, 1200, 1500, 2000, 2087]), ("sparse_rademacher", [3, 9, 264, 400, 777, 1044, 1900, 2083])])
def test_an_expert_approaches_the_closed_form_as_eps_squared(probes, index):
    theta = init_params(CFG, dtype=torch.float64)
    small, inside = restrict(ExpertObjective(CFG, chunk=256), theta, torch.tensor(index))
    assert ("gains" in inside) and small.layout.M == len(index)
    g, moments = gradient(small, inside, WINDOWS), probe_moments(probes, small.layout)
    off = []
    for eps in (0.1, 0.03, 0.01):
        every = enumerated(small, inside, WINDOWS, eps, probes)
        off.append((float((every.mean - moments[0]*g).norm() / g.norm()), abs(every.covariance / float(g @ g) / probe_variance([g], [moments]) - 1)))
    for bias in zip(*off):
        for (a, b), ratio in zip(zip(bias, bias[1:]), (0.1/0.03, 3.)): assert abs(math.log(a / b) / math.log(ratio) - 2) < 0.1
        assert bias[0] < 0.3

def test_restricted_gradient_is_the_gradients_part():
    theta, index = init_params(CFG, dtype=torch.float64), torch.tensor([2000, 3, 0, 1100])   # a weight, two gains, a weight
    small, inside = restrict(ExpertObjective(CFG), theta, index)
    whole = gradient(ExpertObjective(CFG), theta, WINDOWS)
    assert torch.allclose(gradient(small, inside, WINDOWS), whole[torch.tensor([2000, 1100, 3, 0])], rtol=1e-10)
    assert torch.equal(small.losses(inside, "rademacher", Key(1), torch.arange(2), 1e-3, WINDOWS, (0,))[0, 0], ExpertObjective(CFG).losses(theta, "rademacher", Key(1), torch.arange(2), 1e-3, WINDOWS, (0,))[0, 0])

# ---- Monte Carlo, and the standard errors themselves

def test_four_losses_or_their_sum_at_two_thousand_coordinates():
    "Float64; each within its stated error, and the ratio within three of its own, which is at most one per cent."
    objectives, n = [bowl(500, seed=10*e) for e in range(4)], 26_000
    batch = normals(2, 500, seed=3)
    grads = [gradient(*o, batch) for o in objectives]
    own = [probe_sample(*o, batch, Key(1, e), 1e-3, n, "rademacher") for e, o in enumerate(objectives)]
    heard = sum(s.slopes for s in own)
    apart, together = relative_variance(own, grads), relative_variance([s.hearing(heard) for s in own], grads)
    assert abs(apart.value - dense_variance(500)) < 3*apart.se and abs(together.value - dense_variance(2000)) < 3*together.se
    ratio = together / apart
    assert abs(ratio.value - 1/sharding_ratio(2000, 4)) < 3*ratio.se and ratio.se <= 0.01 * 4 and apart.se < 0.01 * apart.value

@pytest.mark.parametrize("probes", ["rademacher", "sparse_rademacher", "gaussian"])
def test_monte_carlo_of_every_family(probes):
    objective, theta = bowl(40, gains=10)
    batch = normals(2, 40, seed=3)
    g, sample = gradient(objective, theta, batch), probe_sample(objective, theta, batch, Key(2), 1e-3, 20_000, probes)
    moments, found = probe_moments(probes, objective.layout), relative_variance([sample], [gradient(objective, theta, batch)])
    assert abs(found.value - probe_variance([g], [moments])) < 3*found.se and found.se < 0.02*found.value
    assert abs(sample.signal().value - float((moments[0]*g).square().sum())) < 3*sample.signal().se

def test_stated_errors_are_the_spread():
    "Over 300 independent samples the spread of each measured number is the error that it states, within a fifth, and its mean is right."
    objective, theta = bowl(30)
    batch = normals(2, 30, seed=3)
    g, runs = gradient(objective, theta, batch), []
    for i in range(300):
        s = probe_sample(objective, theta, batch, Key(3, i), 1e-3, 64, "rademacher")
        runs.append([s.covariance(), s.covariance(4), s.signal(), s.error(g, 8), s.cosine(g, 8)])
    expect = [29*float(g @ g), 29/4*float(g @ g), float(g @ g), 29/8*float(g @ g), None]
    for kind, truth in zip(zip(*runs), expect):
        values, errors = torch.tensor([m.value for m in kind]), torch.tensor([m.se for m in kind])
        assert abs(float(values.std() / (errors**2).mean().sqrt()) - 1) < 0.2
        if truth is not None: assert abs(float(values.mean()) - truth) < 3.5 * float(values.std()) / math.sqrt(300)

# ---- measurements against the plain definition

def sample_of(n=24, M=20, seed=1, dtype=torch.float64): layout = Layout(("w",), ((M,),)); return ProbeSample(layout, "sparse_rademacher", Key(seed), normals(n, seed=9), dtype)

def test_inner_products_are_those_of_the_listed_estimates():
    s, r = sample_of(), normals(20, seed=2)
    X = torch.cat(list(s.averages()))
    assert X.shape == (24, 20) and torch.allclose(s.mean(), X.mean(0))
    def trace(x): return x.var(0).sum()
    def unbiased(x): return ((x.sum(0)**2).sum() - (x**2).sum()) / (len(x) * (len(x) - 1))
    def mean_error(x): return trace(x)/4 + unbiased(x) - 2*x.mean(0) @ r + r @ r
    groups = X.view(6, 4, 20).mean(1)
    pairs = [(s.covariance(), jackknife(trace, X)), (s.covariance(4), jackknife(trace, groups)), (s.signal(), jackknife(unbiased, X)), (s.error(r, 4), jackknife(mean_error, X)),
             (s.cosine(r, 4), jackknife(torch.mean, torch.nn.functional.cosine_similarity(groups, r[None])))]
    for found, plain in pairs: assert math.isclose(found.value, plain.value, rel_tol=1e-10) and torch.allclose(found.left_out, plain.left_out, rtol=1e-9)
    assert math.isclose(s.error(r).value, float(((X - r)**2).sum(1).mean()), rel_tol=1e-10)     # one direction: the mean squared distance itself
    assert math.isclose(s.snr(8).value, 8 * s.signal().value / s.covariance().value)

@pytest.mark.parametrize("room", [1, 19, 20, 55, 10**6])
def test_memory_changes_nothing_but_the_last_bits(monkeypatch, room):
    plain = sample_of()
    expect = [plain.covariance(P) for P in (1, 2, 8)]
    monkeypatch.setattr(variance, "_ROOM", room)
    found = sample_of()
    for P, m in zip((1, 2, 8), expect): assert torch.allclose(found.covariance(P).left_out, m.left_out, rtol=1e-10)

@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_sample_is_what_training_would_have_estimated(impl):
    cfg = ModelConfig(d=16, d_E=16)
    try: objective = expert_objective(cfg, impl=impl)
    except SomaError as e: pytest.skip(str(e))
    theta, key = init_params(cfg), Key(6, 2)
    s = probe_sample(objective, theta, WINDOWS, key, 1e-3, 12)
    trained = spsa(objective, theta, [WINDOWS], key, 1e-3, 12, "sparse_rademacher")
    assert torch.allclose(objective.layout.unflatten(s.mean().float())["blocks.1.w_up"], trained.grad["blocks.1.w_up"], rtol=1e-6, atol=1e-9)
    half = probe_sample(objective, theta, WINDOWS, key, 1e-3, 12, one_sided=12)
    assert torch.allclose(half.mean().float(), objective.layout.flatten(one_sided(objective, theta, [WINDOWS], key, 1e-3, 12, "sparse_rademacher").grad), rtol=1e-5, atol=1e-7)

def test_one_sided_on_a_curved_loss():
    objective, theta = bowl(60)
    batch, eps, P = normals(2, 60, seed=3), 1.5, 6
    H = torch.autograd.functional.hessian(lambda x: objective.loss(objective.layout.unflatten(x[None]), batch).mean(), objective.layout.flatten(theta))
    g = gradient(objective, theta, batch)
    kappa = eps**2 * float((H**2).sum() - (H.diagonal()**2).sum()) / (2*float(g @ g))
    found = one_sided_excess(objective.losses(theta, "rademacher", Key(8), torch.arange(6000), eps, batch))
    assert abs(found.value - kappa) < 3*found.se and found.se < 0.05*kappa
    measured = probe_sample(objective, theta, batch, Key(8), eps, 6000, "rademacher", one_sided=P).covariance(P) / float(g @ g)
    assert abs(measured.value - one_sided_variance(60, P, kappa)) < 3*measured.se and measured.value > 1.5 * one_sided_variance(60, P)

def test_noise_scale_and_the_two_stages():
    g, spread = normals(50, seed=1), normals(80, 50, seed=2)
    grads = list(g + 2*spread)
    nu, mean = noise_scale(grads), torch.stack(grads).mean(0)
    assert abs(nu.value - 200 / float(g @ g)) < 3*nu.se and nu.se < 0.2*nu.value
    assert math.isclose(noise_scale(grads, population=True).value, float(((torch.stack(grads) - mean)**2).sum(1).mean() / (mean @ mean)), rel_tol=1e-12) and noise_scale(grads, population=True).se == 0
    layout, q = Layout(("w",), ((50,),)), 1.
    samples = [ProbeSample(layout, "rademacher", Key(5, i), torch.cat([z @ gi[:, None] for z in [list(ProbeSample(layout, "rademacher", Key(5, i), torch.ones(40), torch.float64).averages())[0]]]).flatten(), torch.float64) for i, gi in enumerate(grads)]
    within, between = two_stage(samples)
    each = torch.tensor([float(gi @ gi) for gi in grads])
    assert abs(within.value - 49*float(each.mean())) < 3*within.se and abs(between.value - 200) < 3*between.se
    assert accumulated(within, between, 4, 2).value == within.value/8 + between.value/2

def test_measured_numbers_compare_only_with_as_many_draws():
    a, b = jackknife(torch.mean, normals(9)), jackknife(torch.mean, normals(8))
    assert (a - a).value == 0 == (a - a).se and math.isclose((2*a).se, 2*a.se) and math.isclose((a + 1).value, a.value + 1)
    assert math.isclose(total([a, a, a]).se, 3*a.se) and a.interval[0] < a.value < a.interval[1]
    with pytest.raises(SomaError, match="equally many"): a / b

# ---- allocation

@pytest.mark.parametrize("K", [1, 7, 36, 256])
@pytest.mark.parametrize("d, nu", [(2, 0.), (129, 8.32), (1000, 0.3), (3, 1e4)])
def test_the_best_split_is_the_best(K, d, nu):
    for exact in (True, False):
        found = best_pair(K, d, nu, exact)
        plain = min((error_variance(d, nu, P, B), B) for B in range(1, K + 1) for P in range(1, K + 1) if (B*P == K if exact else B*P <= K))
        assert math.isclose(found.v, plain[0], rel_tol=1e-12) and found.B == plain[1]
    B, P = best_batch(K, d, nu)
    assert math.isclose(B*P, K) and 1 <= B <= K and all((d-1)*B/K + nu/B <= (d-1)*b/K + nu/b + 1e-12 for b in torch.linspace(1, K, 97).tolist())

def test_error_variance_by_simulation():
    "Shared batches, accumulated batches and a batch of its own for each direction, against draws of the estimator itself."
    d, g, sigma, n = 12, normals(12, seed=1), 1.5, 40_000
    nu = d * sigma**2 / float(g @ g)
    def draws(P, B, A, seed):
        z = torch.where(torch.rand(n, A, P, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < .5, 1., -1.).double()
        gB = g + sigma / math.sqrt(B) * torch.randn(n, A, d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        return (torch.einsum("napd,nad->nap", z, gB)[..., None] * z).mean((1, 2))
    for P, B, A in ((3, 2, 1), (2, 1, 3), (1, 2, 4)):
        error = ((draws(P, B, A, P) - g)**2).sum(1) / float(g @ g)
        assert abs(float(error.mean()) - error_variance(d, nu, P, B, A)) < 4 * float(error.std()) / math.sqrt(n)

# ---- what makes no sense

QUAD = bowl(4)
@pytest.mark.parametrize("call, said", [
    (lambda: dense_variance(0), "d = 0"), (lambda: dense_variance(5, 0), "P = 0"), (lambda: dense_variance(5, 0.5), "P = 0.5"), (lambda: dense_variance(float("inf")), "d = inf"), (lambda: dense_variance("8"), "d = 8"),
    (lambda: sharding_ratio(3, 4), "M = 3"), (lambda: error_variance(5, -1, 1, 1), "nu = -1"), (lambda: error_variance(5, float("nan"), 1, 1), "nu = nan"), (lambda: error_variance(5, 1, 1, 0), "B = 0"), (lambda: error_variance(5, 1, 1, 1, 0), "A = 0"),
    (lambda: best_batch(0, 5, 1), "K = 0"), (lambda: best_batch(4, 1, 1), "d = 1"), (lambda: best_pair(0, 5, 1), "K = 0"), (lambda: largest_step(0, 5), "smoothness"), (lambda: stationarity_bound(1, 1, 10, 1, 5), "Corollary 2"), (lambda: stationarity_bound(-1, .1, 10, 1, 5), "gap"),
    (lambda: multiplier(-3), "d = -3"), (lambda: one_sided_variance(5, 1), "P = 1"), (lambda: accumulated(1., 1., 0), "P = 0"),
    (lambda: probe_variance([torch.zeros(3)]), "not zero"), (lambda: probe_variance([torch.tensor([math.nan, 1.])]), "finite"), (lambda: probe_moments("rank1", Layout(("w",), ((3,),))), "independent"), (lambda: probe_moments("signs", Layout(("w",), ((3,),))), "unknown"),
    (lambda: probe_sample(*QUAD, torch.full((1, 4), math.inf).double(), Key(0), 1e-3, 8, "rademacher"), "not finite"), (lambda: probe_sample(*QUAD, torch.ones(1, 4), Key(0), 0., 8), "eps = 0"), (lambda: probe_sample(*QUAD, torch.ones(1, 4), Key(0), 1e-3, 2), "n = 2"),
    (lambda: probe_sample(*QUAD, torch.ones(1, 4), Key(0), 1e-3, 8, one_sided=3), "divide the 8"), (lambda: relative_variance([sample_of()], [torch.ones(20)], 0), "P = 0"), (lambda: relative_error([sample_of()], [torch.zeros(20)]), "not zero"),
    (lambda: sample_of().error(torch.ones(3)), "20 perturbed"), (lambda: sample_of().cosine(torch.zeros(20)), "not zero"), (lambda: sample_of().covariance(5), "must divide"), (lambda: sample_of().covariance(12), "at least 3"),
    (lambda: enumerate_probes("gaussian", Layout(("w",), ((3,),))), "no finite list"), (lambda: enumerate_probes("rademacher", Layout(("w",), ((13,),))), "at most 12"), (lambda: restrict(*QUAD, torch.tensor([4])), "between 0 and 3"), (lambda: restrict(*QUAD, torch.tensor([], dtype=torch.long)), "distinct"),
    (lambda: noise_scale([torch.ones(2)] * 2), "at least 3"), (lambda: noise_scale([torch.tensor([1.]), torch.tensor([-1.]), torch.tensor([.01])]), "not above"), (lambda: two_stage([sample_of(), sample_of()]), "another key"), (lambda: jackknife(torch.mean, torch.ones(2)), "at least 3"),
    (lambda: one_sided(*QUAD, [torch.ones(1, 4)], Key(0), 1e-3, 1), "at least 2"),
])
def test_nonsense_is_refused_in_one_line(call, said):
    with pytest.raises(SomaError, match=said) as refused: call()
    assert "\n" not in str(refused.value)

def test_a_measured_number_shows_its_error(): assert repr(Measured(2., torch.tensor([1., 2., 3.]))) == "2 ± 1.2"
