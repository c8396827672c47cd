"""Bring a creation without host steps to its end by the runtime's own verbs, without an engine."""

from __future__ import annotations

from onceborn.runtime.admission import Admitted
from onceborn.runtime.completion import Completion
from onceborn.runtime.ledger.operations import Limits
from onceborn.runtime.recovery import Recovery

from .world import Workplace


def settle(place: Workplace, admitted: Admitted, *, abort: bool = False) -> Admitted:
    """Complete (or abort) the creation, under fence 1."""
    assert admitted.handle is not None
    owned = Recovery(place.database, Limits(), "test").take(admitted.handle)
    completion = Completion(place.database, Limits())
    if abort:
        completion.abort(owned.operation_id, owned.fence)
    else:
        completion.enter(owned.operation_id, owned.fence)
        completion.commit(owned.operation_id, owned.fence)
    return admitted
