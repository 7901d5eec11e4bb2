"Bad input: one clear line, exit code 2, nothing half-written; and then the right command works."
import gzip, json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest
import torch

from soma import cli
from soma.train import load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--preset", "smoke", "--model-d", "8", "--model-d-E", "8", "--quiet"]

@pytest.fixture(scope="module")
def corpus(tmp_path_factory)->Path:
    "Forty real documents."
    path = tmp_path_factory.mktemp("corpus")/"some.jsonl"
    with gzip.open(ROOT/"data_cards/pd_small/pd_small.jsonl.gz", "rt", encoding="utf-8") as f: path.write_text("".join(line for _, line in zip(range(40), f)), encoding="utf-8")
    return path

@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory)->Path:
    "A whole tiny run."
    out = tmp_path_factory.mktemp("trained")/"run"
    assert cli.main(["train", "--data", str(corpus), "--out", str(out), "-N", "2", *TINY]) == 0
    return out

@pytest.fixture
def run(trained, tmp_path)->Path:
    "A copy of it to damage."
    return Path(shutil.copytree(trained, tmp_path/"run"))

def snapshot(folder:Path)->dict: "Every file and its bytes, locks aside."; return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}

def refused(capsys, words, *said):
    "The command ends with 2 and one line that says each of the words."
    capsys.readouterr()
    try: code = cli.main([str(w) for w in words])
    except SystemExit as e: code = e.code
    err = capsys.readouterr().err
    lines = [l for l in err.splitlines() if not l.startswith("soma: note:")]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("soma: "), (code, err)
    assert all(s in lines[0] for s in said), lines[0]
    return lines[0]

def text_file(path:Path, content)->Path: path.write_bytes(content if isinstance(content, bytes) else content.encode()); return path

CORPORA = {"empty.txt": (b"", "empty"), "short.jsonl": (json.dumps(dict(text="too short " * 50)), "1,025"), "junk.txt": (bytes(range(256)) * 400, "binary"), "junk.parquet": (b"PAR1 not really", "parquet"),
           "junk.jsonl": (b"\x00\x01{]", "line 1"), "junk.jsonl.gz": (b"\x1f\x8b broken", ""), "odd.xyz": (b"text " * 1000, ".xyz")}

@pytest.mark.parametrize("name", CORPORA)
def test_bad_corpora(name, tmp_path, capsys):
    content, said = CORPORA[name]
    line = refused(capsys, ["train", "--data", text_file(tmp_path/name, content), "--out", tmp_path/"out", *TINY])
    assert name in line or said in line
    assert [p.name for p in tmp_path.iterdir()] == [name]

