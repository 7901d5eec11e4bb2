"Laws of the corpora room: the hub's layout in a folder and over HTTP, WikiText's counts, screens against plain versions, whole draws."
import hashlib, json, os, subprocess, sys, textwrap, threading, unicodedata
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

os.environ["HF_HUB_OFFLINE"] = "1"   # before huggingface_hub is imported anywhere

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soma.core import SomaError
from soma.corpora import (PINNED, SharedSubstrings, draw_candidates, draw_test_set, first_bytes, load_test_set, normalise, open_hub, open_source,
                          screen, wikitext_windows)
from soma.data import Document, build_store, read_documents, shipped_corpus

WIKI = Path(__file__).parents[2]/"shared"/"data"/"wiki.test.raw"
SCHEMA = pa.schema([(n, pa.string()) for n in "text id dump url file_path language".split()]
                   + [("language_score", pa.float64()), ("token_count", pa.int64()), ("score", pa.float64()), ("int_score", pa.int64())])
CARD = """---
license: cc0-1.0
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-tiny
  data_files:
  - split: train
    path: sample/tiny/*
- config_name: by-name
  data_files:
  - split: train
    path: [sample/tiny/001_*, sample/tiny/000_*]
  - split: test
    path: sample/tiny/002_00000.parquet
- config_name: gone
  data_files: nowhere/*
---
Made for a test, of numbers.
"""

