"Laws of the data room that are too ugly or too heavy for its notebook: bad input, memory, kills, exact windows."
import gzip, hashlib, json, os, subprocess, sys, textwrap, tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import soma.data
from soma.core import Key, PRESETS, SomaError, derive_seed
from soma.data import (SPLITS, Corpus, Document, Shards, Store, batch, build_store, make_shards, read_documents, shipped_corpus, split_rank,
                       split_thresholds)

CARD = Path(__file__).parents[1]/"data_cards"/"pd_small"

def text(i, n=2000): "n bytes of letters that only document i has."; return (hashlib.sha256(b"%d" % i).hexdigest() * (n // 64 + 1))[:n]

def jsonl(path, texts, **more):
    path.write_text("".join(json.dumps(dict(text=t, **more)) + "\n" for t in texts), encoding="utf-8")
    return path

def one_line(error, *words):
    "The error is one line and says each of the words."
    said = str(error.value)
    assert "\n" not in said and all(w in said for w in words), said

@pytest.fixture(scope="module")
def corpus(tmp_path_factory): "Sixty documents of 1,025 to 12,000 bytes, and two short ones."; return jsonl(tmp_path_factory.mktemp("corpus")/"letters.jsonl", [text(i, 1025 if i < 5 else 1025 + 186 * i) for i in range(60)] + ["short", text(99, 1024)])

@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory): return build_store(corpus, tmp_path_factory.mktemp("store")/"s", split_seed=3)

# ---- bad input: one line, and nothing left behind

def _truncated(p): p.write_bytes(gzip.compress(json.dumps(dict(text=text(1, 200_000))).encode())[:300]); return p
def _cut_parquet(p): pq.write_table(pa.table(dict(text=[text(i) for i in range(9)])), p); p.write_bytes(p.read_bytes()[:-200]); return p
def _no_text(p): pq.write_table(pa.table(dict(words=["a"], id=[1])), p); return p
def _numbers(p): pq.write_table(pa.table(dict(text=[1, 2, 3])), p); return p
def _bytes(b): return lambda p: (p.write_bytes(b), p)[1]
def _folder(p): p.mkdir(); (p/".hidden").write_text(text(1)); return p

BAD = {
    "missing": ("nowhere.txt", lambda p: p, ["no such file"]),
    "suffix": ("a.docx", _bytes(b"x"), ["unknown kind of file", ".txt", ".jsonl.gz", ".parquet", "folder"]),
    "empty": ("a.txt", _bytes(b""), ["empty corpus"]),
    "only empty rows": ("a.jsonl", _bytes(b'{"text": ""}\n\n'), ["empty corpus"]),
    "only hidden files": ("folder", _folder, ["empty corpus"]),
    "binary": ("a.txt", _bytes(b"\x7fELF\0\0" * 9000), ["looks binary"]),
    "junk jsonl": ("a.jsonl", _bytes(b"\x7fELF\0\0" * 9), ["line 1", "not JSON"]),
    "bad line": ("a.jsonl", _bytes(b'{"text": "a"}\n\n{"text": "b"\n'), ["line 3", "not JSON"]),
    "nesting": ("a.jsonl", _bytes(b"[" * 100_000), ["line 1", "not JSON"]),
    "no field": ("a.jsonl", _bytes(b'{"text": "a"}\n{"body": "b"}\n'), ["line 2", "no field text"]),
    "not an object": ("a.jsonl", _bytes(b'"text"\n'), ["line 1", "no field text"]),
    "null": ("a.jsonl", _bytes(b'{"text": null}\n'), ["line 1", "not a string"]),
    "truncated gz": ("a.jsonl.gz", _truncated, ["damaged"]),
    "not gz": ("a.jsonl.gz", _bytes(b'{"text": "a"}\n'), ["not gzip"]),
    "junk parquet": ("a.parquet", _bytes(b"PAR1" + b"\x17" * 500), ["not parquet"]),
    "cut parquet": ("a.parquet", _cut_parquet, ["not parquet"]),
    "no column": ("a.parquet", _no_text, ["no column text", "words, id"]),
    "number column": ("a.parquet", _numbers, ["int64", "not text"]),
    "short documents": ("a.jsonl", lambda p: jsonl(p, [text(i, 1024) for i in range(50)]), ["all of its 50 documents are under 1,025 bytes"]),
    "two documents": ("a.jsonl", lambda p: jsonl(p, [text(1), text(2)]), ["2 different documents", "16 KiB"]),
    "copies of two": ("a.jsonl", lambda p: jsonl(p, [text(1), text(2)] * 30), ["2 different documents"]),
}

@pytest.mark.parametrize("name", BAD)
def test_bad_corpus(name, tmp_path):
    file, make, words = BAD[name]
    source = make(tmp_path/file)
    with pytest.raises(SomaError) as e: build_store(source, tmp_path/"out"/"store")
    one_line(e, file, *words)
    assert {p.name for p in tmp_path.iterdir()} <= {file}

def test_bad_place(corpus, tmp_path):
    (tmp_path/"file").write_text("in the way")
    (tmp_path/"full").mkdir(); (tmp_path/"full"/"notes.md").write_text("mine")
    for out, word in (("file", "a file is where a folder is needed"), ("file/deeper/store", "a file is where a folder is needed"), ("full", "is not empty")):
        with pytest.raises(SomaError) as e: build_store(corpus, tmp_path/out)
        one_line(e, word)
    with pytest.raises(SomaError) as e: build_store(corpus.parent, corpus.parent/"store")
    one_line(e, "inside the corpus")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["file", "full", "full/notes.md"]
    (tmp_path/"empty").mkdir()
    assert len(build_store(corpus, tmp_path/"empty")) > 0

def test_source_changes_between_passes(corpus, tmp_path, monkeypatch):
    source, survey = tmp_path/"c.jsonl", soma.data._survey
    source.write_bytes(corpus.read_bytes())
    def then_edit(*a):
        found = survey(*a)
        source.write_text(source.read_text().replace("a", "b", 1))
        return found
    monkeypatch.setattr(soma.data, "_survey", then_edit)
    with pytest.raises(SomaError, match="changed while it was being read"): build_store(source, tmp_path/"s")
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]

