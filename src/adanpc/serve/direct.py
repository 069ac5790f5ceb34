"""Direct: answers the one route that programs call all the time, bypassing the framework's routing.

The framework still describes the route, and handles it whenever a request is unusual, for example if it names another
model. Both paths call the same function, and errors have the same form.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from adanpc.errors import AdaNPCError
from adanpc.serve.compressed import whole_body
from adanpc.serve.errors import error_response, framework_response
from adanpc.serve.service import Service
from adanpc.serve.v2 import MODEL, VERSION, inferred

PATHS = {  # each with its route, as metrics and logs name it
    f"/v2/models/{MODEL}/infer": "/v2/models/{model}/infer",
    f"/v2/models/{MODEL}/versions/{VERSION}/infer": "/v2/models/{model}/versions/{version}/infer",
}


class DirectInference:
    """Middleware that answers inference requests itself and passes all others on.

    Args:
        app: the app that answers other requests.
        service: the service that answers inference requests.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an inference request, or passes another request on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        scope["route_path"] = PATHS[scope["path"]]  # by which the log and the metrics name the request
        try:
            content = await whole_body(receive)
            if content is None:
                return  # the client has disconnected
            body, content_headers = await inferred(self._service, content, scope)
        except AdaNPCError as error:
            await error_response(error)(scope, receive, send)
            return
        except HTTPException as error:
            await framework_response(error)(scope, receive, send)
            return
        headers = [*content_headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
