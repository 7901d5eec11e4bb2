"Every card says the same things in the same places, and what it says about files is true of the files that are there."
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from soma.core import sha256_file
from soma.corpora import SharedSubstrings, screen
from soma.data import SHIPPED, SPLITS, build_store, read_documents, shipped_corpus

ROOT = Path(__file__).resolve().parents[1]
CARDS = {p.parent.name: p.read_text(encoding="utf-8") for p in sorted((ROOT/"data_cards").glob("*/README.md"))}
KEYS = {"pretty_name", "language", "license", "size_categories", "task_categories", "key", "revision", "sha256", "seed", "built_by"}
SECTIONS = ["Sources", "Structure", "How it was built", "Overlap screens", "Use and limits", "Licence"]

def front(name): return yaml.safe_load(CARDS[name].split("---\n")[1])

def test_the_cards_are_these():
    assert list(CARDS) == ["fineweb_edu", "paper_reported", "pd_small", "pdmix", "wikitext103"]
    assert sorted(p.name for p in (ROOT/"data_cards").iterdir()) == list(CARDS)

@pytest.mark.parametrize("name", CARDS)
def test_front_matter_and_sections(name):
    meta = front(name)
    assert KEYS <= meta.keys() <= KEYS | {"license_name", "configs", "sha256_unpacked"} and meta["key"] == name
    assert meta["license"] != "other" or meta["license_name"]
    assert meta["sha256"] is None or re.fullmatch("[0-9a-f]{64}", meta["sha256"])
    assert re.findall(r"^## (.+)$", CARDS[name], re.M) == SECTIONS
    assert all(len(part.strip()) > 40 for part in re.split(r"^## .+$", CARDS[name], flags=re.M)[1:])
    for target in re.findall(r"\]\((?!http)([^)]+)\)", CARDS[name]): assert (ROOT/"data_cards"/name/target).exists(), target

@pytest.mark.parametrize("name", CARDS)
def test_hash_is_of_the_files_that_are_there(name):
    "A card with a hash names files, they are there, and nothing else is; a card without one has none."
    meta, here = front(name), ROOT/"data_cards"/name
    found = sorted({p for c in meta.get("configs", []) for p in here.glob(c["data_files"])})
    beside = sorted(p for p in here.iterdir() if p.name != "README.md")
    assert bool(found) == (meta["sha256"] is not None) and beside == [p for p in found if p.parent == here]
    if name == "paper_reported":
        sums = (ROOT/"figures"/"reported"/"SHA256SUMS")
        assert sha256_file(sums) == meta["sha256"], "figures/reported has changed: put the sha256 of SHA256SUMS on its card"
        assert dict(line.split("  ")[::-1] for line in sums.read_text().splitlines()) == {p.name: sha256_file(p) for p in found}
    elif found: assert sha256_file(found[0]) == meta["sha256"]

@pytest.mark.parametrize("name", SHIPPED)
def test_counts_of_a_shipped_corpus(name):
    docs = list(read_documents(shipped_corpus(name)))
    size, card = sum(len(d.text) for d in docs), CARDS[name]
    assert f"{len(docs):,} documents, {size:,} bytes" in card and len({d.text for d in docs}) == len({d.id for d in docs}) == len(docs)
    for source in {d.source for d in docs}:
        mine = [len(d.text) for d in docs if d.source == source]
        assert f"| {source} | {len(mine):,} | {sum(mine):,} |" in card
    for licence in {d.licence for d in docs}: assert f"`{licence}` (" in card and f"({sum(d.licence == licence for d in docs):,}" in card
    lengths = sorted(len(d.text) for d in docs)
    assert f"{lengths[0]:,} to {lengths[-1]:,} bytes, half of them over {lengths[len(lengths) // 2]:,}" in card
    for book in {m[1] for d in docs if (m := re.match("se/([^/]+)/", d.id))}:
        assert re.search(rf"\| standardebooks/{re.escape(book)} \| [0-9a-f]{{12}} \| {sum(d.id.startswith(f'se/{book}/') for d in docs)} \|", card), book

def test_pdmix_has_the_columns_on_its_card():
    assert pq.read_schema(shipped_corpus("pdmix")).names == re.findall(r"^\| `(\w+)` \|", CARDS["pdmix"], re.M)

def test_pd_small_is_a_part_of_pdmix_and_both_cards_warn():
    big = set(read_documents(shipped_corpus("pdmix")))
    assert all(d in big for d in read_documents(shipped_corpus("pd_small")))
    for name in SHIPPED: assert "Never test a model on one that was trained on the other." in CARDS[name]

@pytest.fixture(scope="module")
def stores(tmp_path_factory): return {name: build_store(shipped_corpus(name), tmp_path_factory.mktemp("stores")/name) for name in SHIPPED}

def test_splits_are_as_on_the_cards(stores):
    for name, store in stores.items():
        train, validation, test = (store.manifest["splits"][s]["documents"] for s in SPLITS)
        assert re.search(rf"{train:,} documents to train on.*, {validation} to validate and {test} to test", CARDS[name])

def test_screens_of_pd_small(stores):
    store, w = stores["pd_small"], stores["pd_small"].windows("test")
    docs = {d.id: d for d in store.documents("test")}
    counts = screen([docs[i] for i in w.document], w.bytes, store.documents("train")).counts
    assert counts.pop("candidates") == 27 and set(counts.values()) == {0} and "no shared run of 128 bytes" in CARDS["pd_small"]

def test_screen_of_pdmix_finds_what_its_card_admits(stores):
    store = stores["pdmix"]
    shared = SharedSubstrings(store.windows("test").bytes)
    shared.scan(store.train)
    n = int(re.search(r"\*\*(\d+) of the 323 windows share a run of 128 bytes\*\*", CARDS["pdmix"])[1])
    assert int(shared.found.sum()) == n == 37

def test_unshipped_cards_say_so():
    for name in ("fineweb_edu", "wikitext103"): assert "None of it lies here" in CARDS[name] and "Not shipped here." in CARDS[name]