def test_a_corpus_that_is_no_file(corpus, tmp_path):
    docs, name = list(read_documents(corpus)), dict(name="letters", source="letters, from memory", documents_are="as they come")
    empty = Document("nothing", b"", "x")
    a = build_store(Corpus(read=lambda: iter([empty, *docs, empty]), **name), tmp_path/"a", split_seed=3)
    b = build_store(corpus, tmp_path/"b", split_seed=3)
    assert {k: a.manifest[k] for k in (*name, "skipped")} == name | dict(skipped=dict(empty=2, binary=0))
    assert all(a.manifest[k] == b.manifest[k] for k in ("content_sha256", "splits", "files", "licences"))
    assert build_store(Corpus(read=lambda: docs, **name), tmp_path/"a", split_seed=3).manifest == a.manifest    # reused: the text is the same
    turns = iter([docs, docs[::-1], docs[:2], []])
    again = Corpus(read=lambda: iter(next(turns)), **name)
    for word in ("letters, from memory: it changed while it was being read", "2 different documents", "empty corpus"):
        with pytest.raises(SomaError, match=word): build_store(again, tmp_path/"c")
    def broken(): yield from docs; raise SomaError("the line is dead")
    with pytest.raises(SomaError, match="the line is dead"): build_store(Corpus(read=broken, **name), tmp_path/"c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]

def test_documents_of_a_store_come_back(corpus, store):
    back = {d.id: d for s in SPLITS for d in store.documents(s)}
    assert back == {d.id: d for d in read_documents(corpus)} and [len(list(store.documents(s))) for s in SPLITS] == [53, 3, 6]

def test_damaged_store(corpus, tmp_path):
    def damaged(name, change, words, verify=False):
        path = tmp_path/f"{name}{len(list(tmp_path.iterdir()))}"
        build_store(corpus, path)
        change(path/name)
        with pytest.raises(SomaError) as e: Store(path).verify() if verify else Store(path)
        one_line(e, *words)
        return path
    def flip(p): b = bytearray(p.read_bytes()); b[len(b) // 2] ^= 1; p.write_bytes(b)
    def later(p): m = json.loads(p.read_text()); m["version"] = 2; p.write_text(json.dumps(m))
    damaged("train.bin", lambda p: os.truncate(p, 1000), ["train.bin", "1000 bytes"])
    damaged("test.bin", Path.unlink, ["test.bin", "missing"])
    damaged("documents.parquet", Path.unlink, ["documents.parquet", "missing"])
    damaged("validation.bin", flip, ["validation.bin", "sha256"], verify=True)
    damaged("manifest.json", lambda p: p.write_text("[]"), ["not a store"])
    damaged("manifest.json", lambda p: os.truncate(p, 50), ["not a readable store manifest"])
    damaged("manifest.json", Path.unlink, ["no such store manifest"])
    path = damaged("manifest.json", later, ["format 2", "reads 1", "update"])
    with pytest.raises(SomaError, match="format 2"): build_store(corpus, path)           # and it is not overwritten
    with pytest.raises(SomaError, match="no such store manifest"): Store(tmp_path/"nowhere")

# ---- reading

def test_same_text_from_every_kind_of_file(tmp_path):
    texts = [text(i, 1100 + i) + "é" for i in range(12)]
    ids = [f"d{i:02}" for i in range(12)]
    rows = [dict(id=i, source="s", license="CC0-1.0", text=t) for i, t in zip(ids, texts)]
    lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
    (tmp_path/"a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)                             # with a byte order mark
    (tmp_path/"b.jsonl.gz").write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))  # two gzip members
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/"c.parquet", row_group_size=5)
    shas = set()
    for file in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        docs = list(read_documents(tmp_path/file))
        assert [(d.id, d.source, d.licence, d.text.decode()) for d in docs] == [(i, "s", "CC0-1.0", t) for i, t in zip(ids, texts)]
        shas.add(build_store(tmp_path/file, tmp_path/"stores"/file).manifest["content_sha256"])
    assert len(shas) == 1

