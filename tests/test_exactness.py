"The promise of exactness: a result depends on its inputs and the tile, not on chunks, threads, or what else is computed."
import math, os, subprocess, sys

import numpy as np
import pytest
import torch

from soma.activations import ControlVariate, DustConfig, dust
from soma.core import Key, ModelConfig, TrainConfig
from soma.estimators import Estimate, delta_rule, spsa, spsa_summed
from soma.inference import Ensemble
from soma.kernels import expert_objective
from soma.models import MORE_SITES, ExpertObjective, body_layout, init_params, ordered_sum, tiles, token_losses, window_losses
from soma.optim import adam, adam_step
from soma.probes import PROBES, probe_family, weighted_sum

SIZES = {  # model, sequences, bytes, tile
    "d = 181": (ModelConfig(d=181, D=1), 5, 8, 4),   # a width of the paper's: products that torch and its library divide among threads
    "d = 7": (ModelConfig(d=7, D=2, d_E=5), 7, 12, 2),   # small products, which are added up in another order for other numbers of rows
    "d = 32": (ModelConfig(), 17, 24, 16),
}

def windows(n, T, salt=0)->torch.Tensor: return Key(salt).below(256, "sample", torch.arange(n * (T + 1))).view(n, T + 1).to(torch.uint8)
def moved(theta)->dict: return {n: t + 0.1 * torch.sin(torch.arange(t.numel(), dtype=t.dtype) + 1).view_as(t) for n, t in theta.items()}   # gains away from one

def with_threads(n, f):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        assert torch.get_num_threads() == n
        return f()
    finally: torch.set_num_threads(before)

def same(f, ways):
    "f gives the same bits for every way, with one or two threads; what it gives."
    runs = [(ways[0], 1), *((way, 2 - i % 2) for i, way in enumerate(ways))]
    first, *others = [with_threads(n, lambda: f(way)) for way, n in runs]
    for run, other in zip(runs[1:], others):
        differ = [name for name, value in first.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(other[name]))]
        assert not differ, f"{differ} differ at {run}"
    return first

@pytest.mark.parametrize("size", SIZES)
def test_forward(size):
    cfg, B, T, tile = SIZES[size]
    theta, x = moved(init_params(cfg)), windows(B, T)
    def f(chunk):
        o = ExpertObjective(cfg, tile, chunk)
        return dict(losses=o.losses(theta, "sparse_rademacher", Key(1, 2), torch.arange(3), 1e-3, x, (1, 0, -1)), clean=o.losses(theta, "gaussian", Key(1, 2), torch.arange(1), 1e-3, x, (0,)),
                    one_side=o.losses(theta, "rademacher", Key(1, 2), torch.arange(2), 1e-3, x, (-1,)),
                    token_losses=o.token_losses(theta, x), hidden=o.hidden(theta, x), mean_loss=torch.tensor(o.mean_loss(theta, x), dtype=torch.float64))
    found = same(f, (1, 2, 5, 32))
    assert found["losses"].shape == (3, 3, B) and len(found["losses"].unique()) == 6*B + B   # one clean loss for all directions, else all different
    assert found["mean_loss"].item() == math.fsum(found["token_losses"].double().flatten().tolist()) / (B * T)   # these sums of float32 values are exact in float64
    assert torch.equal(found["losses"][1], found["clean"][0].expand(3, -1)) and found["losses"].dtype == torch.float64

@pytest.mark.parametrize("size", SIZES)
def test_a_tile_knows_nothing_of_the_others(size):
    "The windows of a tile, with others after it, before it, or alone."
    cfg, B, T, tile = SIZES[size]
    theta, x, o = moved(init_params(cfg)), windows(3 * tile, T), ExpertObjective(cfg, tile, 2)
    def losses(x): return o.losses(theta, "sparse_rademacher", Key(3), torch.arange(2), 1e-3, x)
    whole, tokens, hidden = losses(x), o.token_losses(theta, x), o.hidden(theta, x)
    for a, b in ((0, tile), (tile, 2*tile), (2*tile, 3*tile), (tile, 3*tile)):
        assert torch.equal(losses(x[a:b]), whole[..., a:b]) and torch.equal(tokens[a:b], o.token_losses(theta, x[a:b])) and torch.equal(hidden[a:b], o.hidden(theta, x[a:b]))
    part, padded = x[:tile + 1], torch.cat([x[:tile + 1], torch.zeros(tile - 1, T + 1, dtype=torch.uint8)])   # a tile that is not full is filled with zeros
    assert torch.equal(tiles(part, tile), padded.view(2, tile, T + 1))
    assert torch.equal(losses(part), losses(padded)[..., :tile + 1]) and torch.equal(o.token_losses(theta, part), o.token_losses(theta, padded)[:tile + 1])

