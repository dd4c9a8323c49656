"""A program that is there is not compiled again, and is started as this release starts it."""

from pathlib import Path

import pytest

from engine_agent.engines.generic.environment import SERVER, install


@pytest.mark.parametrize("before", [None, b"of before", SERVER.read_bytes()], ids=["none", "older", "this one"])
def test_what_starts_it_is_of_this_release(tmp_path: Path, before: bytes | None) -> None:
    folder = tmp_path / "engines" / "generic" / "llama-cpp"
    folder.mkdir(parents=True)
    program = folder / "serve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if before is not None:
        (folder / "serve.py").write_bytes(before)
    lines: list[str] = []
    assert install(tmp_path, lines.append) == program
    assert (folder / "serve.py").read_bytes() == SERVER.read_bytes()
    assert lines == []
    assert sorted(path.name for path in folder.iterdir()) == ["serve", "serve.py"]