def test_odd_bytes_survive(tmp_path):
    (tmp_path/"a.jsonl").write_bytes(b'{"text": "caf\xe9", "id": "\\ud83d", "source": 7}\n{"text": "\\ud83d!"}\n')
    a, b = read_documents(tmp_path/"a.jsonl")
    assert (a.text, a.id, a.source) == (b"caf\xe9", "?", "7") and b.text == b"\xed\xa0\xbd!"
    broken = pa.array([b"caf\xe9", b"", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table(dict(text=broken, url=["https://a.org/x?y", None, "z"])), tmp_path/"b.parquet")
    (c,) = read_documents(tmp_path/"b.parquet")
    assert (c.text, c.source, c.id) == (b"caf\xe9", "a.org", "b.parquet#0")
    junk = np.random.default_rng(0).integers(1, 256, 200_000, dtype=np.uint8).tobytes()   # not UTF-8 anywhere
    (tmp_path/"junk.txt").write_bytes(junk)
    store = build_store(tmp_path/"junk.txt", tmp_path/"s")
    pieces = [d.text for d in read_documents(tmp_path/"junk.txt")]
    assert all(len(p) >= 16_384 and p in junk for p in pieces) and sum(map(len, pieces)) > 199_900
    assert store.sequences([3])[0].tobytes() in b"\n".join(p for p in pieces)

def test_folder_order_and_skips(tmp_path):
    for name, data in {"b.txt": b"B", "a.md": b"A", ".hidden": b"no", "z/.git/x": b"no", "z/c": b"C", "z/pic.png": b"\x89\0", "y/d.html": b"", "y/e.bin": b"\0"}.items():
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True); (tmp_path/name).write_bytes(data)
    os.symlink("nowhere", tmp_path/"broken")
    with pytest.warns(UserWarning, match="2 binary files skipped, the first is y/e.bin"): docs = list(read_documents(tmp_path))
    assert [(d.id, d.text, d.source) for d in docs] == [("a.md", b"A", tmp_path.name), ("b.txt", b"B", tmp_path.name), ("z/c", b"C", "z")]

