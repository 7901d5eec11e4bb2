"The laws of the house: layers point down, what is made is in sync with what it is made from, and a clone installs itself."
import ast, difflib, gzip, json, os, re, shutil, stat, subprocess, sys, tomllib, zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from soma.report import links, readme

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {m[3]: (int(m[1]), m[2]) for p in (ROOT/"nbs").glob("*.ipynb") if (m := re.match(r"(\d\d)([a-z]?)_(\w+)$", p.stem))}  # name -> number, letter
NOTEBOOKS = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
MODULES = sorted(p for p in (ROOT/"soma").glob("*.py") if not p.name.startswith("_"))
TEXT = {p: p.read_text(encoding="utf-8") for p in (ROOT/"settings.ini", ROOT/"pyproject.toml", ROOT/"constraints.txt")}
PROJECT = tomllib.loads(TEXT[ROOT/"pyproject.toml"])

def tracked()->list:
    "Every file that is or would be committed."
    r = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True)
    if r.returncode: pytest.skip("not a git checkout")
    return [ROOT/name for name in r.stdout.split("\0") if name and (ROOT/name).is_file()]

def run(*command, cwd, **env):
    "Run a command as a user would: without the flag that makes nbdev's commands do nothing inside its tests."
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "IN_TEST"} | env)

# -- layers -----------------------------------------------------------------------------------------------------------

def imported_rooms(source:str)->set:
    "Names of soma's modules that a piece of Python imports, in whichever form, at the top or inside a function."
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("soma.")}
        if isinstance(node, ast.ImportFrom):
            path = ("soma." * bool(node.level) + (node.module or "")).rstrip(".")
            if path == "soma": names |= {a.name for a in node.names}
            elif path.startswith("soma."): names.add(path.split(".")[1])
    return names

