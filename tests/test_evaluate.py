"Laws of scoring: the protocol's indices, weights, pairing, and intervals that mean what they say."
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from soma.core import SomaError, read_json
from soma.evaluate import (BASELINES, SCORED, ByteTable, Scores, baselines, bootstrap, bootstrap_means, compressor_nats, count_bytes, evaluate,
                           format_table, label_levels, load_scores, paired_difference, plot_scores, save_figure, save_results, save_scores, score,
                           shuffle_routes, smoothed)


def synthetic(nats_per_byte, windows=None, source=None):
    "Scores of documents with given means and numbers of windows."
    x = np.asarray(nats_per_byte, float)
    w = np.ones(len(x), int) if windows is None else np.asarray(windows)
    document = [f"d{i:05}" for i in range(len(x))]
    return Scores(pd.DataFrame(dict(document=document, source=source or ["s"] * len(x), windows=w, targets=w * SCORED, nats=x * w * SCORED, mean=x)))


def some_windows(n=12, seed=0, documents=5):
    rng = np.random.default_rng(seed)
    owner = np.arange(n) % documents
    return SimpleNamespace(bytes=rng.integers(0, 256, (n, 1025), dtype=np.uint8), document=np.array([f"doc {i}" for i in owner], object),
                           source=np.array([f"source {i % 2}" for i in owner], object))


class Marked:
    "Experts that charge the value of the target byte, plus a large toll wherever the protocol must not look."
    N = 3
    def route(self, windows, k):
        assert windows.shape[1] == 1025
        return np.tile(np.arange(k), (len(windows), 1))
    def token_losses(self, windows, routes):
        losses = windows[:, 1:].astype(np.float64) + 1000 * routes.sum(1)[:, None]
        losses[:, :256] = 1e12
        return losses


def test_protocol_against_a_naive_loop():
    w = some_windows()
    s = evaluate(Marked(), w, k=1)
    total = {}
    for b, d in zip(w.bytes, w.document):
        for target in range(257, 1025): total[d] = total.get(d, 0) + int(b[target])  # byte 256 and all before are free
    assert dict(zip(s.table.document, s.table.nats)) == total
    assert s.nats == sum(total.values()) / (768 * len(w.bytes)) and s.targets == 768 * 12
    assert s.table.windows.tolist() == [3, 3, 2, 2, 2]


def test_only_scored_bytes_move_the_score_of_a_table():
    model, w = ByteTable(smoothed(count_bytes(np.random.default_rng(1).integers(0, 9, 5000, dtype=np.uint8))[1])), some_windows()
    w.bytes[:] %= 9
    before = evaluate(model, w, 1).nats
    w.bytes[:, :256] = 200  # a bigram reads byte 256 as the context of target 257, and nothing earlier
    assert evaluate(model, w, 1).nats == before
    w.bytes[:, 1024] = 200
    assert evaluate(model, w, 1).nats > before


def test_documents_weigh_by_their_bytes():
    s = synthetic([1.0, 4.0], windows=[3, 1])
    assert s.nats == (3 * 1 + 4) / 4 and s.bits == s.nats / math.log(2)
    b = bootstrap({"m": s}, draws=4000)
    means = np.unique(bootstrap_means([s], draws=4000))
    assert means.tolist() == [1.0, 1.75, 4.0]  # both documents, or one of them twice: a ratio of sums each time
    assert (b.lo.item(), b.hi.item(), b.documents.item(), b.targets.item()) == (1.0, 4.0, 2, 4 * SCORED)


def test_order_of_windows_does_not_show():
    w, rng = some_windows(40, documents=7), np.random.default_rng(3)
    losses = rng.exponential(2, (40, 1024))
    order = rng.permutation(40)
    a, b = score(losses, w), score(losses[order], SimpleNamespace(document=w.document[order], source=w.source[order]))
    pd.testing.assert_frame_equal(a.table, b.table, check_exact=True)
    assert np.array_equal(bootstrap_means([a], 300), bootstrap_means([b], 300))


def test_memory_layout_and_blocks_do_not_show():
    w = some_windows(40)
    losses = np.random.default_rng(0).exponential(2, (40, 1024))
    assert score(np.asfortranarray(losses), w).nats == score(losses, w).nats
    pd.testing.assert_frame_equal(evaluate(Marked(), w, 2, block=3).table, evaluate(Marked(), w, 2).table, check_exact=True)


