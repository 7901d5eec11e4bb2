"Trials: costs, refusals, and the same results side by side as one by one."
import json
from dataclasses import replace

import pytest

from soma.core import ModelConfig, SomaError, TrainConfig
from soma.data import build_store, shipped_corpus
from soma.report import Experiment, find_root, parameters_of
from soma.trials import Trial, training_cost, update_byte_forwards, within

MODEL = ModelConfig(d=6, D=1)
SAY = dict(P=64, B=4, T=16, schedule="cosine", head="delta", weight_decay=0., judge_windows=8)

@pytest.fixture(scope="module")
def store(tmp_path_factory): return build_store(shipped_corpus(), tmp_path_factory.mktemp("trials")/"store")

@pytest.fixture
def experiment(tmp_path, monkeypatch):
    "An experiment that keeps its runs in a folder of this test."
    monkeypatch.chdir(find_root()/"nbs/experiments")
    e = Experiment("z02_recurrent", parameters_of("z02_recurrent.ipynb"))
    e.root, e.runs = tmp_path, tmp_path/"runs/z02_recurrent"
    return e

def deterministic(run): return {k: v for k, v in run.value.items() if k != "training_seconds"}

def test_side_by_side_is_one_by_one(store, experiment, tmp_path):
    trials = [within(20_000, m, MODEL, store, **SAY) for m in ("spsa", "dust:B + cv", "bptt")]
    together = experiment.run_all(trials, workers=2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.json")}
    assert experiment.run_all(trials, workers=2) == together and {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.json")} == before   # kept
    experiment.root = tmp_path/"again"
    alone = experiment.run_all(trials, workers=1)
    assert [deterministic(r) for r in alone] == [deterministic(r) for r in together]
    assert len({r.value["late"] for r in together}) == 3 and all(2 < r.value["valid"] < 5.6 for r in together)

def test_a_trial_is_named_by_what_decides_it(store):
    trial = within(6000, "dust:A", MODEL, store, **SAY)
    names = [json.dumps(t.config, sort_keys=True) for t in (trial, within(6000, "dust:A", MODEL, store, **SAY, seed=2), within(6000, "dust:A", MODEL, store, **SAY, dust=dict(sigma=0.2)), within(9000, "dust:A", MODEL, store, **SAY),
                                                          within(6000, "bptt", MODEL, store, **SAY), within(6000, "bptt", MODEL, store, ("norm",), **SAY))]
    assert len(set(names)) == len(names) and str(store.path) not in names[0]

@pytest.mark.parametrize("method", ["spsa", "dust:A", "dust:C + cv", "bptt"])
def test_a_budget_is_used_up_and_not_exceeded(store, method):
    trial = within(50_000, method, MODEL, store, **SAY)
    cost = training_cost(method, MODEL, trial.cfg)
    assert cost["byte_forwards"] <= 50_000 < cost["byte_forwards"] + update_byte_forwards(method, MODEL, trial.cfg)

def test_refusals(store):
    for make, words in ((lambda: within(10, "spsa", MODEL, store, **SAY), "an update by spsa takes"), (lambda: within(9000, "spsa", MODEL, store, ("norm",), **SAY), "only bptt freezes"),
                        (lambda: within(6000, "dust:Z", MODEL, store, **SAY), "estimator"), (lambda: Trial("dust:A", MODEL, TrainConfig(updates=1), str(store.path)), "its configuration says"),
                        (lambda: replace(within(6000, "bptt", MODEL, store, ("nothing",), **SAY)).run("unused"), "no parameter 'nothing'")):
        with pytest.raises(SomaError, match=words): make()
