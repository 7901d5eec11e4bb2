"Laws of training: a run that is killed, stopped, extended, chunked, threaded or spread over processes ends in the same bytes."
import gc, gzip, json, math, multiprocessing, os, shutil, signal, subprocess, sys, threading, time
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import soma.core, soma.train
from soma.activations import ControlVariate, byte_forwards, dust, trained
from soma.core import Key, ModelConfig, SomaError, TrainConfig, derive_seed, preset, write_json
from soma.data import Shards, Store, batch, build_store, make_shards
from soma.estimators import Estimate
from soma.kernels import expert_objective
from soma.models import ExpertObjective, init_params
from soma.probes import PROBES
from soma.train import Job, Run, Stopped, TogetherJob, digest, dust_config, finished, load_checkpoint, load_kept, load_theta, read_metrics, run_jobs, save_checkpoint, step_together, train

CARD = Path(__file__).resolve().parents[1]/"data_cards"/"pd_small"/"pd_small.jsonl.gz"
MODEL = ModelConfig(d=8, D=1, d_E=8)
CFG = TrainConfig(updates=7, P=2, B=2, T=8, lr=1e-2, eps=3e-3, schedule="plateau", patience=4, tolerance=10., judge_every=2, judge_windows=2, tile=4, head="delta")
FILES = ("checkpoint.safetensors", "metrics.jsonl", "result.json")

