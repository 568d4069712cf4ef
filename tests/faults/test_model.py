"""The scripts and the model are the same, on every server."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.machine import Machine
from tests.support.subject import AnyServer

EXAMPLES = int(os.environ.get("IDEMREDIS_EXAMPLES", "40"))


def test_the_scripts_do_what_the_model_does(server: AnyServer) -> None:
    with server.client() as client:
        kind = type("On", (Machine,), {"client": client})
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=30,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
