"The compiled kernel: the same numbers as the reference whatever the processor, the input and the machine's state, and a way to go on where it cannot be built."
import os, platform, subprocess, sys

import pytest
import torch

import soma.kernels as kernels
from soma.core import Key, ModelConfig, SomaError
from soma.kernels import CpuObjective, expert_objective, kernel
from soma.models import ExpertObjective, all_sites, body_layout, init_params, ordered_sum

KEY = Key(3, 8)

def moved(cfg, seed, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    return {n: t + scale * torch.randn(t.shape, generator=g) * t.std(correction=0).clamp_min(0.3) for n, t in init_params(cfg, seed).items()}

def text(B, T, seed=0): return torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
def exactly(theta): return {n: t.double() for n, t in theta.items()}

def estimate(objective, theta, windows, P=6, eps=1e-3):
    directions = torch.arange(P)
    losses = objective.losses(theta, "sparse_rademacher", KEY, directions, eps, windows)
    up, down = ordered_sum(losses) / losses.shape[-1]
    return objective.combine((up - down) / (2*eps*P), "sparse_rademacher", KEY, directions, theta["norm"].dtype)

@pytest.mark.parametrize("d, D, d_E, B, T", [(8, 2, 8, 40, 30), (13, 1, 32, 17, 40), (32, 2, 32, 64, 16), (45, 3, 7, 70, 12)])
def test_an_estimate_is_as_exact_as_the_float32_reference(d, D, d_E, B, T):
    cfg, worse = ModelConfig(d, D, d_E), []
    for seed in range(3):
        theta, windows = moved(cfg, seed), text(B, T, seed)
        exact = estimate(ExpertObjective(cfg), exactly(theta), windows)
        fast, plain = (estimate(o, theta, windows) - exact for o in (CpuObjective(cfg), ExpertObjective(cfg)))
        worse.append((fast.norm() / plain.norm()).item())
        assert fast.norm() < 0.02 * exact.norm()
    assert sum(worse) / len(worse) < 2, worse

@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 31, 64, 127, 200])
def test_widths_odd_and_even(width):
    cfg = ModelConfig(width, 1, 6)
    theta, windows = moved(cfg, width), text(21, 5, width)
    assert (CpuObjective(cfg).token_losses(theta, windows) - ExpertObjective(cfg).token_losses(exactly(theta), windows)).abs().max() < 2e-6

def test_the_company_of_other_sequences_and_threads_change_no_bit():
    cfg, before = ModelConfig(20, 2, 8), torch.get_num_threads()
    theta, windows, o = moved(cfg, 1), text(150, 9), CpuObjective(cfg)
    ask = lambda w: o.losses(theta, "rademacher", KEY, torch.tensor([4, 0]), 1e-3, w, signs=(1, 0, -1))
    whole = ask(windows)
    for n in (1, 15, 16, 17, 33, 64, 65, 149): assert torch.equal(ask(windows[:n]), whole[..., :n]), n
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(ask(windows), whole) and torch.equal(o.token_losses(theta, windows), o.token_losses(theta, windows[torch.arange(150)]))
    finally: torch.set_num_threads(before)

@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_scores_far_from_zero(scale):
    cfg = ModelConfig(12, 1, 12)
    theta, windows = moved(cfg, 2), text(20, 6)
    theta["E"] = theta["E"] * scale
    got, wanted = CpuObjective(cfg).token_losses(theta, windows), ExpertObjective(cfg).token_losses(exactly(theta), windows)
    assert wanted.max() > 100 and got.isfinite().all() and (got - wanted).abs().max() < 1e-6 * wanted.max()
    sums = CpuObjective(cfg).losses(theta, "rademacher", KEY, torch.arange(1), 1e-3, windows, signs=(0,))[0, 0]
    assert (sums - wanted.mean(1)).abs().max() < 1e-6 * wanted.max()