def code_cells(path:Path)->str:
    "The Python of a notebook; shell and magic lines become comments."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return re.sub(r"^(\s*)[!%]", r"\1pass #", "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), flags=re.M)

def test_import_forms_are_seen():
    seen = imported_rooms("import soma.a\nfrom soma.b import x\nfrom soma import c\nfrom .d import y\nfrom . import e\ndef f():\n    from soma.g import z\nimport torch, os.path")
    assert seen == set("abcdeg")

def test_rooms_have_numbers_of_their_own():
    assert {p.stem for p in MODULES} <= set(ROOMS) and len(set(ROOMS.values())) == len(ROOMS)

@pytest.mark.parametrize("name", sorted(ROOMS, key=ROOMS.get))
def test_a_room_imports_only_rooms_with_smaller_numbers(name):
    number, letter = ROOMS[name]
    module, notebook = ROOT/"soma"/f"{name}.py", ROOT/"nbs"/f"{number:02}{letter}_{name}.ipynb"
    assert {r for r in imported_rooms(module.read_text()) & ROOMS.keys() if ROOMS[r] >= ROOMS[name]} == set()
    assert {r for r in imported_rooms(code_cells(notebook)) & ROOMS.keys() if ROOMS[r] > ROOMS[name]} == set()   # a lesson may import its own room

# -- functions and notebooks ------------------------------------------------------------------------------------------

def functions(path:Path):
    "(dotted name, node) of every function and class in a module."
    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if named: yield f"{prefix}.{child.name}", child
            yield from walk(child, f"{prefix}.{child.name}" if named else prefix)
    return walk(ast.parse(path.read_text()), path.stem)

@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_public_names_say_what_they_do_in_one_line(path):
    tree = ast.parse(path.read_text())
    public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
    public += [m for c in public if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
    assert [n.name for n in public if not (doc := ast.get_docstring(n)) or "\n" in doc] == []

@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_functions_have_at_most_forty_lines(path):
    lengths = {name: n.end_lineno - n.lineno + 1 for name, n in functions(path) if not isinstance(n, ast.ClassDef)}
    assert {name: k for name, k in lengths.items() if k > 40} == {}

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_a_story_of_at_most_ninety_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first, last = ("".join(next(c for c in order if c["cell_type"] == "markdown")["source"]) for order in (cells, cells[::-1]))
    assert len(cells) <= 90
    if path.parent.name == "nbs": assert re.match(r"# .+\n\n> [^\n]+(\n|$)", first)
    if path.stem != "index" and path.parent.name == "nbs": assert last.startswith("## What is not here")

# -- what is made is in sync with what it is made from ---------------------------------------------------------------

@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The notebooks and nbdev's configuration in a folder of their own, exported and cleaned there."
    there = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT/"nbs", there/"nbs", symlinks=True, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (there/"soma").mkdir()
    for path in TEXT: shutil.copy(path, there)
    for command in ("export", "clean"):
        r = run(sys.executable, "-c", f"from nbdev.cli import nbdev_{command} as f; f()", cwd=there)
        assert r.returncode == 0, r.stderr
    return there

def test_export_is_in_sync(copy):
    made, here = ({p.relative_to(top): p.read_text() for p in (top/"soma").rglob("*.py")} for top in (copy, ROOT))
    changed = [str(p) for p in sorted(made.keys() | here.keys()) if made.get(p) != here.get(p)]
    assert changed == [], "run nbdev_export; " + "".join(list(difflib.unified_diff(*((d.get(Path(changed[0])) or "").splitlines(True) for d in (here, made))))[:20])

def test_notebooks_are_clean(copy):
    assert [p.name for p in NOTEBOOKS if p.read_bytes() != (copy/p.relative_to(ROOT)).read_bytes()] == [], "run nbdev_clean"
    for p in NOTEBOOKS:
        cells = json.loads(p.read_text(encoding="utf-8"))["cells"]
        assert {k for c in cells for k in c["metadata"]} <= {"tags"} and all(c.get("execution_count") is None for c in cells)

def test_cleaning_keeps_the_tag_that_papermill_needs(copy):
    from papermill import inspect_notebook
    cell = dict(cell_type="code", execution_count=7, id="00000000", metadata=dict(tags=["parameters"], collapsed=True), outputs=[], source="preset = 'smoke'")
    book = copy/"nbs"/"e00_tagged.ipynb"
    book.write_text(json.dumps(dict(cells=[cell], metadata=dict(kernelspec=dict(name="python3", display_name="x", language="python")), nbformat=4, nbformat_minor=5)))
    assert run(sys.executable, "-c", f"from nbdev.clean import nbdev_clean; nbdev_clean({str(book)!r})", cwd=copy).returncode == 0
    after = json.loads(book.read_text())["cells"][0]
    assert after["metadata"] == {"tags": ["parameters"]} and after["execution_count"] is None
    assert inspect_notebook(str(book))["preset"]["default"] == "'smoke'"

def test_readme_is_the_index_notebook():
    made = readme(json.loads((ROOT/"nbs/index.ipynb").read_text(encoding="utf-8")))
    assert (ROOT/"README.md").read_text(encoding="utf-8") == made, "run make readme"
    assert not re.search(r"pip install soma|badge", made)

@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "LOG.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    assert [t for t in links((ROOT/page).read_text(encoding="utf-8")) if not (ROOT/t).exists()] == []

def test_every_room_is_in_the_readme_and_on_the_site_in_order():
    rooms = [f"{n:02}{letter}_{name}.ipynb" for name, (n, letter) in sorted(ROOMS.items(), key=lambda x: x[1])]
    site = yaml.safe_load((ROOT/"_quarto.yml").read_text())
    assert [c for c in site["website"]["sidebar"]["contents"] if not c.startswith("experiments")] == ["index.ipynb", *rooms]
    assert [Path(t).name for t in links((ROOT/"README.md").read_text(encoding="utf-8")) if re.match(r"nbs/\d\d", t)] == rooms
    assert (ROOT/"nbs/_quarto.yml").is_symlink() and (ROOT/"nbs/_quarto.yml").resolve() == ROOT/"_quarto.yml"

# -- the top of the repository ---------------------------------------------------------------------------------------

def test_settings_agree():
    parser = ConfigParser(); parser.read(ROOT/"settings.ini")
    ini, project, nbdev3 = dict(parser["DEFAULT"]), PROJECT["project"], PROJECT["tool"]["nbdev"]
    said = {k: ini[k] for k in ("lib_name", "version", "description", "min_python", "author")}
    assert said == dict(lib_name=project["name"], version=project["version"], description=project["description"],
                        min_python=project["requires-python"].removeprefix(">="), author=project["authors"][0]["name"])
    assert ini["keywords"].split() == project["keywords"] and (ini["license"], project["license"]) == ("apache2", "Apache-2.0")
    def as_ini(v): return " ".join(v) if isinstance(v, list) else str(v)
    assert {k: ini[k] for k in nbdev3} == {k: as_ini(v) for k, v in nbdev3.items()}
    assert set(ini) - set(nbdev3) == {*said, "repo", "license", "keywords", "copyright", "update_pyproject", "git_url", "doc_host", "doc_baseurl"}
    assert re.fullmatch(r'__version__ = "(.*)"\n', (ROOT/"soma/__init__.py").read_text())[1] == project["version"]

def test_every_direct_dependency_is_pinned_inside_its_range():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    pins = {canonicalize_name(r.name): r for r in (Requirement(line) for line in TEXT[ROOT/"constraints.txt"].splitlines() if line and line[0] != "#")}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(r) for r in sum(extras.values(), PROJECT["project"]["dependencies"]) if not r.startswith("soma[")]
    assert [f"soma[{name}]" for name in extras if name != "dev"] == [r for r in extras["dev"] if r.startswith("soma[")]   # dev has every extra
    for r in wanted: assert r.specifier.contains(str(pins[canonicalize_name(r.name)].specifier).removeprefix("==")), r

def test_nothing_else_at_the_top():
    plan = set("README.md settings.ini pyproject.toml constraints.txt Makefile _quarto.yml nbs soma tests figures data_cards .ci LICENSE CHANGELOG.md "
               "CONTRIBUTING.md LOG.md .gitignore".split())
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} - plan == set()