@pytest.mark.parametrize("shape", [(5, 17, 8), (37, 64, 32), (17, 256, 33), (17, 1024, 32), (3, 2048, 7)])
def test_delta_rule(shape):
    B, T, d_E = shape
    hidden, E, y = Key(1).normal("sample", torch.arange(B*T*d_E))[:, 0].view(shape).float(), init_params(ModelConfig(d_E=d_E))["E"], windows(B, T)[:, 1:]
    same(lambda block: dict(E=delta_rule(hidden, y, E, block)), (16, 1, 7, 64))
    one_by_one = sum((delta_rule(hidden[i:i+1], y[i:i+1], E) * T for i in range(B)), torch.zeros(256, d_E, dtype=torch.float64)) / (B*T)
    assert torch.allclose(delta_rule(hidden, y, E), one_by_one, rtol=1e-12, atol=1e-18)

@pytest.mark.parametrize("probes", PROBES)
def test_weighted_sum(probes):
    layout, c = body_layout(ModelConfig(d=181, D=1)), Key(2).normal("sample", torch.arange(2)).flatten()[:5]
    directions = torch.tensor([6, 0, 3, 11, 4])
    found = same(lambda chunk: dict(sum=weighted_sum(layout, probes, Key(1, 5), directions, c, chunk=chunk)), (1, 2, 3, 16))["sum"]
    z = torch.stack([probe_family(probes)(layout, Key(1, 5), j[None])[0] for j in directions]).double()
    total = torch.zeros(layout.M, dtype=torch.float64)
    for row, weight in zip(z, c): total = total + row * weight   # in the order of directions, each product rounded, then each sum
    assert found.std() > 0.5
    if probes == "rank1": assert torch.allclose(found, total, rtol=1e-5, atol=1e-6)   # one product instead of five outer ones, which were rounded to float32
    else: assert torch.equal(found, total)

@pytest.mark.parametrize("size", ["d = 181", "d = 7"])
def test_an_update(size):
    "SPSA over two batches, by own and by summed losses; Adam's step with coupled decay; the mean loss."
    cfg, B, T, tile = SIZES[size]
    theta, batches = init_params(cfg), list(windows(2 * B, T).split(B))
    def f(chunk):
        o, body = ExpertObjective(cfg, tile, chunk), {n: t.clone() for n, t in theta.items() if n != "E"}
        estimate = spsa(o, theta, batches, Key(7), 1e-3, 2, "sparse_rademacher")
        adam_step(adam(body, TrainConfig(), 1e-2), body, estimate.grad, 1e-2)
        both = spsa_summed([o, o], [theta, body | dict(E=theta["E"])], [batches, batches[::-1]], [Key(8), Key(9)], 1e-3, 1, "gaussian")
        return {f"{i}.{n}": t for i, d in enumerate((estimate.grad, body, both[0].grad, both[1].grad)) for n, t in d.items()} | dict(loss=torch.tensor(estimate.loss, dtype=torch.float64))
    found = same(f, (1, 5))
    assert not torch.equal(found["1.blocks.0.w_ih"], theta["blocks.0.w_ih"]) and found["0.norm"].dtype == torch.float32