@pytest.mark.parametrize("name", ["blocks.0.w_hh", "blocks.1.norm2", "E"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_hidden(name, bad):
    cfg = ModelConfig(8, 2, 8)
    theta = init_params(cfg)
    theta[name] = theta[name].clone()
    theta[name].view(-1)[3] = bad
    losses = CpuObjective(cfg).losses(theta, "rademacher", KEY, torch.arange(2), 1e-3, text(5, 4))
    assert not losses.isfinite().any() and not CpuObjective(cfg).token_losses(theta, text(5, 4)).isfinite().any()

@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_weights_that_overflow_are_never_hidden(scale):
    cfg = ModelConfig(8, 2, 8)
    theta = {n: t * scale if n.startswith("blocks") and "norm" not in n else t for n, t in init_params(cfg).items()}
    assert not CpuObjective(cfg).losses(theta, "rademacher", KEY, torch.arange(2), 1e-3, text(5, 4)).isfinite().any()
    assert not CpuObjective(cfg).token_losses(theta, text(5, 4)).isfinite().any()

def test_other_precisions_take_the_reference_path():
    cfg, windows = ModelConfig(8, 1, 8), text(3, 5)
    theta = exactly(init_params(cfg))
    assert torch.equal(CpuObjective(cfg).token_losses(theta, windows), ExpertObjective(cfg).token_losses(theta, windows))
    assert CpuObjective(cfg).token_losses(theta, windows).dtype == torch.float64

def test_tensors_that_do_not_lie_in_order():
    cfg = ModelConfig(8, 1, 8)
    theta, windows = init_params(cfg), text(9, 12)
    strided = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in theta.items()}
    wide = torch.zeros(9, 26, dtype=torch.uint8); wide[:, ::2] = windows
    ask = lambda t, w: CpuObjective(cfg).losses(t, "sparse_rademacher", KEY, torch.arange(5)[::2], 1e-3, w)
    assert torch.equal(ask(strided, wide[:, ::2]), ask(theta, windows))
    assert torch.equal(ask(theta, windows.long()), ask(theta, windows)) and torch.equal(CpuObjective(cfg).token_losses(theta, windows.int()), CpuObjective(cfg).token_losses(theta, windows))

@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for other x86 processors")
@pytest.mark.parametrize("target", ["x86-64", "haswell"])
def test_narrower_vectors_give_the_same_numbers(target):
    cfg, lib = ModelConfig(13, 2, 8), kernel(f"-march={target}")
    theta, windows = moved(cfg, 5), text(37, 8)
    class Narrow(CpuObjective): _kernel = staticmethod(lambda: lib)
    narrow, exact = Narrow(cfg), ExpertObjective(cfg).token_losses(exactly(theta), windows)
    assert (narrow.token_losses(theta, windows) - exact).abs().max() < 2e-6
    assert torch.equal(narrow.combine(torch.arange(3.0), "rademacher", KEY, torch.arange(3)), CpuObjective(cfg).combine(torch.arange(3.0), "rademacher", KEY, torch.arange(3)))
    wide, clean = CpuObjective(cfg).clean(theta, windows, KEY), narrow.clean(theta, windows, KEY)
    for site in ("blocks.0.gates", "blocks.1.down", "embed", "blocks.0.norm1"):   # the noise is the same noise, however many lanes a vector has
        assert (clean.site_losses(site, torch.arange(2), 0.3) - wide.site_losses(site, torch.arange(2), 0.3)).abs().max() < 5e-6
        rewards = torch.ones(2, 37, 8, dtype=torch.float64)
        assert torch.equal(clean.site_sum(site, torch.arange(2), rewards), wide.site_sum(site, torch.arange(2), rewards))

def test_a_sequence_s_noise_is_its_own():
    cfg = ModelConfig(9, 1, 9)
    theta, windows, o = moved(cfg, 3), text(70, 6), CpuObjective(cfg)
    for site in all_sites(1):
        whole = o.clean(theta, windows, KEY).site_losses(site, torch.tensor([7, 2]), 0.2)
        assert torch.equal(o.clean(theta, windows[:18], KEY).site_losses(site, torch.tensor([2]), 0.2)[0], whole[1, :18])
    with pytest.raises(SomaError, match="blocks.0.gates"): o.clean(theta, windows, KEY).site_losses("blocks.1.gates", torch.arange(1), 0.1)
    with pytest.raises(SomaError, match="65,535"): o.clean(theta, windows, KEY).site_losses("blocks.0.up", torch.tensor([2**16]), 0.1)
    with pytest.raises(SomaError, match="rademacher, gaussian"): o.clean(theta, windows, KEY, "uniform")

# ---- where it cannot be built

PROGRAM = """import sys, torch
from soma.core import Key, ModelConfig
from soma.kernels import expert_objective
from soma.models import init_params
o = expert_objective(ModelConfig(4, 1, 4))
print(o.impl, o.token_losses(init_params(ModelConfig(4, 1, 4)), torch.zeros(2, 3, dtype=torch.uint8)).sum().item())"""

def go(tmp_path, **env):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path/"cache"), **env}
    r = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert r.returncode == 0, r.stderr
    return r.stdout.split()[0], r.stderr

def script(tmp_path, does):
    "A stand-in for a compiler: it knows its version, and then `does`; $out is where the library should go."
    file = tmp_path/"c++"
    file.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\nfor out; do :; done\n{does}\n')
    file.chmod(0o755)
    return str(file)

def test_without_a_compiler_one_line_and_the_reference(tmp_path):
    impl, said = go(tmp_path, CXX="no-such-compiler")
    assert impl == "reference" and said.count("\n") == 1 and said.startswith("soma: slow path: no-such-compiler")
    impl, said = go(tmp_path, PATH="/nowhere", CXX="")
    assert impl == "reference" and said.count("\n") == 1 and "g++" in said
    impl, said = go(tmp_path, CXX=script(tmp_path, "echo 'error: no such machine' >&2; exit 1"))
    assert impl == "reference" and said.count("\n") == 1 and "no such machine" in said and not list((tmp_path/"cache").rglob("*.part"))

def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path/"cache").write_text("a file stands here")
    assert go(tmp_path, CXX=script(tmp_path, f"cp {kernels.build()} $out")) == ("cpu", "") and (tmp_path/"cache").read_text() == "a file stands here"

def test_two_processes_build_at_once_and_a_damaged_file_is_built_again(tmp_path):
    slow = script(tmp_path, f"sleep 1; cp {kernels.build()} $out")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": slow}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].split()[0] for p in both] == ["cpu", "cpu"]
    built, = (tmp_path/"soma").glob("*.so")
    assert sorted(f.suffix for f in (tmp_path/"soma").iterdir()) == [".sha256", ".so"]
    built.write_bytes(built.read_bytes()[:1000])
    impl, said = go(tmp_path, XDG_CACHE_HOME=str(tmp_path), CXX=slow)
    assert (impl, said) == ("cpu", "") and built.stat().st_size > 10_000

def test_another_processor_gets_a_binary_of_its_own(monkeypatch, tmp_path):
    mine = kernels.build()
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    monkeypatch.setenv("CXX", script(tmp_path, f"cp {mine} $out"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.build().name != mine.name

def test_a_named_implementation_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel.cache_clear()
    with pytest.raises(SomaError, match="no-such-compiler: cannot be run"): expert_objective(ModelConfig(), impl="cpu")
    monkeypatch.undo()
    assert expert_objective(ModelConfig(), impl="cpu").impl == "cpu" and body_layout(ModelConfig()).M == 32_928