def test_text_names_no_machine_and_no_registry():
    places = ["/wo" "rk/", "/ro" "ot/", "/ho" "me/", ".lib" "rary", "site-pack" "ages/", "pypi" ".org", "python" "hosted", "npm" "js.org",
              "anaconda" ".org", "download.py" "torch", str(ROOT)]   # in halves, or this file would be found
    found = []
    for p in tracked():
        try: text = p.read_text(encoding="utf-8")
        except UnicodeDecodeError: continue
        found += [(str(p.relative_to(ROOT)), place) for place in places if place in text]
    assert found == []

# -- make ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def clone(tmp_path):
    "The three files that installation depends on, and a pretended interpreter in .venv that writes down what it was asked."
    for name in ("Makefile", "pyproject.toml", "constraints.txt"): shutil.copy(ROOT/name, tmp_path)
    (tmp_path/".venv/bin").mkdir(parents=True)
    program(tmp_path/".venv/bin/python", 'echo "$@" >> asked; case "$*" in *"pip install"*) exit ${PIP_FAILS:-0};; esac')
    return tmp_path

def program(path:Path, script:str):
    path.write_text(f"#!/bin/sh\n{script}\n"); path.chmod(path.stat().st_mode | stat.S_IXUSR)

def make(where, *args, **env): return run("make", *args, cwd=where, PYTHON=sys.executable, TORCH_INDEX="", **env)

def test_stamp_is_written_only_after_pip_succeeds(clone):
    failed = make(clone, ".venv/.ready", PIP_FAILS="1")
    assert failed.returncode == 2 and not (clone/".venv/.ready").exists()
    assert make(clone, ".venv/.ready").returncode == 0 and (clone/".venv/.ready").exists()
    assert (clone/"asked").read_text().splitlines()[-1] == "-m pip install -e .[dev] -c constraints.txt"

def test_stamp_depends_on_both_files(clone):
    make(clone, ".venv/.ready")
    stamp = (clone/".venv/.ready").stat().st_mtime
    for name in ("pyproject.toml", "constraints.txt"): os.utime(clone/name, (stamp - 9, stamp - 9))
    for target in ("demo", "test", "lab", "readme", "docs"): assert "pip install" not in make(clone, "-n", target).stdout
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(clone/name, (stamp + 9, stamp + 9))
        for target in ("demo", "test", "lab", "readme", "docs"): assert "pip install -e" in make(clone, "-n", target).stdout
        os.utime(clone/name, (stamp - 9, stamp - 9))

def test_torch_build_is_chosen_before_the_rest(clone):
    assert run("make", ".venv/.ready", cwd=clone, PYTHON=sys.executable, TORCH_INDEX="file:///wheels").returncode == 0
    assert [line for line in (clone/"asked").read_text().splitlines() if "install" in line] == [
        "-m pip install --no-deps --index-url file:///wheels -c constraints.txt torch", "-m pip install -e .[dev] -c constraints.txt"]

