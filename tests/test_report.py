"The laws of figures and tables: a complete manifest, the paper's numbers as printed, and a runner and a check that notice what is missing, changed or wrong."
import json, re, shutil, sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from soma import report
from soma.cli import main
from soma.core import ModelConfig, SomaError
from soma.models import count_body, count_ensemble
from soma.report import BEYOND, IDS, OURS, Experiment, check, code_cells, dry_run, listing, load_manifest, manifest_faults, parameters_of, plan, read_rows, readme, reported, reproduce, sources, state

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = load_manifest(ROOT)
NOTEBOOKS = sorted((ROOT/"nbs/experiments").glob("*.ipynb"))

# -- the repository as it is -----------------------------------------------------------------------------------------

def test_the_manifest_has_every_numbered_result():
    raw = yaml.safe_load((ROOT/"figures/manifest.yml").read_text(encoding="utf-8"))
    counts = {kind: sum(i.startswith(kind) for i in raw) for kind in ("fig", "tab", "prop", "cor", "eq")}
    assert list(raw) == IDS + OURS and len(IDS) == 38 and [i for i in raw if raw[i]["place"] == BEYOND] == OURS and counts == dict(fig=17, tab=13, prop=1, cor=1, eq=6)

def test_figures_notebooks_and_manifest_agree():
    assert check(ROOT)[0] == []

def test_every_experiment_notebook_is_in_the_manifest():
    assert {p.stem for p in NOTEBOOKS} == {e["notebook"] for e in MANIFEST.values() if e["presets"]}

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_are_what_papermill_sees(path):
    from papermill import inspect_notebook
    seen = {k: v["default"] for k, v in inspect_notebook(str(path)).items()}
    assert {k: eval(v) for k, v in seen.items()} == parameters_of(path)

def test_readme_shows_every_artifact():
    index = json.loads((ROOT/"nbs/index.ipynb").read_text(encoding="utf-8"))
    page = readme(index, ROOT)
    assert [i for i in IDS + OURS if not re.search(rf"\b{i}\b", page)] == []
    assert page.count("**: ") >= sum(e["verdict"] != "not run" for e in MANIFEST.values())

def test_listing_has_a_line_for_each():
    lines = listing(ROOT).splitlines()
    assert [line.split()[0] for line in lines[1:39]] == IDS and lines[39] == "beyond the paper:" and [line.split()[0] for line in lines[40:-1]] == OURS
    assert lines[-1].startswith("38 artifacts, ") and f"; beyond the paper {len(OURS)}, " in lines[-1]

def test_the_readme_keeps_ours_apart():
    theirs, ours = report.artifact_table(MANIFEST).split("### Beyond the paper")
    assert all(i in theirs and not re.search(rf"\b{i}\b", ours) for i in IDS) and all(i in ours and i not in theirs for i in OURS)

# -- the paper's numbers ---------------------------------------------------------------------------------------------

