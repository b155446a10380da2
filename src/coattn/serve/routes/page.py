"""`GET /` and the page's own files: plain files of this package, read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from coattn.serve.errors import ApiError

FOLDER = Path(__file__).resolve().parent.parent / "page"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page, which is a chat and where the KV lies, or one of its files."""
    name = request.path_params.get("name", "index.html")
    if name not in files():
        raise ApiError(404, "There is no such file.", code="not_found")
    return Response(files()[name], headers=HEADERS, media_type=KINDS[Path(name).suffix])


@cache
def files() -> dict[str, bytes]:
    """By name: only what is in the folder can be asked for."""
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in KINDS)
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in found}
