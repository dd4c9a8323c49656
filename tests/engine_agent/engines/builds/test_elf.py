"""The needs of ELF files: as readelf reports them, and nothing for files that are none or are damaged."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.builds.elf import ElfFile, least_glibc, read_elf

PYTHON = Path(sys.executable).resolve()


def test_an_interpreter_needs_what_readelf_says() -> None:
    found = read_elf(PYTHON)
    assert found is not None
    listed = subprocess.run(["readelf", "-d", "-V", PYTHON], capture_output=True, text=True, check=True).stdout
    assert [f"[{name}]" in listed for name in found.needed] == [True] * len(found.needed)
    assert len(found.needed) == listed.count("(NEEDED)")
    assert {version for _, version in found.versions} == {
        line.split("Name: ")[1].split()[0] for line in listed.splitlines() if "Name: " in line and "Flags: " in line
    }


@pytest.mark.parametrize(
    ("versions", "floor"),
    [
        ((("libc.so.6", "GLIBC_2.4"), ("libm.so.6", "GLIBC_2.35")), "2.35"),
        ((("libc.so.6", "GLIBC_2.9"),), "2.17"),
        ((("libstdc++.so.6", "GLIBCXX_3.4.30"), ("libc.so.6", "GLIBC_PRIVATE")), "2.17"),
        ((), "2.17"),
    ],
)
def test_the_floor_is_the_newest_version_of_glibc(versions: tuple[tuple[str, str], ...], floor: str) -> None:
    assert least_glibc([ElfFile((), "", (), versions)]) == floor


@given(st.integers(0, 20_000), st.binary(max_size=64))
def test_a_damaged_file_is_none_or_some_file_but_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    content = PYTHON.read_bytes()[:20_000]
    path.write_bytes(content[:at] + noise + content[at + len(noise) :])
    read_elf(path)
    path.write_bytes(content[:at])
    read_elf(path)
