"The GPU kernels without a GPU: interpreted against the reference in float64, and compiled for cards that are not here."
import json, os, subprocess, sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it comes with the CUDA and ROCm builds of torch)")
ROOT = Path(__file__).resolve().parents[1]

def run(code:str, interpret:bool):
    "Run Python in a process of its own, where Triton's switch is read anew; the JSON it prints last."
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) | (dict(TRITON_INTERPRET="1") if interpret else {})
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert r.returncode == 0, r.stderr[-3000:]
    return json.loads(r.stdout.splitlines()[-1])

# -- interpreted ------------------------------------------------------------------------------------------------------

HEAD = """
import json
import numpy as np, torch
from soma import gpu
from soma.core import Key, ModelConfig
from soma.gpu import *
from soma.models import ExpertObjective, body_layout, init_params
from soma.probes import probe_family
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # torch.empty gives NaN: whatever a kernel does not write shows
assert torch.empty(3).isnan().all() and gpu.interpreted() and not gpu.available()

def case(d, D, d_E, n, T, seed):
    "A model with gains away from one, in both precisions, and random windows."
    cfg = ModelConfig(d, D, d_E)
    theta = init_params(cfg, seed)
    for name in theta:
        if "norm" in name: theta[name] = 1 + .3*Key(seed).normal("sample", torch.arange(d)).float()[:, 0]
    return cfg, theta, {n: t.double() for n, t in theta.items()}, Key(seed).below(256, "sample", torch.arange(n*(T + 1))).view(n, T + 1).to(torch.uint8)
"""

SHAPES = [(8, 1, 8, "ieee"), (13, 2, 32, "fp16x3"), (20, 3, 20, "ieee"), (32, 2, 32, "ieee"), (70, 1, 8, "fp16x3"), (9, 4, 16, "tf32x3")]

@pytest.fixture(scope="module")
def found():
    "All interpreted cases in one process: per-token losses, losses of perturbed models, estimates."
    return run(HEAD + f"""
out = {{}}
for number, (d, D, d_E, precision) in enumerate({SHAPES!r}):
    cfg, theta, exact, windows = case(d, D, d_E, 5, {{9: 2, 13: 7, 20: 3, 70: 2}}.get(d, 4), 10 + number)
    ours, reference = TritonObjective(cfg, precision=precision), ExpertObjective(cfg)
    family, key, directions, eps = gpu.DRAWN[number % 2], Key(4_000_000_007, 3), torch.tensor([6, 1]), 1e-3
    token = (ours.token_losses(theta, windows) - reference.token_losses(exact, windows)).abs().max().item()
    signs = (1, -1, 0) if d == 8 else (1, -1)
    a, b, c = (o.losses(t, family, key, directions, eps, windows, signs) for o, t in ((ours, theta), (reference, theta), (reference, exact)))
    estimates = lambda l: torch.stack([reference.combine(one / (2*eps), family, key, directions) for one in (l[0] - l[1]).T])  # one a window
    error = lambda l: (estimates(l) - estimates(c)).norm().item()
    out[number] = dict(token=token, dtype=str(a.dtype), shape=list(a.shape), loss=(a - c).abs().max().item(), clean=(a[-1, 0] - a[-1, 1]).abs().max().item(),
                       estimate=error(a), fp32=error(b), size=estimates(c).norm().item())
print(json.dumps(out))
""", True)

@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda i: "d{}-D{}-E{}-{}".format(*SHAPES[i]))
def test_losses_and_estimates_agree_with_float64(found, number):
    r = found[str(number)]
    signs = 3 if SHAPES[number][0] == 8 else 2
    assert r["dtype"] == "torch.float64" and r["shape"] == [signs, 2, 5] and (r["clean"] == 0) == (signs == 3)  # sign 0 is one model for all directions
    assert r["token"] < 2e-6 and r["loss"] < 2e-6
    assert r["estimate"] <= 2*r["fp32"] and r["size"] > 100*r["estimate"]

def test_probes_and_combination_are_those_of_room_03_bit_for_bit():
    r = run(HEAD + """
equal = {}
for d, D, d_E in ((13, 1, 8), (20, 1, 20)):
    cfg, theta, _, _ = case(d, D, d_E, 1, 1, 5)
    layout, where, flat = body_layout(cfg), places(cfg).long(), body_layout(cfg).flatten(theta)
    directions, key = torch.tensor([0, 4_000_000_000]), Key(4_294_967_295, 77)
    for family in gpu.DRAWN:
        m = prepare(cfg, flat[None], theta["E"][None], "ieee", key, directions, torch.tensor([1., -1]), 3e-3, "sparse" in family)
        inside = torch.where(where >= 0, m.mats[:, 0, where.clamp(min=0)], m.gains[:, (-1 - where).clamp(min=0)])
        z = probe_family(family)(layout, key, directions)
        c = torch.tensor([.37, -1.9], dtype=torch.float64)
        equal[f"{d} {family}"] = [torch.equal(inside, flat + torch.tensor([[1.], [-1]])*z.mul(3e-3)), z.count_nonzero().item() / z.numel(), m.mats.count_nonzero().item() <= (where >= 0).sum().item()*2,
                                  torch.equal(TritonObjective(cfg).combine(c, family, key, directions), ExpertObjective(cfg).combine(c, family, key, directions))]
print(json.dumps(equal))
""", True)
    assert len(r) == 4
    for name, (weights, density, padding, combined) in r.items():
        assert weights and padding and combined, name
        assert density == 1 if "sparse" not in name else .45 < density < .6, name