@pytest.mark.parametrize("tier, cv, more", [("A", False, dict(n=3, baseline="loo", more=MORE_SITES)), ("B", True, dict(warmup=1, ridge=2.)), ("C", False, dict(n=2, noise="gaussian"))])
@pytest.mark.parametrize("make, size", [(ExpertObjective, "d = 7"), *((expert_objective, size) for size in SIZES)], ids=("reference", *SIZES))
def test_noise_at_outputs(make, size, tier, cv, more):
    "Two updates' gradients and losses, and what the control variate learns."
    model, B, T, tile = SIZES[size]
    theta, batches, config = moved(init_params(model)), list(windows(2 * B, T).split(B)), DustConfig(tier=tier, cv=cv, **more)
    def f(chunk):
        state, objective = ControlVariate(model, config) if cv else None, make(model, tile, chunk)
        found = [dust(objective, theta, batches, Key(5, step), config, state) for step in range(2)]
        return {f"{step}.{n}": t for step, e in enumerate(found) for n, t in (e.grad | dict(losses=e.losses)).items()} | (state.tensors() if cv else {})
    found = same(f, (1, 32))
    assert not torch.equal(found["0.blocks.0.w_hh"], found["1.blocks.0.w_hh"]) and torch.equal(found["0.losses"], found["1.losses"])

@pytest.mark.parametrize("n", [32_770, 40_000, 100_001])
def test_mean_of_many_losses(n):
    "So many that torch adds them in several threads: what a run records must not depend on it."
    losses = (Key(1).uniform("sample", torch.arange(n)) + 2).view(1, 1, 1, n)
    assert len({with_threads(t, lambda: Estimate({}, losses).loss) for t in (1, 2, 3, 4)}) == 1

def in_chunks(ensemble, chunk):
    "The same ensemble with another number of tiles in flight."
    ensemble.objective.chunk = chunk
    return ensemble

def test_ensemble():
    "Grouping by expert; the average does not depend on chunks, threads, or the order in which a window's experts are named."
    cfg, n, T = ModelConfig(d=33, D=1), 11, 40
    thetas, x = [moved(init_params(cfg, s)) for s in range(3)], windows(n, T).numpy()
    routes = np.stack([np.arange(n) % 3, (np.arange(n) + 1) % 3], 1)
    found = same(lambda chunk: dict(token_losses=in_chunks(Ensemble(thetas, cfg, tile=4), chunk).token_losses(x, routes)), (1, 2, 8))["token_losses"]
    assert torch.equal(torch.as_tensor(Ensemble(thetas, cfg, tile=4).token_losses(x, routes[:, ::-1])), torch.as_tensor(found))
    o = ExpertObjective(cfg, 4)
    p = torch.stack([torch.stack([(-o.token_losses(thetas[e], torch.tensor(x[i:i+1]))[0].double()).exp() for e in routes[i]]).mean(0) for i in range(n)])
    assert np.allclose(found, -p.log(), rtol=1e-6) and found.dtype == np.float64 and found.shape == (n, T)

def test_ordered_sum_is_a_running_sum():
    "Values of very different sizes, whose sum depends on the order: equal to a Python loop bit by bit, and to no other order."
    u = Key(3).uniform("sample", torch.arange(3 * 5000)).view(3, 5000)
    x = (u - 0.5) * 10 ** (30 * Key(4).uniform("sample", torch.arange(3 * 5000)).view(3, 5000) - 15)
    def loop(row):
        total = 0.0
        for value in row.tolist(): total += value
        return total
    found = same(lambda _: dict(sum=ordered_sum(x)), (0, 1))["sum"]
    assert found.tolist() == [loop(row) for row in x]
    assert not (found == x.sum(-1)).all() and not (found == ordered_sum(x.flip(-1))).all()
    assert ordered_sum(torch.tensor([1., 2**-30, 2**-30])).item() == 1 + 2**-29   # float32 is widened before it is added
    stacked = {n: t if n == "E" else t[None] for n, t in init_params(ModelConfig(d=7, D=1, d_E=5), dtype=torch.float64).items()}
    tokens = token_losses(stacked, windows(4, 50)[None])
    assert window_losses(stacked, windows(4, 50)[None])[0].tolist() == [loop(row) / 50 for row in tokens[0]]

@pytest.mark.skipif(sys.platform != "linux", reason="looks at what GNU OpenMP says of itself")
def test_waiting_threads_sleep():
    "Two programs on the same cores would otherwise wait for each other's waiting. What OpenMP says as it is loaded: ours unless the user has said something."
    def said(**env): return subprocess.run([sys.executable, "-c", "import soma.core"], capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | dict(OMP_DISPLAY_ENV="TRUE") | env).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said() and "OMP_WAIT_POLICY = 'ACTIVE'" in said(OMP_WAIT_POLICY="ACTIVE")
