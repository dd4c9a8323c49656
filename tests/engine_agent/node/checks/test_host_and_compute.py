"""Correct memory, disks and processors pass their checks, and faulty ones are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_agent.node.checks import compute, deep
from engine_agent.node.checks.deep import MIB, check_disk, check_memory
from engine_agent.node.checks.result import Result, result_from, timed

pytestmark = pytest.mark.processes


def test_memory_holds_its_patterns_within_a_share_of_what_is_free() -> None:
    result = check_memory(64, 30.0, available_bytes=320 * MIB)
    assert result.ok is True
    assert result.found == "16 MiB held 5 of 5 patterns"
    assert check_memory(64, 0.0, available_bytes=0).found == "8 MiB held 1 of 5 patterns"


def test_a_bit_that_flips_is_named() -> None:
    content = bytes([0x55]) * 16
    block = bytearray(content)
    block[3] ^= 0x10
    assert deep._differing(2, block, content) == "byte 3 of block 2 is 0x45 and 0x55 was written"


def test_a_disk_returns_what_was_written_and_keeps_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "DISK_SLOW_MIB_S", 0.0)
    result = check_disk(tmp_path, 4, 30.0)
    assert result.ok is True
    assert result.numbers["mib"] == 4
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_reads_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = deep._read_all
    monkeypatch.setattr(deep, "_read_all", lambda descriptor, length: real(descriptor, length)[:-1] + b"?")
    result = check_disk(tmp_path, 2, 30.0)
    assert (result.ok, result.found) == (False, "2 MiB came back changed")


def test_a_slow_disk_fails_and_a_full_one_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "DISK_SLOW_MIB_S", 1e9)
    assert check_disk(tmp_path, 1, 30.0).ok is False
    assert check_disk(tmp_path, 1 << 40, 30.0).ok is None


@pytest.mark.parametrize("without", [(), ("torch",), ("torch", "numpy")])
def test_products_are_right_with_whatever_this_python_has(without: tuple[str, ...]) -> None:
    hide = "".join(f"sys.modules[{name!r}] = None;" for name in without)
    script = f"import sys; {hide} from engine_agent.node.checks.compute import main; sys.exit(main(['--seconds', '0']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    results = [result_from(line) for line in done.stdout.splitlines()]
    assert [result.check for result in results][:1] == ["matmul cpu"]
    assert all(result.ok for result in results)
    assert "were right" in results[0].found


def test_a_product_that_differs_once_fails() -> None:
    answers = iter([True, True, False])
    result = compute._repeated("matmul x", 8, 60.0, lambda: next(answers))
    assert (result.ok, result.found) == (False, "product 4 differs from the first")


def test_results_are_bounded_and_read_back() -> None:
    long = Result("x", True, "f" * 9000, "w" * 9000, numbers={f"n{index}": 1 / 3 for index in range(99)})
    back = result_from(long.as_line())
    assert (len(back.found), len(back.wanted), len(back.numbers)) == (400, 400, 16)
    assert back.numbers["n0"] == 0.333
    for bad in ("", "[]", json.dumps({"x": 1})):
        with pytest.raises(ValueError, match="not the result of a check"):
            result_from(bad)


def test_what_cannot_be_made_is_no_failure() -> None:
    def broken() -> Result:
        raise MemoryError("none left")

    result = timed("memory", broken)
    assert (result.ok, result.found) == (None, "it could not run: MemoryError: none left")
