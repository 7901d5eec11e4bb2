"The laws of budgets: operations are those of the matrix products, device-hours are the paper's, and no curve is read where it was not saved."
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from soma.budget import Curve, affordable_updates, cheapest, choose, compute_to, device_hours, inference_operations, loss_at, loss_range, passes, step_time, training_operations, wall_hours
from soma.core import PRESETS, Key, ModelConfig, SomaError, TrainConfig

ROOT = Path(__file__).resolve().parents[1]
PAPER = PRESETS["paper"].expert
def printed(artifact, row, column): return pd.read_csv(ROOT/"figures/reported"/("captions.csv" if artifact[:3] == "fig" else f"{artifact}.csv")).query("id == @artifact and row == @row and column == @column").value.item()

# -- operations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("d", [8, 32, 40])
def test_an_update_takes_the_operations_that_torch_counts_in_its_matrix_products(d):
    from torch.utils.flop_counter import FlopCounterMode
    from soma.estimators import spsa
    from soma.models import ExpertObjective, init_params
    model, cfg = ModelConfig(d=d), TrainConfig(P=3, B=4, T=16, A=2, tile=4)
    batches = torch.randint(0, 256, (cfg.A, cfg.B, cfg.T + 1), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter: spsa(ExpertObjective(model, cfg.tile), init_params(model), list(batches), Key(1, 0), 1e-3, cfg.P)
    assert counter.get_total_flops() == training_operations(model, cfg, [1])

def test_the_papers_operations():
    early = training_operations(ModelConfig(), PAPER, [1_000] * 4)
    assert early == pytest.approx(printed("fig04", "early", "operations per arm"), rel=2e-3) and 10 * early == pytest.approx(printed("fig04", "late", "operations per arm"), rel=2e-3)
    assert training_operations(ModelConfig(), TrainConfig(A=16), [512] * 8) == pytest.approx(4.5e16, rel=2e-3)
    assert inference_operations(ModelConfig(d=361), 2) / inference_operations(ModelConfig(), 256) == pytest.approx(printed("fig15", "N=2 over N=256", "expert operations per token"), rel=1e-3)

def test_counts_of_a_long_run_do_not_overflow():
    one = training_operations(ModelConfig(), PAPER, [1])
    assert training_operations(ModelConfig(), PAPER, np.full(256, 4_160_000)) == one * 256 * 4_160_000 > 2**63

def test_experts_may_have_their_own_counts():
    one = training_operations(ModelConfig(), PAPER, 1)
    assert training_operations(ModelConfig(), PAPER, [3, 0, 5]) == 8 * one

# -- time -------------------------------------------------------------------------------------------------------------

def test_table_3():
    every = np.full(256, 4_160_000)
    assert device_hours(every, 0.168) == pytest.approx(49_698, abs=0.5) and device_hours(every, 0.140) == pytest.approx(41_415, abs=0.5)
    for row, seconds in (("Fixed 0.168-second reference", 0.168), ("Fixed 0.140-second normalization", 0.140), ("Recorded expert mean times", 36.3 / 256)):
        assert device_hours(every, seconds) == pytest.approx(printed("tab03", row, "GPU-hours"), rel=2e-3)
    assert wall_hours(every, np.linspace(0.12, 0.165, 256)) == pytest.approx(printed("fig01", "SOMA N=256", "wall-clock"), rel=2e-3)
    assert f"{device_hours(every, 36.3 / 256) / 700:.1f}" == "59.9" and round(passes(PAPER, 4_160_000, 100e9 / 256 * 0.99)) == 705

def test_accumulated_batches_count_as_passes():
    assert passes(TrainConfig(A=4, B=2, T=8), 10, 640) == 1 and passes(TrainConfig(B=2, T=8), 10, 640) == 0.25

def test_hours_with_counts_of_their_own():
    updates, seconds = [100, 10, 50], [1.0, 20.0, 3.0]
    assert device_hours(updates, seconds) == pytest.approx((100 + 200 + 150) / 3600) and wall_hours(updates, seconds) == pytest.approx(200 / 3600)
    assert device_hours(updates, seconds, [1, 2, 4]) == pytest.approx((100 + 400 + 600) / 3600) and device_hours([0, 5], 2.0) == pytest.approx(10 / 3600)

def test_a_step_time_does_not_depend_on_the_order_of_the_log_and_counts_nothing_twice():
    rng = np.random.default_rng(1)
    seconds = rng.uniform(0.1, 0.2, 3_000)
    seconds[:1_000] += 5
    updates = np.arange(1, 3_001)
    assert step_time(updates, seconds) == pytest.approx(seconds[1_000:].mean(), rel=1e-12)
    assert step_time(np.r_[updates, updates[2_000:]], np.r_[seconds, np.full(1_000, 9.0)]) == pytest.approx(seconds[1_000:].mean(), rel=1e-12)
    order = rng.permutation(3_000)
    assert step_time(updates[order], seconds[order], skip=500) == pytest.approx(seconds[500:].mean(), rel=1e-12)

@pytest.mark.parametrize("cost", [0.1, 0.3, 0.7, 36.3 / 3600])
def test_exactly_paid_updates_are_affordable(cost):
    for n in (1, 3, 7, 10**6 + 3):
        assert affordable_updates(cost, n * cost) == n == affordable_updates(1, seconds=cost, deadline=n * cost / 3600)
        assert affordable_updates(cost, float(Fraction(cost) * n) * (1 - 1e-9)) == n - 1
    assert affordable_updates(cost, 100 * cost, seconds=60, deadline=0.5) == 30

# -- curves -----------------------------------------------------------------------------------------------------------

def law(N=8, P=64, B=64, a=3.0, c=(1, 10, 100, 1000), **more):
    "A curve that is straight over the logarithm of compute."
    return Curve(**(dict(N=N, P=P, B=B, compute=c, loss=a - 0.3 * np.log10(c), cost=0.5, seconds=1.0) | more))

def test_logarithmic_interpolation_finds_a_logarithmic_law_and_the_linear_one_lies_above():
    for c in np.geomspace(1, 1000, 50):
        assert loss_at(law(), c, log=True) == pytest.approx(3 - 0.3 * math.log10(c), abs=1e-12)
        low, high = loss_range(law(), c)
        assert low == pytest.approx(3 - 0.3 * math.log10(c)) and low <= high
    for target in (2.9, 2.5, 2.11):
        saved, low, high = compute_to(law(), target)
        assert low == pytest.approx(10**((3 - target) / 0.3)) and low < high <= saved == 10**math.ceil((3 - target) / 0.3)

def test_a_loss_and_its_compute_are_inverse_on_a_falling_curve():
    rng = np.random.default_rng(1)
    for _ in range(50):
        c = Curve(2, 64, 64, np.sort(rng.uniform(1, 1e6, 6)), np.sort(rng.uniform(1, 3, 6))[::-1], cost=1)
        target = rng.uniform(c.loss[-1], c.loss[0] * 0.999)
        saved, low, high = compute_to(c, target)
        found = sorted((loss_at(c, low, log=True), loss_at(c, high), loss_at(c, low), loss_at(c, high, log=True)))
        assert any(f == pytest.approx(target, rel=1e-9) for f in found) and low <= high <= saved * (1 + 1e-12) and loss_at(c, saved) <= target

def test_table_10_from_three_saved_points():
    update = float(training_operations(ModelConfig(), TrainConfig(A=16), [1] * 8))
    rebuilt = Curve(8, 64, 1024, np.array([2_000, 20_000, 124_500]) * update, [2.16516, 1.80640, 1.78028], cost=update)
    for power in ("2 × 10^18", "4 × 10^18", "8 × 10^18"):
        low, high = loss_range(rebuilt, float(power[0]) * 1e18)
        assert (round(low, 4), round(high, 4)) == tuple(printed("tab10", f"{power} operations", f"estimated ensemble validation loss, {end}") for end in ("low", "high"))
    names = ("operations to reach 1.90", "operations to reach 1.90, interpolated, low", "operations to reach 1.90, interpolated, high")
    assert [float(f"{c:.3g}") for c in compute_to(rebuilt, 1.90)] == [printed("fig13", "n_pert=64, B=1024", n) for n in names]

def test_the_choice_is_that_of_going_through_all_settings():
    curves = [law(N=N, a=3 + 0.05 * i, cost=0.1 * N, seconds=4 / N) for i, N in enumerate((1, 2, 8, 256))]
    for budget in (20, 200, 900):
        for deadline in (0.01, 0.1, 1, 10):
            spent = {c.N: min(math.floor(budget / c.cost + 1e-9), math.floor(deadline * 3600 / c.seconds + 1e-9)) * c.cost for c in curves}
            known = {c.N: loss_at(c, spent[c.N], log=True) for c in curves if 1 <= spent[c.N] <= 1000}
            table = choose(curves[::-1], budget, deadline)
            assert set(table.N[table.why == ""]) == set(known) and min(known, key=known.get) in set(table.N[table.chosen])
            assert all(r.hours == pytest.approx(r.updates * 4 / r.N / 3600) and r.hours <= deadline for r in table[table.why == ""].itertuples())
            assert {r.N: r.low for r in table[table.why == ""].itertuples()} == pytest.approx(known)

def test_a_budget_at_either_end_of_a_curve_is_covered():
    c = law(cost=0.1, c=(0.1 * 3, 0.1 * 7))
    assert choose([c], 0.3).low[0] == c.loss[0] and choose([c], 0.7).high[0] == c.loss[1]
    for budget in (0.29, 0.81):
        with pytest.raises(SomaError, match="nothing is extrapolated"): choose([c], budget)

def test_overlapping_ranges_are_not_decided():
    near, nearer, away = law(B=1024, a=3.0), law(B=256, a=3.02), law(B=16, a=3.5)
    assert choose([away, near, nearer], 30).B.tolist() == [1024, 256, 16] and choose([away, near, nearer], 30).chosen.tolist() == [True, True, False]
    assert choose([away, near, nearer], 10).chosen.tolist() == [True, False, False]      # at a saved point there is no range
    assert cheapest([away, near, nearer], 2.75).chosen.tolist() == [True, True, False]

def test_a_curve_that_begins_below_the_target_is_not_left_out():
    late, early = law(N=1), law(N=2, a=2.6, c=(50, 500))
    table = cheapest([late, early], 2.5)                       # `late` gets there between 46 and 60, `early` before 50
    assert table.chosen.tolist() == [True, True] and table.set_index("N").loc[2, ["low", "high"]].tolist() == [0, 50]
    assert cheapest([late, early], 2.2).set_index("N").chosen.to_dict() == {1: False, 2: True}

def test_a_curve_keeps_its_own_numbers():
    compute = np.array([1.0, 10.0])
    c = law(c=compute)
    compute[:] = 0
    assert c.compute.tolist() == [1, 10]

# -- refusals ---------------------------------------------------------------------------------------------------------

M = ModelConfig()
@pytest.mark.parametrize("ask, says", [
    (lambda: training_operations(M, PAPER, []), "updates: empty"),
    (lambda: training_operations(M, PAPER, [1.5]), "updates = [1.5]: must be whole"),
    (lambda: training_operations(M, PAPER, [-1]), "updates: -1 among them"),
    (lambda: training_operations(M, TrainConfig(P=0), [1]), "P = 0: must be at least 1"),
    (lambda: inference_operations(M, 0), "N: 0 among them"),
    (lambda: step_time([1, 2], [0.1]), "step time: 2 updates, but 1 times"),
    (lambda: step_time([2_000], [math.nan]), "seconds: nan among them"),
    (lambda: step_time([2_000], [0.0]), "seconds: 0 among them"),
    (lambda: step_time([2_000], [0.1], skip=-1), "skip: -1 among them"),
    (lambda: device_hours([1, 2], [1, 2, 3]), "hours: 2 counts, 3 times, 1 devices"),
    (lambda: device_hours(1, 1, 0), "devices: 0 among them"),
    (lambda: passes(PAPER, -1, 10), "updates: -1 among them"),
    (lambda: affordable_updates(1), "neither a budget nor a deadline"),
    (lambda: affordable_updates(1, math.nan), "budget: nan"),
    (lambda: affordable_updates(1, 1, deadline=1), "seconds: nan"),
    (lambda: law(loss=[3, 2, math.inf, 1]), "N=8, n_pert=64, B=64: loss: inf among them"),
    (lambda: law(c=(1, 10, 10, 100), loss=[4, 3, 2, 1]), "compute does not rise at point 3"),
    (lambda: law(compute=[[1, 2]], loss=[[2, 1]]), "give one of each a checkpoint"),
    (lambda: law(P=0), "P: 0 among them"),
    (lambda: law(B=2.5), "B = 2.5: must be whole"),
    (lambda: loss_at(law(), 1001), "saved from 1 to 1000 operations, and 1001 lies outside"),
    (lambda: loss_at(law(), -1), "compute: -1 among them"),
    (lambda: compute_to(law(), 2.0), "never reaches 2; its lowest saved loss is 2.1"),
    (lambda: compute_to(law(), 3.0), "already at its first saved point"),
    (lambda: compute_to(law(), math.nan), "target: nan"),
    (lambda: cheapest([], 2.0), "curves: none"),
    (lambda: cheapest([law()], math.nan), "target: nan"),
    (lambda: cheapest([law(), law(unit="device-hours")], 2.5), "in device-hours and in operations"),
    (lambda: cheapest([law(), law(B=16)], 1.0), "a loss of 1: no setting can be offered: N=8, n_pert=64, B=64 never reaches 1"),
    (lambda: choose([law()], 5_000), "choice: no setting can be offered: N=8, n_pert=64, B=64 saved from 1 to 1000"),
    (lambda: choose([law()], 0.4), "cannot be updated once"),
    (lambda: choose([law(seconds=math.nan)], 100, deadline=1), "seconds: nan"),
    (lambda: choose([law()], 100, devices=4), "needs 8 devices"),
    (lambda: choose([law()], devices=8), "neither a budget nor a deadline"),
    (lambda: choose([law()], math.nan), "budget: nan"),
])
def test_what_makes_no_sense_is_refused(ask, says):
    with pytest.raises(SomaError) as e: ask()
    assert says in str(e.value) and "\n" not in str(e.value)