def test_here_is_a_folder(tmp_path, monkeypatch):
    for i in range(4): (tmp_path/f"{i}.md").write_text(text(i))
    monkeypatch.chdir(tmp_path)
    assert {d.source for d in read_documents(".")} == {tmp_path.name} and build_store(".", "../here").manifest["source"] == tmp_path.name

def test_flipped_bytes_of_parquet_never_crash(tmp_path):
    pq.write_table(pa.table(dict(text=[text(i) for i in range(20)], id=range(20))), tmp_path/"a.parquet")
    good, rng, said = (tmp_path/"a.parquet").read_bytes(), np.random.default_rng(0), 0
    for at in rng.integers(0, len(good), 150).tolist() + list(range(len(good) - 150, len(good))):
        (tmp_path/"a.parquet").write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1:])
        try: list(read_documents(tmp_path/"a.parquet"))
        except SomaError as e: said += 1; assert "\n" not in str(e) and "a.parquet" in str(e)
    assert said > 20

POOLS = []   # arrow's own threads may free what they have from a pool long after it is the default no more: a pool that is gone by then is a crash

def test_memory_stays_small(tmp_path):
    n, size, default = 1000, 20_000, pa.default_memory_pool()                             # 20 MB
    with open(tmp_path/"big.jsonl", "w") as f: f.writelines(json.dumps(dict(text=text(i, size))) + "\n" for i in range(n))
    with open(tmp_path/"big.txt", "w") as f: f.writelines(text(i, size) + "\n\n" for i in range(n))
    pq.write_table(pa.table(dict(text=[text(i, size) for i in range(n)])), tmp_path/"big.parquet", row_group_size=100)
    for file in ("big.jsonl", "big.txt", "big.parquet"):
        POOLS.append(pool := pa.proxy_memory_pool(default))
        pa.set_memory_pool(pool)
        tracemalloc.start()
        store = build_store(tmp_path/file, tmp_path/f"{file}.store")
        store.sequences(np.arange(100)), store.windows("test")
        peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
        pa.set_memory_pool(default)
        assert 1e5 < peak < 5e6 and 1e5 < pool.max_memory() < 5e6, (file, peak, pool.max_memory())
        assert 0 <= sum(c["bytes"] for c in store.manifest["splits"].values()) - n * size <= 2  # the last piece of a .txt keeps its newlines

# ---- splits

def test_split_is_a_function_of_text_and_seed(corpus, store, tmp_path):
    again = build_store(corpus, tmp_path/"again", split_seed=3)
    assert again.manifest == store.manifest and all((again.path/f).read_bytes() == (store.path/f).read_bytes() for f in store.manifest["files"])
    lines = corpus.read_text().splitlines(keepends=True)
    (tmp_path/"shuffled.jsonl").write_text("".join(lines[::-1]))
    mixed = build_store(tmp_path/"shuffled.jsonl", tmp_path/"mixed", split_seed=3)
    def side(s, split): return sorted(pq.read_table(s.path/"documents.parquet", filters=[("split", "==", split)])["sha256"].to_pylist())
    assert all(side(store, s) == side(mixed, s) for s in SPLITS)                            # the order of the corpus does not matter
    assert side(build_store(corpus, tmp_path/"other", split_seed=4), "test") != side(store, "test")
    assert {s: c["documents"] for s, c in store.manifest["splits"].items()} == dict(test=6, validation=3, train=53)

def test_copies_stay_together(tmp_path):
    texts = [text(i) for i in range(20)]
    store = build_store(jsonl(tmp_path/"c.jsonl", texts + texts[::-1] + texts[:7]), tmp_path/"s")
    docs = pq.read_table(store.path/"documents.parquet").to_pylist()
    sides = {}
    for d in docs: sides.setdefault(d["sha256"], set()).add(d["split"])
    assert all(len(s) == 1 for s in sides.values())
    assert Counter(s for (s,) in sides.values()) == dict(test=2, validation=1, train=17)

