"""What a release is made of: versions that agree, wheels for each platform, and a container file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import cbatch
from cbatch.backend.llama.library import ABI_VERSION
from tests.conftest import ROOT

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)
import tomllib


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    version = _project()["project"]["version"]
    assert cbatch.__version__ == version
    assert re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE)


def test_surface_of_the_native_library_is_that_of_its_header() -> None:
    header = (ROOT / "native" / "include" / "cbatch.h").read_text(encoding="utf-8")
    assert re.search(rf"^#define CBATCH_ABI_VERSION {ABI_VERSION}\b", header, re.MULTILINE)


def test_wheels_are_built_for_each_platform_once() -> None:
    settings = _project()["tool"]
    assert settings["scikit-build"]["wheel"]["py-api"] == "py3"
    platforms = [name.partition("-")[2] for name in settings["cibuildwheel"]["build"]]
    assert platforms == [
        *("manylinux_x86_64", "manylinux_aarch64", "musllinux_x86_64", "musllinux_aarch64"),
        "macosx_arm64",
    ]
    test = settings["cibuildwheel"]["test-command"].partition("{project}/")[2]
    assert (ROOT / test).is_file()


def test_container_and_pages_ask_for_the_oldest_bindings() -> None:
    from cbatch.backend.bindings import OLDEST

    for name in ("Containerfile", "docs/use/install.md"):
        asked = re.findall(r"llama-cpp-python>=([\d.]+)", (ROOT / name).read_text(encoding="utf-8"))
        assert set(asked) == {OLDEST}, name


def test_licence_of_the_package_is_an_spdx_expression() -> None:
    project = _project()["project"]
    assert project["license"] == "MIT AND BSD-3-Clause"
    assert all((ROOT / file).is_file() for file in project["license-files"])


@pytest.mark.skipif(os.name != "posix", reason="scripts of a POSIX shell")
@pytest.mark.parametrize("name", ["run", "wheel", "container", "sanitize"])
def test_scripts_of_ci_can_be_run(name: str) -> None:
    assert os.access(Path(ROOT, ".ci", name), os.X_OK)
