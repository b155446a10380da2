"""For schemathesis (`SCHEMATHESIS_HOOKS=serve_fuzz`): a deadline that a request sets ends in a 504, by design."""

from __future__ import annotations

from typing import Any

import schemathesis

LEAST = 300.0


@schemathesis.hook
def before_call(_: Any, case: Any, __: Any) -> None:
    """Leaves such a request the time it needs; the tests look at deadlines."""
    body = case.body
    given = body.get("timeout_s") if isinstance(body, dict) else None
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < LEAST:
        case.body = {**body, "timeout_s": LEAST}