def test_ranks_by_hand():
    digest = hashlib.sha256(b"some text").digest()
    assert split_rank(digest, 12) == int.from_bytes(hashlib.sha256(b"12:" + digest).digest()[7::-1], "big")
    top = np.array([2**64 - 1, 0, 5], np.uint64)
    for n, test, validation in ((3, 1, 1), (10, 1, 1), (11, 2, 1), (20, 2, 1), (21, 3, 2)):
        assert split_thresholds(np.arange(n, dtype=np.uint64)[::-1].copy()) == (test - 1, test + validation - 1)
    assert split_thresholds(top) == (0, 5)                                                  # 64 bits, unsigned

# ---- the stream and its windows

def test_stream_by_hand(corpus, store):
    docs = {d.id: d.text for d in read_documents(corpus)}
    table = pq.read_table(store.path/"documents.parquet").to_pylist()
    assert [d["id"] for d in table] == list(docs)
    assert store.train.tobytes() == b"\n".join(docs[d["id"]] for d in table if d["split"] == "train")
    for split in SPLITS:
        data = (store.path/f"{split}.bin").read_bytes()
        assert all(data[d["start"]:][:d["bytes"]] == docs[d["id"]] and hashlib.sha256(docs[d["id"]]).digest() == d["sha256"] for d in table if d["split"] == split)
    x = store.train.tobytes()
    want = [x[i: i + 1025] for i in range(0, len(x) - 1024, 1024)]
    idx = np.array([5, 0, 5, len(store) - 1])
    assert len(want) == store.n_sequences and [s.tobytes() for s in store.sequences(idx)] == [want[i] for i in idx]
    for bad in ([-1], [len(store)]):
        with pytest.raises(IndexError): store.sequences(bad)

@pytest.mark.parametrize("size, n", [(1025, 1), (2048, 1), (2049, 2), (3072, 2), (3073, 3)])
def test_number_of_sequences(size, n, tmp_path):
    store = build_store(jsonl(tmp_path/"c.jsonl", [text(i, size) for i in range(3)]), tmp_path/"s")
    assert len(store.train) == size and store.n_sequences == len(store) == n
    assert store.sequences([n - 1])[0].tobytes() == store.train[1024 * (n - 1): 1024 * n + 1].tobytes()

def test_windows_of_the_shortest_documents(tmp_path):
    texts = [text(i, 1025) for i in range(40)]
    store = build_store(jsonl(tmp_path/"c.jsonl", texts), tmp_path/"s")
    for split, n in (("validation", 2), ("test", 4)):
        w = store.windows(split)
        assert len(w) == n and w.start.tolist() == [0] * n and w.bytes.shape == (n, 1025) and w.bytes.dtype == np.uint8
        assert all(b.tobytes().decode() == texts[int(d.split("#")[1])] for b, d in zip(w.bytes, w.document))

@pytest.mark.parametrize("size, starts", [(1025, [0]), (2048, [0]), (2049, [0, 1024]), (5121, [0, 1024, 2048, 3072, 4096]), (9000, [0, 1024, 2048, 3072, 4096])])
def test_validation_windows_of_a_document(size, starts, tmp_path):
    store = build_store(jsonl(tmp_path/"c.jsonl", [text(i, size) for i in range(5)]), tmp_path/"s")
    assert store.windows("validation").start.tolist() == starts

