"""`python -m bench` finds every bench, explains it without importing the others, and runs the one that is named."""

import subprocess
import sys

import pytest

from bench import ROOT
from bench.__main__ import benches, listing, main, summary


def test_every_bench_has_a_name_of_its_own_and_a_summary_of_one_line() -> None:
    modules = [path for path in (ROOT / "bench").glob("*/*.py") if "def main(parser" in path.read_text()]
    assert sorted(benches().values()) == sorted(modules)
    assert {
        name for name, path in benches().items() if not 30 <= len(summary(path).removesuffix('"""')) <= 110
    } == set()
    assert {name for name, path in benches().items() if not summary(path).endswith(".")} == set()


def test_help_lists_every_bench_under_its_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fleet:" in lines
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(benches())


def test_without_a_name_it_lists_them_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert listing() in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err


def test_a_bench_says_what_it_measures_and_takes() -> None:
    asked = [sys.executable, "-m", "bench", "routing", "--help"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("usage: python -m bench routing")
    assert "--requests" in said


def test_listing_imports_no_bench() -> None:
    code = "import sys, bench.__main__ as b; b.main(['--help']); print(*(m for m in sys.modules if 'bench.' in m))"
    asked = [sys.executable, "-c", code]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines()[-1] == "bench.__main__"


def test_a_bench_whose_package_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["retry_storm", "--help"]) == 2
    assert "retry_storm needs the package uvloop" in capsys.readouterr().err