@pytest.mark.parametrize("python, gpp, says", [
    (None, True, "python3.11 or newer is missing"),
    ("exit 1", True, "python3.11 or newer is missing"),
    ('case "$*" in *ensurepip*) exit 1;; esac', True, "python3-venv is missing"),
    ("exit 0", False, "g++ is missing"),
    ("exit 0", True, None),
])
def test_the_missing_prerequisite_is_named(clone, tmp_path_factory, python, gpp, says):
    bin = tmp_path_factory.mktemp("bin")
    for tool in ("make", "rm", "touch"): (bin/tool).symlink_to(shutil.which(tool))
    if python: program(bin/"python3", python)
    if gpp: program(bin/"g++", "exit 0")
    r = subprocess.run(["make", ".venv/.ready"], cwd=clone, capture_output=True, text=True, env=dict(PATH=str(bin)))
    told = [line for line in r.stderr.splitlines() if line.startswith("soma: ")]
    assert (r.returncode, len(told), (clone/".venv/.ready").exists()) == ((2, 1, False) if says else (0, 0, True))
    if says: assert says in told[0]

def test_a_notebook_that_hangs_is_ended_with_all_it_started(clone):
    make(clone, ".venv/.ready")
    program(clone/".venv/bin/nbdev_test", "(sleep 4; touch survivor) & wait")
    text = (clone/"Makefile").read_text(); assert "limit,600," in text
    (clone/"Makefile").write_text(text.replace("limit,600,", "limit,1,"))
    r = make(clone, "test")
    assert r.returncode == 2 and "over the time limit of 1 s" in r.stderr and "pytest" not in (clone/"asked").read_text()
    assert run("sleep", "4", cwd=clone).returncode == 0 and not (clone/"survivor").exists()

# -- the wheel -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    "(wheel, folder): the wheel, built without a network from a copy, and a folder outside the clone that it is installed in."
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"): shutil.copy(ROOT/name, source)
    shutil.copytree(ROOT/"soma", source/"soma", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    r = run(*pip, "wheel", source, "--no-index", "--no-build-isolation", "--no-deps", "-w", out, cwd=out)
    assert r.returncode == 0, r.stderr
    wheel, = out.glob("*.whl")
    r = run(*pip, "install", wheel, "--no-index", "--no-deps", "--target", out/"lib", cwd=out)
    assert r.returncode == 0, r.stderr
    return wheel, out/"lib"

def test_wheel_holds_the_library_and_nothing_else(installed):
    wheel, _ = installed
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if not n.startswith(f"soma-{PROJECT['project']['version']}.dist-info/")} == {str(p.relative_to(ROOT)) for p in (ROOT/"soma").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    meta = {n.rsplit("/", 1)[1]: zipfile.ZipFile(wheel).read(n).decode() for n in names if ".dist-info/" in n}
    assert "soma = soma.cli:main" in meta["entry_points.txt"] and "License-Expression: Apache-2.0" in meta["METADATA"] and "Apache License" in meta["LICENSE"]

def test_wheel_imports_outside_the_clone(installed, tmp_path):
    _, lib = installed
    r = run(sys.executable, "-c", "import soma.core; print(soma.core.__file__, soma.core.run_id(soma.core.PRESETS['paper']))", cwd=tmp_path, PYTHONPATH=str(lib))
    from soma.core import PRESETS, run_id
    assert r.stdout.split() == [str(lib/"soma/core.py"), run_id(PRESETS["paper"])], r.stderr

def test_wheel_trains_on_data_and_asks_for_it(installed, tmp_path):
    from soma.data import shipped_corpus
    _, lib = installed
    def soma(*argv): return run(sys.executable, "-c", "import sys, soma.cli; print(soma.cli.__file__); sys.exit(soma.cli.main())", *argv, cwd=tmp_path, PYTHONPATH=str(lib), OMP_NUM_THREADS="1")
    tiny = ["train", "-N", "2", "--preset", "smoke", "--model-d", "8", "--model-d-E", "8", "--quiet", "--workers", "1", "--out", "out"]
    asked = soma(*tiny)
    assert (asked.returncode, asked.stdout.split(), len(asked.stderr.splitlines())) == (2, [str(lib/"soma/cli.py")], 1) and "--data" in asked.stderr and list(tmp_path.iterdir()) == []
    with gzip.open(shipped_corpus(), "rt", encoding="utf-8") as f: (tmp_path/"mine.jsonl").write_text("".join(line for line, _ in zip(f, range(20))), encoding="utf-8")
    trained = soma(*tiny, "--data", "mine.jsonl")
    assert trained.returncode == 0 and "experts: 20 updates each" in trained.stdout, trained.stderr
    assert {p.parent.name for p in (tmp_path/"out").rglob("checkpoint.safetensors")} == {"seed", "0", "1"}
