import pytest

from controlplane.management.in_order import main

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting Django up again would give the loggers of this process the streams of one test."""
    monkeypatch.setattr("django.setup", lambda: None)


def test_commands_run_in_their_order_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    main([",", "migrate", "--no-input", ",", "check", "--tag", "models"])
    said = capsys.readouterr().out
    assert said.index("No migrations to apply") < said.index("System check identified no issues")


def test_the_first_command_that_fails_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["grant_application", "nobody-knows", ",", "check"])
    assert ended.value.code
    captured = capsys.readouterr()
    assert "nobody-knows" in captured.err
    assert "System check" not in captured.out