def test_shuffled_routes_are_a_permutation():
    routes = np.arange(2000).reshape(1000, 2)
    a = shuffle_routes(routes, 1)
    assert not np.array_equal(a, routes) and np.array_equal(np.sort(a[:, 0]), routes[:, 0]) and (a[:, 1] == a[:, 0] + 1).all()
    assert np.array_equal(a, shuffle_routes(routes, 1)) and not np.array_equal(a, shuffle_routes(routes, 2))
    kept = [(shuffle_routes(routes, s) == routes).all(1).sum() for s in range(300)]
    assert abs(np.mean(kept) - 1) < 4 / math.sqrt(300)  # a fair deal leaves one row at home on average, with variance 1
    w = some_windows()
    given = evaluate(Marked(), w, 1, routes=np.full((12, 1), 2))
    assert given.nats == evaluate(Marked(), w, 1).nats + 2000 and (given.routes == 2).all()


def test_bootstrap_is_the_same_for_any_chunk_and_in_a_fresh_process():
    x = 2 + np.sin(np.arange(37)) / 3
    s = synthetic(x, windows=1 + np.arange(37) % 4)
    reference = bootstrap_means([s, synthetic(x + 0.1, 1 + np.arange(37) % 4)], draws=500, seed=5)
    for chunk in (1, 37 * 3, 10**6): assert np.array_equal(reference[:1], bootstrap_means([s], draws=500, seed=5, chunk=chunk))
    assert np.array_equal(reference[:, :200], bootstrap_means([s, synthetic(x + 0.1, 1 + np.arange(37) % 4)], draws=200, seed=5))
    assert not np.array_equal(reference[:1], bootstrap_means([s], draws=500, seed=6))
    code = """if True:
        import hashlib, numpy as np, pandas as pd, torch
        from soma.evaluate import Scores, bootstrap_means
        torch.set_num_threads(1)
        w = 1 + np.arange(37) % 4; x = 2 + np.sin(np.arange(37)) / 3
        t = pd.DataFrame(dict(document=[f"d{i:05}" for i in range(37)], source="s", windows=w, targets=w * 768, nats=x * w * 768, mean=x))
        print(bootstrap_means([Scores(t)], draws=500, seed=5).tobytes().hex())"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert out == reference[:1].tobytes().hex()


def test_intervals_cover_the_truth():
    "95% of intervals hold the true mean; 400 repetitions tell that to a standard error of 1.1%, and n = 80 costs under 1%."
    n, repetitions, rng = 80, 400, np.random.default_rng(0)
    inside = 0
    for r in range(repetitions):
        windows = rng.integers(1, 5, n)
        s = synthetic(2 + rng.normal(0, 0.5, n), windows)
        lo, hi = np.quantile(bootstrap_means([s], draws=600, seed=r), [0.025, 0.975])
        inside += lo <= 2 <= hi
    assert abs(inside / repetitions - 0.95) < 3 * math.sqrt(0.95 * 0.05 / repetitions) + 0.01


def test_pairing_narrows_what_is_shared_and_nothing_else():
    rng, n = np.random.default_rng(2), 200
    hard, own_a, own_b = rng.normal(2, 0.5, n), rng.normal(0, 0.02, n), rng.normal(0.03, 0.02, n)
    a, b = synthetic(hard + own_a), synthetic(hard + own_b)
    d, t = paired_difference(a, b), bootstrap({"a": a, "b": b})
    unpaired = math.hypot(*(t.hi - t.lo))
    assert d["hi"] - d["lo"] < unpaired / 10 and d["hi"] < 0 and t.hi[0] > t.lo[1]  # clear, though the two intervals overlap
    assert d["improved"] == int((own_a < own_b).sum()) and d["documents"] == n and math.isclose(d["difference"], a.nats - b.nats)
    c = synthetic(rng.normal(2, 0.5, n))  # shares nothing with a: pairing must not narrow anything
    e, u = paired_difference(a, c), bootstrap({"a": a, "c": c})
    assert 0.8 < (e["hi"] - e["lo"]) / math.hypot(*(u.hi - u.lo)) < 1.2
    assert paired_difference(b, a)["difference"] == -d["difference"]
    assert paired_difference(a, a) == dict(difference=0.0, lo=0.0, hi=0.0, improved=0, documents=n, by="document")


def test_by_source_resamples_whole_sources():
    s = synthetic([1, 1, 3, 3], source=["x", "x", "y", "y"])
    assert np.unique(bootstrap_means([s], draws=500, by="source")).tolist() == [1, 2, 3]
    t = bootstrap({"m": s}, draws=500, by="source")
    assert t.units.item() == 2 and t.by.item() == "source" and t.documents.item() == 4
    for few in (bootstrap({"m": synthetic([1, 2])}, by="source"), bootstrap({"m": synthetic([1])})):
        assert few[["lo", "hi"]].isna().all(axis=None) and "–" in format_table(few)
        assert np.isfinite(few["nats/byte"]).all()


def test_a_number_without_documents_has_no_interval():
    t = bootstrap({"gzip -9": 2.5, "m": synthetic([1, 2, 3])}, draws=100)
    assert t.method.tolist() == ["gzip -9", "m"] and t.lo.isna().tolist() == [True, False]
    assert t["bits/byte"][0] == 2.5 / math.log(2) and t.targets.tolist() == [3 * SCORED] * 2


def test_baselines_by_hand():
    "Training text abab…: a bigram knows what follows, a unigram half of it."
    stream, w = np.frombuffer(b"ab" * 50_000, np.uint8), SimpleNamespace(document=["x"], source=["s"])
    w.bytes = np.frombuffer((b"ab" * 513)[:1025], np.uint8)[None]
    b = baselines(stream, w)
    assert tuple(b) == BASELINES and math.isclose(b["uniform"].nats, 8 * math.log(2))
    assert math.isclose(b["unigram"].nats, math.log(100_256 / 50_001))
    after_a, after_b = math.log((50_000 + 256) / 50_001), math.log((49_999 + 256) / 50_000)
    assert math.isclose(b["bigram"].nats, (after_a + after_b) / 2, rel_tol=1e-9)
    assert b["gzip -9"] < 0.5 and compressor_nats(lambda d: d, b"12345") == 8 * math.log(2)


def test_counting_a_memory_map(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)
    data.tofile(tmp_path / "train.bin")
    stored = np.memmap(tmp_path / "train.bin", np.uint8, "r")
    naive = np.zeros((256, 256), int)
    np.add.at(naive, (data[:-1], data[1:]), 1)
    for chunk in (999, 100_002, 100_003, 1 << 22):
        singles, pairs = count_bytes(stored, chunk)
        assert np.array_equal(pairs, naive) and np.array_equal(singles, np.bincount(data, minlength=256))
    with pytest.raises(SomaError, match="there are none to count"): count_bytes(data[:0])


def test_scores_survive_the_disk(tmp_path):
    x = np.random.default_rng(0).normal(2, 0.3, 7)
    scores = {"a, \"b\"": synthetic(x), "NA": synthetic(x / 3), "gzip -9": 2.0}
    names = ["007", "NA", "", "a,b", 'say "x"', "two\nlines\r", "naïve 猫"]
    for s in list(scores.values())[:2]: s.table["document"] = names
    save_scores(tmp_path / "scores.csv", scores)
    back = load_scores(tmp_path / "scores.csv")
    assert list(back) == ["a, \"b\"", "NA"]
    for m in back: pd.testing.assert_frame_equal(back[m].table, scores[m].table, check_exact=True)
    assert [p.name for p in tmp_path.iterdir()] == ["scores.csv"]
    save_results(tmp_path / "results.json", bootstrap(scores, draws=50), note="x", d=paired_difference(back["NA"], scores["NA"], draws=50, by="source"))
    r = read_json(tmp_path / "results.json")
    assert r["methods"][2]["lo"] is None and r["methods"][0]["targets"] == 7 * SCORED and r["note"] == "x" and r["d"]["lo"] is None and r["d"]["difference"] == 0 and r["protocol"]["outputs"] == [256, 1024]


def test_bad_files_of_scores(tmp_path):
    with pytest.raises(SomaError, match="no such file of scores"): load_scores(tmp_path / "none.csv")
    for name, content in dict(empty=b"", other=b"a,b\n1,2\n", short=b'"method","document","source","windows","targets","nats","mean"\n"m","d"\n', junk=bytes(range(256))).items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SomaError, match=f"{name}: not a readable file of scores"): load_scores(tmp_path / name)


@pytest.mark.parametrize("k, message", [(0, "k = 0"), (4, "choose a number from 1 to 3")])
def test_k_out_of_range(k, message):
    with pytest.raises(SomaError, match=message): evaluate(Marked(), some_windows(), k)


def test_other_bad_input():
    w = some_windows()
    empty = SimpleNamespace(bytes=w.bytes[:0], document=w.document[:0], source=w.source[:0])
    with pytest.raises(SomaError, match="there are none"): evaluate(Marked(), empty, 1)
    with pytest.raises(SomaError, match="1024 bytes each; the protocol needs 1025"): evaluate(Marked(), SimpleNamespace(bytes=w.bytes[:, 1:]), 1)
    with pytest.raises(SomaError, match="routes: shape"): evaluate(Marked(), w, 2, routes=np.zeros((12, 1), int))
    with pytest.raises(SomaError, match="they name experts 0 to 3"): evaluate(Marked(), w, 1, routes=np.arange(12)[:, None] % 4)
    losses = np.ones((12, 1024))
    losses[:, 100] = np.nan  # not scored, so not asked for
    assert score(losses, w).nats == 1
    losses[[7, 9], 256] = np.nan, np.inf
    with pytest.raises(SomaError, match=r"window 7 \(document doc 2\): its loss is not finite \(so in 2 of 12 windows\)"): score(losses, w)
    a = synthetic([1, 2, 3])
    for other in (synthetic([1, 2]), synthetic([1, 2, 3], windows=[1, 2, 1])):
        with pytest.raises(SomaError, match="different documents or windows"): paired_difference(a, other)
        with pytest.raises(SomaError, match="different documents or windows"): bootstrap({"a": a, "b": other})
    with pytest.raises(SomaError, match="choose document or source"): bootstrap({"a": a}, by="window")
    with pytest.raises(SomaError, match="draws = 0"): bootstrap({"a": a}, draws=0)
    with pytest.raises(SomaError, match="no method has scores"): bootstrap({"gzip -9": 2.0})


def test_the_table_fits_a_terminal():
    t = bootstrap({"a rather long name of a method " * 5: synthetic([1, 2, 3]), "unigram": synthetic([3, 3, 3])}, draws=100)
    lines = format_table(t).splitlines()
    assert max(map(len, lines)) <= 100 and len({len(x) for x in lines[:4]}) == 1 and "2.0000" in lines[2] and "3 documents, 2,304 scored bytes" in lines[-1]


def test_labels_never_meet():
    x, w = np.sort(np.random.default_rng(0).uniform(0, 10, 30)), np.full(30, 1.0)
    levels = label_levels(x, w)
    for i in range(30):
        for j in range(i): assert levels[i] != levels[j] or x[i] - x[j] >= 1
    assert label_levels([0, 2, 4], [1, 1, 1]) == [0, 0, 0] and label_levels([], []) == []


def test_the_picture_is_drawn_from_the_table_alone(tmp_path):
    t = bootstrap({"ensemble": synthetic([2.1, 2.2, 2.4]), "uniform": synthetic([5.545] * 3), "bigram": synthetic([2.4] * 3), "xz": 2.2}, draws=100)
    t.to_csv(tmp_path / "t.csv", index=False)
    save_figure(tmp_path / "a.svg", plot_scores(t))
    save_figure(tmp_path / "b.svg", plot_scores(pd.read_csv(tmp_path / "t.csv")))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ax = plot_scores(t).axes[0]
    said = [x.get_text() for x in ax.texts]
    assert "bigram 2.40" in said and "xz 2.20" in said and "2.233" in said and "uniform 5.545" in ax.get_xlabel()
    assert [x.get_text() for x in ax.get_yticklabels()] == ["ensemble"]
    with pytest.raises(SomaError, match="every method is a baseline"): plot_scores(t[t.method == "bigram"])
