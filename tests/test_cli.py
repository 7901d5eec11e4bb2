"What a user can get wrong at the command line: one clear line, exit code 2, nothing half-written, and the next correct command works."
import errno, gzip, hashlib, io, json, os, shutil, signal, subprocess, sys, threading, time
from pathlib import Path

import pytest
import torch

import soma.cli, soma.commands, soma.data, soma.train
from soma.core import ModelConfig, SomaError, alone, preset
from soma.data import Store, build_store
from soma.routing import fit_router
from soma.train import load_checkpoint, save_checkpoint, update_operations

CARD = Path(__file__).resolve().parents[1]/"data_cards"/"pd_small"/"pd_small.jsonl.gz"
TINY = ["--preset", "smoke", "--model-d", "8", "--model-d-E", "8", "--quiet"]
SEED, TRAIN, EVAL, GENERATE, INFO = ["seed", "--out", "m", *TINY], ["train", "--out", "m", *TINY], ["eval", "--out", "m"], ["generate", "--out", "m", "hi", "--bytes", "5"], ["info", "m"]
SOMA = [sys.executable, "-c", "import sys; from soma.cli import main; sys.exit(main())"]
JUNK = b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(200))   # holds NUL bytes, line ends and bytes that are not UTF-8

def one_after_another(jobs, *args, **kwargs): "run_jobs without its processes."; return [job.run() for job in jobs]

def call(*argv)->int:
    "The command, in this process: its exit code."
    try: return soma.cli.main([str(a) for a in argv])
    except SystemExit as e: return e.code

def tree(folder=".")->dict:
    "Every file and folder with its content; locks and the diary of sessions do not count."
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*") if p.name != "sessions.jsonl"}

@pytest.fixture(scope="module")
def made(tmp_path_factory)->Path:
    "A folder with corpus.jsonl (40 real documents) and m, a finished run of two experts."
    home = tmp_path_factory.mktemp("made")
    with gzip.open(CARD, "rt", encoding="utf-8") as f: (home/"corpus.jsonl").write_text("".join(line for line, _ in zip(f, range(40))), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soma.commands, "run_jobs", one_after_another)
        patch.chdir(home)
        assert call(*TRAIN, "--data", "corpus.jsonl") == 0
    return home

