"""Agent profiles: the file, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceborn.runtime.profiles import Profile, load_profiles
from onceborn.runtime.protocol.errors import ConfigurationError


def test_profiles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(
        '[profiles.reviewer]\nargv = ["agent", "{prompt_file}"]\nenvironment = ["AGENT_KEY"]\n'
        'time_limit_s = 5\n[profiles.off]\nargv = ["x"]\nenabled = false\n'
    )
    assert load_profiles(path) == {
        "reviewer": Profile(
            argv=("agent", "{prompt_file}"), environment=("AGENT_KEY",), time_limit_s=5
        ),
        "off": Profile(argv=("x",), enabled=False),
    }


def test_no_file_is_no_profiles(tmp_path: Path) -> None:
    assert load_profiles(tmp_path / "none.toml") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profiles.p", "is not TOML"),
        ("[profiles.p]\n", "profiles.p.argv: Field required"),
        ("[profiles.p]\nargv = []\n", "profiles.p.argv"),
        ('[profiles.p]\nargv = [" "]\n', "must not be empty"),
        ('[profiles.p]\nargv = "agent"\n', "profiles.p.argv"),
        ('[profiles.p]\nargv = ["a\\u0000"]\n', "profiles.p.argv.0: must not contain a NUL"),
        ('[profiles.p]\nargv = ["a"]\nshell = true\n', "profiles.p.shell: is not a field"),
        ('[profiles.p]\nargv = ["a"]\nenabled = "yes"\n', "profiles.p.enabled"),
        ('[profiles.p]\nargv = ["a"]\ntime_limit_s = 0\n', "profiles.p.time_limit_s"),
        ('[profiles.p]\nargv = ["a"]\nenvironment = ["A=B"]\n', "profiles.p.environment.0"),
        ('[profiles.p]\nargv = ["a"]\nenvironment = ["DATABASE_URL"]\n', "this server's own"),
        ('[profiles.p]\nargv = ["a"]\nenvironment = ["ONCEBORN_X"]\n', "this server's own"),
        ('[profiles."P P"]\nargv = ["a"]\n', "profiles.P P"),
        ("[agents]\n", "agents"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        load_profiles(path)
    assert str(path) in error.value.message
    assert said in error.value.message
