"""The OpenAPI schema: complete, and safe to be called by a machine that tries everything in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from services import encode, filled, queries

import adanpc
from adanpc.serve import create, serving

EXAMPLES = 10  # for each route
LEAST_ROUTES = 15  # that something is asked of
SERVICE = Path(__file__).parents[2] / "docs" / "service.md"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("schema") / "bank"
    with adanpc.DurableBank.create(folder, filled()) as bank:
        bank.classify(torch.from_numpy(queries(5)))
        with serving(create(bank, encoder=encode)) as address:
            yield address


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_within_or_outside_of_the_schema_breaks_the_service(url: str, mode: GenerationMode) -> None:
    # An event stream has no end: what is sent by it is tested where it is listened to.
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").exclude(path="/v1/events")
    tried = set()
    operations: Any = schema.get_all_operations()
    for found in operations:
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None, derandomize=True,
            phases=[Phase.generate],
        )  # fmt: skip
        def ask(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error])
            tried.add(case.operation.label)

        with contextlib.suppress(Unsatisfiable):  # nothing outside of the schema can be asked of some routes
            ask()
    assert len(tried) >= LEAST_ROUTES


def test_every_route_is_described_in_the_documentation(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as bank:
        app = create(bank)
        paths = app.openapi()["paths"]
        app.state.service.close()
    text = SERVICE.read_text(encoding="utf-8")
    missing = [path for path in paths if f"`{path}`" not in text]
    assert missing == []