def number(printed:str)->float:
    "What a printed number means."
    text = printed.replace(",", "").rstrip("×%∗")
    if m := re.fullmatch(r"(?:([\d.]+) × )?(10|2)\^(-?\d+)", text): return float(m[1] or 1) * float(m[2]) ** int(m[3])
    m = re.fullmatch(r"([\d.]+)([kMB]?)", text)
    return float(m[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[m[2]]

def test_values_are_what_is_printed():
    wrong = []
    for path in sorted((ROOT/"figures/reported").glob("*.csv")):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert list(frame.columns) == ["id", "row", "column", "printed", "value", "unit", "place", "note"]
        wrong += [(path.name, r.row, r.printed) for r in frame.itertuples() if r.value and float(r.value) != pytest.approx(number(r.printed), rel=1e-12)]
        assert (frame.place != "").all() and not frame.duplicated(["id", "row", "column", "place", "printed"]).any()
    assert wrong == []

def test_all_tables_and_the_captions_are_there():
    shapes = {i: len(pd.read_csv(ROOT/f"figures/reported/{i}.csv")) for i in IDS if i.startswith("tab")}
    assert shapes == dict(tab01=58, tab02=16, tab03=4, tab04=20, tab05=18, tab06=20, tab07=15, tab08=16, tab09=15, tab10=6, tab11=3, tab12=16, tab13=16)
    captions = set(pd.read_csv(ROOT/"figures/reported/captions.csv").id)
    assert captions >= {f"fig{i:02}" for i in (1, 4, 5, 6, 7, 8, 10, 11, 13, 14, 15, 16, 17)}
    for i in sorted(captions): assert set(reported(i, text=True, root=ROOT).who) == {"paper"}

def grid(id:str)->pd.DataFrame: return pd.read_csv(ROOT/f"figures/reported/{id}.csv").pivot(index="row", columns="column", values="value")

def test_the_papers_tables_agree_with_themselves():
    t7 = grid("tab07")
    seeds = t7.loc[["seed 1", "seed 2", "seed 3"]]
    assert (seeds["monolithic SPSA"] - seeds["SOMA N=2"] - seeds.difference).abs().max() < 1.1e-4
    assert (seeds.mean() - t7.loc["mean"]).abs().max() < 1e-4 and (seeds.std() - t7.loc["sample standard deviation"]).abs().max() < 1e-4
    t3 = grid("tab03")["GPU-hours"]
    assert [256 * 4.16e6 * s / 3600 for s in (0.142, 0.168, 0.140)] == pytest.approx([t3[n] for n in ("Recorded expert mean times", "Fixed 0.168-second reference", "Fixed 0.140-second normalization")], rel=4e-3)
    assert sorted(grid("tab09")["training compute"]) == sorted(grid("tab04")["training compute"])   # the same checkpoints
    assert grid("tab12").throughput["SOMA N=256"] / grid("tab12").throughput["SOMA N=8"] == pytest.approx(9.19, rel=2e-3)

def test_the_papers_counts_are_those_of_our_models():
    t2 = grid("tab02")
    for name, row in t2.iterrows():
        N, d = int(name.removeprefix("N=")), int(row.d)
        model = ModelConfig(d=d)
        ours = (count_ensemble(model, N), count_body(model))
        assert ours == pytest.approx((row["ensemble parameters"], row["expert body parameters"]), rel=2e-3)

# -- a small repository, to break ------------------------------------------------------------------------------------

def cell(source, *tags): return dict(cell_type="code", source=source, metadata=dict(tags=list(tags)) if tags else {}, outputs=[], execution_count=None)

def write_notebook(path, *cells):
    path.write_text(json.dumps(dict(cells=list(cells), metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")), nbformat=4, nbformat_minor=4)))

IMPORTS = "from matplotlib.figure import Figure\nfrom soma.report import Experiment, markdown_table"
DRAW = '''def draw_{id}(table):
    fig = Figure(figsize=(3, 2))
    fig.subplots().plot(table.step, table.value)
    return fig
def verdict_{id}(table): return "holds", f"ends at {{table.value.iloc[-1]:.4f}}"'''
RUN = '''run = experiment.run(dict(updates=updates), lambda folder: [0.5**t for t in range(updates)], operations=10 * updates)
{id} = experiment.tidy("{id}", [dict(step=t, metric="loss", value=v) for t, v in enumerate(run.value)], run_id=run.id, seed=1)'''
SAVE = 'experiment.save("{id}", {id}, draw_{id}, verdict_{id})'

def small(**parameters): return dict(small=dict(parameters=parameters, runs=1, operations=10 * parameters["updates"], seconds=4, memory_mb=300, disk_mb=1))

def entries(**changes): return {i: {**e, "presets": {}, "verdict": "not run", "number": ""} | changes.get(i, {}) for i, e in MANIFEST.items()}

def write_manifest(root, manifest): (root/"figures/manifest.yml").write_text(yaml.safe_dump(manifest, sort_keys=False))

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "(root, faults, progress): two notebooks, the second of which raises after its first artifact; all asked for, with two ids that cannot be made."
    root = tmp_path_factory.mktemp("clone")
    (root/"nbs/experiments").mkdir(parents=True)
    shutil.copytree(ROOT/"figures/reported", root/"figures/reported")
    head = cell('preset = "smoke"\nupdates = 3\nnames = ["a"]', "parameters"), cell(IMPORTS)
    def part(id): return cell(RUN.format(id=id)), cell(DRAW.format(id=id), "draw"), cell(SAVE.format(id=id))
    write_notebook(root/"nbs/experiments/e06_independent_losses.ipynb", *head, cell('experiment = Experiment("e06_independent_losses", globals())'), *part("fig04"), cell("assert len(fig04) == updates", "check"))
    write_notebook(root/"nbs/experiments/e07_scaling_sweeps.ipynb", *head, cell('experiment = Experiment("e07_scaling_sweeps", globals())'), *part("fig07"),
                   cell("raise ValueError('the moon is full\\nsecond line')"), *part("fig08"))
    manifest = entries(fig04=dict(presets=small(updates=4)), fig07=dict(presets=small(updates=5)), fig08=dict(presets=small(updates=5)))
    write_manifest(root, manifest)
    said = []
    faults = reproduce(["fig04", "fig99", "fig08", "fig07", "fig01"], "small", root, say=said.append)
    for i in ("fig04", "fig07"): manifest[i] |= {k: json.loads((root/f"figures/small/{i}.json").read_text())[k] for k in ("verdict", "number")}
    write_manifest(root, manifest)
    return root, faults, said

@pytest.fixture
def clone(made, tmp_path):
    "A copy of it to break."
    return Path(shutil.copytree(made[0], tmp_path/"clone"))

def files(folder): return sorted(p.name for p in folder.iterdir())

def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))

def test_a_failure_is_one_line_and_the_rest_is_made(made):
    root, faults, said = made
    assert faults == ["fig99: unknown; soma reproduce --list shows the ids",
                      "fig01: cannot be made yet: its notebook e08_fixed_size is still to be written",
                      "fig08: e07_scaling_sweeps, code cell 7 (raise ValueError('the moon is full\\nsecond line')): ValueError: the moon is full"]
    assert files(root/"figures/small") == [f"{i}.{s}" for i in ("fig04", "fig07") for s in ("csv", "json", "svg")]
    assert files(root/"runs/reproduce/small") == ["e06_independent_losses.ipynb", "e07_scaling_sweeps.failed.ipynb"]
    assert said[0] == "[1/2] fig04: e06_independent_losses at preset small, about 4 s" and re.match(r"\[1/2\] fig04: made in \d+ s, in figures/small", said[1])

def test_the_runner_passes_the_manifests_parameters(made):
    table, record = read_rows(made[0]/"figures/small/fig04.csv"), json.loads((made[0]/"figures/small/fig04.json").read_text())
    assert table.value.tolist() == [1, 0.5, 0.25, 0.125] and set(table.preset) == {"small"} and set(table.seed) == {1}
    assert record["parameters"] == dict(updates=4, names=["a"]) and (record["runs"], record["operations"]) == (1, 40)
    assert record["command"] == "soma reproduce fig04 --preset small" and record["source"] == sources(made[0]/"nbs/experiments/e06_independent_losses.ipynb")
    assert record["memory_mb"] > 50 and set(record["versions"]) >= {"torch", "numpy"}

def never(*args): raise AssertionError("a notebook was run")

def test_what_is_made_is_not_run_again(clone, monkeypatch):
    monkeypatch.setattr(report, "run_notebook", never)
    said = []
    assert reproduce(["fig04"], "small", clone, say=said.append) == [] and said == ["[1/1] fig04: made already, figures/small/fig04.svg"]
    picture = (clone/"figures/small/fig04.svg").read_bytes()
    (clone/"figures/small/fig04.svg").write_text("a scribble")
    assert reproduce(["fig04"], "small", clone, say=said.append) == [] and (clone/"figures/small/fig04.svg").read_bytes() == picture

@pytest.mark.parametrize("change", ["source", "parameter", "csv", "record"])
def test_what_is_changed_is_run_again(clone, monkeypatch, change):
    ran = []
    monkeypatch.setattr(report, "run_notebook", lambda root, job, preset: ran.append(job.ids))
    if change == "source": edit(clone/"nbs/experiments/e06_independent_losses.ipynb", "0.5**t", "0.4**t")
    if change == "parameter": edit(clone/"figures/manifest.yml", "updates: 4", "updates: 6")
    if change == "csv": edit(clone/"figures/small/fig04.csv", "0.25", "0.26")
    if change == "record": (clone/"figures/small/fig04.json").write_text("{")
    assert reproduce(["fig04"], "small", clone, say=lambda text: None) == ["fig04: e06_independent_losses ended without making it"] and ran == [["fig04"]]

def test_names_and_kinds_of_parameters_are_held_against_the_notebook(clone, monkeypatch):
    monkeypatch.setattr(report, "run_notebook", never)
    edit(clone/"figures/manifest.yml", "updates: 4", "update: 4")
    for faults in (reproduce(["fig04"], "small", clone), dry_run(["fig04"], "small", clone)[1], check(clone)[0]):
        assert faults == ["fig04: e06_independent_losses: the manifest sets update at preset small; the notebook has updates, names"]
    edit(clone/"figures/manifest.yml", "update: 4", "updates: 1e1")   # YAML reads a word, not a number
    assert reproduce(["fig04"], "small", clone) == ["fig04: e06_independent_losses: the manifest sets updates = '1e1' at preset small; the notebook expects a value like 3"]

def test_without_papermill_one_line_says_what_to_install(clone, monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)
    (clone/"figures/small/fig04.csv").unlink()
    assert reproduce(["fig04"], "small", clone, say=lambda text: None) == ["fig04: papermill is missing, which runs the notebooks; pip install -e '.[reproduce]'"]

def test_what_an_artifact_needs_comes_first():
    manifest = entries(fig04=dict(presets=small(updates=1), needs=["tab06"]), tab06=dict(presets=small(updates=1), needs=["fig07"]), fig07=dict(presets=small(updates=1)))
    assert [j.ids for j in plan(manifest, ["fig04"], "small")[0]] == [["fig07"], ["tab06"], ["fig04"]]
    manifest["fig07"]["presets"] = {}
    assert plan(manifest, ["fig04"], "small") == ([], ["fig04: needs tab06, which needs fig07, which cannot be made yet: its notebook e07_scaling_sweeps is still to be written"])
    assert [j.ids for j in plan(entries(fig04=dict(presets=small(updates=1))), ["all"], "small")[0]] == [["fig04"]]
    with pytest.raises(SomaError, match="--preset smal: unknown; choose one of paper, small, smoke"): plan(manifest, ["fig04"], "smal")

def test_dry_run_says_what_would_run(clone):
    table, faults = dry_run(["fig04", "fig08"], "small", clone)
    rows = [line.split() for line in table.splitlines()]
    assert faults == [] and rows[1] == "fig04 e06_independent_losses 1 40 4 s 300 MB 1 MB made".split() and rows[2][:2] == ["fig07,", "fig08"] and rows[2][-3:] == "made, not made".split()
    assert rows[-1] == "preset small; still to run: 4 s".split()

# -- what check notices ----------------------------------------------------------------------------------------------

BOOK, CSV, SVG = "nbs/experiments/e06_independent_losses.ipynb", "figures/small/fig04.csv", "figures/small/fig04.svg"
PLANTED = {
    "csv taken away": (lambda r: (r/CSV).unlink(), f"fig04: {CSV} is missing"),
    "csv changed": (lambda r: edit(r/CSV, "0.25", "0.24"), f"fig04: {CSV} was changed after it was made"),
    "picture taken away": (lambda r: (r/SVG).unlink(), f"fig04: {SVG} is missing"),
    "picture changed": (lambda r: edit(r/SVG, "<path", "<path "), f"fig04: {SVG} is not what its CSV gives"),
    "record taken away": (lambda r: (r/"figures/small/fig04.json").unlink(), "fig04: figures/small/fig04.json is missing"),
    "record damaged": (lambda r: (r/"figures/small/fig04.json").write_text("[]"), "fig04: figures/small/fig04.json is not a record"),
    "all of a result taken away": (lambda r: [p.unlink() for p in (r/"figures/small").glob("fig04.*")], "fig04: figures/manifest.yml says 'holds', but figures/small has no result"),
    "notebook taken away": (lambda r: (r/BOOK).unlink(), f"fig04: no notebook {BOOK}"),
    "experiment changed": (lambda r: edit(r/BOOK, "0.5**t", "0.4**t"), f"fig04: {BOOK} has changed since"),
    "drawing changed": (lambda r: edit(r/BOOK, "(3, 2)", "(3, 3)"), f"fig04: {SVG} is not what its CSV gives"),
    "drawing uses more than the CSV": (lambda r: edit(r/BOOK, "plot(table.step", "plot(fig04.step"), "fig04: cannot be redrawn from its CSV (NameError"),
    "drawing taken away": (lambda r: edit(r/BOOK, "def draw_fig04", "def paint_fig04"), f"fig04: no cell of {BOOK} that is tagged draw defines draw_fig04"),
    "judgement changed": (lambda r: edit(r/BOOK, "ends at", "arrives at"), "fig04: its CSV now gives the verdict 'holds' (arrives at 0.1250), its record says 'holds' (ends at 0.1250)"),
    "parameter taken away": (lambda r: edit(r/BOOK, "updates = 3", "steps = 3"), "fig04: e06_independent_losses: the manifest sets updates at preset small; the notebook has steps, names"),
    "parameter renamed in the manifest": (lambda r: edit(r/"figures/manifest.yml", "updates: 4", "updatse: 4"), "fig04: e06_independent_losses: the manifest sets updatse"),
    "parameter value changed": (lambda r: edit(r/"figures/manifest.yml", "updates: 4", "updates: 7"), "fig04: made with updates = 4, the manifest and its notebook now say updates = 7"),
    "default changed": (lambda r: edit(r/BOOK, "[\\\"a\\\"]", "[\\\"b\\\"]"), "fig04: made with names = ['a'], the manifest and its notebook now say names = ['b']"),
    "tag parameters lost": (lambda r: edit(r/BOOK, '"parameters"', '"parameter"'), "fig04: "),
    "verdict embellished": (lambda r: edit(r/"figures/manifest.yml", "ends at 0.1250", "ends at 0.0001"), "fig04: figures/manifest.yml says 'holds' (ends at 0.0001), the result says 'holds' (ends at 0.1250)"),
    "cost understated": (lambda r: edit(r/"figures/manifest.yml", "operations: 40", "operations: 4"), "fig04: figures/manifest.yml says 1 runs and 4 operations at preset small; it took 1 and 40"),
    "entry taken away": (lambda r: edit(r/"figures/manifest.yml", "fig10:", "fig18:"), "{r}/figures/manifest.yml: fig10: has no entry (and 2 more)"),
    "not YAML": (lambda r: (r/"figures/manifest.yml").write_text("fig01: {"), "{r}/figures/manifest.yml: not readable as YAML"),
    "paper's number changed": (lambda r: edit(r/"figures/reported/tab02.csv", "8.33M", "8.34M"), "figures/reported/tab02.csv is missing or was changed"),
    "paper's table taken away": (lambda r: (r/"figures/reported/tab13.csv").unlink(), "figures/reported/tab13.csv is missing or was changed"),
}

def test_check_passes_what_is_right(clone):
    assert check(clone) == ([], [])
    assert check(clone, "smoke") == ([], [])

@pytest.mark.parametrize("what", PLANTED)
def test_check_notices(clone, what):
    plant, says = PLANTED[what]
    plant(clone)
    faults, _ = check(clone)
    assert len(faults) == 1 and faults[0].startswith(says.replace("{r}", str(clone))), faults

def test_a_changed_room_makes_a_result_stale_which_is_a_note(clone, monkeypatch):
    monkeypatch.setattr(report, "sources", lambda path: sources(path) | dict(rooms=dict(core="0" * 16)))
    faults, notes = check(clone)
    assert faults == [] and notes[0] == "fig04: stale: soma/core.py changed since; run soma reproduce fig04 --preset small"
    assert "small (stale)" in listing(clone)

def test_another_matplotlib_is_a_note_and_the_verdict_is_still_compared(clone, monkeypatch):
    import matplotlib
    monkeypatch.setattr(matplotlib, "__version__", "9.9")
    faults, notes = check(clone)
    assert faults == [] and notes[0].startswith("fig04: drawn by matplotlib ") and "here is 9.9" in notes[0]

@pytest.mark.parametrize("change, says", [
    (dict(verdict="true"), "verdict 'true': must be one of"),
    (dict(verdict="holds"), "a verdict needs its number"),
    (dict(outputs=["fig04.csv"]), "outputs ['fig04.csv']: must be"),
    (dict(place="beyond the paper"), "place 'beyond the paper': must be 'beyond the paper' for our own questions, and only for them"),
    (dict(needs=["fig04"]), "needs ['fig04']: must be a list of other ids"),
    (dict(claim=""), "title, place, notebook and claim must be text"),
    (dict(presets=dict(tiny={})), "preset 'tiny': must be one of"),
    (dict(presets=dict(small=dict(parameters={}))), "small: must have parameters and the numbers"),
    (dict(presets=dict(small=small(updates=1)["small"] | dict(operations="1e9"))), "small: must have parameters and the numbers"),
    (dict(notebook="e07_scaling_sweeps", presets=small(updates=2)), "presets differ from those of another artifact of e07_scaling_sweeps"),
])
def test_a_fault_in_an_entry_is_named(change, says):
    faults = manifest_faults(entries(fig04=change, fig07=dict(presets=small(updates=1)) if "notebook" in change else {}))
    assert [f for f in faults if says in f], faults

# -- in a notebook ---------------------------------------------------------------------------------------------------

@pytest.fixture
def experiment(clone, monkeypatch):
    "The notebook's names after all of its cells but the last three."
    monkeypatch.chdir(clone/"nbs/experiments")
    scope = {}
    for _, source in code_cells(clone/BOOK)[:-2]: exec(source, scope)
    return scope

def test_an_interrupted_write_is_a_result_not_made(clone, experiment, monkeypatch):
    def full(path, data): raise SomaError(f"{path}: cannot be written (No space left on device); nothing was changed")
    first = experiment["experiment"].save("fig04", experiment["fig04"], experiment["draw_fig04"], experiment["verdict_fig04"])
    assert state(clone, entries(fig04=dict(presets=dict(smoke=small(updates=3)["small"]))), "fig04", "smoke").word == "made" and first.verdict == "holds"
    write = report.atomic_write
    monkeypatch.setattr(report, "atomic_write", lambda path, data: (full if path.suffix == ".svg" else write)(path, data))
    longer = experiment["experiment"].tidy("fig04", [dict(step=0, metric="loss", value=7.0)])
    with pytest.raises(SomaError, match="No space left"): experiment["experiment"].save("fig04", longer, experiment["draw_fig04"], experiment["verdict_fig04"])
    assert state(clone, load_manifest(clone), "fig04", "smoke").word == "damaged" and files(clone/"figures/smoke") == ["fig04.csv", "fig04.json", "fig04.svg"]

def test_an_interrupted_run_finds_its_folder_and_a_finished_one_is_kept(experiment):
    def make(folder):
        if (folder/"half").exists(): return "finished"
        (folder/"half").write_text("x"); raise KeyboardInterrupt
    run = experiment["experiment"].run
    with pytest.raises(KeyboardInterrupt): run(dict(seed=1), make)
    assert run(dict(seed=1), make).value == "finished" and run(dict(seed=1), never).value == "finished"
    assert run(dict(seed=1), never).id != run(dict(seed=2), lambda folder: 0).id

def test_a_shared_run_is_made_once_for_all_notebooks(clone, experiment, monkeypatch):
    from functools import partial
    monkeypatch.chdir(clone)
    mine, other = experiment["experiment"], Experiment("e07_scaling_sweeps", dict(preset="smoke", updates=3, names=["a"]))
    def run(e, config, make, **more): return e.run(config, make, shared=True, **more)
    first = run(mine, dict(n=1), report.check_reported, operations=5)
    assert first == run(other, dict(n=1), partial(report.check_reported)) and first.folder.parent == clone/"runs/shared" and re.fullmatch(rf"{first.id}-[0-9a-f]{{8}}", first.folder.name)
    table = mine.tidy("fig04", [dict(step=0, metric="loss", value=1.0)])
    assert mine.record("fig04", table)["runs"] == 1 + 1 and mine.record("fig04", table)["operations"] == 30 + 5
    assert run(mine, dict(n=2), report.check_reported).folder != first.folder != run(mine, dict(n=1), partial(report._line)).folder    # another configuration, another function
    monkeypatch.setattr(report, "reached", lambda names: {n: "0" * 16 for n in names})
    assert run(mine, dict(n=1), report.check_reported).folder != first.folder and mine.run(dict(n=1), lambda folder: 3).value == 3    # another text of the room; not shared

def test_a_shared_run_waits_for_the_notebook_that_is_at_it(clone, experiment, monkeypatch):
    import threading, time
    calls = []
    def slow(folder): calls.append(folder); time.sleep(0.3); return len(calls)
    slow.__module__, slow.__qualname__ = "soma.core", "slow"
    threads = [threading.Thread(target=lambda: experiment["experiment"].run(dict(n=1), slow, shared=True)) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(calls) == 1 and experiment["experiment"].run(dict(n=1), slow, shared=True).value == 1

@pytest.mark.parametrize("make, name", [(lambda folder: 1, "<lambda>"), (never, "never"), (print, "print"), (files, "files")])
def test_a_shared_run_of_a_notebooks_own_function_is_refused(experiment, make, name):
    with pytest.raises(SomaError, match=f"{name}: a shared run needs a room's function"): experiment["experiment"].run(dict(n=1), make, shared=True)

@pytest.mark.parametrize("rows, says", [
    ([dict(metric="loss")], "no value"), ([dict(value=1.0)], "no metric"), ([], "no rows"), ([dict(metric="loss", value=1.0, colour="red")], "no column colour"),
])
def test_a_table_without_the_shape_is_refused(experiment, rows, says):
    with pytest.raises(SomaError, match=says): experiment["experiment"].tidy("fig04", rows)

@pytest.mark.parametrize("draw, verdict, says", [
    (lambda t: None, lambda t: ("holds", "1"), "must return a matplotlib Figure or Markdown"),
    (lambda t: "| a |", lambda t: ("holds", "1"), "makes fig04.csv, fig04.md; the manifest says fig04.csv, fig04.svg"),
    (lambda t: "| a |", lambda t: ("not run", ""), "the first must be one of holds, does not hold, not resolved"),
])
def test_a_picture_or_verdict_of_the_wrong_kind_is_refused(clone, experiment, draw, verdict, says):
    with pytest.raises(SomaError, match=re.escape(says)): experiment["experiment"].save("fig04", experiment["fig04"], draw, verdict)
    assert not list(clone.glob("figures/smoke/*"))

def test_an_artifact_of_another_notebook_is_refused(experiment):
    with pytest.raises(SomaError, match="the manifest says that e07_scaling_sweeps makes it"): experiment["experiment"].save("fig07", experiment["fig04"], None, None)
    with pytest.raises(SomaError, match="the table is of fig04 at smoke"):
        experiment["experiment"].name = "e07_scaling_sweeps"
        experiment["experiment"].save("fig07", experiment["fig04"], None, None)

# -- the command -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args, says", [
    (["fig04", "--preset", "smal"], "soma: --preset smal: unknown; choose one of paper, small, smoke\n"),
    (["fig99"], "soma: fig99: unknown; soma reproduce --list shows the ids\n"),
    ([], "soma: reproduce: name artifacts (fig04 tab02 …) or all; soma reproduce --list shows them\n"),
])
def test_the_command_says_what_is_wrong_in_one_line(clone, monkeypatch, capsys, args, says):
    monkeypatch.chdir(clone)
    assert main(["reproduce", *args]) == 2 and capsys.readouterr().err == says

def test_the_command_lists_plans_and_checks(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for args in (["--list"], ["fig04", "--dry-run"], ["--check"], ["fig04"]): assert main(["reproduce", *args]) == 0
    out = capsys.readouterr().out
    assert "38 artifacts, 2 with a verdict, 36 not run; beyond the paper" in out and "still to run: 0 s" in out and "byte for byte" in out and "fig04: made already" in out
    (clone/CSV).unlink(); edit(clone/"figures/small/fig07.svg", "<path", "<path ")
    assert main(["reproduce", "--check"]) == 2
    assert [line.split(";")[0] for line in capsys.readouterr().err.splitlines()] == [f"soma: fig04: {CSV} is missing", "soma: fig07: figures/small/fig07.svg is not what its CSV gives"]

# -- costs -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", ["smoke", "small", "paper"])
def test_the_operations_of_fig04_are_counted_not_guessed(preset):
    "2·T·P·B·F of Eq. 21 a body update, a multiply-add counted as two: two seeds, four experts from each, then for each start and seed two arms of four experts, scoring them, and their variances."
    from soma.core import PRESETS
    from soma.models import ops_per_token
    entry, recipe = MANIFEST["fig04"], PRESETS[preset]
    p = report.expected_parameters(report.notebook_path(ROOT, entry), entry, preset)
    F, arms, scores = ops_per_token(ModelConfig(d=p["d"], d_E=p["d"])), (p["score_early"], p["score_late"]), 2 * len(p["seeds"])
    seed, update = (2 * c.T * P * c.B * F for c, P in ((recipe.seed, recipe.seed.P), (recipe.expert, p["P"])))
    documents = min(p["documents"], 323)   # test windows of pdmix
    counted = seed * sum(p["seed_updates"]) + 4 * update * (sum(p["start_updates"]) + scores * sum(a[-1] for a in arms)) + 4 * scores * sum(map(len, arms)) * documents * 1024 * F
    counted += 2 * (1 + scores) * 4 * 2 * 2 * p["directions"] * 64 * recipe.expert.T * F   # the variance at each start and at the end of each arm: four experts, two batches of 64, both signs
    assert entry["presets"][preset]["operations"] == pytest.approx(counted, rel=1e-9)
    if preset == "paper":
        printed = reported("fig04", root=ROOT).query("column == 'operations per arm'").set_index("row").value
        assert [4 * a[-1] * update for a in arms] == pytest.approx([printed["early"], printed["late"]], rel=2e-3)