def text(i, n=1500): "n letters that only document i has."; return (hashlib.sha256(b"%d" % i).hexdigest() * (n // 64 + 1))[:n]

def table(first, n, size=1500):
    rows = [dict(text=text(i, size), id=f"<urn:{i}>", dump="none", url=f"https://host{i % 50}.example/{i}", file_path="none", language="en", language_score=.9,
                 token_count=size // 4, score=3.1, int_score=3) for i in range(first, first + n)]
    return pa.Table.from_pylist(rows, SCHEMA)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Three files of four row groups of twenty-five rows, and a README, as on the hub."
    root = tmp_path_factory.mktemp("hub")/"numbers"
    (root/"sample"/"tiny").mkdir(parents=True)
    for i in (2, 0, 1): pq.write_table(table(100 * i, 100), root/"sample"/"tiny"/f"{i:03}_00000.parquet", row_group_size=25)
    (root/"README.md").write_text(CARD)
    return root

def one_line(error, *words):
    said = str(error.value)
    assert "\n" not in said and all(w in said for w in words), said

# ---- the hub's layout

def test_files_of_each_spelling(folder):
    names = lambda *spec: [f.rsplit("/", 1)[1][:3] for f in open_hub(":".join(["hub", str(folder), *spec])).files]
    assert names("sample-tiny") == names("sample-tiny", "train") == ["000", "001", "002"]
    assert names("by-name") == ["001", "000"] and names("by-name", "test") == ["002"]

def test_rows_become_documents(folder):
    docs = list(open_hub(f"hub:{folder}:sample-tiny").documents())
    assert docs == [Document(f"<urn:{i}>", text(i).encode(), f"host{i % 50}.example", "cc0-1.0") for i in range(300)]
    assert [d.id for d in open_hub(f"hub:{folder}:sample-tiny").documents([1, 0], group=3)] == [f"<urn:{i}>" for i in (*range(175, 200), *range(75, 100))]

def test_ids_that_are_missing_count_rows_of_the_file(tmp_path):
    pq.write_table(pa.table(dict(text=[text(i) for i in range(9)])), tmp_path/"a.parquet", row_group_size=4)
    (tmp_path/"README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: a.parquet\n---\n")
    hub = open_hub(f"hub:{tmp_path}")
    assert [(d.id, d.licence) for d in hub.documents(group=1)] == [(f"a.parquet#{i}", "unknown") for i in range(4, 8)]
    assert [d.id for d in hub.documents()] == [f"a.parquet#{i}" for i in range(9)]

BAD = {
    "hub:{}:nope": ["no configuration nope", "sample-tiny"],
    "hub:{}:by-name:validation": ["no split validation", "train, test"],
    "hub:{}:gone": ["nowhere/*", "fetch the folder again"],
    "hub:{}:default": ["data/*/*", "fetch the folder again"],
    "hub:{}@main:sample-tiny": ["is a folder here", "leave @main out"],
    "hub:{}:a:b:c": ["not a source"],
    "hub:": ["not a source"],
    "hub:no/such/folder": ["not the id of a data set"],
    "hub:someone/else:config": ["no revision is pinned", "hub:someone/else@REVISION"],
    "hub:someone/else@v1.0": ["no commit"],
    "hub:HuggingFaceFW/fineweb-edu:sample-100BT": ["cannot be read", "offline"],
}
@pytest.mark.parametrize("spec", BAD)
def test_bad_source(spec, folder):
    with pytest.raises(SomaError) as e: open_source(spec.format(folder))
    one_line(e, *BAD[spec])

def test_damaged_folder(folder, tmp_path):
    for name, content, words in (("README.md", None, ["cannot be read"]), ("README.md", b"---\n: [\n---\n", ["cannot be read"]), ("README.md", b"no front matter", ["card lists none"])):
        (tmp_path/name).unlink(missing_ok=True)
        if content is not None: (tmp_path/name).write_bytes(content)
        with pytest.raises(SomaError) as e: open_hub(f"hub:{tmp_path}:sample-tiny")
        one_line(e, *words)
    (tmp_path/"README.md").write_text(CARD); (tmp_path/"sample"/"tiny").mkdir(parents=True)
    good = (folder/"sample"/"tiny"/"000_00000.parquet").read_bytes()
    (tmp_path/"sample"/"tiny"/"000_00000.parquet").write_bytes(good)
    (tmp_path/"sample"/"tiny"/"001_00000.parquet").write_bytes(good[:-200])
    with pytest.raises(SomaError) as e: build_store(open_source(f"hub:{tmp_path}:sample-tiny"), tmp_path/"store")
    one_line(e, "file 1 (001_00000.parquet)", "cannot be read")
    assert not (tmp_path/"store").exists()
    pq.write_table(pa.table(dict(words=["a"])), tmp_path/"sample"/"tiny"/"001_00000.parquet")
    with pytest.raises(SomaError) as e: build_store(open_source(f"hub:{tmp_path}:sample-tiny"), tmp_path/"store")
    one_line(e, "001_00000.parquet", "no column text")

def test_without_the_extra_one_line_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SomaError) as e: open_hub(f"hub:{folder}:sample-tiny")
    one_line(e, "huggingface_hub, which is not installed", "pip install huggingface_hub")
    assert open_source(folder) == folder                                                    # and paths need it not

def test_pinned_revisions_are_the_ones_on_the_cards():
    assert PINNED["Salesforce/wikitext"] == "b08601e04326c79dfdd32d625aee71d232d685c3"      # Appendix L.1
    for name, id in (("fineweb_edu", "HuggingFaceFW/fineweb-edu"), ("wikitext103", "Salesforce/wikitext")):
        assert f"revision: {PINNED[id]}\n" in (Path(__file__).parents[1]/"data_cards"/name/"README.md").read_text(encoding="utf-8")

class Pieces(BaseHTTPRequestHandler):
    "As much of the hub's HTTP interface as reading one data set at one commit takes; every range asked for is noted."
    protocol_version, root, commit, ranges = "HTTP/1.1", None, "a" * 40, []
    def log_message(self, *args): pass
    def answer(self, body, code=200, **headers):
        self.send_response(code)
        for k, v in (headers | dict(Content_Length=len(body), X_Repo_Commit=self.commit, ETag='"x"')).items(): self.send_header(k.replace("_", "-"), str(v))
        self.end_headers()
        if self.command == "GET": self.wfile.write(body)
    def listing(self, path):
        return [dict(type="directory" if p.is_dir() else "file", path=p.relative_to(self.root).as_posix(), oid="b" * 40, size=0 if p.is_dir() else p.stat().st_size) for p in sorted(path.iterdir())]
    def do_GET(self):
        path, api, files = unquote(urlsplit(self.path).path), "/api/datasets/our/numbers", f"/datasets/our/numbers/resolve/{self.commit}/"
        if path == f"{api}/revision/{self.commit}": self.answer(json.dumps(dict(id="our/numbers", sha=self.commit, siblings=[])).encode())
        elif path.startswith(tree := f"{api}/tree/{self.commit}"): self.answer(json.dumps(self.listing(self.root/path.removeprefix(tree).lstrip("/"))).encode())
        elif path.startswith(files) and (span := self.headers.get("Range")):
            a, b = (int(x) for x in span.removeprefix("bytes=").split("-"))
            data = (self.root/path.removeprefix(files)).read_bytes()
            Pieces.ranges.append((path, a, b))
            self.answer(data[a: b + 1], 206, Content_Range=f"bytes {a}-{min(b, len(data) - 1)}/{len(data)}")
        elif path.startswith(files): self.answer((self.root/path.removeprefix(files)).read_bytes())
        else: self.answer(b'{"error": "not here"}', 404, X_Error_Code="RepoNotFound")
    do_HEAD = do_GET

def test_over_http_it_is_the_same_data_set(folder, tmp_path):
    "A small server in the hub's place: an id and a commit give the same documents and row groups as the folder."
    Pieces.root = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pieces)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = textwrap.dedent("""
        import json
        from soma.core import SomaError
        from soma.corpora import open_hub, open_source
        hub = open_hub("hub:our/numbers@" + "a" * 40 + ":sample-tiny")
        try: open_hub("hub:our/other@" + "a" * 40)
        except SomaError as e: said = str(e)
        print(json.dumps(dict(str=str(hub), all=[d.id for d in hub.documents()], group=[d.id for d in hub.documents([1], group=2)], groups=hub.row_groups(2), said=said,
                              source=open_source(hub.spec, 5000).source)))
    """)
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path), NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    r = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=100)
    server.shutdown(); server.server_close()
    assert r.returncode == 0, r.stderr
    got = json.loads(r.stdout.splitlines()[-1])
    assert got["all"] == [f"<urn:{i}>" for i in range(300)] and got["group"] == [f"<urn:{i}>" for i in range(150, 175)] and got["groups"] == 4
    assert got["str"] == f"our/numbers@{'a' * 40}, sample-tiny, train" and got["source"] == got["str"] + ", the first 5,000 bytes"
    assert "our/other" in got["said"] and "not found" in got["said"] and "\n" not in got["said"]
    assert {p.rsplit("/", 1)[1] for p, _, _ in Pieces.ranges} == {f"{i:03}_00000.parquet" for i in range(3)}