@pytest.fixture
def fresh(made, tmp_path, monkeypatch)->Path:
    "A folder of its own, to work in, with the corpus."
    shutil.copy(made/"corpus.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soma.commands, "run_jobs", one_after_another)
    return tmp_path

@pytest.fixture
def run(made, fresh)->Path: "The same, with a copy of the finished run."; shutil.copytree(made/"m", "m"); return fresh

@pytest.fixture
def check_works(capfd):
    "Call a command that must succeed; its output."
    def check(*argv):
        capfd.readouterr()
        assert call(*argv) == 0, capfd.readouterr().err
        return capfd.readouterr().out
    return check

@pytest.fixture
def check_refused(capfd):
    "Call a command that must say `words` in one line and leave the working folder as it was, but for what `new` allows."
    def check(argv, *words, new=(), silent=True):
        before = tree()
        capfd.readouterr()
        code, (out, err) = call(*argv), capfd.readouterr()
        after = tree()
        assert (code, len(err.splitlines()), err[:6]) == (2, 1, "soma: "), (code, err)
        assert all(str(w) in err for w in words), err
        assert {k: after.get(k) for k in before} == before and {k for k in after.keys() - before.keys() if not k.startswith(tuple(new))} == set()
        if silent: assert out == ""
        return err
    return check

# ---- the corpus

CORPORA = {
    "no such file": ("nowhere.txt", None, "no such file"),
    "nothing named": ("", None, "--data"),
    "empty file": ("a.txt", b"", "empty"),
    "empty folder": ("folder/", None, "empty"),
    "short documents": ("a.jsonl", b'{"text": "short"}\n' * 50, "under 1,025 bytes"),
    "two documents": ("a.jsonl", b'{"text": "%s"}\n{"text": "%s"}\n' % (b"a" * 2000, b"b" * 2000), "2 different documents"),
    "binary .txt": ("a.txt", JUNK, "binary"),
    "binary .parquet": ("a.parquet", JUNK, "not parquet"),
    "binary .jsonl": ("a.jsonl", JUNK, "line 1"),
    "binary .jsonl.gz": ("a.jsonl.gz", JUNK, "not gzip"),
    "cut .jsonl.gz": ("a.jsonl.gz", gzip.compress(b'{"text": "%s"}\n' % JUNK.hex().encode())[:900], "damaged"),
    "unknown kind": ("a.docx", JUNK, "unknown kind of file"),
    "newline in its name": ("a\nb.txt", b"", "empty"),
    "escape in its name": ("a\x1b[31mb.txt", None, "no such file"),
    "name that is not UTF-8": (os.fsdecode(b"caf\xe9.txt"), b"", "empty"),
}

@pytest.mark.parametrize("name", CORPORA)
def test_bad_corpus(name, fresh, check_refused, check_works):
    source, content, words = CORPORA[name]
    if source.endswith("/"): Path(source).mkdir()
    if content is not None: Path(source).write_bytes(content)
    assert "\x1b" not in check_refused(["train", "--data", source, "--out", "m", *TINY], words)
    check_works("data", "corpus.jsonl", "--out", "m")
    Store("m/store").verify()

def latin(n)->bytes: "n documents in Latin-1, so not UTF-8, each with a word of its own."; return b"\n\n".join(f"caf\xe9 number{i} gar\xe7on fen\xeatre royaume\n".encode("latin-1") * 400 for i in range(n))

def test_invalid_utf8_trains(fresh, check_works):
    Path("a.txt").write_bytes(latin(12) + b"\xff\xfe\xfd")
    check_works(*TRAIN, "--data", "a.txt", "-N", "2")
    store = Store("m/store")
    assert sum((store.path/f"{s}.bin").read_bytes().count(b"caf\xe9") for s in ("train", "validation", "test")) == 12 * 400
    assert [load_checkpoint(f"m/experts/{e}/checkpoint.safetensors")[1]["states"][0]["update"] for e in (0, 1)] == [20, 20]
    assert "N = 2, k = 2" in check_works(*EVAL)

def test_corpus_without_a_word(fresh, check_refused, check_works):
    stop = ["it", "is", "of", "to", "in"]   # of two letters: no sequence begins or ends with a part of one that counts as a word
    Path("a.txt").write_text("\n".join(" ".join(stop[b % 5] for b in hashlib.sha256(b"%d" % i).digest()) for i in range(1500)))
    check_works("data", "a.txt", "--out", "m")
    check_refused(["cluster", "--out", "m", "-N", "2"], "no word survives the stop words")
    check_refused(TRAIN, "no word survives the stop words", new=["m/seed", "m/whole"], silent=False)
    check_works(*SEED)

def test_more_experts_than_sequences(run, check_refused, check_works):
    shutil.rmtree("m/clusters"); shutil.rmtree("m/experts")
    check_refused(["cluster", "--out", "m", "-N", "5000"], "N = 5000", "427")
    check_refused([*TRAIN, "-N", "5000"], "N = 5000", "427")
    check_refused(["cluster", "--out", "m", "-N", "300"], "use fewer experts than 300")
    check_works("cluster", "--out", "m", "-N", "3")
    assert json.loads(Path("m/clusters/cluster.json").read_text())["N"] == 3

@pytest.mark.parametrize("command", (["data"], [*SEED, "--data"], ["cluster", "--out", "m", "--data"], [*TRAIN, "--data"], [*EVAL, "--data"]), ids=lambda c: c[0])
def test_another_corpus_or_one_that_changed(command, run, check_refused, check_works):
    lines = Path("corpus.jsonl").read_text(encoding="utf-8").splitlines(True)
    Path("other.jsonl").write_text("".join(json.dumps(dict(text=json.loads(x)["text"].upper())) + "\n" for x in lines), encoding="utf-8")
    Path("less.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    out = ["--out", "m"] if command == ["data"] else []
    for source in ("other.jsonl", "less.jsonl"): check_refused([*command, source, *out], "another corpus", "corpus.jsonl")
    check_refused([*command, "nowhere.jsonl", *out], "nowhere.jsonl", "no such file")
    before = tree("m/seed") | tree("m/experts") | tree("m/store")
    check_works(*command, "corpus.jsonl", *out)
    assert tree("m/seed") | tree("m/experts") | tree("m/store") == before

# ---- options

TRAINING = {
    "--P 0": "P", "--P x": "--P", "--B 0": "B", "--A -1": "A", "--T 0": "T", "--T 5000": "1024", "--tile 0": "tile", "--lr nan": "lr", "--lr -1": "lr", "--lr 1e400": "lr", "--lr x": "--lr", "--eps 0": "eps",
    "--seed -1": "seed", "--seed 4294967296": "seed", "--schedule linear": "plateau, cosine", "--preset banana": "small", "--model-d 0": "must be at least 1", "--model-D 0": "must be at least 1", "--model-d-E -1": "must be at least 1",
    "--seed-updates 0": "must be at least 1", "--expert-updates -5": "must be at least 1", "--chunk 0": "--chunk", "--threads 0": "--threads", "--workers -1": "--workers", "--device banana": "--device banana", "--device meta": "--device meta",
    "-N 0": "N", "-N -2": "N", "-N x": "-N", "--balance none": "nearest", "--bogus": "--bogus", "--see 1": "--see", "--out=": "--out", "--data=": "--data", "extra": "extra",
    "--estimator dust:D": "spsa, dust:A", "--estimator=": "spsa, dust:A", "--estimator": "--estimator", "--cv": "--cv: spsa", "--estimator dust:A --P 8": "--P 8", "--estimator dust:C --cv --eps 0.1": "--eps 0.1: a setting of spsa", "--estimator spsa --cv": "--cv: spsa",
}

@pytest.mark.parametrize("given", TRAINING)
def test_bad_option_of_training(given, fresh, check_refused):
    check_refused(["train", "--data", "corpus.jsonl", "--out", "m", *TINY, *given.split()], TRAINING[given])   # before anything is read or made

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("command", (TRAIN, SEED, EVAL, GENERATE), ids=lambda c: c[0])
def test_a_device_that_is_not_here(command, run, check_refused): check_refused([*command, "--device", "cuda"], "--device cuda", "--device cpu")

def test_tensorboard_that_is_not_installed(fresh, check_refused, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("torch.utils.tensorboard")]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for command in (SEED, TRAIN, ["demo", "--out", "m", "--figures", "f", *TINY]): check_refused([*command, "--data", "corpus.jsonl", "--tensorboard"], "--tensorboard", "pip install")

USING = {
    ("generate", "-k 0"): "k", ("generate", "-k 9"): "k", ("generate", "--temperature -1"): "--temperature", ("generate", "--temperature nan"): "--temperature", ("generate", "--bytes -5"): "--bytes",
    ("generate", "--sample-seed -1"): "--sample-seed", ("generate", "--device banana"): "--device", ("generate", "--threads 0"): "--threads", ("generate", "two"): "two", ("generate", "--out nowhere"): "nowhere",
    ("eval", "-k 0"): "k", ("eval", "-k 9"): "k", ("eval", "--split train"): "validation", ("eval", "--out nowhere"): "nowhere", ("eval", "--device banana"): "--device",
}

@pytest.mark.parametrize("command, given", USING)
def test_bad_option_of_using(command, given, run, check_refused):
    check_refused([*dict(generate=GENERATE, eval=EVAL)[command], *given.split()], USING[command, given])

@pytest.mark.parametrize("given", ("-k 9", "--temperature -1", "--bytes -1", "--sample-seed -1", "--figures corpus.jsonl", "--figures corpus.jsonl/deep", "--device banana"))
def test_the_demo_refuses_before_it_trains(given, fresh, check_refused):
    check_refused(["demo", "--data", "corpus.jsonl", "--out", "m", "--figures", "f", *TINY, *given.split()])

@pytest.mark.parametrize("argv, words", [([], "COMMAND"), (["dance"], "'dance'"), (["da\nnce"], "choose from"), (["seed", "--x\ny"], "--x"), (["data"], "CORPUS"), (["data", "corpus.jsonl", "--bytes", "many"], "number of bytes"), (["data", "corpus.jsonl", "--bytes", "500"], "--bytes 500"), (["reproduce", "fig\n99"], "99"), (["reproduce"], "--list"), (["info"], "PATH"), (["info", "no\nwhere"], "no such file"),
                                         (["info", "corpus.jsonl"], "corpus.jsonl"), (["info", "."], "no checkpoint, router, store or run")])
def test_bad_command(argv, words, fresh, check_refused): check_refused(argv, words)

# ---- places

@pytest.mark.parametrize("command", (["data", "corpus.jsonl"], ["seed", "--data", "corpus.jsonl", *TINY], ["cluster", "--data", "corpus.jsonl"], ["train", "--data", "corpus.jsonl", *TINY], ["demo", "--data", "corpus.jsonl", *TINY, "--figures", "f"], ["eval"], ["generate", "hi"]), ids=lambda c: c[0])
def test_a_file_where_a_folder_is_expected(command, fresh, check_refused):
    Path("file").write_text("in the way")
    for out in ("file", "file/deeper"): check_refused([*command, "--out", out], "file", new=["f"])
    if command[0] not in ("eval", "generate"): check_refused([*command, "--out", os.fsdecode(b"caf\xe9")], "UTF-8", new=["f"])   # safetensors could not read it again

@pytest.mark.parametrize("part, command", [("seed", SEED), ("clusters", ["cluster", "--out", "m"]), ("experts", TRAIN), ("experts/1", TRAIN), ("eval", EVAL), ("store", SEED), ("store", EVAL)])
def test_a_file_where_a_part_of_the_run_is_expected(part, command, run, check_refused):
    shutil.rmtree(Path("m")/part, ignore_errors=True)
    (Path("m")/part).write_text("in the way")
    check_refused(command, part, silent=command is not EVAL)

def test_names_with_spaces_and_letters_of_all_kinds(made, fresh, check_works):
    home = Path("my texts/größe 文 \n")
    home.mkdir(parents=True); shutil.copy("corpus.jsonl", home/"ein korpus ü.jsonl")
    check_works("seed", "--data", home/"ein korpus ü.jsonl", "--out", home/"the run", *TINY)
    assert load_checkpoint(home/"the run/seed/checkpoint.safetensors")[0].keys() == load_checkpoint(made/"m/seed/checkpoint.safetensors")[0].keys()
    assert "20 updates" in check_works("info", home/"the run") and check_works("generate", "hi", "--bytes", "3", "--out", home/"the run").startswith("hi")

# ---- checkpoints

def again(path, change=lambda tensors, meta: None):
    "Write a checkpoint again, changed and with a digest that fits."
    tensors, meta = load_checkpoint(path)
    change(tensors, meta)
    save_checkpoint(path, tensors, meta)

def cut(p): p.write_bytes(p.read_bytes()[:p.stat().st_size // 2])
def emptied(p): p.write_bytes(b"")
def one_bit(p): b = bytearray(p.read_bytes()); b[len(b) * 3 // 4] ^= 1; p.write_bytes(b)
def one_bit_of_the_header(p): b = bytearray(p.read_bytes()); b[b.index(b'"soma"') + 40] ^= 1; p.write_bytes(b)
def replaced(p): p.write_bytes(JUNK)
def a_folder(p): p.unlink(); p.mkdir()
def gone(p): p.unlink()
def later(p):
    with pytest.MonkeyPatch.context() as patch: patch.setattr(soma.train, "FORMAT", 9); again(p)
def not_a_number(p): again(p, lambda t, m: t["theta.E"].view(-1)[7:8].fill_(float("nan")))
def not_a_run(p): again(p, lambda t, m: m.update(kind="kept"))

DAMAGE = {cut: "damaged", emptied: "damaged", one_bit: "damaged", one_bit_of_the_header: "damaged", replaced: "damaged", a_folder: "damaged", later: "format 9", not_a_number: "not finite", not_a_run: "not"}

@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_checkpoints(damage, run, check_refused, check_works):
    seed, expert = Path("m/seed/checkpoint.safetensors"), Path("m/experts/1/checkpoint.safetensors")
    for path, commands in ((seed, (SEED, TRAIN, EVAL, *([INFO] if damage not in (not_a_run, not_a_number) else []))), (expert, (TRAIN, EVAL, GENERATE))):
        good = path.read_bytes()
        damage(path)
        for command in commands: check_refused(command, path.parent, DAMAGE[damage], silent=command is not INFO)
        if path.is_dir(): path.rmdir()
        path.write_bytes(good)
    for command in (SEED, TRAIN, GENERATE, INFO): check_works(*command)

def test_info_of_whole_files_that_lack_something(run, check_refused):
    again(Path("m/seed/checkpoint.safetensors"), lambda t, m: m.pop("identity"))
    check_refused(["info", "m/seed"], "m/seed", "'identity'")
    Path("m/clusters/shards.json").write_text("[1, 2]")
    check_refused(["info", "m/clusters"], "m/clusters/shards.json")

def test_metrics_cut_short(run, check_refused):
    cut(Path("m/seed/metrics.jsonl"))
    check_refused([*SEED, "--seed-updates", "30"], "metrics.jsonl", "shorter")

@pytest.mark.parametrize("given, was", [("--lr 0.02", "lr = 0.005"), ("--seed 7", "seed = 1"), ("--model-d 9", "d = 8"), ("--model-d-E 16", "d_E = 8"), ("--model-D 1", "D = 2"), ("--T 16", "T = 32"), ("--tile 8", "tile = 4"), ("--schedule plateau", "cosine")])
def test_checkpoint_of_another_configuration(given, was, run, check_refused):
    said = given.split()[1]
    check_refused([*SEED, *given.split()], "m/seed", was, f"not {said}")
    check_refused([*TRAIN, *given.split()], was, f"not {said}")

def test_a_run_by_noise_at_outputs(fresh, check_refused, check_works):
    "Its tier is in everything that names it, and it is not gone on with by another."
    by = ["--estimator", "dust:B", "--cv"]
    assert "20 updates by dust:B + cv" in check_works(*TRAIN, "--data", "corpus.jsonl", *by)
    check_works(*EVAL)
    said = check_works(*INFO).splitlines()
    assert sum("20 updates by dust:B + cv" in line for line in said) == 3 and sum("control variate: learnt from 20 updates" in line for line in said) == 3
    held = [line for line in said if line.startswith("  frozen: ")]
    gains = ", ".join(f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2))
    assert held == [f"  frozen: {gains}", f"  frozen: E, {gains}", f"  frozen: E, {gains}"]
    scores = json.loads(Path("m/eval/test/scores.json").read_text())
    assert scores["provenance"]["estimator"] == "dust:B + cv"
    assert {json.loads(line)["estimator"] for p in Path("m").rglob("sessions.jsonl") for line in p.read_text().splitlines()} == {"dust:B + cv"}
    assert {m["estimator"] for p in Path("m").rglob("metrics.jsonl") for m in map(json.loads, p.read_text().splitlines())} == {"dust:B + cv"}
    for other in ([], ["--estimator", "dust:B"], ["--estimator", "dust:C", "--cv"]):
        check_refused([*SEED, *other], "m/seed", "estimator = dust:B + cv, not " + (other[1] + " + cv" * ("--cv" in other) if other else "spsa"))
        check_refused([*TRAIN, *other], "m/seed: this seed was trained by dust:B + cv, not ")
    before = tree("m")
    check_works(*TRAIN, *by); check_works(*SEED, "--estimator", "dust:B + cv")
    assert tree("m") == before

def test_noise_from_a_seed_by_spsa(run, check_refused):
    shutil.rmtree("m/experts")
    check_refused([*TRAIN, "--estimator", "dust:A"], "m/seed: this seed was trained by spsa, not dust:A", "--out")

def test_the_demo_sets_two_estimators_side_by_side(fresh, check_works):
    said = check_works("demo", "--data", "corpus.jsonl", "--out", "m", "--figures", "f", "--bytes", "5", *TINY)
    spent = {p: json.loads(Path(f"m/{p}/result.json").read_text())["update"] * update_operations(ModelConfig(d=8, d_E=8), preset("smoke", e).seed) for p, e in (("seed", "spsa"), ("rival", "dust:A"))}
    assert load_checkpoint("m/rival/checkpoint.safetensors")[1]["identity"]["train"]["estimator"] == "dust:A"
    assert spent["rival"] == pytest.approx(spent["seed"], abs=0.51 * update_operations(ModelConfig(d=8, d_E=8), preset("smoke", "dust:A").seed))
    assert "seed by dust:A, equal operations minus seed: " in said and "seed by dust:A, equal operations," in Path("f/demo.csv").read_text().replace('"', "") and "seed by dust:A" in Path("f/demo_training.svg").read_text()
    shutil.rmtree("m/rival"); check_works("demo", "--out", "m2", "--data", "corpus.jsonl", "--figures", "f2", "--bytes", "5", "--estimator", "dust:A", *TINY)
    assert not Path("m2/rival").exists() and json.loads(Path("f2/demo.json").read_text())["estimator"] == "dust:A"

def test_a_finished_run_stays_as_it_is(run, check_works):
    before = tree("m")
    check_works(*SEED); check_works(*TRAIN)
    assert tree("m") == before

def test_events_of_every_training(fresh, check_works):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install -e '.[tensorboard]')")
    check_works(*TRAIN, "--data", "corpus.jsonl", "--tensorboard")
    assert sorted(str(p.parent) for p in Path("m").rglob("events.out.tfevents.*")) == [f"m/{part}/tensorboard" for part in ("experts/0", "experts/1", "seed")]

def test_a_seed_that_was_trained_on_after_its_experts(run, check_refused, check_works):
    check_works(*SEED, "--seed-updates", "22")
    check_refused([*TRAIN, "--seed-updates", "22"], "other initial parameters", silent=False)

@pytest.mark.parametrize("lr, updates", [("1e30", "1"), ("1e30", "9")])
def test_a_loss_that_is_not_finite(lr, updates, run, check_refused, check_works):
    check_refused(["seed", "--out", "m2", "--data", "corpus.jsonl", *TINY, "--lr", lr, "--seed-updates", updates], "update 1", "not finite", "--lr", new=["m2"])
    tensors, meta = load_checkpoint("m2/seed/checkpoint.safetensors")
    assert meta["states"][0]["update"] == 0 and all(t.isfinite().all() for t in tensors.values()) and not list(Path("m2").rglob("*.tmp"))
    check_refused(["train", "--out", "m2", *TINY, "--lr", lr, "--seed-updates", updates], "not finite", new=["m2/clusters"], silent=False)

# ---- the rest of a run

MISSING = [
    ("seed store clusters experts whole", EVAL, "no trained model"), ("seed store clusters experts whole", GENERATE, "soma train"), ("seed clusters experts", EVAL, "no trained model"), ("seed clusters experts", GENERATE, "soma train"),
    ("experts/1", EVAL, "expert 1 of 2"), ("experts/1", GENERATE, "expert 1 of 2"), ("store", EVAL, "store"), ("store", SEED, "--data"), ("store", TRAIN, "--data"), ("clusters/router.json", EVAL, "router"), ("clusters/shards.json", TRAIN, "shards"),
]

@pytest.mark.parametrize("parts, command, words", MISSING)
def test_missing_pieces(parts, command, words, run, check_refused, check_works):
    kept = shutil.copytree("m", "kept")
    for p in parts.split(): shutil.rmtree(f"m/{p}") if Path(f"m/{p}").is_dir() else os.remove(f"m/{p}")
    check_refused(command, words)
    shutil.rmtree("m"); kept.rename("m") if isinstance(kept, Path) else os.rename(kept, "m")
    check_works(*command)

def test_info_of_what_is_there(run, check_works):
    shutil.rmtree("m/experts/1"); Path("m/experts/1").mkdir(); gone(Path("m/seed/checkpoint.safetensors"))
    said = check_works(*INFO)
    assert "m/experts/0: training run, 20 updates" in said and "m/store: corpus store" in said and "Router(N=2" in said

def test_a_router_with_other_N(run, check_refused):
    fit_router(Store("m/store"), 3, 1).save("m/clusters")
    check_refused(TRAIN, "N = 3", "N = 2")
    check_refused(EVAL, "m/"), check_refused(GENERATE, "m/")
    check_refused([*TRAIN, "-N", "3"], "N = 2, not 3")

def test_the_seeds_shard_is_made_again(run, check_works):
    for part, damage in ((part, damage) for part in ("shards.json", "train.npy", "valid.npy") for damage in (cut, emptied, replaced, one_bit, gone)):
        path = Path("m/whole", part)
        good = path.read_bytes()
        damage(path)
        check_works(*SEED)
        assert path.read_bytes() == good

PARTS = {"store/manifest.json": EVAL, "store/train.bin": SEED, "store/test.bin": EVAL, "store/documents.parquet": EVAL, "clusters/cluster.json": TRAIN, "clusters/router.json": EVAL, "clusters/router.safetensors": GENERATE,
         "clusters/shards.json": TRAIN, "clusters/train.npy": TRAIN, "clusters/valid.npy": TRAIN}

@pytest.mark.parametrize("part", PARTS)
def test_other_damaged_files(part, run, check_refused, check_works):
    path, command = Path("m")/part, PARTS[part]
    good = path.read_bytes()
    damages = [cut, emptied, replaced, a_folder]
    if part in ("store/test.bin", "store/documents.parquet", "clusters/router.safetensors", "clusters/train.npy"): damages.append(one_bit)
    if path.suffix == ".json": damages += [lambda p, text=text: p.write_text(text) for text in ("[1, 2]", "null", "{}", "3")]
    for damage in damages:
        damage(path)
        check_refused(command, "m/" + part.split("/")[0])
        if path.is_dir(): path.rmdir()
        path.write_bytes(good)
    check_works(*command)

# ---- a full disk, and two at once

class FullDisk:
    "os.fsync and os.replace, until the nth call: there and ever after the disk is full."
    def __init__(self, patch, n):
        self.left = n
        for name in ("fsync", "replace"): patch.setattr(os, name, lambda *a, real=getattr(os, name): self.take() or real(*a))
    def take(self):
        self.left -= 1
        if self.left < 0: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def test_a_full_disk_at_any_moment(fresh, check_works, capfd, monkeypatch):
    small = [*TINY, "--seed-updates", "2", "--P", "1", "--B", "1", "--T", "8", "--data", "corpus.jsonl"]
    check_works("seed", "--out", "good", *small)
    good = {n: Path("good/seed", n).read_bytes() for n in ("checkpoint.safetensors", "metrics.jsonl", "result.json")}
    for n in range(99):
        out, _ = f"m{n}", capfd.readouterr()
        with monkeypatch.context() as patch:
            FullDisk(patch, n)
            code, said = call("seed", "--out", out, *small), capfd.readouterr().err
        if code == 0: break
        assert code == 2 and len(said.splitlines()) == 1 and os.strerror(errno.ENOSPC) in said and out in said, said
        assert not list(Path(out).rglob("*.tmp"))
        if Path(out, "store").exists(): Store(Path(out, "store")).verify()
        if n % 4 == 0:
            check_works("seed", "--out", out, *small)
            assert {n: Path(out, "seed", n).read_bytes() for n in good} == good
        shutil.rmtree(out)
    assert n > 20

@pytest.mark.parametrize("command", (EVAL, ["cluster", "--out", "m"]), ids=lambda c: c[0])
def test_a_full_disk_keeps_what_was_there(command, run, check_refused, check_works, monkeypatch):
    if command is EVAL: check_works(*EVAL)
    else: shutil.rmtree("m/clusters")
    with monkeypatch.context() as patch:
        FullDisk(patch, 0)
        check_refused(command, os.strerror(errno.ENOSPC), new=["m/clusters"], silent=command is not EVAL)
    check_works(*command)

@pytest.mark.parametrize("command, part", [([*SEED, "--seed-updates", "25"], "seed"), ([*TRAIN, "--expert-updates", "25"], "experts/0")], ids=("seed", "train"))
def test_two_trainings_on_one_folder(command, part, run, check_refused, check_works):
    with alone(Path("m")/part, "training"): check_refused(command, part, "another process")
    check_works(*command)
    assert load_checkpoint(f"m/{part}/checkpoint.safetensors")[1]["states"][0]["update"] == 25

def test_two_stores_built_at_once(fresh, monkeypatch):
    read, survey, paused, go, ends = soma.data._read, soma.data._survey, threading.Event(), threading.Event(), {}
    surveyed = set()
    def survey_once(*args): found = survey(*args); surveyed.add(threading.current_thread().name); return found
    def slow(source, skipped):
        "In its second pass the second one waits, half done, until the first has finished."
        for i, doc in enumerate(read(source, skipped)):
            if i == 5 and threading.current_thread().name in surveyed:
                if threading.current_thread().name == "second": paused.set(); go.wait(20)
                else: started.set(); paused.wait(3)
            yield doc
    started = threading.Event()
    monkeypatch.setattr(soma.data, "_read", slow); monkeypatch.setattr(soma.data, "_survey", survey_once)
    def build():
        name = threading.current_thread().name
        try: ends[name] = build_store("corpus.jsonl", fresh/"m/store")
        except SomaError as e: ends[name] = str(e); paused.set()
    first, second = (threading.Thread(target=build, name=name) for name in ("first", "second"))
    first.start(); started.wait(20); second.start()
    first.join(); go.set(); second.join()
    Store("m/store").verify()
    assert isinstance(ends["first"], Store) and (isinstance(ends["second"], Store) or "\n" not in ends["second"])
    assert sorted(p.name for p in Path("m").iterdir()) == ["store"]

# ---- prompts, terminals, pipes

@pytest.mark.parametrize("prompt", ("", "x", "word " * 1000, "!?.,;:", "the and of", "🎉 Überraschung 文", "a\0b", "two\nlines\r\n", os.fsdecode(b"caf\xe9 \xff"), "\x1b[31mred"), ids=range(10))
def test_any_prompt_is_continued(prompt, run, check_works):
    said = check_works("generate", "--out", "m", "--bytes", "20", "--", prompt)
    shown = prompt.encode("utf-8", "replace").decode()
    assert said.startswith(shown) and said.endswith("\n") and said.isprintable() is False
    assert len(said[len(shown):-1].encode()) >= 20   # bytes that are not UTF-8 become marks of three bytes

@pytest.mark.parametrize("argv, encoding", [(["--help"], "ascii"), (["seed", "--help"], "latin-1"), (EVAL, "latin-1"), (["cluster", "--out", "m"], "ascii"), (INFO, "ascii"), (["generate", "--out", "m", "🎉"], "ascii"), (["generate", "--out", "m", "caf\udce9"], "utf-8")])
def test_terminals_that_cannot_show_everything(argv, encoding, run, monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, errors=errors) for errors in ("strict", "backslashreplace"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out); patch.setattr(sys, "stderr", err)
        code = call(*argv)
        out.flush(); err.flush()
    assert (code, err.buffer.getvalue()) == (0, b"") and len(out.buffer.getvalue()) > 5

def test_scores_are_kept_when_nobody_reads_the_table(run, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert call(*EVAL) == 2
    assert {p.name for p in Path("m/eval/test").iterdir()} == {"documents.csv", "scores.json", "scores.svg"}

def test_a_pipe_that_closes_early(run):
    p = subprocess.Popen([*SOMA, "generate", "--out", "m", "--bytes", "100000", "hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert p.stdout.read(10)[:5] == b"hello"
    p.stdout.close()
    assert p.wait(60) == 141 and p.stderr.read() == b""

# ---- signals

def session(pid)->list:
    "Processes of a session that still run."
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: state, _, _, sid = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError: continue
        if int(sid) == pid and state != "Z": found.append(stat.parent.name)
    return found

def stopped(argv, ready, signum, pause=0.3)->tuple:
    "Run a command in a session of its own, send it a signal as a terminal does (to its whole process group) once `ready()`: exit code, stderr lines, what still runs."
    p = subprocess.Popen([*SOMA, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    end = time.time() + 120
    while not ready() and p.poll() is None and time.time() < end: time.sleep(0.02)
    time.sleep(pause)
    os.killpg(p.pid, signum)
    _, err = p.communicate(timeout=60)
    time.sleep(0.2)
    return p.returncode, err.splitlines(), session(p.pid)

def updates(part)->int: return load_checkpoint(f"m/{part}/checkpoint.safetensors")[1]["states"][0]["update"]
def begun(*parts): return lambda: all(p.exists() and p.stat().st_size > 0 for p in (Path("m")/part/"metrics.jsonl" for part in parts))

PRESS = """
import signal, sys
class Press:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]: signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
from soma.cli import main
sys.exit(main(sys.argv[2:]))
"""

@pytest.mark.parametrize("room", ("torch", "scipy.sparse", "soma.commands"))
def test_ctrl_c_while_the_rooms_are_imported(room, fresh):
    r = subprocess.run([sys.executable, "-c", PRESS, room, *TRAIN], capture_output=True, text=True)
    assert (r.returncode, r.stdout, r.stderr) == (130, "", "soma: stopped\n") and not Path("m").exists()

def test_what_needs_no_room_imports_none():
    code = "import sys; from soma.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit as e: print(e.code, {m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'scipy', 'sklearn', 'pandas', 'matplotlib'}, [m for m in sys.modules if m.startswith('soma.')])"
    for argv, exit_code in ((["--version"], 0), (["train", "--help"], 0), (["train", "--bogus"], 2)):
        assert subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True).stdout.splitlines()[-1] == f"{exit_code} set() ['soma.cli']"

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=("SIGINT", "SIGTERM"))
def test_stopped_seed_goes_on(signum, code, made, fresh, check_works, capfd, monkeypatch):
    step = soma.train.Run.step
    with monkeypatch.context() as patch:
        patch.setattr(soma.train.Run, "step", lambda run, *args: (run.update == 7 and signal.raise_signal(signum), step(run, *args))[1])
        assert call(*TRAIN, "--data", "corpus.jsonl") == code
    assert capfd.readouterr().err == "soma: stopped after update 8, saved in m/seed; the same command goes on from there\n"
    assert updates("seed") == 8 and not Path("m/experts").exists() and not list(Path("m").rglob("*.tmp"))
    check_works(*TRAIN)
    for part in ("seed", "experts/0", "experts/1"): assert load_checkpoint(f"m/{part}/checkpoint.safetensors")[1] == load_checkpoint(made/f"m/{part}/checkpoint.safetensors")[1]

@needs_proc
def test_stopped_experts_all_save(run):
    shutil.rmtree("m/experts")
    rc, said, left = stopped([*TRAIN, "--expert-updates", "100000", "--workers", "2"], begun("experts/0", "experts/1"), signal.SIGINT, pause=1)
    assert (rc, len(said), left) == (130, 1, []) and said[0].startswith("soma: stopped") and "same command" in said[0]
    assert updates("experts/0") > 0 and updates("experts/1") > 0 and not list(Path("m").rglob("*.tmp"))
    with alone(Path("m/experts/0"), "training"), alone(Path("m/experts/1"), "training"): pass