def test_missing_and_empty_places(tmp_path, capsys):
    refused(capsys, ["seed", "--data", tmp_path/"no.txt", "--out", tmp_path/"out", *TINY], "no.txt", "no such file")
    (tmp_path/"empty").mkdir()
    refused(capsys, ["data", tmp_path/"empty", "--out", tmp_path/"out"], "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]

def test_invalid_utf8_trains(tmp_path, capsys):
    words = [b"caf\xe9 na\xefve r\xe9sum\xe9 number %d of many words about ships and harvest\n\n" % i for i in range(3000)]
    assert cli.main(["train", "--data", str(text_file(tmp_path/"latin.txt", b"".join(words))), "--out", str(tmp_path/"out"), "-N", "2", *TINY]) == 0
    assert "experts: 20 updates each" in capsys.readouterr().out

def test_no_word_survives(tmp_path, capsys):
    path = tmp_path/"stop.jsonl"
    path.write_text("".join(json.dumps(dict(text=f"{w} and the of " * 200)) + "\n" for w in ("it", "was", "not", "for", "had", "all")))
    refused(capsys, ["cluster", "--data", path, "--out", tmp_path/"out", "-N", "2"], "stop words")
    assert not (tmp_path/"out"/"clusters").exists()

@pytest.mark.parametrize("words, said", [(["-N", "100000"], "100000"), (["-N", "0"], "0"), (["-N", "3"], "N = 2, not 3"), (["--balance", "capacity"], "balance = nearest, not capacity"), (["--balance", "fair"], "invalid choice")])
def test_clusters(words, said, run, corpus, tmp_path, capsys):
    before, fresh = snapshot(run), words[0] == "-N" and words[1] != "3"
    refused(capsys, ["cluster", "--out", tmp_path/"fresh" if fresh else run, *(["--data", corpus] if fresh else []), *words], *([] if fresh else [said]))
    assert snapshot(run) == before and not (tmp_path/"fresh"/"clusters").exists()

def test_a_cut_checkpoint(run, capsys):
    path = run/"seed"/"checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:len(path.read_bytes())//2])
    before = snapshot(run)
    for words in (["seed", "--out", run, *TINY, "--seed-updates", "30"], ["eval", "--out", run], ["info", run/"seed"]): refused(capsys, words, "checkpoint.safetensors", "damaged")
    assert snapshot(run) == before

def test_a_flipped_bit_and_a_later_format(run, capsys):
    path = run/"experts"/"0"/"checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    refused(capsys, ["eval", "--out", run], "digest")
    path.write_bytes(whole.replace(b'\\"format\\":1', b'\\"format\\":7'))
    refused(capsys, ["generate", "--out", run, "The"], "format 7")

@pytest.mark.parametrize("words, said", [(["--lr", "0.5"], "lr = 0.005, not 0.5"), (["--seed", "9"], "seed = 1, not 9"), (["--T", "16"], "T = 32, not 16"), (["--model-D", "3"], "D = 2, not 3")])
def test_another_configuration(words, said, run, capsys):
    before = snapshot(run)
    refused(capsys, ["seed", "--out", run, *TINY, *words], said, "another --out")
    assert snapshot(run) == before

def test_a_router_of_other_N_and_missing_parts(run, tmp_path, capsys):
    shutil.rmtree(run/"experts"/"1")
    refused(capsys, ["eval", "--out", run], "expert 1 of 2 is not trained yet")
    refused(capsys, ["eval", "--out", tmp_path/"nothing"], "no trained model")
    refused(capsys, ["generate", "--out", tmp_path/"nothing", "a"], "no such checkpoint")
    assert not (tmp_path/"nothing").exists()
    (run/"clusters"/"router.safetensors").write_bytes(b"x")
    refused(capsys, ["generate", "--out", run, "a"], "router.safetensors")

@pytest.mark.parametrize("words, said", [(["fly"], "invalid choice"), ([], "COMMAND"), (["seed", "--wings", "2"], "--wings"), (["seed", "--preset", "huge"], "choose one of"), (["seed", "--P", "0"], "P = 0"), (["seed", "--lr", "nan"], "lr = nan"),
                                         (["seed", "--T", "5000"], "T = 5000"), (["seed", "--device", "banana"], "--device banana"), (["seed", "--threads", "0"], "--threads 0"), (["seed", "--schedule", "up"], "schedule"), (["seed", "--model-d", "0"], "d = 0"),
                                         (["data", "x", "--bytes", "many"], "number of bytes"), (["reproduce", "fig99"], "fig99"), (["info", "nowhere"], "no such file")])
def test_words_that_make_no_sense(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, words, said)
    if words[:2] != ["seed", "--device"]: assert list(tmp_path.iterdir()) == []

@pytest.mark.parametrize("words, said", [(["-k", "9"], "k = 9"), (["--temperature", "-1"], "temperature"), (["--bytes", "-5"], "--bytes -5"), (["--sample-seed", "-1"], "--sample-seed")])
def test_generate_says_it_before_the_prompt(words, said, trained, capsys):
    refused(capsys, ["generate", "--out", trained, "A prompt", *words], said)

def test_a_file_where_a_folder_is_expected(corpus, tmp_path, capsys):
    text_file(tmp_path/"file", b"mine")
    for out in (tmp_path/"file", tmp_path/"file"/"below"): refused(capsys, ["train", "--data", corpus, "--out", out, *TINY], "file")
    assert (tmp_path/"file").read_bytes() == b"mine" and [p.name for p in tmp_path.iterdir()] == ["file"]

def test_another_corpus_into_the_same_out(run, tmp_path, capsys):
    before = snapshot(run)
    refused(capsys, ["train", "--data", ROOT/"data_cards/pd_small/pd_small.jsonl.gz", "--out", run, *TINY], "another corpus")
    assert snapshot(run) == before

def test_parameters_that_are_not_numbers(run, capsys):
    path = run/"seed"/"checkpoint.safetensors"
    tensors, meta = load_checkpoint(path)
    tensors["theta.norm"][0] = torch.nan
    save_checkpoint(path, tensors, meta)
    before = path.read_bytes()
    refused(capsys, ["seed", "--out", run, *TINY, "--seed-updates", "30"], "not finite")
    assert path.read_bytes() == before

def test_a_full_disk(corpus, tmp_path, capsys, monkeypatch):
    def full(fd): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    refused(capsys, ["seed", "--data", corpus, "--out", tmp_path/"out", *TINY], "No space left on device")
    monkeypatch.undo()
    assert cli.main(["seed", "--data", str(corpus), "--out", str(tmp_path/"out"), *TINY]) == 0

def test_an_unfinished_seed_is_finished_first(trained, corpus, tmp_path, capsys, monkeypatch):
    real = cli.Bar.__call__
    def stop(self, update, loss, *more): real(self, update, loss, *more); update == 5 and signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(cli.Bar, "__call__", stop)
    assert cli.main(["train", "--data", str(corpus), "--out", str(tmp_path/"run"), "-N", "2", *TINY]) == 143
    monkeypatch.undo()
    assert cli.main(["train", "--data", str(corpus), "--out", str(tmp_path/"run"), "-N", "2", *TINY]) == 0
    for part in ("seed", "experts/0", "experts/1"): assert (tmp_path/"run"/part/"checkpoint.safetensors").read_bytes() == (trained/part/"checkpoint.safetensors").read_bytes()

def soma(*words, **more): return subprocess.Popen([sys.executable, "-c", "import sys; from soma.cli import main; sys.exit(main())", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

def test_ctrl_c_stops_every_worker_politely(run, capsys):
    p = soma("train", "--out", run, *TINY, "--expert-updates", "20000", "--threads", "1", "--workers", "2", start_new_session=True)
    logs, end = [run/"experts"/str(e)/"metrics.jsonl" for e in range(2)], time.time() + 60
    sizes = [log.stat().st_size for log in logs]
    while time.time() < end and not all(log.stat().st_size > size for log, size in zip(logs, sizes)): time.sleep(0.2)
    os.killpg(p.pid, signal.SIGINT)                        # as a terminal does it: to the whole group
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err.decode().count("\n") == 1 and b"the same command goes on" in err, err
    assert all(load_checkpoint(run/"experts"/str(e)/"checkpoint.safetensors")[1]["states"][0]["update"] > 20 for e in range(2))

def test_a_pipe_that_closes(trained):
    p = soma("generate", "--out", trained, "The", "--bytes", "3000")
    assert p.stdout.read(3) == b"The"
    p.stdout.close()
    err = p.stderr.read()
    p.wait(60)
    assert b"Traceback" not in err and p.returncode != 0

@pytest.mark.parametrize("prompt", ["", "…", "🙂 hello", "x" * 5000, "\udcff broken"])
def test_any_prompt(prompt, trained, capsys):
    assert cli.main(["generate", "--out", str(trained), prompt, "--bytes", "20"]) == 0
    assert capsys.readouterr().out.endswith("\n")