# ---- budgets and stores

def test_a_budget_is_a_prefix_of_whole_documents(folder, tmp_path):
    hub = open_hub(f"hub:{folder}:sample-tiny")
    assert [d.id for d in first_bytes(hub.documents(), 3001)] == ["<urn:0>", "<urn:1>", "<urn:2>"]
    assert [d.id for d in first_bytes(hub.documents(), 3000)] == ["<urn:0>", "<urn:1>"]
    assert len(list(first_bytes(hub.documents(), 10**12))) == 300
    store = build_store(open_source(hub.spec, 60_000), tmp_path/"s")
    assert sum(c["documents"] for c in store.manifest["splits"].values()) == 40 and store.manifest["name"] == "numbers"
    assert store.manifest["documents_are"] == "each row is a document" and store.manifest["source"].endswith("sample-tiny, train, the first 60,000 bytes")
    small = build_store(open_source(shipped_corpus(), 300_000), tmp_path/"small")           # a path can have one too
    want = list(first_bytes(read_documents(shipped_corpus()), 300_000))
    assert small.manifest["source"] == "pd_small.jsonl.gz, the first 300,000 bytes" and sorted(d.id for s in small.manifest["splits"] for d in small.documents(s)) == sorted(d.id for d in want)
    with pytest.raises(SomaError, match="--bytes 100: must be at least 1,025"): open_source(hub.spec, 100)
    with pytest.raises(SomaError, match="another corpus"): build_store(open_source(hub.spec, 70_000), tmp_path/"s")

# ---- WikiText

@pytest.mark.skipif(not WIKI.is_file(), reason="WikiText's test split is not shipped; it is read from ../shared/data when it lies there")
def test_wikitext_has_the_papers_number_of_targets(tmp_path):
    rows = WIKI.read_bytes().splitlines(keepends=True)
    assert len(rows) == 4358
    here = wikitext_windows(WIKI)
    assert 768 * len(here) == 1_252_608 and here.bytes.shape == (1631, 1025)
    place = tmp_path/"wikitext-103-raw-v1"; place.mkdir()
    pq.write_table(pa.table(dict(text=[r.decode() if r.strip() else "" for r in rows])), place/"test-00000-of-00001.parquet")
    (tmp_path/"README.md").write_text("---\nlicense: [cc-by-sa-3.0, gfdl]\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n  - split: test\n    path: wikitext-103-raw-v1/test-*\n"
                                      "  - split: train\n    path: wikitext-103-raw-v1/train-*\n---\n")
    hub = wikitext_windows(f"hub:{tmp_path}:wikitext-103-raw-v1:test")
    assert 768 * len(hub) == 1_249_536 and len(set(hub.document)) <= 62
    whole = b"".join(r if r.strip() else b"" for r in rows)
    assert all(w.tobytes() in whole for w in hub.bytes[::50]) and hub.document[0] == here.document[0] == "1: Robert Boulter"
    with pytest.raises(SomaError, match="none of the parquet files"): wikitext_windows(f"hub:{tmp_path}:wikitext-103-raw-v1:train")

