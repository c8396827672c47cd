"""A worker process for runs: RUN_WORKER DATA HOST_ID DATABASE_URL ADDRESS NAMESPACE."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from onceborn.activities.kind import Host
from onceborn.runtime.ledger.database import Database
from onceborn.workflows.agent_run import AgentRunWorkflow
from onceborn.workflows.engine import host_queue
from onceborn.workflows.run_activities import RunActivities


def run_worker(client: Client, database: Database, host: Host) -> Worker:
    """A worker for the runs of a host, in the default sandbox, that notices the dead soon."""
    return Worker(
        client,
        task_queue=host_queue(host.host_id),
        workflows=[AgentRunWorkflow],
        activities=RunActivities(database, host, grace_s=0.5, poll_s=0.1).all(),
        activity_executor=ThreadPoolExecutor(8),
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
    )


async def main(data: str, host_id: str, database_url: str, address: str, namespace: str) -> None:
    client = await Client.connect(address, namespace=namespace)
    host = Host(host_id=host_id, data=Path(data))
    async with run_worker(client, Database(database_url), host):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
