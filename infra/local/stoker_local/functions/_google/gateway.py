"""All Google functions at one address, below their names, as those of a project are at ``cloudfunctions.net``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import web

from stoker_local.functions._google.service import Service

__all__ = ["Gateway"]

_TARGET = re.compile(r"/(?P<name>[a-z0-9-]+)(?P<rest>(?:[/?].*)?)", re.ASCII | re.DOTALL)


class Gateway:
    """Passes ``/NAME/path?query`` on to the function NAME as ``/path?query``."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = services

    def application(self) -> web.Application:
        """Return it as a web application."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.Response:
        target = _TARGET.fullmatch(request.raw_path)
        service = self._services.get(target["name"]) if target else None
        if target is None or service is None:
            return web.Response(status=404, text="There is no such function.")
        rest = target["rest"]
        return await service.answer(request, rest if rest.startswith("/") else f"/{rest}")