def test_wikitext_refuses_other_text(tmp_path):
    (tmp_path/"plain.raw").write_text("= Not a heading of WikiText =\n" * 100)
    with pytest.raises(SomaError, match="no row is a top-level heading"): wikitext_windows(tmp_path/"plain.raw")
    (tmp_path/"short.raw").write_text(" = A = \n short \n")
    with pytest.raises(SomaError, match="no segment reaches 1,025 bytes"): wikitext_windows(tmp_path/"short.raw")
    with pytest.raises(SomaError, match="cannot be read"): wikitext_windows(tmp_path/"nowhere.raw")

@pytest.mark.parametrize("size, n", [(1024, 0), (1025, 1), (1792, 1), (1793, 2), (2560, 2), (2561, 3)])
def test_windows_of_a_segment(size, n, tmp_path):
    head = b" = Title = \n"
    (tmp_path/"a.raw").write_bytes(b" = Other = \n" + b"y" * 1013 + b"\n" + head + b"x" * (size - len(head)))
    w = wikitext_windows(tmp_path/"a.raw")
    assert Counter(w.document)["2: Title"] == n and w.start[w.document == "2: Title"].tolist() == [768 * i for i in range(n)]

def test_which_rows_are_headings(tmp_path):
    rows = [" = One = \n", " = = Not = = \n", "= Two =\n", " = Three = = \n", " = 4 = 5 = \n", " =  = \n", " = Six =\n", "x = Seven = \n", " = Ünï = "]
    from soma.corpora import segments
    assert [n.split(": ")[1] for n, _ in segments(r.encode() for r in rows)][1:] == ["One", "Three =", "4 = 5", "Ünï"]

# ---- screens

def letters(rng, n, k=3): return rng.integers(97, 97 + k, n).astype(np.uint8)

@pytest.mark.parametrize("n, shared", [(127, False), (128, True), (129, True)])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 500, 1025 - 129])
def test_shared_runs_to_the_byte(n, shared, at):
    rng = np.random.default_rng(n * 2000 + at)
    text, w = letters(rng, 5000, 200), letters(rng, 1025, 200)
    text[2000 - 1: 2000 + n + 1] = 10; w[max(at - 1, 0): at + n + 1] = 11                   # what stands beside the run differs
    w[at: at + n] = text[2000: 2000 + n] = letters(rng, n)
    for place in (text, text[2000:], text[: 2000 + n], text[2000: 2000 + n]):               # in the middle, at the ends, and nothing else
        s = SharedSubstrings(w[None]); s.scan(place.tobytes())
        assert s.found.tolist() == [shared]

def test_screen_of_a_long_text_is_the_plain_one(monkeypatch):
    monkeypatch.setattr("soma.corpora._PIECE", 1000)                                        # many pieces: runs lie across their ends
    rng = np.random.default_rng(5)
    text, windows = letters(rng, 40_000, 2), letters(rng, 40 * 1025, 2).reshape(40, 1025).copy()
    for i in range(0, 40, 2):
        n = int(rng.integers(120, 137)); s, p = rng.integers(0, 1025 - n), rng.integers(0, 40_000 - n)
        windows[i, s: s + n] = text[p: p + n]
    windows[5] = windows[4]; windows[7] = 97                                                # the same blocks many times over
    runs = {text[i: i + 128].tobytes() for i in range(len(text) - 127)}
    want = [any(w[i: i + 128].tobytes() in runs for i in range(898)) for w in windows]
    s = SharedSubstrings(windows); s.scan(text)
    assert s.found.tolist() == want and 5 < sum(want) < 21
    s = SharedSubstrings(windows)
    for i in range(0, 40_000, 20_000): s.scan(text[i: i + 20_000 + 127].tobytes())
    assert s.found.tolist() == want
    s = SharedSubstrings(windows); s.scan(b""); s.scan(text[:127].tobytes())
    assert not s.found.any()