def test_a_mean_over_many_tokens_is_within_1e_7_and_a_difference_within_1e_8():
    r = run(HEAD + """
gpu.PLANS["cpu", "ieee"] = (gpu.Plan(2048, 1, 256), None)
cfg, theta, exact, windows = case(32, 2, 32, 2048, 8, 9)
a, b = (o.losses(t, "sparse_rademacher", Key(3), torch.tensor([0]), 1e-3, windows).mean(2)[:, 0] for o, t in ((TritonObjective(cfg), theta), (ExpertObjective(cfg), exact)))
print(json.dumps([(a - b).abs().max().item(), abs((a[0] - a[1]) - (b[0] - b[1])).item(), abs(b[0] - b[1]).item()]))
""", True)
    loss, difference, size = r
    assert loss < 1e-7 and difference < 1e-8 and size > 1e-6

def test_grouped_inference_gives_each_pair_its_own_expert():
    r = run(HEAD + """
cfg, theta, _, windows = case(12, 1, 16, 37, 3, 2)
experts = [case(12, 1, 16, 1, 1, 20 + e)[1] for e in range(4)]
rng = Key(8).below(4, "sample", torch.arange(37)).numpy()
routes = np.stack([rng, (rng + 1) % 4], 1)
routes[:, 1][rng == 2] = 0   # expert 3 gets few pairs
models = prepare_experts(cfg, experts)
window, expert = np.repeat(np.arange(37), 2), routes.reshape(-1)
each = grouped_token_losses(models, windows, window, expert)
alone = torch.stack([torch_token_losses(cfg, experts[e], windows[w][None])[0] for w, e in zip(window, expert)])
mixed = mixture_losses(models, windows, routes)
p = sum(torch.stack([torch_token_losses(cfg, experts[r[i]], w[None])[0] for w, r in zip(windows, routes)]).double().neg().exp() for i in range(2)) / 2
of_tile, place = tile_pairs(expert, 16)
needed = sum(-(-int((expert == e).sum()) // 16) for e in set(expert.tolist()))
print(json.dumps([(each - alone).abs().max().item(), (mixed - p.log().neg()).abs().max().item(), len(of_tile) == needed, len(set(place.tolist())) == 74,
                  bool((of_tile[place // 16] == expert).all()), models.E.shape[0]]))
""", True)
    each, mixed, tiles, own_place, own_tile, decoders = r
    assert each < 2e-6 and mixed < 2e-6 and tiles and own_place and own_tile and decoders == 4

def test_what_the_kernel_does_not_take_goes_the_reference_way_or_says_why():
    r = run(HEAD + """
from soma.core import SomaError
def why(f):
    try: f(); return ""
    except SomaError as e: return str(e)
cfg, theta, exact, windows = case(8, 1, 8, 3, 2, 4)
ours, reference, directions = TritonObjective(cfg), ExpertObjective(cfg), torch.tensor([0, 1])
same = [torch.equal(ours.losses(t, p, Key(1), directions, 1e-3, windows), reference.losses(t, p, Key(1), directions, 1e-3, windows)) for t, p in ((theta, "gaussian"), (exact, "rademacher"))]
same.append(torch.equal(ours.token_losses(exact, windows), reference.token_losses(exact, windows)))
errors = [why(lambda: TritonObjective(cfg, precision="half")), why(lambda: TritonObjective(ModelConfig(8, 5, 8))), why(lambda: bench_gpu("x.csv")), why(lambda: gpu.resources("sm_90"))]
print(json.dumps([same, ours.impl, errors]))
""", True)
    same, impl, (precision, depth, bench, compiling) = r
    assert same == [True]*3 and impl == "triton"
    assert "precision 'half'" in precision and "D = 5" in depth and bench.startswith("bench-gpu: ") and "\n" not in bench and "TRITON_INTERPRET" in compiling
    assert not (ROOT/"x.csv").exists()