def test_test_windows_by_hand(tmp_path):
    sizes = [1025 + i % 3 for i in range(400)]                                              # one, two or three places
    store = build_store(jsonl(tmp_path/"c.jsonl", [text(i, n) for i, n in enumerate(sizes)]), tmp_path/"s", split_seed=9)
    w, docs = store.windows("test"), pq.read_table(store.path/"documents.parquet", filters=[("split", "==", "test")]).to_pylist()
    for d, start in zip(docs, w.start, strict=True):
        a, b = int.from_bytes(d["sha256"][:4], "little"), int.from_bytes(d["sha256"][4:8], "little")
        assert start == int(Key(derive_seed(9, "test")).below(d["bytes"] - 1024, "window", a, b))
    assert set(w.start[[d["bytes"] == 1027 for d in docs]]) == {0, 1, 2}                    # the last place is reached
    with pytest.raises(SomaError, match="choose one of validation, test"): store.windows("train")

# ---- shards and batches

def test_shards_of_another_store(store, corpus, tmp_path):
    make_shards(store, np.zeros(len(store), int), 1, seed=1).save(tmp_path/"s")
    with pytest.raises(SomaError, match="made for another store"): Shards.load(tmp_path/"s", build_store(corpus, tmp_path/"other", split_seed=8))

