"""A creation's workflow whose commands come in another order than the recorded ones."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from onceborn.runtime.protocol.orders import Looked, OperationRef
    from onceborn.workflows.creation import CreationWorkflow


@workflow.defn(name="creation", failure_exception_types=[])
class ChangedWorkflow:
    """Sleeps before it looks."""

    @workflow.run
    async def run(self, ref: OperationRef) -> str:
        await workflow.sleep(timedelta(seconds=1))
        looked: Looked = await CreationWorkflow()._read("begin", ref)
        return str(looked)