def corpus(path, n, salt=0)->Path:
    "n documents of 1,300 to 3,300 bytes, each letter drawn from a counter."
    letters = [Key(salt, i).below(26, "sample", torch.arange(1300 + 2000 * i // n)) + 97 for i in range(n)]
    path.write_text("".join(json.dumps(dict(text=bytes(x.tolist()).decode())) + "\n" for x in letters))
    return path

@pytest.fixture(scope="module")
def home(tmp_path_factory)->Path:
    "A folder with a store, shards of three experts, and a trained seed."
    home = tmp_path_factory.mktemp("home")
    store = build_store(corpus(home/"letters.jsonl", 60), home/"store")
    make_shards(store, np.arange(len(store)) % 3, 3, seed=1).save(home/"shards")
    go(home, home/"seed")
    return home

def go(home, out, cfg=CFG, model=MODEL, expert=0, theta=None, checkpoint_every=3, **more)->dict:
    "Train one expert from fresh parameters, or resume it."
    store = Store(home/"store")
    shards = Shards.load(home/"shards", store)
    return train(cfg, model, theta or init_params(model), store, shards.train[expert], shards.valid[expert], out, checkpoint_every=checkpoint_every, **more)

def state(folder)->tuple:
    "What a run leaves behind, byte for byte. Only the record of its sessions depends on its history; and there is nothing else."
    assert {p.name for p in folder.iterdir()} - {"sessions.jsonl"} == {*FILES}
    return tuple((folder/f).read_bytes() for f in FILES)

def snapshot(folder)->dict: "Every file and its bytes."; return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

def one_line(error, *words):
    "The error is one line and says each of the words."
    said = str(error.value)
    assert "\n" not in said and all(str(w) in said for w in words), said

# ---- a child process that is killed at every moment at which it changes the disk

class Faults:
    "Names every moment before, in the middle of and after a change of the disk; at one of them the process is killed."
    def __init__(self, folder, kill_at=None, lose=False):  # lose: unsynced bytes are lost too, as when the power fails
        self.folder, self.kill_at, self.lose, self.moments, self.durable = folder, kill_at, lose, [], {}

    def unsynced(self)->list:
        "Files of the folder with the length they would have after a power failure, where that is less."
        found = [(p, p.stat().st_size, self.durable.get(p.stat().st_ino)) for p in self.folder.iterdir()] if self.folder.exists() else []
        return [(p, safe) for p, size, safe in found if safe is not None and safe < size]

    def moment(self, name):
        if len(self.moments) == self.kill_at:
            for p, safe in self.unsynced() if self.lose else (): os.truncate(p, safe)
            os.kill(os.getpid(), signal.SIGKILL)
        self.moments.append((name, bool(self.unsynced())))

    def around(self, change, name, *args):
        self.moment(f"{name}: before")
        out = change(*args)
        self.moment(f"{name}: after")
        return out

    def open(self, path, mode="r", **more):
        if "r" in mode: return open(path, mode, **more)
        file = self.around(open, f"open {Path(path).name}", path, mode)
        info = os.fstat(file.fileno())
        self.durable[info.st_ino] = info.st_size
        return Spied(file, self)

    def install(self):
        replace = os.replace
        def fsync(fd): info = os.fstat(fd); self.durable[info.st_ino] = info.st_size
        os.replace, os.fsync = lambda a, b: self.around(replace, f"rename {Path(b).name}", a, b), lambda fd: self.around(fsync, "sync", fd)
        soma.core.open = soma.train.open = self.open

class Spied:
    "A file opened for writing whose writes can be cut in half."
    def __init__(self, file, faults): self.file, self.faults, self.name = file, faults, Path(file.name).name.removeprefix(".").removesuffix(".tmp")
    def __getattr__(self, name): return getattr(self.file, name)
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def truncate(self, n): return self.faults.around(self.file.truncate, f"truncate {self.name}", n)
    def write(self, data):
        self.faults.moment(f"write {self.name}: before")
        for part, when in ((data[:len(data)//2], "half"), (data[len(data)//2:], "after")):
            self.file.write(part)
            self.file.flush()
            self.faults.moment(f"write {self.name}: {when}")

def start(action)->int:
    "Run it in a copy of this process, which is forked before torch has threads; its process id."
    if pid := os.fork(): return pid
    try: action()
    except Stopped as e: os._exit(100 + e.signum)
    except SomaError as e: print(e, file=sys.stderr, flush=True); os._exit(2)
    except BaseException: sys.excepthook(*sys.exc_info()); os._exit(1)
    os._exit(0)

def end(pid)->int: "Its exit code, or minus the signal that ended it."; return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def child_kills(home, out):
    "Kill a copy of this process at each moment (every third time another one on the way), then finish here; report what differs from a run left alone."
    def attempt(folder, kill_at=None, lose=False):
        def action():
            Faults(folder, kill_at, lose).install()
            go(home, folder)
        return end(start(action))
    soma.train.provenance, os.fsync = lambda **more: {}, lambda fd: None   # slow, and nothing here depends on them
    go(home, out/"whole")
    def dry_run():
        faults = Faults(out/"dry")
        faults.install()
        go(home, faults.folder)
        write_json(out/"moments.json", faults.moments)
    gc.freeze()   # what is here already is shared with the copies
    assert end(start(dry_run)) == 0
    whole, moments, bad, again, outcome = state(out/"whole"), json.loads((out/"moments.json").read_text()), [], 0, {}
    def finish(folder):
        left = tuple(sorted((name, data) for name, data in snapshot(folder).items() if name != "sessions.jsonl")) if folder.exists() else ()
        if left not in outcome:   # what is left on the disk is all that the next process knows
            try: go(home, folder); outcome[left] = state(folder) == whole
            except SomaError as e: outcome[left] = str(e)
        return outcome[left]
    for i, lose in [(i, False) for i in range(len(moments))] + [(i, True) for i, (_, unsynced) in enumerate(moments) if unsynced]:
        folder = out/f"{i}-{lose}"
        first, second = attempt(folder, i, lose), attempt(folder, i // 3, lose) if i % 3 == 0 else 0
        again += second == -signal.SIGKILL
        if first != -signal.SIGKILL or (same := finish(folder)) is not True: bad.append((moments[i][0], lose, first, second, same))
    print(json.dumps(dict(moments=moments, bad=bad, again=again, outcomes=len(outcome))))

def child(what, *args, timeout=300)->dict:
    "What a fresh process prints as JSON after doing `child_<what>` of this file."
    r = subprocess.run([sys.executable, __file__, what, *map(str, args)], capture_output=True, text=True, timeout=timeout, start_new_session=True)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1]) | dict(stderr=r.stderr)

def test_killed_at_every_write_and_rename(home, tmp_path):
    found = child("kills", home, tmp_path)
    saved, lines = 4, 4   # checkpoints of updates 0, 3, 6, 7; metrics of updates 0, 2, 4, 6; one session and one result
    before_after, all_three = ("before", "after"), ("before", "half", "after")
    expected = [("write metrics.jsonl", all_three, lines), ("write checkpoint.safetensors", all_three, saved), ("write result.json", all_three, 1), ("write sessions.jsonl", all_three, 1),
                ("rename checkpoint.safetensors", before_after, saved), ("rename result.json", before_after, 1), ("truncate metrics.jsonl", before_after, 1),
                ("sync", before_after, saved + 2 * (saved + 1)),   # metrics before each checkpoint; each new file, and its folder after the rename
                *((f"open {name}", before_after, n) for name, n in (("metrics.jsonl", 1), (".checkpoint.safetensors.tmp", saved), (".result.json.tmp", 1), ("sessions.jsonl", 1)))]
    assert Counter(name for name, _ in found["moments"]) == {f"{name}: {when}": n for name, moments, n in expected for when in moments}
    assert not [name for name, unsynced in found["moments"] if name.startswith("rename checkpoint") and unsynced]   # nothing a checkpoint counts on can be lost
    assert found["bad"] == []
    assert found["again"] >= len(found["moments"]) // 3 and found["outcomes"] >= 25   # so many were killed twice, and left so many different states of the disk

# ---- signals from outside, and a second process on the same folder

def child_signals(home, out):
    "Stop by each signal in mid run, once and twice; meanwhile a second process tries the same folder. Then finish."
    def go_and_wait(folder, times, ready):
        def handlers(): return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        def report(update, loss):
            if update != 4: return
            before, until = handlers(), time.time() + 30
            os.write(ready, b"4")
            while handlers() == before and time.time() < until: time.sleep(0.001)   # until the first signal has been noticed
            if times == 2: os.write(ready, b"!"); time.sleep(30)
        go(home, folder, report=report)
    go(home, out/"whole")
    found = {}
    for name in ("SIGINT", "SIGTERM"):
        for times in (1, 2):
            folder, (hear, say) = out/f"{name}{times}", os.pipe()
            pid = start(lambda: go_and_wait(folder, times, say))
            os.read(hear, 1)
            second = end(start(lambda: go(home, folder)))
            for i in range(times):
                if i: os.read(hear, 1)
                os.kill(pid, getattr(signal, name))
            code, saved = end(pid), load_checkpoint(folder/FILES[0])[1]["states"][0]["update"]
            found[folder.name] = [code, second, saved, end(start(lambda: go(home, folder))), state(folder) == state(out/"whole")]
    print(json.dumps(found))

def test_stopped_by_signals(home, tmp_path):
    found = child("signals", home, tmp_path)
    said = found.pop("stderr")
    assert found == dict(SIGINT1=[100 + signal.SIGINT, 2, 4, 0, True], SIGTERM1=[100 + signal.SIGTERM, 2, 4, 0, True],   # saves where it is
                         SIGINT2=[1, 2, 3, 0, True], SIGTERM2=[-signal.SIGTERM, 2, 3, 0, True])                          # the second acts as usual
    assert said.count("another process is training here") == 4 and said.count("KeyboardInterrupt") == 1


# ---- what an update is

@pytest.mark.parametrize("probes", PROBES)
def test_an_update_by_hand(home, probes):
    "Body and head move in the same update from the same batches: SPSA and Eq. 7, Adam with moments of their own, coupled decay on the body alone."
    cfg, model = replace(CFG, A=2, B=3, tile=2, probes=probes, weight_decay=0.3, schedule="cosine", horizon=9), ModelConfig(d=6, D=1, d_E=5)
    store = Store(home/"store")
    idx, objective, run = Shards.load(home/"shards", store).train[0], ExpertObjective(model, 2), Run(cfg, model, init_params(model))
    m, v, theta = {}, {}, {n: t.clone() for n, t in run.theta.items()}
    for update in range(3):
        windows, lr = batch(store, idx, cfg, update), 1e-2 * (1 + math.cos(math.pi * update / 9)) / 2
        loss = run.step(objective, windows)
        key, total = Key(derive_seed(cfg.seed, cfg.stream, "probes"), update), 0
        for a in range(2):
            up, down = objective.losses(theta, probes, key, torch.arange(2*a, 2*a + 2), cfg.eps, windows[3*a:3*a + 3]).mean(-1)
            total = total + ((up - down) / (2*cfg.eps)) @ PROBES[probes](objective.layout, key, torch.arange(2*a, 2*a + 2)).double() / 4
        leaf = theta["E"].double().requires_grad_()
        torch.nn.functional.cross_entropy((objective.hidden(theta, windows).double() @ leaf.T).flatten(0, 1), windows[:, 1:].flatten().long()).backward()
        grad = objective.layout.unflatten(total) | dict(E=leaf.grad)
        for n, t in theta.items():
            g = grad[n] + (0 if n == "E" else 0.3 * t.double())
            m[n], v[n] = 0.9 * m.get(n, 0) + 0.1 * g, 0.999 * v.get(n, 0) + 0.001 * g**2
            theta[n] = (t.double() - lr * m[n] / (1 - 0.9**(update + 1)) / ((v[n] / (1 - 0.999**(update + 1))).sqrt() + 1e-8)).float()
            assert torch.allclose(run.theta[n], theta[n], rtol=1e-4, atol=2e-6), (update, n)
            theta[n] = run.theta[n].clone()   # so that rounding does not grow
        assert 4 < loss < 8

# ---- one run, told in many ways

VARIANTS = {f"{head}, {schedule}, {probes}": dict(head=head, schedule=schedule, probes=probes) for head, schedule in (("delta", "plateau"), ("frozen", "cosine")) for probes in PROBES}
WIDE, ODD = ModelConfig(d=6, D=2, d_E=5), replace(CFG, updates=8, A=2, B=3, tile=2, patience=3)   # d ≠ d_E; a tile that is not full

def stop_at(wanted):
    def report(update, loss):
        if update == wanted: signal.raise_signal(signal.SIGTERM)
    return report

@pytest.mark.parametrize("name", VARIANTS)
def test_stopped_extended_and_chunked(home, tmp_path, name):
    cfg = replace(ODD, **VARIANTS[name], horizon=8)
    go(home, tmp_path/"straight", cfg, WIDE)
    with pytest.raises(Stopped, match="stopped after update 2"): go(home, tmp_path/"told", cfg, WIDE, chunk=1, report=stop_at(2))
    go(home, tmp_path/"told", replace(cfg, updates=5), WIDE, chunk=3, checkpoint_every=1)
    assert load_checkpoint(tmp_path/"told"/FILES[0])[1]["states"][0]["update"] == 5
    sessions = tmp_path/"told"/"sessions.jsonl"
    os.truncate(sessions, sessions.stat().st_size - 9)   # a line that a kill has cut short
    go(home, tmp_path/"told", cfg, WIDE, chunk=5, checkpoint_every=100)
    lines = sessions.read_text().splitlines()
    assert [(s["first"], s["last"]) for s in map(json.loads, (lines[0], lines[2]))] == [(0, 2), (5, 8)] and len(lines) == 3
    assert state(tmp_path/"told") == state(tmp_path/"straight")
    (tensors, meta), fresh, lines = load_checkpoint(tmp_path/"told"/FILES[0]), init_params(WIDE), read_metrics(tmp_path/"told")
    assert {n for n, t in fresh.items() if not torch.equal(t, tensors[f"theta.{n}"])} == set(fresh) - ({"E"} if cfg.head == "frozen" else set())   # what moved
    assert ("adam.E.m" in tensors) == (cfg.head == "delta")
    if cfg.schedule == "plateau":   # no improvement is large enough, so lr and ε are halved at the first look 3 updates or more after update 0
        assert meta["states"][0]["plateau"] == dict(best=lines[0]["valid"], since=4, halvings=1)
        assert [(m["update"], m["lr"], m["eps"]) for m in lines] == [(0, 1e-2, 3e-3), (2, 1e-2, 3e-3), (4, 5e-3, 1.5e-3), (6, 5e-3, 1.5e-3)]
    else: assert [(m["lr"], m["eps"]) for m in lines] == [(pytest.approx(1e-2 * (1 + math.cos(math.pi * u / 8)) / 2), 3e-3) for u in (0, 2, 4, 6)]
    assert [m["bytes"] for m in lines] == [u * 2 * 3 * cfg.T for u in (0, 2, 4, 6)]

@pytest.mark.parametrize("estimator", ["spsa", "dust:A", "dust:B + cv", "dust:C"])
def test_threads(home, tmp_path, estimator):
    "Products as large as the paper's widths have, which torch and its library divide among threads."
    model, cfg = ModelConfig(d=181, D=1, d_E=32), replace(CFG, updates=3, B=3, tile=4, estimator=estimator, dust=dict(warmup=1) if "cv" in estimator else {})
    before = torch.get_num_threads()
    for n in (1, 2):
        torch.set_num_threads(n)
        go(home, tmp_path/f"{n}", cfg, model, chunk=n)
    torch.set_num_threads(before)
    assert state(tmp_path/"1") == state(tmp_path/"2")

def test_every_setting_matters(home, tmp_path):
    "The variants above, another expert, stream, seed or decay: all end in different weights, so none is ignored."
    runs = {name: (replace(ODD, **v), 0) for name, v in VARIANTS.items()} | dict(expert=(ODD, 1), stream=(replace(ODD, stream="other"), 0), seed=(replace(ODD, seed=2), 0), decay=(replace(ODD, weight_decay=0.1), 0))
    for name, (cfg, expert) in runs.items(): go(home, tmp_path/name, replace(cfg, updates=2), WIDE, expert)
    assert len({load_checkpoint(tmp_path/n/FILES[0])[0]["theta.blocks.0.w_hh"].numpy().tobytes() for n in runs}) == len(runs) == 12

def test_a_finished_run_goes_on_at_its_first_horizon(home, tmp_path):
    cfg = replace(CFG, schedule="cosine")
    go(home, tmp_path/"extended", replace(cfg, updates=4))
    go(home, tmp_path/"extended", replace(cfg, updates=7))
    go(home, tmp_path/"straight", replace(cfg, updates=7, horizon=4))
    assert state(tmp_path/"extended") == state(tmp_path/"straight")
    before = state(tmp_path/"extended")
    assert go(home, tmp_path/"extended", replace(cfg, updates=2))["update"] == 7   # fewer than there are: nothing is undone
    assert state(tmp_path/"extended") == before

def test_a_run_begun_again_has_its_own_result(home, tmp_path):
    "Whoever removes a checkpoint begins anew; nothing of the old run stays."
    go(home, tmp_path/"again")
    (tmp_path/"again"/FILES[0]).unlink()
    go(home, tmp_path/"again", replace(CFG, lr=2e-2))
    go(home, tmp_path/"straight", replace(CFG, lr=2e-2))
    assert state(tmp_path/"again") == state(tmp_path/"straight")

# ---- by noise at outputs

NOISY = {   # estimator, settings
    "dust:A": {}, "dust:A + cv": dict(warmup=3, ridge=2.), "dust:B": dict(n=2, baseline="loo", more=("embed", "input", "norm1", "norm2")), "dust:B + cv": dict(warmup=3, ridge=2., gamma=dict(hidden=0.9)), "dust:C": dict(sigma=0.05, noise="gaussian"), "dust:C + cv": dict(warmup=2, dense=3, ridge=2.),
}
def noisy(estimator, cfg=ODD, **more): return replace(cfg, horizon=8, estimator=estimator, dust=NOISY[estimator], **more)

@pytest.mark.parametrize("head", ["delta", "frozen"])
@pytest.mark.parametrize("estimator", NOISY)
def test_noise_by_hand(home, estimator, head):
    "What has a gradient makes Adam's step, with decay; what has none stays, without decay; the head's gradient is of the same clean pass."
    cfg = noisy(estimator, weight_decay=0.3, head=head, schedule="cosine")
    store, objective, config = Store(home/"store"), expert_objective(WIDE, cfg.tile), dust_config(cfg, WIDE)
    idx, run, state = Shards.load(home/"shards", store).train[0], Run(cfg, WIDE, init_params(WIDE)), ControlVariate(WIDE, config) if config.cv else None
    theta = {n: t.clone() for n, t in run.theta.items()}
    names = trained(WIDE, config)
    adam = [torch.optim.Adam([theta[n] for n in names if (n == "E") == top], betas=(0.9, 0.999), weight_decay=0 if top else 0.3, foreach=False) for top in (False, True) if not top or head == "delta"]
    for update in range(5):
        windows = batch(store, idx, cfg, update)
        found = dust(objective, theta, list(windows.split(cfg.B)), Key(derive_seed(cfg.seed, cfg.stream, "probes"), update), config, state)
        for n in names: theta[n].grad = found.grad[n]
        for opt in adam: opt.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * update / 8)) / 2; opt.step()
        assert run.step(objective, windows) == found.loss and all(torch.equal(run.theta[n], t) for n, t in theta.items()), update
    fresh = init_params(WIDE)
    held = {n for n, t in fresh.items() if torch.equal(run.theta[n], t)}
    assert held == set(fresh) - set(names) and ("E" in held) == (head == "frozen") and ("blocks.0.norm1" in held) == (estimator != "dust:B") and ("norm" in held) == (estimator in ("dust:A",))
    assert {n.split(".", 1)[1].rsplit(".", 1)[0] for n in run.tensors() if n.startswith("adam.")} == set(names)

@pytest.mark.parametrize("estimator", NOISY)
def test_noise_stopped_anywhere(home, tmp_path, estimator):
    "After every update: in the warm-up, at its end, when the guess is learnt from each update or from every fourth."
    cfg = noisy(estimator)
    go(home, tmp_path/"straight", cfg, WIDE)
    for stop in range(1, 8):
        with pytest.raises(Stopped): go(home, tmp_path/f"{stop}", cfg, WIDE, chunk=1 + stop % 3, report=stop_at(stop))
        go(home, tmp_path/f"{stop}", cfg, WIDE)
        assert state(tmp_path/f"{stop}") == state(tmp_path/"straight"), stop
    meta, lines = load_checkpoint(tmp_path/"straight"/FILES[0])[1], read_metrics(tmp_path/"straight")
    assert meta["identity"]["train"]["estimator"] == estimator and {(m["estimator"], m["eps"]) for m in lines} == {(estimator, None)}
    assert {json.loads(x)["estimator"] for x in (tmp_path/"3"/"sessions.jsonl").read_text().splitlines()} == {estimator}
    if "cv" in estimator: assert meta["states"][0]["cv"]["updates"] == 8 and len(meta["states"][0]["cv"]["explained"]) >= 3 and meta["states"][0]["cv"]["off"] is None

def test_noise_without_its_control_variate(home, tmp_path, capfd):
    "One that forgets at once diverges: one line, and the run goes on without it, wherever it is stopped."
    cfg = replace(ODD, estimator="dust:B + cv", dust=dict(warmup=3, decay=1e-3, ridge=1e-6), horizon=8)
    go(home, tmp_path/"straight", cfg, WIDE)
    said = capfd.readouterr().err
    off = load_checkpoint(tmp_path/"straight"/FILES[0])[1]["states"][0]["cv"]["off"]
    assert off.startswith("update 3: the control variate diverges") and said == f"soma: {off}; going on without it (raise decay above 0.001, or n)\n"
    for stop in (2, 3, 4, 6):
        with pytest.raises(Stopped): go(home, tmp_path/f"{stop}", cfg, WIDE, report=stop_at(stop))
        go(home, tmp_path/f"{stop}", cfg, WIDE)
        assert state(tmp_path/f"{stop}") == state(tmp_path/"straight") and capfd.readouterr().err == said   # said once, by whichever process it happened in
    assert not any(t.any() for n, t in load_checkpoint(tmp_path/"straight"/FILES[0])[0].items() if n.startswith("cv."))

def test_every_estimator_and_setting_of_noise_matters(home, tmp_path):
    runs = {e: (e, d) for e, d in NOISY.items()} | {f"{e} plain": (e, {"warmup": 3} if "cv" in e else {}) for e in ("dust:B", "dust:B + cv", "dust:C", "dust:C + cv")} | dict(trace=("dust:B", dict(trace=False)), ridge=("dust:B + cv", dict(warmup=3, ridge=1.)))
    for name, (e, d) in runs.items(): go(home, tmp_path/name, replace(ODD, estimator=e, dust=d, updates=6), WIDE)
    assert len({load_checkpoint(tmp_path/n/FILES[0])[0]["theta.blocks.0.w_hh"].numpy().tobytes() for n in runs}) == len(runs) == 12

@pytest.mark.parametrize("was, now, words", [
    ("dust:A", dict(estimator="dust:B"), "has estimator = dust:A, not dust:B;"), ("dust:A", dict(estimator="dust:A + cv"), "has estimator = dust:A, not dust:A + cv;"), ("dust:B + cv", dict(estimator="spsa"), "has estimator = dust:B + cv, not spsa;"),
    ("dust:C", dict(estimator="dust:C", dust=dict(sigma=0.2)), "has dust = {'noise': 'gaussian', 'sigma': 0.05}, not {'sigma': 0.2};"), ("dust:A", dict(estimator="dust:A", dust=dict(n=2)), "has dust = {}, not {'n': 2};"),
])
def test_tiers_are_not_mixed(home, tmp_path, was, now, words):
    go(home, tmp_path/"run", noisy(was, updates=2), WIDE)
    before = snapshot(tmp_path/"run")
    with pytest.raises(SomaError) as e: go(home, tmp_path/"run", replace(ODD, horizon=8, **dict(dust={}) | now), WIDE)
    one_line(e, tmp_path/"run"/FILES[0], words)
    assert snapshot(tmp_path/"run") == before

@pytest.mark.parametrize("dust, word", [(dict(sigma=0), "sigma = 0"), (dict(gamma=1.5), "between 0 and 1"), (dict(n=0), "n = 0"), (dict(sigma={"out": 1.}), "no site 'out'"), (dict(n={"blocks.7.up": 2}), "blocks.7.up"), (dict(tier="C"), "said by the estimator"), (dict(more=["gain"]), "choose from embed"),
                                        (dict(sgima=1), "sgima: unknown"), (dict(sigma="much"), "give numbers"), (dict(baseline="loo"), "at least 2 draws")])
def test_settings_that_noise_has_not(home, tmp_path, dust, word):
    with pytest.raises(SomaError) as e: go(home, tmp_path/"run", replace(CFG, estimator="dust:A", dust=dust))
    one_line(e, word)
    assert not (tmp_path/"run").exists()

def test_noise_that_is_not_finite(home, tmp_path):
    with pytest.raises(SomaError) as e: go(home, tmp_path/"run", replace(CFG, estimator="dust:A", lr=1e30))
    one_line(e, "update 1:", "not finite", "keeps its last good checkpoint")
    assert "--eps" not in str(e.value) and load_checkpoint(tmp_path/"run"/FILES[0])[1]["states"][0]["update"] == 0

def test_noise_learns_more_from_as_many_forwards():
    "Fresh experts of the shipped corpus's first words: tier A and SPSA as preset small has them, 0.66 million byte-forwards each."
    text = torch.frombuffer(bytearray(b"".join(json.loads(x)["text"].encode() for x, _ in zip(gzip.open(CARD, "rt", encoding="utf-8"), range(40)))), dtype=torch.uint8)
    def windows(n, step): return text.unfold(0, 65, 1)[Key(1, step).below(len(text) - 65, "batch", torch.arange(n))].contiguous()
    model, judged, found = ModelConfig(), windows(256, 10**6), {}
    for estimator, updates in dict(spsa=20, **{"dust:A": 66}).items():
        cfg = replace(preset("small", estimator).seed, updates=updates, horizon=updates)
        used = updates * (2*cfg.P * cfg.B*cfg.T if estimator == "spsa" else byte_forwards(model, dust_config(cfg, model), cfg.B, cfg.T))
        assert used == pytest.approx(6.58e5, rel=5e-3)
        run, objective = Run(cfg, model, init_params(model)), expert_objective(model)
        for update in range(updates): run.step(objective, windows(cfg.B, update))
        found[estimator] = run.valid(objective, judged)
    assert found["dust:A"] < found["spsa"] - 0.3 and found["spsa"] < 3.5, found

# ---- the same numbers for TensorBoard

def events(folder)->dict:
    "(tag, update) -> every value that the event files in a folder give it."
    loader, found = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="tensorboard is not installed (pip install -e '.[tensorboard]')"), {}
    for file in folder.glob("events.out.tfevents.*"):
        for e in loader.EventFileLoader(str(file)).Load():
            for v in e.summary.value: found.setdefault((v.tag, e.step), []).append(v.tensor.float_val[0])
    return found

def metric_events(folder)->dict: return {(name, m["update"]): [float(np.float32(m[name]))] for m in read_metrics(folder) for name in ("valid", "loss", "lr", "eps") if m[name] is not None}

def child_killed_with_events(home, out):
    "Killed after update 5: the look at 4 has been written, and the last checkpoint is of 3."
    def report(update, loss):
        if update == 5: time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)   # its writer has had time for the disk
    from torch.utils import tensorboard
    writer = tensorboard.SummaryWriter
    tensorboard.SummaryWriter = lambda folder, flush_secs: writer(folder, flush_secs=0.1)
    go(home, out/"run", report=report, tensorboard=True)

def test_events_for_tensorboard(home, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install -e '.[tensorboard]')")
    run = tmp_path/"run"
    assert subprocess.run([sys.executable, __file__, "killed_with_events", home, tmp_path], stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert {u for _, u in events(run/"tensorboard")} == {0, 2, 4} and load_checkpoint(run/FILES[0])[1]["states"][0]["update"] == 3
    with pytest.raises(Stopped): go(home, run, report=stop_at(4), tensorboard=True)
    assert {u for _, u in events(run/"tensorboard")} == {0, 2}                              # the look at 4 is to come again
    go(home, run, tensorboard=True)
    go(home, tmp_path/"plain")
    shutil.copytree(tmp_path/"plain", tmp_path/"after")
    go(home, tmp_path/"after", tensorboard=True)                                            # of a run that has finished
    for folder in (run, tmp_path/"after"):
        assert events(folder/"tensorboard") == metric_events(tmp_path/"plain") and len(metric_events(folder)) == 4 * 4 - 1
        shutil.rmtree(folder/"tensorboard")
        assert state(folder) == state(tmp_path/"plain")

# ---- values that are not finite

@pytest.mark.parametrize("what", ["a parameter", "a moment", "the loss", "the validation loss"])
def test_not_finite(home, tmp_path, monkeypatch, what):
    "The error names the update, the last good checkpoint stays, and the same command without the fault ends in the usual bytes."
    step, spsa, mean_loss = soma.train.adam_step, soma.train.spsa, soma.models.ExpertObjective.mean_loss
    def poisoned(opt, params, *rest): step(opt, params, *rest); list(params.values())[0][..., 0] = float("nan")
    def overflowing(opt, params, *rest): step(opt, params, *rest); opt.state[list(params.values())[0]]["exp_avg_sq"].fill_(float("inf"))
    def losing(objective, theta, batches, key, *rest):
        found = spsa(objective, theta, batches, key, *rest)
        return found._replace(losses=torch.where(torch.rand(found.losses.shape, generator=torch.Generator().manual_seed(0)) < 0.3, float("inf"), found.losses)) if key.step == 5 else found
    count = iter(range(99))
    with monkeypatch.context() as m:
        if what == "a parameter": m.setattr(soma.train, "adam_step", lambda *a: poisoned(*a) if next(count) == 2 * 5 + 1 else step(*a))   # the head's sixth step
        if what == "a moment": m.setattr(soma.train, "adam_step", lambda *a: overflowing(*a) if next(count) == 2 * 5 + 1 else step(*a))
        if what == "the loss": m.setattr(soma.train, "spsa", losing)
        if what == "the validation loss": m.setattr(soma.models.ExpertObjective, "mean_loss", lambda *a: float("nan") if next(count) == 9 else mean_loss(*a))   # the look at 6: three looks and six saves come before it
        with pytest.raises(SomaError) as e: go(home, tmp_path/"run", CFG, checkpoint_every=1)
    update, last = {"a parameter": (6, 5), "a moment": (6, 5), "the loss": (5, 5), "the validation loss": (6, 6)}[what]
    one_line(e, f"update {update}:", what.split()[-1], "not finite", "keeps its last good checkpoint")
    tensors, meta = load_checkpoint(tmp_path/"run"/FILES[0])
    assert meta["states"][0]["update"] == last and all(t.isfinite().all() for t in tensors.values())
    go(home, tmp_path/"run", CFG)
    go(home, tmp_path/"straight", CFG)
    assert state(tmp_path/"run") == state(tmp_path/"straight")

# ---- a checkpoint that cannot be continued


OTHER = dict(P=3, B=4, T=9, A=2, lr=2e-2, eps=1e-3, schedule="cosine", horizon=99, patience=5, tolerance=1., floor=1e-6, judge_every=3, judge_windows=3, beta1=0.8, beta2=0.9, adam_eps=1e-7,
             weight_decay=0., probes="gaussian", head="frozen", seed=2, stream="expert0", tile=3, estimator="dust:A")

@pytest.fixture(scope="module")
def done(home)->Path: go(home, home/"done"); return home/"done"

@pytest.mark.parametrize("name", OTHER)
def test_another_configuration(home, done, name):
    before = snapshot(done)
    with pytest.raises(SomaError) as e: go(home, done, replace(CFG, **{name: OTHER[name]}))
    one_line(e, done/FILES[0], f"has {name} = {7 if name == 'horizon' else getattr(CFG, name)}, not {OTHER[name]}")
    assert snapshot(done) == before

def test_every_field_of_the_configuration_is_in_the_table(): assert set(OTHER) == {f.name for f in fields(TrainConfig)} - {"updates", "dust"}   # spsa has no settings of dust: below

def _other_corpus(home, done): build_store(corpus(home/"other.jsonl", 60, salt=1), home/"other"/"store"); return dict(home=home/"other")
MISMATCH = {
    "width": (lambda home, done: dict(model=replace(MODEL, d=9)), ["has d = 8, not 9"]),
    "blocks": (lambda home, done: dict(model=replace(MODEL, D=2)), ["has D = 1, not 2"]),
    "embedding": (lambda home, done: dict(model=replace(MODEL, d_E=7)), ["has d_E = 8, not 7"]),
    "parameters": (lambda home, done: dict(theta=init_params(MODEL, 5)), ["other initial parameters"]),
    "one bit of them": (lambda home, done: dict(theta=init_params(MODEL) | dict(norm=torch.ones(8).nextafter(torch.tensor(2.)))), ["other initial parameters"]),
    "shard": (lambda home, done: dict(expert=1), ["another clustering"]),
}

@pytest.mark.parametrize("name", MISMATCH)
def test_another_run(home, done, name):
    change, words = MISMATCH[name]
    before = snapshot(done)
    with pytest.raises(SomaError) as e: go(home, done, **change(home, done))
    one_line(e, done/FILES[0], *words)
    assert snapshot(done) == before

def test_another_corpus(home, done, tmp_path):
    store = build_store(corpus(tmp_path/"other.jsonl", 60, salt=1), tmp_path/"store")
    make_shards(store, np.arange(len(store)) % 3, 3, seed=1).save(tmp_path/"shards")
    before = snapshot(done)
    with pytest.raises(SomaError) as e: go(tmp_path, done)
    one_line(e, done/FILES[0], "another corpus")
    assert snapshot(done) == before

def _cut(n): return lambda b: b[:n(len(b))]
def _later(b): assert b.count(b'\\"format\\":1') == 1; return b.replace(b'\\"format\\":1', b'\\"format\\":2')
def _meta(meta): return lambda b: safetensors.torch.save(init_params(MODEL), dict(soma=json.dumps(meta)))
def _kept(b): theta = init_params(MODEL); return safetensors.torch.save(theta, dict(soma=json.dumps(dict(kind="kept", format=1, digest=digest(theta, dict(kind="kept", format=1))))))
DAMAGE = {
    "cut in half": (_cut(lambda n: n // 2), ["damaged or not a checkpoint"]),
    "cut in its header": (_cut(lambda n: 20), ["damaged or not a checkpoint"]),
    "last byte gone": (_cut(lambda n: n - 1), ["damaged or not a checkpoint"]),
    "empty": (_cut(lambda n: 0), ["damaged or not a checkpoint"]),
    "text": (lambda b: b"not a checkpoint\n" * 99, ["damaged or not a checkpoint"]),
    "later format": (_later, ["later soma (format 2, this one reads 1)"]),
    "another's safetensors": (lambda b: safetensors.torch.save(init_params(MODEL)), ["not a soma checkpoint"]),
    "another's metadata": (_meta([1, 2]), ["damaged"]),
    "no metadata": (_meta({}), ["damaged"]),
    "a format that is no number": (_meta(dict(format="new")), ["damaged"]),
    "kept parameters": (_kept, ["not of a training run"]),
}

@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint(home, done, tmp_path, name):
    change, words = DAMAGE[name]
    shutil.copytree(done, tmp_path/"run")
    path = tmp_path/"run"/FILES[0]
    path.write_bytes(change(path.read_bytes()))
    before = snapshot(tmp_path/"run")
    for use in (lambda: go(home, tmp_path/"run"), lambda: load_theta(tmp_path/"run")):
        with pytest.raises(SomaError) as e: use()
        one_line(e, tmp_path/"run", *words)
    assert snapshot(tmp_path/"run") == before

def _lacking(name): return lambda t, m: t.pop(name)
def _reshaped(name, change): return lambda t, m: t.update({name: change(t[name])})
CRAFTED = {   # with a digest that fits; what is said, and what may use it all the same: resuming (r), taking its parameters (t), asking whether it has finished (f)
    "a weight is missing": (_lacking("theta.blocks.0.w_hh"), "theta.blocks.0.w_hh is missing", "f"),
    "the head is missing": (_lacking("theta.E"), "theta.E is missing", "f"),
    "a moment is missing": (_lacking("adam.norm.v"), "adam.norm.v is missing", "ft"),
    "a shape that broadcasts": (_reshaped("theta.norm", lambda t: t[:1].clone()), "theta.norm is torch.float32 [1], not floating point [8]", "f"),
    "a wrong shape": (_reshaped("theta.E", lambda t: t[:, :4].clone()), "theta.E is torch.float32 [256, 4], not floating point [256, 8]", "f"),
    "a moment of a wrong shape": (_reshaped("adam.norm.m", lambda t: t[None]), "adam.norm.m is torch.float32 [1, 8], not", "ft"),
    "whole numbers": (_reshaped("theta.norm", lambda t: t.long()), "theta.norm is torch.int64 [8]", "f"),
    "no identity": (lambda t, m: m.pop("identity"), "KeyError: 'identity'", "f"),
    "no model": (lambda t, m: m["identity"].pop("model"), "checkpoint", "f"),   # resuming says that its d is None, taking its parameters that there is no model
    "a model of another kind": (lambda t, m: m["identity"]["model"].update(heads=8), "heads", "f"),
    "no corpus": (lambda t, m: m["identity"].pop("corpus"), "corpus", "f"),
    "no states": (lambda t, m: m.update(states=[]), "IndexError", ""),
    "a state of another kind": (lambda t, m: m.update(states=[7]), "TypeError", ""),
    "no plateau": (lambda t, m: m["states"][0].pop("plateau"), "plateau", "ft"),
    "no length of the metrics": (lambda t, m: m.pop("metrics_length"), "metrics_length", "ft"),
}

@pytest.mark.parametrize("name", CRAFTED)
def test_a_whole_checkpoint_that_lacks_something(home, done, tmp_path, name):
    change, word, fine = CRAFTED[name]
    shutil.copytree(done, tmp_path/"run")
    tensors, meta = load_checkpoint(tmp_path/"run"/FILES[0])
    change(tensors, meta)
    save_checkpoint(tmp_path/"run"/FILES[0], tensors, meta)
    before = snapshot(tmp_path/"run")
    for use, action in dict(r=lambda: go(home, tmp_path/"run", replace(CFG, updates=9)), t=lambda: load_theta(tmp_path/"run"), f=lambda: finished(tmp_path/"run")).items():
        if use in fine: action(); continue
        with pytest.raises(SomaError) as e: action()
        one_line(e, tmp_path/"run", word)
    assert snapshot(tmp_path/"run") == before

def test_every_flipped_bit_is_noticed(done, tmp_path):
    "A bit of every fifth byte of the header and of every 211th of the tensors; what loads all the same must be the same."
    whole, path = (done/FILES[0]).read_bytes(), tmp_path/"x.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    tensors, meta = load_checkpoint(done/FILES[0])
    said = Counter()
    for i in [*range(0, header, 5), *range(header, len(whole), 211)]:
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i+1:])
        try:
            found = load_checkpoint(path)
            assert found[1] == meta and all(torch.equal(t, found[0][n]) for n, t in tensors.items()), i   # a last digit that rounds to the same number
            said["same"] += 1
        except SomaError as e: said["digest" if "do not match its digest" in str(e) else "other"] += 1
    assert said["same"] <= 2 and said["digest"] > (len(whole) - header) // 211 and said["other"] > header // 15, said

def test_metrics_shorter_than_the_checkpoint_remembers(home, done, tmp_path):
    shutil.copytree(done, tmp_path/"run")
    metrics = tmp_path/"run"/"metrics.jsonl"
    length = metrics.stat().st_size
    for damage in (lambda: os.truncate(metrics, length - 1), metrics.unlink):
        damage()
        before = snapshot(tmp_path/"run")
        with pytest.raises(SomaError) as e: go(home, tmp_path/"run", replace(CFG, updates=9))
        one_line(e, metrics, f"shorter than its checkpoint remembers ({before.get('metrics.jsonl') and length - 1 or 0} of {length} bytes)")
        assert snapshot(tmp_path/"run") == before

def test_out_that_cannot_be_written(home, tmp_path):
    (tmp_path/"file").write_text("in the way")
    with pytest.raises(SomaError) as e: go(home, tmp_path/"file"/"run")
    one_line(e, tmp_path/"file", "a file is where a folder is needed")
    assert snapshot(tmp_path) == dict(file=b"in the way")

# ---- several processes

def jobs(home, out, cls=Job, cfg=replace(CFG, head="frozen"))->list:
    return [cls(replace(cfg, stream=f"expert{e}"), str(home/"seed"), str(home/"store"), str(home/"shards"), e, str(out/f"{e}"), chunk=1 + e) for e in range(3)]

def alone(job, out)->tuple: "What it leaves behind when it is run here, undisturbed, in other chunks."; replace(job, out=str(out), chunk=8).run(); return state(out)

@dataclass(frozen=True)
class Doomed(Job):
    "Expert 1's process is killed at update 4."
    def run(self, report):
        def doom(update, loss):
            if self.expert == 1 and update == 4: os.kill(os.getpid(), signal.SIGKILL)
            report(update, loss)
        return super().run(doom)

def test_one_of_two_workers_is_killed(home, tmp_path):
    with pytest.raises(SomaError) as e: run_jobs(jobs(home, tmp_path, Doomed), workers=2, threads=1, show=False)
    one_line(e, tmp_path/"1", "ended from outside", "-9", "the same command resumes it")
    whole = {job.expert: alone(job, tmp_path/f"alone{job.expert}") for job in jobs(home, tmp_path)}
    assert [state(tmp_path/e) == whole[int(e)] for e in "02"] == [True, True]   # the other process has trained both of its experts
    assert load_checkpoint(tmp_path/"1"/FILES[0])[1]["states"][0]["update"] == 0   # this one saves after 100 updates, or at the end
    jobs(home, tmp_path)[1].run()
    assert state(tmp_path/"1") == whole[1] and len(set(whole.values())) == 3

@dataclass(frozen=True)
class Waiting(Job):
    "Waits at update 4 until a signal has been noticed, and then a second for another one."
    def run(self, report):
        def wait(update, loss):
            report(update, loss)
            if update != 4: return
            handler, until = signal.getsignal(signal.SIGTERM), time.time() + 30
            (Path(self.out)/"ready").touch()
            while signal.getsignal(signal.SIGTERM) == handler and time.time() < until: time.sleep(0.001)
            time.sleep(1)
        return super().run(wait)

def child_terminal(home, out):
    "Ctrl-C in a terminal, in slow motion: what is in this process's group gets SIGINT, then this process, which tells its worker."
    def press():
        while not (out/"0"/"ready").exists(): time.sleep(0.01)
        for p in multiprocessing.active_children():
            if os.getpgid(p.pid) == os.getpgrp(): os.kill(p.pid, signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    try: run_jobs(jobs(home, out, Waiting)[:1], workers=1, threads=1, show=False)
    except Exception as e: raised = type(e).__name__
    print(json.dumps(dict(raised=raised, update=load_checkpoint(out/"0"/FILES[0])[1]["states"][0]["update"])))

def test_ctrl_c_in_a_terminal(home, tmp_path):
    found = child("terminal", home, tmp_path)
    assert "Traceback" not in found.pop("stderr") and found == dict(raised="Stopped", update=4)   # it has saved where it was
    (tmp_path/"0"/"ready").unlink()
    job = jobs(home, tmp_path)[0]
    job.run()
    assert state(tmp_path/"0") == alone(job, tmp_path/"alone")

def child_orphan(home, out, signum, times):
    "Once its worker is in the middle of update 4, this process is ended; the worker goes on alone."
    def end_it():
        while not (out/"0"/"ready").exists(): time.sleep(0.01)
        for _ in range(times): os.kill(os.getpid(), signum); time.sleep(0.5)
    os.setpgrp()
    threading.Thread(target=end_it, daemon=True).start()
    run_jobs(jobs(home, out, Left)[:1], workers=1, threads=1, show=False)

@dataclass(frozen=True)
class Left(Job):
    "At update 4 it waits until its parent has ended."
    def run(self, report):
        def wait(update, loss):
            if update == 4:
                parent, until = os.getppid(), time.monotonic() + 60
                (Path(self.out)/"ready").touch()
                while os.getppid() == parent and time.monotonic() < until: time.sleep(0.01)
            report(update, loss)
        return super().run(wait)

@pytest.mark.parametrize("signum, times", [(signal.SIGKILL, 1), (signal.SIGTERM, 2)], ids=("killed", "told twice"))
def test_a_worker_without_its_parent_saves_and_leaves(home, tmp_path, signum, times):
    r = subprocess.run([sys.executable, __file__, "orphan", home, tmp_path, str(int(signum)), str(times)], stderr=subprocess.PIPE, text=True, timeout=120)   # ends with the worker, which holds its stderr
    assert r.returncode == -signum and "Traceback" not in r.stderr
    assert load_checkpoint(tmp_path/"0"/FILES[0])[1]["states"][0]["update"] == 4

# ---- experts in step

@pytest.fixture(scope="module")
def starts(home)->list:
    "Three experts at update 4."
    cfg = replace(CFG, head="frozen", schedule="cosine", updates=4, horizon=8)
    for job in jobs(home, home/"starts", cfg=cfg): job.run()
    return [str(home/"starts"/f"{e}") for e in range(3)]

def together(home, out, starts, rule, updates=8, **more): return TogetherJob(replace(CFG, head="frozen", schedule="cosine", updates=updates, horizon=8), tuple(starts), str(home/"store"), str(home/"shards"), str(out), rule, keep=(4, 6, 8), **more)

def equal(a, b)->bool: return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)

def test_in_step_by_their_own_losses_is_each_for_itself(home, tmp_path, starts):
    together(home, tmp_path/"own", starts, "own").run()
    for e, start in enumerate(starts):
        shutil.copytree(start, tmp_path/f"{e}")
        replace(jobs(home, tmp_path, cfg=replace(CFG, head="frozen", schedule="cosine", horizon=8))[e], cfg=replace(CFG, head="frozen", schedule="cosine", updates=8, horizon=8, stream=f"expert{e}")).run()
        assert equal(load_kept(tmp_path/"own", 4)[e], load_theta(start)[0]) and equal(load_kept(tmp_path/"own", 8)[e], load_theta(tmp_path/f"{e}")[0])

def test_in_step_each_expert_draws_its_own_directions(home, starts):
    "The update of the summed loss (Eq. 9) from its parts: one shared difference of losses, directions by each run's own key."
    job = together(home, "unused", starts, "summed")
    ours, twins, objective = job._runs(job.cfg), job._runs(job.cfg), ExpertObjective(MODEL, CFG.tile)
    store = Store(home/"store")
    shards = Shards.load(home/"shards", store)
    windows = [batch(store, shards.train[e], r.cfg, 4) for e, r in enumerate(ours)]
    losses = [objective.losses(r.theta, CFG.probes, r.key, torch.arange(CFG.P), CFG.eps, w) for r, w in zip(twins, windows)]
    up, down = sum(l.mean(-1) for l in losses)
    step_together(ours, objective, windows, "summed")
    for run, twin, w, l in zip(ours, twins, windows, losses):
        total = ((up - down) / (2*CFG.eps)) @ PROBES[CFG.probes](objective.layout, twin.key, torch.arange(CFG.P)).double() / CFG.P
        twin.apply(objective, w, Estimate({n: g.float() for n, g in objective.layout.unflatten(total).items()}, l[None]))
        assert all(torch.allclose(run.theta[n], t, rtol=1e-5, atol=1e-7) for n, t in twin.theta.items()) and run.update == 5
    assert len({r.key for r in ours}) == 3

def test_in_step_by_the_sum_of_losses(home, tmp_path, starts):
    "Differs from their own losses, is the same for one expert, and stops and goes on to the same bytes and the same result."
    straight = together(home, tmp_path/"straight", starts, "summed").run()
    with pytest.raises(Stopped, match="stopped after update 6"): together(home, tmp_path/"told", starts, "summed", chunk=1).run(stop_at(6))
    assert together(home, tmp_path/"told", starts, "summed", chunk=3).run() == straight
    assert snapshot(tmp_path/"told") == snapshot(tmp_path/"straight") and set(snapshot(tmp_path/"told")) == {FILES[0], *(f"kept-{u:07}.safetensors" for u in (4, 6, 8))}
    assert together(home, tmp_path/"told", starts, "summed").run() == straight   # nothing left to do
    for rule in ("own", "summed"): together(home, tmp_path/rule, starts[:1], rule).run()
    with pytest.raises(SomaError) as e: replace(job := together(home, tmp_path/"no", starts, "summed"), cfg=replace(job.cfg, estimator="dust:A")).run()
    one_line(e, "rule 'summed'", "dust:A has none of")
    assert not (tmp_path/"no").exists()
    assert equal(load_kept(tmp_path/"own", 8)[0], load_kept(tmp_path/"summed", 8)[0]) and not equal(load_kept(tmp_path/"own", 8)[0], load_kept(tmp_path/"straight", 8)[0])
    with pytest.raises(SomaError) as e: together(home, tmp_path/"own", starts[:1], "summed").run()
    one_line(e, "rule = own, not summed")

@pytest.mark.parametrize("change, word", [(lambda t, m: t.pop("1/norm"), "1/norm is missing"), (lambda t, m: t.update({"0/E": t["0/E"][0].clone()}), "0/E is torch.float32 [8]"), (lambda t, m: m.pop("model"), "'model'")])
def test_kept_parameters_that_lack_something(home, tmp_path, starts, change, word):
    together(home, tmp_path/"own", starts[:2], "own", updates=4).run()
    path = tmp_path/"own"/"kept-0000004.safetensors"
    tensors, meta = load_checkpoint(path)
    change(tensors, meta)
    save_checkpoint(path, tensors, meta)
    with pytest.raises(SomaError) as e: load_kept(tmp_path/"own", 4)
    one_line(e, path, word)

if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[f"child_{sys.argv[1]}"](*(int(a) if a.isdigit() else Path(a) for a in sys.argv[2:]))
