"""What the repository and the wheel contain, and the rules that keep the layout working."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dustin_hf

ROOT = Path(__file__).parents[1]
LINKS = {
    "kernels": "../kernels",
    "model_patches": "../model_patches",
    "eval": "../eval",
    "demo_texts": "../examples/books",
}


def test_kernels_is_no_package():
    """transformers asks for a module `kernels`; a regular package of that name at the root would be found instead."""
    assert (ROOT / "kernels").is_dir() and not (ROOT / "kernels" / "__init__.py").exists()


def test_links_are_links():
    for name, target in LINKS.items():
        path = ROOT / "dustin_hf" / name
        assert path.is_symlink() and path.readlink() == Path(target)


def test_tests_are_no_package():
    assert not (ROOT / "tests" / "__init__.py").exists() and not (ROOT / "conftest.py").exists()


def test_public_names():
    assert sorted(dustin_hf.__all__) == [
        "BatchStreamer",
        "BatchTextStreamer",
        "DustinCache",
        "DustinConfig",
        "DustinGenerateOutput",
        "DustinHandle",
        "DustinProfile",
        "GenerationStats",
        "PolicyContext",
        "Selection",
        "SelectionPolicy",
        "Signals",
        "UnsupportedModelError",
        "disable",
        "enable",
        "register_policy",
        "unregister_policy",
    ]
    for name in dustin_hf.__all__:
        assert getattr(dustin_hf, name).__doc__
    assert set(dir(dustin_hf)) == set(dustin_hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dustin_hf.nothing  # noqa: B018


def test_readme_names_real_tests():
    """The README's table of what works is backed by tests that exist."""
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text()))
    assert len(named) > 20
    for name in named:
        assert name in sources or any(f"def {name}(" in source for source in sources.values()), name


def test_file_sizes():
    """One job a file: 400 lines, 600 for kernels, 150 for an architecture."""
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] not in ("dustin_hf", "kernels", "model_patches", "eval", "tests", "examples") or path.is_symlink():
            continue
        limit = 600 if parts[0] == "kernels" else 400
        assert len(path.read_text().splitlines()) <= limit, path


def test_extras_that_texts_name_exist():
    """Also by their normal form: pip before 23.3 does not find `lm_eval` where the metadata has `lm-eval`."""
    given = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S)
    extras = set(re.findall(r"^([\w-]+) = \[", given.group(1), re.M))
    folders = [ROOT / name for name in ("dustin_hf", "eval", "kernels", "model_patches", "examples")]
    texts = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*.py"))]
    named = set(re.findall(r"(?:dustin_hf|'\.)\[([\w-]+)\]", "\n".join(path.read_text() for path in texts)))
    assert {"lm-eval", "search"} <= named <= extras and not any("_" in name for name in extras)


@pytest.mark.wheel
def test_wheel_holds_the_tree(tmp_path):
    # a copy: an old build folder in the checkout would leak into the wheel
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path), str(source)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {"dustin_hf/py.typed"}
    for folder in ("dustin_hf", *LINKS):
        base = ROOT / "dustin_hf" if folder == "dustin_hf" else ROOT / "dustin_hf" / folder
        for path in base.resolve().rglob("*"):
            if path.suffix in (".py", ".json", ".txt") and not {"__pycache__", "results"} & set(path.parts):
                inside = path.relative_to(base.resolve())
                expected.add(str(Path("dustin_hf") / (inside if folder == "dustin_hf" else Path(folder) / inside)))
    assert names == expected
    assert {"dustin_hf/kernels/srh_score/naive.py", "dustin_hf/demo_texts/katrine.txt"} <= names
