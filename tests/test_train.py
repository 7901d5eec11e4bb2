"Laws of training: a run that is killed, stopped, extended, chunked, threaded or spread over processes ends in the same bytes."
import json, multiprocessing, os, signal, subprocess, sys, time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import soma.core, soma.train
from soma.core import Key, ModelConfig, SomaError, TrainConfig, V, write_json
from soma.data import Shards, Store, build_store, make_shards
from soma.models import body_layout, init_params
from soma.probes import PROBES
from soma.train import Job, Stopped, TogetherJob, load_checkpoint, load_kept, load_theta, locked, read_metrics, run_jobs, save_checkpoint, train

MODEL = ModelConfig(d=8, D=1, d_E=8)
CFG = TrainConfig(updates=9, P=2, B=2, T=16, lr=1e-2, eps=3e-3, schedule="plateau", patience=4, tolerance=10., judge_every=2, judge_windows=4, tile=4, head="delta")
FILES = ("checkpoint.safetensors", "metrics.jsonl")

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
    "What a run leaves behind that must not depend on its history; and that it leaves nothing else."
    assert sorted(p.name for p in folder.iterdir()) == sorted([".lock", "result.json", *FILES])
    result = json.loads((folder/"result.json").read_text())
    return *((folder/f).read_bytes() for f in FILES), result["update"], result["valid"]

def one_line(error, *words):
    "The error is one line and says each of the words."
    said = str(error.value)
    assert "\n" not in said and all(str(w) in said for w in words), said

# ---- a child process that is killed at every moment at which it changes the disk

class Faults:
    "Names every moment before, in the middle of and after a change of the disk; at one of them the process is killed."
    def __init__(self, kill_at=None, lose=None):  # lose: a folder whose files also lose what was not yet synced, as when the power fails
        self.kill_at, self.lose, self.moments, self.durable = kill_at, lose, [], {}

    def moment(self, name):
        if len(self.moments) == self.kill_at:
            for p in self.lose.iterdir() if self.lose else ():
                if p.stat().st_ino in self.durable: os.truncate(p, min(p.stat().st_size, self.durable[p.stat().st_ino]))
            os.kill(os.getpid(), signal.SIGKILL)
        self.moments.append(name)

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
        replace, fsync = os.replace, os.fsync
        def spied_fsync(fd):
            self.around(fsync, "sync", fd)
            info = os.fstat(fd)
            self.durable[info.st_ino] = info.st_size
        os.replace, os.fsync = lambda a, b: self.around(replace, f"rename {Path(b).name}", a, b), spied_fsync
        soma.core.open = soma.train.open = self.open
        soma.train.provenance = lambda **more: {}   # starts git, which is slow and changes nothing

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
    "Kill at each moment, then once more on the way, then let it finish; report what differs from a run left alone."
    def attempt(folder, kill_at=None, lose=False, log=None):
        def action():
            faults = Faults(kill_at, folder if lose else None)
            faults.install()
            go(home, folder)
            if log: write_json(log, faults.moments)
        return end(start(action))
    assert attempt(out/"whole", log=out/"moments.json") == 0
    whole, moments, bad, again = state(out/"whole"), json.loads((out/"moments.json").read_text()), [], 0
    for lose in (False, True):
        for i, name in enumerate(moments):
            folder = out/f"{i}-{lose}"
            codes = [attempt(folder, i, lose), attempt(folder, 7 * i % 23, lose), attempt(folder)]
            again += codes[1] == -signal.SIGKILL
            if codes[0] != -signal.SIGKILL or codes[2] or state(folder) != whole: bad.append((i, name, lose, codes))
    print(json.dumps(dict(moments=moments, bad=bad, again=again)))

def child(what, *args, timeout=120)->dict:
    "What a fresh process prints as JSON after doing `child_<what>` of this file."
    r = subprocess.run([sys.executable, __file__, what, *map(str, args)], capture_output=True, text=True, timeout=timeout, start_new_session=True)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1]) | dict(stderr=r.stderr)

def test_killed_at_every_write_and_rename(home, tmp_path):
    found = child("kills", home, tmp_path)
    moments = Counter(found["moments"])
    saved, lines = 4, 5   # checkpoints of updates 0, 3, 6, 9; metrics of updates 0, 2, 4, 6, 8
    expected = {f"write metrics.jsonl: {w}": lines for w in ("before", "half", "after")} | {f"truncate metrics.jsonl: {w}": 1 for w in ("before", "after")}
    expected |= {f"write checkpoint.safetensors: {w}": saved for w in ("before", "half", "after")} | {f"write result.json: {w}": 1 for w in ("before", "half", "after")}
    expected |= {f"rename {name}: {w}": n for name, n in (("checkpoint.safetensors", saved), ("result.json", 1)) for w in ("before", "after")}
    expected |= {f"sync: {w}": saved + 2 * (saved + 1) for w in ("before", "after")}   # metrics before each checkpoint; each new file, and its folder
    expected |= {f"open {name}: {w}": n for name, n in ((".lock", 1), ("metrics.jsonl", 1), (".checkpoint.safetensors.tmp", saved), (".result.json.tmp", 1)) for w in ("before", "after")}
    assert moments == expected
    assert found["bad"] == [], found["bad"]
    assert found["again"] > len(found["moments"])   # of two passes over all moments, more than half were killed twice

# ---- signals from outside, and a second process on the same folder

def child_signals(home, out):
    "Stop by each signal in mid run, once and twice; meanwhile a second process tries the same folder. Then finish."
    def go_and_wait(folder, times, ready):
        def handlers(): return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        def report(update, loss):
            if update != 4: return
            before = handlers()
            os.write(ready, b"4")
            while handlers() == before: time.sleep(0.001)   # until the first signal has been noticed
            if times == 2: os.write(ready, b"!"); time.sleep(60)
        go(home, folder, report=report)
    assert end(start(lambda: go(home, out/"whole"))) == 0
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[f"child_{sys.argv[1]}"](*map(Path, sys.argv[2:]))
