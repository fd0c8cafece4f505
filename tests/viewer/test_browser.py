"""Tests how the lane finds a Chromium or installs one; the programs here are scripts, and no browser is started."""

from __future__ import annotations

from pathlib import Path

import browser
import pytest

STARTS = "#!/bin/sh\nexit 0\n"
FAILS = "#!/bin/sh\nexit 1\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs, on a machine where playwright has no browser and cannot download one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(browser, "_of_playwright", list)
    monkeypatch.setattr(browser, "PLAYWRIGHT", (str(program(folder, "playwright", FAILS)), "install", "chromium"))
    return folder


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_a_browser_of_the_machine_is_taken(programs: Path) -> None:
    program(programs, "chromium-browser", FAILS)  # a note about snap
    expected = program(programs, "google-chrome", STARTS)
    assert browser.found() == str(expected)
    browser.main()


def test_the_variable_comes_first(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "chromium", STARTS)
    own = program(programs, "mine", STARTS)
    monkeypatch.setenv("CHROMIUM", str(own))
    assert browser.found() == str(own)
    monkeypatch.setenv("CHROMIUM", "/none")
    with pytest.raises(SystemExit, match="CHROMIUM = '/none' is no program"):
        browser.main()


def test_root_installs_one_with_apt(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    installed, calls = programs / "chromium", programs / "calls"
    script = f"""#!/bin/sh
echo "$@" >> {calls}
[ "$1" = install ] || exit 0
printf '#!/bin/sh\\n' > {installed}
/bin/chmod 755 {installed}
"""
    program(programs, "apt-get", script)
    browser.main()
    assert browser.found() == str(installed)
    assert calls.read_text().splitlines() == ["update", "install --yes --no-install-recommends chromium"]


@pytest.mark.parametrize(
    ("user", "has_apt", "command"),
    [(0, True, "apt-get install chromium"), (1, True, "sudo apt-get install chromium"), (1, False, "install chromium")],
)
def test_where_none_can_be_installed_one_line_says_what_to_run(
    user: int, has_apt: bool, command: str, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    if has_apt:
        program(programs, "apt-get", FAILS)
    with pytest.raises(SystemExit) as ended:
        browser.main()
    said = str(ended.value)
    assert "\n" not in said
    assert said.endswith(command)


def test_an_installer_that_installs_nothing_is_a_failure(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    program(programs, "apt-get", STARTS)  # Ubuntu's package is a note about snap
    program(programs, "playwright", STARTS)
    with pytest.raises(SystemExit, match="cannot be installed from here"):
        browser.main()
