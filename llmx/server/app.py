"""The application: routes, and nothing that a handler does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from llmx import __version__
from llmx.server.chat import ChatRequest, chat
from llmx.server.completions import CompletionRequest, completions
from llmx.server.errors import install
from llmx.server.prometheus import CONTENT_TYPE
from llmx.server.service import Service
from llmx.server.settings import ServerSettings
from llmx.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

if TYPE_CHECKING:
    from llmx.llm import LLM


_TEXT = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE, "code": _MAYBE},
        }
    },
}


def build_app(llm: LLM, settings: ServerSettings) -> FastAPI:
    """OpenAI's API over `llm`. The shared state is `app.state.service`. The documentation pages load scripts from the
    net, so only /openapi.json is served.
    """
    service = Service(llm, settings)
    app = FastAPI(title="llmx", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    install(app)

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest))
    async def chat_completions_route(request: Request) -> Response:
        return await chat(service, request)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest))
    async def completions_route(request: Request) -> Response:
        return await completions(service, request)

    @app.get("/v1/models")
    async def models_route() -> Response:
        return JSONResponse({"object": "list", "data": [service.card(name) for name in service.public]})

    @app.get("/v1/models/{name:path}")
    async def model_route(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.card(name))

    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest))
    async def tokenize_route(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest))
    async def detokenize_route(request: Request) -> Response:
        return await detokenize(service, request)

    _add_state(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    """The routes that tell how the server is."""

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_route() -> Response:
        return Response(service.traffic.exposition(await service.measure()), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version_route() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/health")
    async def health_route() -> Response:
        service.check_up()
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready_route(deep: bool = False) -> Response:
        service.check_up()
        service.admission.check()
        if deep:
            await service.probe()
        return JSONResponse({"status": "ready"})


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a route whose body is read by `parsing.read`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The API's description, with the request models that FastAPI can't see because we parse them ourselves."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    schemas["Error"] = ERROR
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own refusal, which becomes ours
            operation["responses"]["default"] = {
                "description": "Why not",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            }
    return document
