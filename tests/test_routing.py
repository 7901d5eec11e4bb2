"Laws of the router that are too heavy or too ugly for its notebook."
import gzip, hashlib, json, subprocess, sys, warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from soma.core import Key, SomaError, sha256_file
from soma.routing import (Router, _sample, _seal, balance, balanced_assignment, balanced_kmeans, fit_router, prefix_agreement, routing_report,
                          top_terms)

ROOT = Path(__file__).parent.parent
CORPUS = ROOT/"data_cards"/"pd_small"/"pd_small.jsonl.gz"


def real_sequences(n=1200):
    with gzip.open(CORPUS, "rt", encoding="utf-8") as f: data = "\n".join(json.loads(line)["text"] for line in f).encode()
    every = np.frombuffer(data[:len(data) // 1024 * 1024], np.uint8).reshape(-1, 1024)
    return every[::len(every) // n][:n]


@pytest.fixture(scope="module")
def corpus(): return real_sequences()


@pytest.fixture(scope="module")
def router(corpus): return fit_router(corpus, N=8, seed=3)


def quiet_fit(*args, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_router(*args, **more)


def same(a, b):
    "Bit-identical routers."
    return a.terms == b.terms and a.config == b.config and all(
        getattr(a, x).tobytes() == getattr(b, x).tobytes() for x in ("idf", "components", "mean", "centroids", "sizes"))


# --- balanced assignment ---

def clumped(n, N, seed):
    "Similarities of n points, a third of them near one centroid, so that balance has to work."
    rng = np.random.default_rng(seed)
    x, c = rng.normal(size=(n, 16)), rng.normal(size=(N, 16))
    x[::3] += 2 * c[0]
    x, c = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, c))
    return (x @ c.T).astype(np.float32)


def total(sim, own): return sim[np.arange(len(sim)), own].astype(np.float64).sum()


@pytest.mark.parametrize("n,N,seed", [(200, 8, 0), (200, 8, 1), (203, 8, 2), (9, 8, 3), (64, 64, 4), (700, 50, 5), (30, 1, 6), (31, 2, 7)])
def test_capacity_is_optimal(n, N, seed):
    sim = clumped(n, N, seed)
    own, cap = balanced_assignment(sim), -(-n // N)
    sizes = np.bincount(own, minlength=N)
    assert sizes.max() <= cap and sizes.min() >= 1
    places = np.repeat(sim, cap, axis=1).astype(np.float64)
    places[:, ::cap] += 100                                                  # every cluster's first place must be filled
    _, column = linear_sum_assignment(-places)
    assert total(sim, own) == pytest.approx(total(sim, column // cap), rel=1e-5)
    if n >= 200:                                                             # and there it hardly matters that none may be empty
        _, column = linear_sum_assignment(-np.repeat(sim, cap, axis=1).astype(np.float64))
        assert total(sim, own) >= 0.995 * total(sim, column // cap)


def test_capacity_with_ties_and_few_rows():
    same_everywhere = np.zeros((1000, 7), np.float32)                        # nobody prefers anything
    assert balance(balanced_assignment(same_everywhere), 7)["sizes"].max() == 143
    copies = np.repeat(clumped(4, 8, 0), 500, axis=0)                        # four sequences, 500 copies of each
    own = balanced_assignment(copies)
    assert np.bincount(own, minlength=8).tolist() == [250] * 8
    _, column = linear_sum_assignment(-np.repeat(copies[::50], 5, axis=1))   # the same problem, a fiftieth of it
    assert total(copies, own) == pytest.approx(50 * total(copies[::50], column // 5), rel=1e-4)
    assert sorted(balanced_assignment(clumped(5, 8, 1))) == sorted(set(balanced_assignment(clumped(5, 8, 1))))  # n < N: one each


def test_capacity_is_deterministic_and_scales():
    sim = clumped(20_000, 64, 0)
    own = balanced_assignment(sim)
    assert np.array_equal(own, balanced_assignment(sim.copy()))
    assert np.bincount(own, minlength=64).max() == 313
    assert total(sim, own) > 0.5 * total(sim, sim.argmax(1))


def test_kmeans_finds_planted_clusters():
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(6), 100)
    x = np.eye(6, 20)[truth] + 0.1 * rng.normal(size=(600, 20))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    centroids, histories = balanced_kmeans(x, 6, seed=0)
    found = (x @ centroids.T).argmax(1)
    assert len(set(zip(truth, found))) == 6                                  # one name each
    assert all(np.diff(h).min(initial=0) > -1e-6 for h in histories)         # never downhill


def test_sample_is_sorted_distinct_and_spread():
    for n, m in ((10, 10), (1000, 7), (10**11, 1000), (11, 10)):
        index = _sample(n, m, Key(1))
        assert len(index) == m and (np.diff(index) > 0).all() and 0 <= index[0] and index[-1] < n
    assert not np.array_equal(_sample(1000, 7, Key(1)), _sample(1000, 7, Key(2)))


# --- the same bits, whatever the threads, the process, the company ---

def test_fit_is_the_same_for_any_thread_count(corpus, router):
    for threads in (1, 2):
        with threadpool_limits(threads): assert same(fit_router(corpus, N=8, seed=3), router)
    assert not same(fit_router(corpus, N=8, seed=4), router)


CHILD = """
import sys; sys.path[:0] = [{tests!r}]
from test_routing import real_sequences
from soma.routing import fit_router
fit_router(real_sequences(), N=8, seed=3).save({out!r})
"""


def test_fit_is_the_same_in_a_fresh_process(router, tmp_path):
    code = CHILD.format(tests=str(Path(__file__).parent), out=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert same(Router.load(tmp_path), router)


def test_rows_do_not_depend_on_company(corpus, router):
    rows, features, top = corpus[:300], router.features(corpus[:300]), router.top_k(corpus[:300], 4)
    for size in (1, 7, 64):
        parts = [rows[i:i + size] for i in range(0, len(rows), size)]
        assert np.concatenate([router.features(p) for p in parts]).tobytes() == features.tobytes()
        assert np.array_equal(np.concatenate([router.top_k(p, 4) for p in parts]), top)
    with threadpool_limits(1): assert router.features(rows).tobytes() == features.tobytes()


def test_lists_arrays_and_views_agree(corpus, router):
    class View:
        def __len__(self): return len(corpus)
        def __getitem__(self, index): return corpus[index]
    as_list = [row.tobytes() for row in corpus]
    assert np.array_equal(router.top_k(as_list, 4), router.top_k(corpus, 4))
    assert same(fit_router(View(), N=8, seed=3), router) and same(fit_router(as_list, N=8, seed=3), router)


# --- choices ---

def test_top_k_is_nearest_first_with_ties_to_the_smaller_index(corpus, router):
    sim, top = router.similarity(corpus), router.top_k(corpus, 8)
    assert np.all(np.diff(np.take_along_axis(sim, top, 1), axis=1) <= 0)
    assert np.array_equal(router.assign(corpus), sim.argmax(1)) and np.array_equal(top[:, :3], router.top_k(corpus, 3))
    twin = Router(router.terms, router.idf, router.components, router.mean, router.centroids[[2, 1, 2, 2]], np.array([1, 2, 3, 3]), router.config)
    ranks = twin.top_k(corpus, 4).tolist()
    assert {tuple(r) for r in ranks} <= {(0, 2, 3, 1), (1, 0, 2, 3)}
    assert twin.top_k([b"", b"\xff\xfe", "Ελλάδα".encode()], 4).tolist() == [[2, 3, 1, 0]] * 3    # no words: largest first


def test_words_or_no_words(corpus, router):
    rows = [corpus[5].tobytes(), b"the of and", b"\x80\x81 \xff", b"", b"\xffconstitution\xfe", corpus[5].tobytes()[:64]]
    assert router.has_words(rows).tolist() == [True, False, False, False, True, True]
    assert router.features(rows).any(1).tolist() == router.has_words(rows).tolist()
    assert np.array_equal(router.features([b"\xffconstitution\xfe"]), router.features([b"constitution"]))  # bad bytes are left out


def test_capacity_and_nearest(corpus, router):
    capacity = router.assign(corpus, "capacity")
    even = balance(capacity, 8)
    assert even["sizes"].max() <= -(-len(corpus) // 8) and even["entropy"] > 0.9999
    near = router.assign(corpus)
    sim = router.similarity(corpus)
    assert total(sim, near) > total(sim, capacity) > 0.9 * total(sim, near)
    assert router.config["mean_cosine"] <= total(sim, near) / len(corpus)
    assert np.array_equal(router.sizes, np.bincount(near, minlength=8))


@pytest.mark.parametrize("k", [0, 9, -1])
def test_k_out_of_range(router, k):
    with pytest.raises(SomaError, match=rf"k = {k}: the router has 8 experts"): router.top_k([b"ship"], k)


def test_other_bad_arguments(corpus, router):
    with pytest.raises(SomaError, match="balance = 'fair': choose one of nearest, capacity"): router.assign(corpus, "fair")
    with pytest.raises(SomaError, match="N = 0: must be at least 1"): fit_router(corpus, 0)
    with pytest.raises(SomaError, match=r"N = 1201: more clusters than sequences to fit on \(1,200\)"): fit_router(corpus, 1201)
    with pytest.raises(SomaError, match=r"N = 8: more clusters than sequences to fit on \(5\)"): fit_router(corpus, 8, sample=5)
    with pytest.raises(SomaError, match=r"more clusters than sequences to fit on \(0\)"): fit_router([], 1)
    with pytest.raises(SomaError, match="held-out windows: shape"): prefix_agreement(router, corpus[:, :256])


# --- small and strange corpora ---

@pytest.mark.parametrize("n,N", [(1, 1), (2, 1), (2, 2), (3, 2), (24, 8), (24, 24), (40, 39), (60, 4)])
def test_tiny_corpora(corpus, n, N):
    with pytest.warns(UserWarning, match="routing: a small corpus") as caught: r = fit_router(corpus[:n], N)
    assert len(caught) == 1 and f"→ {r.config['dims']}" in str(caught[0].message)
    assert r.N == N and r.centroids.shape == (N, r.config["dims"]) and np.isfinite(r.centroids).all() and r.config["dims"] <= n
    assert np.bincount(r.assign(corpus[:n], "capacity"), minlength=N).max() == -(-n // N)
    assert sorted(r.top_k(corpus[:3, :256], N)[0].tolist()) == list(range(N))
    if n == N > 2: assert len(set(r.assign(corpus[:n]))) == n                # every sequence is its own cluster


def test_a_large_enough_corpus_says_nothing(corpus):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_router(corpus, 1).config["dims"] == 128


def test_identical_sequences():
    r = quiet_fit([b"whale ship sea"] * 20, 4)
    assert r.top_k([b"whale", b"nothing known"], 4).shape == (2, 4) and np.isfinite(r.centroids).all()


@pytest.mark.parametrize("corpus_of", [[b"the and of which"] * 30, [b"\xff\xfe\x80"] * 30, [b""] * 30, [b"a b c !"] * 3])
def test_no_word_survives(corpus_of):
    with pytest.raises(SomaError, match="no word survives the stop words"): fit_router(corpus_of, 2)


def test_one_word_survives():
    with pytest.raises(SomaError, match=r"only one word \('whale'\) survives"): fit_router([b"the whale and"] * 30, 2)


def test_invalid_utf8_fits(corpus):
    broken = corpus.copy()
    broken[:, ::50] = 0xFF
    r = fit_router(broken, 4)
    clean = [row.tobytes().replace(b"\xff", b"") for row in broken]
    assert same(quiet_fit(clean, 4), r)


def test_many_rows_without_words(corpus):
    mixed = [row.tobytes() for row in corpus[:300]] + [b"\x00" * 1024] * 300
    r = quiet_fit(mixed, 4)
    assert r.sizes.sum() == 300 and np.bincount(r.assign(mixed, "capacity"), minlength=4).tolist() == [150] * 4
    assert set(r.assign(mixed)[300:]) == {int(r.sizes.argmax())}


# --- saved and loaded ---

def test_round_trip(corpus, router, tmp_path):
    router.save(tmp_path/"r")
    again = Router.load(tmp_path/"r", N=8)
    assert same(again, router) and sorted(p.name for p in (tmp_path/"r").iterdir()) == ["router.json", "router.safetensors"]
    assert np.array_equal(again.top_k(corpus[:, :256], 4), router.top_k(corpus[:, :256], 4))
    card = json.loads((tmp_path/"r"/"router.json").read_text())
    assert card["tensors_sha256"] == sha256_file(tmp_path/"r"/"router.safetensors") and card["terms"] == router.terms and card["N"] == 8
    with pytest.raises(SomaError, match="a router with N = 8 where N = 4 is needed"): Router.load(tmp_path/"r", N=4)


def edit(path, seal=False, **changes):
    card = json.loads((path/"router.json").read_text()) | changes
    if seal: card["sha256"] = _seal(card)
    (path/"router.json").write_text(json.dumps(card))


def swap(path, **changes):
    "Replace tensors and make every checksum fit."
    data = save(load((path/"router.safetensors").read_bytes()) | changes)
    (path/"router.safetensors").write_bytes(data)
    edit(path, seal=True, tensors_sha256=hashlib.sha256(data).hexdigest())


def cut_tensors(p): f = p/"router.safetensors"; f.write_bytes(f.read_bytes()[:-1000])
def cut_json(p): f = p/"router.json"; f.write_text(f.read_text()[:500])
def flip_bit(p): f = p/"router.safetensors"; b = bytearray(f.read_bytes()); b[-9] ^= 1; f.write_bytes(b)


@pytest.mark.parametrize("damage,message", [
    (cut_tensors, "damaged, or of another router"), (flip_bit, "damaged, or of another router"), (cut_json, "not a readable router"),
    (lambda p: (p/"router.safetensors").unlink(), "router.safetensors: cannot be read"), (lambda p: (p/"router.json").unlink(), "no such router"),
    (lambda p: (p/"router.json").write_text("[1, 2]"), "not a router"), (lambda p: (p/"router.json").write_text("{}"), "not a router"),
    (lambda p: edit(p, format=2), "format 2, this soma reads format 1; update soma"),
    (lambda p: edit(p, N=9), "edited or damaged"), (lambda p: edit(p, sizes=[1] * 8), "edited or damaged"),
    (lambda p: swap(p, centroids=np.zeros((9, 128), np.float32)), r"centroids has shape \(9, 128\), not \(8, 128\)"),
    (lambda p: swap(p, idf=np.ones(3)), r"idf has shape \(3,\)"),
])
def test_damaged_routers_are_refused_in_one_line(router, tmp_path, damage, message):
    router.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(SomaError, match=message) as e: Router.load(tmp_path)
    assert "\n" not in str(e.value)


def test_save_where_a_file_is(router, tmp_path):
    (tmp_path/"x").write_text("here first")
    with pytest.raises(SomaError, match="a file is where a folder is needed"): router.save(tmp_path/"x")
    assert (tmp_path/"x").read_text() == "here first"


# --- the report ---

def test_report(corpus, router):
    own = router.assign(corpus)
    report = routing_report(router, corpus, own, corpus[:400])
    assert report.clusters["size"].tolist() == np.bincount(own, minlength=8).tolist() and report.clusters.share.sum() == pytest.approx(1)
    a = report.agreement.iloc[0]
    home, top = own[:400], router.top_k(corpus[:400, :256], 4)
    assert a.bytes == 256 and a.top1 == (top[:, 0] == home).mean() and a.topk == (top == home[:, None]).any(1).mean()
    rng = np.random.default_rng(0)
    shuffled = np.mean([(top[rng.permutation(400), 0] == home).mean() for _ in range(300)])
    assert a.chance1 == pytest.approx(shuffled, abs=0.005) and a.top1 > 2 * a.chance1 and 0.9 < a.topk <= 1
    text = str(report).split("\n")
    assert max(map(len, text)) <= 100 and len(text) == 12 and "find their window's cluster" in text[-2]


def test_report_terms_are_the_planted_words():
    texts = [b"whale ship harpoon sea" + b" common words here", b"senate treasury tariff congress" + b" common words here"] * 60
    r = quiet_fit(texts, 2)
    own = r.assign(texts)
    terms = top_terms(r, texts, own, count=4)
    assert set(terms[own[0]]) == {"whale", "ship", "harpoon", "sea"} and set(terms[own[1]]) == {"senate", "treasury", "tariff", "congress"}
    assert set(top_terms(quiet_fit(texts, 1), texts, np.zeros(120, int))[0]) <= set(b" ".join(texts[:2]).decode().split())
