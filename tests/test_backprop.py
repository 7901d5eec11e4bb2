"Backpropagation: what the notebook's lessons do not reach: many experts at once, both rules for the head, and files."
from dataclasses import replace

import pytest
import torch

from soma.backprop import CHUNK, bptt, initial_ensemble, load_sharded, stack, train_sharded, unstack
from soma.core import ModelConfig, RunFolder, SomaError, TrainConfig
from soma.data import Shards, Store
from soma.kernels import expert_objective
from soma.models import init_params

MODEL, CFG = ModelConfig(d=8, d_E=8), TrainConfig(updates=8, lr=1e-2, schedule="cosine")

def windows(C): return torch.randint(0, 256, (C, 2, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(C))

def test_one_expert_does_not_feel_what_another_reads():
    data, other = windows(2), windows(2)
    other[1] = 255 - data[1]
    other[0] = data[0]
    a, b = (stack([init_params(MODEL, 1), init_params(MODEL, 1)]) for _ in range(2))
    first, second = bptt(a, lambda u: data, CFG), bptt(b, lambda u: other, CFG)
    assert torch.equal(first[:, 0], second[:, 0]) and not torch.equal(first[:, 1], second[:, 1])
    for n in a: assert n == "E" or torch.equal(a[n][0], b[n][0])

def test_the_head_moves_only_when_it_is_trained():
    for head in (False, True):
        theta, before = stack([init_params(MODEL)]), init_params(MODEL)["E"]
        bptt(theta, lambda u: windows(1), CFG, head)
        assert torch.equal(theta["E"], before) is not head

def test_rates_follow_the_cosine_to_the_floor():
    theta, steps = stack([init_params(MODEL)]), []
    last = [theta["norm"].clone()]
    def report(update, loss): steps.append((theta["norm"].detach() - last[0]).abs().max().item()); last[0] = theta["norm"].detach().clone()
    bptt(theta, lambda u: windows(1), replace(CFG, updates=20), report=report)
    assert steps[0] == pytest.approx(1e-2, rel=1e-3) and steps[-1] < 1e-3

@pytest.mark.parametrize("d", [32, 12])
def test_a_folder_holds_what_was_trained(tmp_path, d):
    result = train_sharded(tmp_path, "pd_small", N=2, d=d, seed_updates=12, expert_updates=6, B=4, T=16, lr=1e-2, show=False)
    thetas, model = load_sharded(tmp_path)
    assert (len(thetas), model.d, result["N"], result["d"]) == (2, d, 2, d)
    assert torch.equal(thetas[0]["E"], thetas[1]["E"]) is (d == 32)     # frozen at the embedding's width, else each its own
    assert result["losses"]["seed"] < result["losses"]["before"] and result["operations"] > 0
    store = Store(RunFolder(tmp_path).store)
    assert Shards.load(RunFolder(tmp_path).clusters, store).N == 2
    again = train_sharded(tmp_path, "pd_small", N=2, d=d, seed_updates=12, expert_updates=6, B=4, T=16, lr=1e-2, show=False)
    assert again["losses"] == result["losses"] and all(torch.equal(t, s[n]) for theta, s in zip(thetas, load_sharded(tmp_path)[0]) for n, t in theta.items())

def test_one_expert_goes_on_with_everything(tmp_path):
    result = train_sharded(tmp_path, "pd_small", N=1, d=12, seed_updates=6, expert_updates=6, B=4, T=16, lr=1e-2, show=False)
    assert result["losses"]["experts"] < result["losses"]["seed"] and not RunFolder(tmp_path).clusters.exists()

def test_groups_of_experts_make_no_difference_beyond_rounding(monkeypatch, tmp_path):
    found = []
    for size in (CHUNK, 1):
        monkeypatch.setattr("soma.backprop.CHUNK", size)
        train_sharded(tmp_path/str(size), "pd_small", N=3, d=32, seed_updates=4, expert_updates=3, B=2, T=16, lr=1e-3, show=False)
        found.append(load_sharded(tmp_path/str(size))[0])
    for a, b in zip(*found):
        for n in a: assert torch.allclose(a[n], b[n], atol=2e-3), n    # Adam's first steps are signs: where a gradient is nothing but rounding they may differ

def test_divergence_and_missing_files_are_said(tmp_path):
    with pytest.raises(SomaError, match="not finite"): bptt(stack([init_params(MODEL)]), lambda u: windows(1), replace(CFG, lr=1e30))
    with pytest.raises(SomaError, match="no such checkpoint"): load_sharded(tmp_path)

def test_fresh_experts_are_equal():
    thetas, model = initial_ensemble(3, 16)
    assert model == ModelConfig(d=16) and all(torch.equal(t, thetas[2][n]) for n, t in thetas[0].items())
    assert all(torch.equal(t, thetas[0][n]) for n, t in unstack(stack(thetas))[1].items())
