"Laws of the variance theory on losses where everything can be counted, that cross estimators and closed forms."
import math

import pytest
import torch

from soma.core import Key
from soma.estimators import one_sided, spsa, spsa_summed
from soma.models import Objective
from soma.probes import Layout
from soma.variance import enumerate_probes, largest_step, multiplier, one_sided_variance, probe_moments, probe_variance, sharding_ratio

def quadratic(weights:int, gains:int, seed:int)->tuple:
    "½xᵀAx + bᵀx with that many weights and gains: objective, theta at zero, b."
    sizes = {n: k for n, k in dict(weights=weights, gains=gains).items() if k}
    layout, M = Layout(tuple(sizes), tuple((k,) for k in sizes.values()), frozenset(sizes) & {"gains"}), weights + gains
    draws = Key(seed).normal("init", torch.arange(M * M)).flatten()
    A, b = draws[:M*M].view(M, M), draws[M*M:M*M + M]
    A = A + A.T
    def loss(stacked, _):
        x = torch.cat([stacked[n] for n in layout.names], 1)
        return 3 + x @ b + 0.5 * torch.einsum("ci,ij,cj->c", x, A, x)
    return Objective(layout, loss), layout.unflatten(torch.zeros(M, dtype=torch.float64)), b

def joint(z, w, N):
    "All N-tuples of directions with their probabilities: [K^N, N, m], [K^N]."
    at = torch.cartesian_prod(*[torch.arange(len(z))] * N).view(-1, N)
    return z[at], w[at].prod(1)

@pytest.mark.parametrize("weights, gains, only_gains, ratio", [(3, 0, False, 2), (2, 0, False, 2), (2, 1, True, (2*2 - 1) / (2 - 1))])
def test_summed_over_own_losses_with_sparse_probes_counted(weights, gains, only_gains, ratio):
    "Two experts, every pair of sparse directions: N exactly where q is one half throughout, (Ns − 1)/(s − 1) for gradients in the gains."
    (o, _, b), m = quadratic(weights, gains, 4), weights + gains
    z, w = enumerate_probes("sparse_rademacher", o.layout)
    g = [torch.where(o.layout.gain_mask() | (not only_gains), b, 0.) * s for s in (1., 2.)]
    pairs, p = joint(z, w, 2)
    own = torch.stack([pairs[:, e] @ g[e] for e in range(2)], 1)
    def trace(slopes):
        x = slopes[:, :, None] * pairs
        mean = (p[:, None, None] * x).sum(0)
        return float((p[:, None, None] * (x - mean)**2).sum())
    v_own, v_summed = trace(own), trace(own.sum(1, keepdim=True).expand(-1, 2))
    moments = [probe_moments("sparse_rademacher", o.layout)] * 2
    squared = sum(float(x @ x) for x in g)
    assert v_own / squared == pytest.approx(probe_variance(g, moments), rel=1e-12) and v_summed / squared == pytest.approx(probe_variance(g, moments, summed=True), rel=1e-12)
    assert v_summed / v_own == pytest.approx(ratio, rel=1e-12)

def test_estimators_are_the_formulas_averaged():
    "Means over many keys of what rooms 06's three estimators give come to the gradient, with the variance of the closed form."
    objective, theta, b = quadratic(6, 0, 9)
    def estimates(make, n): return torch.stack([make(Key(7, k)) for k in range(n)])
    for make, law in ((lambda k: spsa(objective, theta, [None], k, 0.01, 4).grad["weights"], 5 / 4),
                      (lambda k: one_sided(objective, theta, [None], k, 1e-4, 4).grad["weights"], one_sided_variance(6, 4))):
        x = estimates(make, 400)
        error = ((x - b)**2).sum(1) / b.square().sum()
        assert abs(error.mean() - law) < 4 * error.std() / len(x)**0.5
        assert ((x.mean(0) - b).abs() < 4.5 * x.std(0) / len(x)**0.5).all()

def test_summed_losses_in_the_estimator_are_one_block():
    "spsa_summed of two experts has the variance of one block of all coordinates: (M − 1)/P."
    (a, ta, ba), (c, tc, bc) = quadratic(4, 0, 1), quadratic(4, 0, 2)
    G = torch.cat([ba, bc])
    found = torch.stack([torch.cat([e.grad["weights"] for e in spsa_summed([a, c], [ta, tc], [[None]] * 2, [Key(1, k), Key(2, k)], 0.01, 2)]) for k in range(400)])
    error = ((found - G)**2).sum(1) / G.square().sum()
    assert abs(error.mean() - 7 / 2) < 4 * error.std() / len(error)**0.5
    assert sharding_ratio(8, 2) == pytest.approx(3 / 7)

def test_the_condition_of_corollary_2_is_sharp():
    "Equal curvatures: the share of the bound that is used after very many updates is 1/(2 − x), one at the largest step."
    d, P, lam = 33, 4, 0.7
    for x in (0.25, 1.0, 1.5):
        eta, m = x * largest_step(lam, d, P), multiplier(d, P)
        factor = 1 - 2*eta*lam + (eta*lam)**2 * m                    # E‖g'‖² over ‖g‖²
        total, bound = 1 / (1 - factor), 2 * (1 / (2*lam)) / eta      # sums over all updates from ‖g‖ = 1, whose loss is 1/(2λ)
        assert total / bound == pytest.approx(1 / (2 - x), rel=1e-12) and math.isclose(total, bound) == (x == 1)