def test_the_bench_script_checks_then_writes_a_tidy_table(tmp_path):
    "Its GPU is played by the interpreter, with small shapes and a clock that always says a second."
    r = run(HEAD + f"""
import csv
for name in ("cuda", "pin_memory"): setattr(torch.Tensor, name, lambda self: self)
torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated = lambda: None, lambda: 4096
tiny, check, infer, windows, train = ModelConfig(8, 1, 8), gpu.check_precision, gpu._bench_inference, gpu._windows, gpu.TrainConfig
gpu.available, gpu.target, gpu.ModelConfig = lambda: gpu.Available(True, "a card"), lambda device: "cpu", lambda *a: tiny
gpu.TrainConfig, gpu._windows, gpu._seconds = lambda: train(P=1, B=3, T=1), lambda n, T, seed: windows(n, 1, seed), lambda f: (f(), 1.)[1]
gpu.check_precision = lambda cfg, precision: check(tiny, precision, "cpu", 2, 16, 1) if precision != "tf32x3" else dict(token=1., difference=1., difference_fp32=1., mean=1.)
gpu._bench_inference = lambda N, precision, batches, row, deadline: infer(min(N, 2), precision, (4,), row, deadline)
out = gpu.bench_gpu({str(tmp_path/"made"/"bench.csv")!r})
rows = list(csv.DictReader(open(out)))
print(json.dumps(rows))
""", True)
    assert list(r[0]) == "artifact preset run_id method N n_pert B seed step metric value unit device".split()
    assert {x["device"] for x in r} == {"a card"} and len({x["run_id"] for x in r}) == 1
    of = lambda metric, method: [float(x["value"]) for x in r if x["metric"] == metric and x["method"] == method]
    assert of("error_token", "triton ieee")[0] < 2e-6 and of("error_token", "triton tf32x3") == [1.]
    assert of("update", "triton ieee") == [1.] and of("update", "triton tf32x3") == []   # what fails its check is not timed
    assert of("throughput", "triton ieee") == [768*4.]*4 and of("throughput", "cuDNN") == [768*4.]*4

def test_without_triton_the_room_loads_and_says_what_is_missing():
    r = run("""
import sys, json
sys.modules["triton"] = None
from soma import gpu
from soma.core import ModelConfig, SomaError
import torch
from soma.models import init_params
try: gpu.TritonObjective(ModelConfig(8, 1, 8)).losses(init_params(ModelConfig(8, 1, 8)), "rademacher", gpu.Key(1), torch.arange(1), 1e-3, torch.zeros(1, 3, dtype=torch.uint8)); said = ""
except SomaError as e: said = str(e)
print(json.dumps([bool(gpu.available()), gpu.available().reason, said]))
""", False)
    assert r[:2] == [False, "triton is not installed"] and "install it, or use impl='reference'" in r[2]

# -- compiled for cards that are not here -----------------------------------------------------------------------------

CARDS = ("sm_80", "sm_90", "sm_120", "gfx942")
MORE = [(card, precision, d, tokens) for card in CARDS for precision in ("ieee", "tf32x3", "fp16x3") for d in (32, 181) for tokens in (False, True)
        if (card, precision) != ("gfx942", "tf32x3") and (precision, d, tokens) != ("ieee", 32, False)]

def compiled(*cases):
    "What the forward kernel asks of each card, and the card's limits."
    return run(f"import json; from soma.core import ModelConfig; from soma.gpu import *; print(json.dumps([(resources(c, ModelConfig(d), p, t), LIMITS[c]) for c, p, d, t in {cases!r}]))", False)

def check_fits(found):
    (shared, registers, stack, code), (kib, most) = found
    assert 1000 < code < 30_000
    assert shared <= kib*1024 and registers <= most and stack == 0

@pytest.fixture(scope="module")
def training(): return dict(zip(CARDS, compiled(*((card, "ieee", 32, False) for card in CARDS))))

def test_the_small_kernels_compile_too():
    r = run("""
import json
from soma import gpu
common = dict(key="*i64", directions="*i64", place="*i32", M="i32")
write = common | dict(flat="*fp32", stride="i32", signs="*fp32", eps="fp32", mats="*fp16", gains="*fp32", low="i32")
add = common | dict(coefficients="*fp64", total="*fp64", P="i32")
found = [gpu._measure(gpu._compile(card, kernel, arguments, constants, gpu.Plan(0, 4, 0))) for card in ("sm_90", "gfx942")
         for kernel, arguments, constants in ((gpu._write_models, write, dict(GAINS=160, SPARSE=True, HALF=True, R=16)), (gpu._add_probes, add, dict(SPARSE=True, R=4)))]
print(json.dumps(found))
""", False)
    assert len(r) == 4 and all(stack == 0 and registers <= 255 and code > 100 for shared, registers, stack, code in r)

@pytest.mark.parametrize("card", CARDS)
def test_the_training_kernel_fits_the_card_and_spills_nothing(training, card): check_fits(training[card])

@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda c: "-".join(map(str, c)))
def test_every_plan_fits_its_card_and_spills_nothing(case): check_fits(compiled(case)[0])