def test_no_place_is_missed_where_pieces_meet(monkeypatch):
    monkeypatch.setattr("soma.corpora._PIECE", 256)
    rng = np.random.default_rng(3)
    text, w = letters(rng, 1200, 200), np.full((300, 1025), 7, np.uint8)
    for i in range(300): w[i, 1 + i: 129 + i] = text[400 + i: 528 + i]                     # every place relative to a piece and to a block
    s = SharedSubstrings(w); s.scan(text)
    assert s.found.all()

def test_a_run_ends_with_the_text():
    rng = np.random.default_rng(4)
    run, w = letters(rng, 127), np.zeros((2, 1025), np.uint8)
    w[0, 300:427], w[0, 427] = run, run[-1]                                                 # goes on in the window as if the last byte were repeated
    w[1, 301:428], w[1, 300] = run, run[0]
    s = SharedSubstrings(w); s.scan(run); s.scan(np.r_[run[:1] + 1, run]); s.scan(np.r_[run, run[-1:] + 1])
    assert not s.found.any()
    s.scan(np.r_[run, run[-1:]])
    assert s.found.tolist() == [True, False]

def test_equal_hashes_are_not_equal_bytes(monkeypatch):
    monkeypatch.setattr("soma.corpora.block_hashes", lambda x: np.zeros(len(x) - 63, np.uint64))   # everything collides
    rng = np.random.default_rng(0)
    w, text = letters(rng, 2050, 99).reshape(2, 1025), letters(rng, 2000, 99)
    text[300:428] = w[1, 70:198]
    s = SharedSubstrings(w); s.scan(text)
    assert s.found.tolist() == [False, True]
    near = w[0].copy(); near[::70] += 1                                                     # runs of 69 about every block, and no longer
    s = SharedSubstrings(w); s.scan(near)
    assert not s.found.any()

def test_each_screen_finds_its_own_kind():
    docs = [Document(str(i), text(i).encode(), "a", "b") for i in range(10)]
    train = [Document(f"t{i}", text(1000 + i, 3000).encode(), "a", "b") for i in range(50)]
    window = lambda d: np.frombuffer(d.text[100:1125], np.uint8)
    def found(*more, training=train):
        all = docs + list(more)
        s = screen(all, np.stack([window(d) for d in all]), iter(training))
        assert s.counts["candidates"] == len(all) and s.counts["excluded"] == (~s.keep).sum()
        return {k: v for k, v in s.counts.items() if v and k != "candidates"}, s.keep.tolist()
    fresh = text(77)
    assert found() == ({}, [True] * 10)
    out = [True] * 10 + [False]
    assert found(Document("t7", fresh.encode(), "", "")) == (dict({"source id": 1}, excluded=1), out)
    copy = Document("x", b"A Note " + fresh.encode(), "", "")
    assert found(copy, training=train + [Document("y", copy.text, "", "")]) == ({"exact copy": 1, "normalised copy": 1, "shared substring": 1, "excluded": 1}, out)
    upper = Document("y", ("a \t\nnote\u2003" + unicodedata.normalize("NFKD", fresh.upper())).encode(), "", "")
    assert found(copy, training=train + [upper]) == ({"normalised copy": 1, "excluded": 1}, out)
    assert found(Document("x", docs[3].text, "", "")) == ({"repeated document": 1, "repeated window": 1, "excluded": 1}, out)
    assert found(Document("x", docs[3].text + b"!", "", "")) == ({"repeated window": 1, "excluded": 1}, out)
    quote = fresh[:500].encode() + train[9].text[1000:1128] + fresh[500:].encode()
    assert found(Document("x", quote, "", "")) == ({"shared substring": 1, "excluded": 1}, out)
    assert found(Document("x", quote[:600] + b"!" + quote[600:], "", "")) == ({}, [True] * 11)  # 127 bytes at most

def test_normalising():
    assert normalise("ﬁ Å İ\u00a0\u3000x".encode()) == normalise("FI Å i̇ X".encode()) == "fi å i̇ x".encode()
    assert normalise("Ｓtraße ²".encode()) == b"strasse 2"
    assert normalise(b"\xe9 \xe9") == b"\xe9 \xe9" and normalise(b" \n\t") == b""

# ---- a test set from row groups

def test_sizes_are_the_papers_unless_told_otherwise():
    d = {k: p.default for k, p in signature(draw_test_set).parameters.items() if p.default is not p.empty}
    assert d == dict(seed=20260906, files=range(40, 140), groups=256, per_group=40, choose=16)