def test_shards_round_trip_and_damage(store, tmp_path):
    where = np.random.default_rng(0).integers(0, 3, len(store))
    shards = make_shards(store, where, 3, seed=1)
    shards.save(tmp_path/"s"); shards.save(tmp_path/"s")                                    # saving again is fine
    assert sorted(p.name for p in (tmp_path/"s").iterdir()) == ["shards.json", "train.npy", "valid.npy"]
    back = Shards.load(tmp_path/"s", store)
    for e in range(3):
        assert np.array_equal(np.sort(np.r_[back.train[e], back.valid[e]]), np.flatnonzero(where == e))
        assert np.array_equal(back.valid[e], shards.valid[e]) and len(back.valid[e]) == max(1, (where == e).sum() // 100)
    (tmp_path/"file").write_text("x")
    with pytest.raises(SomaError, match="a file is where a folder is needed"): shards.save(tmp_path/"file")
    with pytest.raises(SomaError, match="no such shards"): Shards.load(tmp_path/"nowhere", store)
    meta = (tmp_path/"s"/"shards.json").read_text()
    for change, word in (((b'"version": 1', b'"version": 7'), "format 7"), ((b"soma-shards", b"soma-router"), "holds no shards"), ((b'"sizes"', b'"size"'), "damaged")):
        (tmp_path/"s"/"shards.json").write_text(meta.replace(*(c.decode() for c in change)))
        with pytest.raises(SomaError, match=word): Shards.load(tmp_path/"s", store)
    (tmp_path/"s"/"shards.json").write_text(meta)
    (tmp_path/"s"/"valid.npy").write_bytes((tmp_path/"s"/"train.npy").read_bytes())
    with pytest.raises(SomaError, match="valid.npy: missing, or not the file"): Shards.load(tmp_path/"s", store)

def test_shards_are_whole_or_absent(store, tmp_path, monkeypatch):
    shards = make_shards(store, np.arange(len(store)) % 2, 2, seed=1)
    shards.save(tmp_path/"s")
    write = soma.data.atomic_write
    def dies(path, data):
        if path.name == "valid.npy": raise KeyboardInterrupt
        write(path, data)
    monkeypatch.setattr(soma.data, "atomic_write", dies)
    with pytest.raises(KeyboardInterrupt): make_shards(store, np.zeros(len(store), int), 1, seed=2).save(tmp_path/"s")
    with pytest.raises(SomaError, match="no such shards"): Shards.load(tmp_path/"s", store)

def test_shards_refuse(store):
    n = len(store)
    for where, N, word in ((np.r_[1, np.zeros(n - 1, int)], 2, "cluster 1 has 1 of .* fewer experts than 2 or the capacity-limited"), (np.zeros(n + 1, int), 1, "cluster this store again"),
                           (np.full(n, 2), 2, "where there are 2 experts"), (np.arange(n) % (n + 5), n + 5, "needs 2"), (np.full(n, -1), 1, "cluster -1")):
        with pytest.raises(SomaError, match=word): make_shards(store, where, N, seed=0)

def test_batch_by_hand(store):
    indices = make_shards(store, np.zeros(len(store), int), 1, seed=0).train[0]
    cfg, x = replace(PRESETS["small"].expert, A=3, B=5, T=200, seed=8, stream="expert4"), store.train.tobytes()
    key = Key(derive_seed(8, "expert4", "batch"), 17)
    want = []
    for i in range(15):
        s, o = indices[int(key.below(len(indices), "batch", i))], int(key.below(825, "window", i))
        want.append(x[1024 * s + o: 1024 * s + o + 201])
    got = batch(store, indices, cfg, 17)
    assert got.dtype == torch.uint8 and got.shape == (15, 201) and [w.numpy().tobytes() for w in got] == want
    for other in (replace(cfg, seed=9), replace(cfg, stream="expert5")): assert not torch.equal(got, batch(store, indices, other, 17))
    whole = batch(store, indices, replace(cfg, T=1024), 17)
    rows = {s.tobytes() for s in store.sequences(indices)}
    assert all(w.numpy().tobytes() in rows for w in whole)                                  # T = 1024 is the sequence itself

# ---- kills

def test_killed_build_leaves_nothing(corpus, tmp_path):
    "A child dies at each kind of step: nothing stands at `out`, and the next build gives the same store as an undisturbed one."
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        import soma.data
        corpus, here = Path(sys.argv[1]), Path(sys.argv[2])
        def child(die_at):
            seen = 0
            def hook(event, args):
                nonlocal seen
                if event in ("os.mkdir", "os.rename") or event == "open" and ".tmp" in str(args[0]) and args[1] and "w" in args[1]:
                    seen += 1
                    if seen == die_at: os._exit(9)
            sys.addaudithook(hook)
            soma.data.build_store(corpus, here/"store")
            os._exit(0)
        for die_at in range(1, 99):
            pid = os.fork()
            if pid == 0: child(die_at)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(code, (here/"store").exists(), flush=True)
            if code != 9: break
    """)
    lines = subprocess.run([sys.executable, "-c", script, corpus, tmp_path], capture_output=True, text=True, check=True, timeout=100).stdout.split("\n")[:-1]
    assert len(lines) >= 7 and lines[:-1] == ["9 False"] * (len(lines) - 1) and lines[-1] == "0 True"
    Store(tmp_path/"store").verify()
    assert Store(tmp_path/"store").manifest == build_store(corpus, tmp_path/"quiet").manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["quiet", "store"]

# ---- the shipped corpora and their cards

def test_shipped_corpus_is_the_one_on_its_card():
    assert shipped_corpus() == CARD/"pd_small.jsonl.gz"
    packed = shipped_corpus().read_bytes()
    assert len(packed) == 1_394_435 and hashlib.sha256(packed).hexdigest() == "aa3ec29500c620a2b15bac66841a2377518d3fd0e39332c511cf3db5fd969a9b"
    unpacked = gzip.decompress(packed)
    assert hashlib.sha256(unpacked).hexdigest() == "30bcca8d2fbe24dc67df61caf00bee74fdd4b577cb25ff243c0c0ca8a0f54b48"
    card = (CARD/"README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(packed).hexdigest() in card and hashlib.sha256(unpacked).hexdigest() in card
    docs = list(read_documents(shipped_corpus()))
    assert len(docs) == len({d.text for d in docs}) == len({d.id for d in docs}) == 263 and sum(len(d.text) for d in docs) == 3_752_488
    for source, (n, size) in dict(digitalgov=(110, 741_016), standardebooks=(118, 2_170_729), sotu=(35, 840_743)).items():
        mine = [len(d.text) for d in docs if d.source == source]
        assert (len(mine), sum(mine)) == (n, size) and f"| {source} | {n} | {size:,} |" in card

def test_installed_wheel_asks_for_data(monkeypatch, tmp_path):
    monkeypatch.setattr(soma.data, "files", lambda package: tmp_path/"site-packages"/package)
    with pytest.raises(SomaError, match="give your own with --data"): shipped_corpus()
    with pytest.raises(SomaError, match="corpus moby: not one of those in the clone .pd_small, pdmix."): shipped_corpus("moby")
