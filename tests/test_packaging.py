"""What is built and installed is icmljax alone, whole, and light to import."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import icmljax

ROOT = pathlib.Path(__file__).resolve().parent.parent


def build(kind: str, folder: pathlib.Path) -> pathlib.Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return folder / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive of a copy of the checkout."""
    copy = tmp_path_factory.mktemp("build") / "checkout"
    unwanted = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=unwanted)
    return build("sdist", copy)


@pytest.fixture(scope="module")
def wheel(archive):
    """The wheel of the source archive, where the links of the checkout are missing."""
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent, filter="data")
    return build("wheel", archive.parent / archive.name.removesuffix(".tar.gz"))


def sources() -> set[str]:
    """The installed paths of all modules of the checkout."""
    folders = {"icmljax": "icmljax", "kernels": "icmljax/kernels"}
    folders["experiments"] = "icmljax/experiments"
    return {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in folders.items()
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }


def test_wheel_holds_the_package_only(archive, wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"icmljax-{icmljax.__version__}.dist-info/"
    installed = [name for name in names if not name.startswith(info)]
    assert sorted(installed) == sorted(sources() | {"icmljax/py.typed"})
    assert f"{info}licenses/LICENSE" in names
    checkout = archive.parent.parent
    for link in ("kernels", "experiments"):  # some ways to get a checkout lose its links
        (checkout / "icmljax" / link).unlink()
    assert sorted(zipfile.ZipFile(build("wheel", checkout)).namelist()) == sorted(names)


def test_source_archive_holds_each_file_once(archive):
    with tarfile.open(archive) as tar:
        names = [member.name.partition("/")[2] for member in tar if not member.isdir()]
    python = [name for name in names if re.match(r"(icmljax|kernels|experiments)/.*\.py$", name)]
    installed = [f"icmljax/{name.removeprefix('icmljax/')}" for name in python]
    assert sorted(installed) == sorted(sources())
    assert {"LICENSE", "README.md", "icmljax/py.typed", "pyproject.toml", "setup.cfg"} <= set(names)


def test_unpacked_wheel_imports(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (entry_points,) = tmp_path.glob("*.dist-info/entry_points.txt")
    assert "icmljax = icmljax.experiments.__main__:main" in entry_points.read_text()
    code = (
        "import icmljax.kernels, icmljax.experiments.__main__ as cli\n"
        "print(icmljax.kernels.__file__)\n"
        "cli.main()"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{tmp_path / 'icmljax' / 'kernels'}")
    assert "mada" in done.stdout


def test_links_are_relative_and_lead_home():
    for name in ("kernels", "experiments"):
        assert os.readlink(ROOT / "icmljax" / name) == f"../{name}"


def test_version_has_one_source():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == icmljax.__version__
    assert "version = attr: icmljax.__version__" in (ROOT / "setup.cfg").read_text()


def test_library_imports_nothing_from_the_extras():
    code = (
        "import sys, icmljax.optimizers, icmljax.nn, icmljax.data, icmljax.training\n"
        "import icmljax.data.text, icmljax.data.digits, icmljax.nn.gpt, icmljax.training.loop\n"
        "extras = {'matplotlib', 'sklearn', 'tensorboardX', 'tqdm', 'tensorboard', 'pytest'}\n"
        "print(sorted(extras & sys.modules.keys()))\n"
        "print([name for name in sys.modules if name.startswith('icmljax.experiments')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]