def test_draw_is_uniform_and_stays_in_its_files(folder):
    hub, seen = open_hub(f"hub:{folder}:sample-tiny"), Counter()
    for seed in range(40):
        c = draw_candidates(hub, seed, range(1, 3), groups=3, per_group=10)
        assert len({(x.file, x.group) for x in c}) == 3 and len({x.document.id for x in c}) == 30
        assert [(x.file, x.group) for x in c] == sorted((x.file, x.group) for x in c)
        seen.update((x.file[:3], x.group) for x in c[::10]); seen.update(x.row for x in c); seen.update(("start", x.start // 120) for x in c)
    assert {k for k in seen if isinstance(k, tuple) and k[0] != "start"} == {(f, g) for f in ("001", "002") for g in range(4)} and sum(seen[f, g] for f in ("001", "002") for g in range(4)) == 120
    assert all(30 < seen[r] < 70 for r in range(25)), seen                                   # 48 each, sd 5.4
    assert all(220 < seen["start", k] < 380 for k in range(3)) and seen["start", 3] > 220    # 476 places: 302 a bin but for the last
    assert max(x.start for s in range(10) for x in draw_candidates(hub, s, range(3), 12, 25)) == 475

def test_short_documents_are_no_candidates(folder, tmp_path):
    (tmp_path/"sample"/"tiny").mkdir(parents=True); (tmp_path/"README.md").write_text(CARD)
    pq.write_table(pa.concat_tables([table(0, 10, 1024), table(10, 5, 1025)]), tmp_path/"sample"/"tiny"/"000_00000.parquet")
    c = draw_candidates(open_hub(f"hub:{tmp_path}:sample-tiny"), 3, [0], 1, 40)
    assert sorted(x.row for x in c) == [10, 11, 12, 13, 14] and {x.start for x in c} == {0}
    pq.write_table(table(0, 10, 1024), tmp_path/"sample"/"tiny"/"000_00000.parquet")
    with pytest.raises(SomaError, match="a row group has 0 candidates, .* and 2 are needed"): draw_test_set(open_hub(f"hub:{tmp_path}:sample-tiny"), [], 3, [0], 1, 40, 2)

def test_whole_construction(folder, tmp_path):
    "Planted overlaps never reach the set, each group gives its share, and the saved file is the set."
    hub = open_hub(f"hub:{folder}:sample-tiny")
    size = dict(files=range(1, 3), groups=6, per_group=20, choose=8)
    plain = draw_test_set(hub, hub.documents([0]), 9, **size)
    assert plain.how["screens"]["excluded"] == 0 and len(plain.chosen) == 48
    bad = plain.chosen[::5]
    older = [replace(c.document, id="x") if i % 2 else Document(c.document.id, b"rewritten", "", "") for i, c in enumerate(bad)]
    drawn = draw_test_set(hub, chain(hub.documents([0]), older), 9, **size)
    s = drawn.how["screens"]
    assert (s["source id"], s["exact copy"], s["normalised copy"], s["shared substring"], s["excluded"], s["candidates"]) == (5, 5, 5, 5, 10, 120)
    assert not {c.document.id for c in bad} & {c.document.id for c in drawn.chosen}
    assert set(Counter((c.file, c.group) for c in drawn.chosen).values()) == {8} and {c.file[:3] for c in drawn.chosen} == {"001", "002"}
    kept = [c for c in plain.chosen if c not in bad]
    assert [c for c in drawn.chosen if c in plain.chosen] == kept                            # the rest of the draw is as it was
    drawn.save(tmp_path/"t.parquet")
    w, how = load_test_set(tmp_path/"t.parquet")
    assert how == drawn.how == dict(source=str(hub), seed=9, files=[1, 2], groups=6, per_group=20, choose=8, screens=s)
    for i, c in enumerate(drawn.chosen):
        n = int(c.document.id[5:-1])
        assert (w.document[i], w.source[i], w.bytes[i].tobytes().decode()) == (f"<urn:{n}>", f"host{n % 50}.example", text(n)[w.start[i]: w.start[i] + 1025])
    first = (tmp_path/"t.parquet").read_bytes(); drawn.save(tmp_path/"t.parquet"); assert (tmp_path/"t.parquet").read_bytes() == first
    pq.write_table(table(0, 3), tmp_path/"other.parquet"); (tmp_path/"junk.parquet").write_bytes(b"PAR1junk")
    for name, word in (("other", "no test set"), ("junk", "cannot be read as a test set"), ("nowhere", "cannot be read as a test set")):
        with pytest.raises(SomaError) as e: load_test_set(tmp_path/f"{name}.parquet")
        one_line(e, word)
