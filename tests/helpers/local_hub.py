"""A hub of models on this machine, as far as the client of `huggingface_hub` needs one to upload.

It takes LFS uploads alone (``HF_HUB_DISABLE_XET=1``), and keeps everything in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_right"
Files = dict[str, bytes]
Answer = tuple[int, Any]


@dataclass
class Hub:
    """What lies on it, and what was asked of it.

    Attributes:
        url: Where it answers.
        repos: Name -> branch -> file -> content. A pull request is a branch, too.
        private: Name -> what was asked for as it was made.
        messages: Of every commit.
        blobs: SHA-256 -> what was uploaded by LFS.
        asked: ``METHOD path`` of every request.
        before: Called with each of those before it is answered; what it returns is the answer,
            and what it raises closes the connection.
    """

    url: str = ""
    repos: dict[str, dict[str, Files]] = field(default_factory=dict)
    private: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    before: Callable[[str], Answer | None] = lambda asked: None

    def asked_for(self, word: str) -> int:
        """Count the requests that have a word in them."""
        return sum(word in asked for asked in self.asked)

    # --- what the client asks, each by the path of its request

    def create(self, body: Any) -> Answer:
        name = f"{body['organization']}/{body['name']}"
        if name in self.repos:
            there = {"error": "You already created this model repo"}
            return 409, {**there, "url": f"{self.url}/{name}"}
        self.repos[name] = {"main": {".gitattributes": b""}}
        self.private[name] = body.get("visibility", body.get("private"))
        return 200, {"url": f"{self.url}/{name}"}

    def branch(self, name: str, branch: str) -> Answer:
        branches = self.repos[name]
        if branch in branches:
            return 409, {"error": "Reference already exists"}
        branches[branch] = dict(branches["main"])
        return 200, {}

    def tree(self, name: str, branch: str) -> Answer:
        found = self.repos[name].get(branch)
        if found is None:
            return 404, {"error": f"Invalid rev id: {branch}"}
        return 200, [
            {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            for path, data in found.items()
        ]

    def preupload(self, name: str, branch: str, body: Any) -> Answer:
        there = self.repos[name].get(branch, {})
        answers = []
        for file in body["files"]:
            path = file["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            known = {"oid": git_oid(there[path])} if path in there and mode == "regular" else {}
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        return 200, {"files": answers}

    def batch(self, body: Any) -> Answer:
        answers = []
        for asked in body["objects"]:
            oid = asked["oid"]
            answer = {"oid": oid, "size": asked["size"]}
            if oid not in self.blobs:
                answer["actions"] = {
                    "upload": {"href": f"{self.url}/lfs/{oid}"},
                    "verify": {"href": f"{self.url}/verify"},
                }
            answers.append(answer)
        return 200, {"transfer": "basic", "objects": answers}

    def put(self, oid: str, data: bytes) -> Answer:
        if hashlib.sha256(data).hexdigest() != oid:
            return 400, {"error": "other bytes than were announced"}
        self.blobs[oid] = data
        return 200, {}

    def verify(self, body: Any) -> Answer:
        whole = len(self.blobs.get(body["oid"], b"")) == body["size"]
        return (200, {}) if whole else (404, {"error": "nothing was uploaded"})

    def commit(self, name: str, branch: str, body: bytes, *, request: bool) -> Answer:
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(self.repos[name][branch])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return 400, {"error": f"unknown operation {line['key']}"}
        number = len(self.messages)
        answer = {"commitUrl": f"{self.url}/{name}/commit/{number}", "commitOid": f"{number:040x}"}
        if request:
            answer["pullRequestUrl"] = f"{self.url}/{name}/discussions/{number}"
        self.repos[name][f"refs/pr/{number}" if request else branch] = files
        return 200, answer


def git_oid(data: bytes) -> str:
    """Return what git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _answer(self) -> None:
        asked = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.hub.asked.append(asked)
        try:
            given = self.hub.before(asked)
        except Exception:  # the connection breaks, in the midst of what the client sends
            self.close_connection = True
            self.connection.close()
            return
        body = self._body()
        status, answer = given or self._find(asked, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", str(answer.get("error", "")))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = _answer  # noqa: N815 named by the class above

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _find(self, asked: str, body: bytes) -> Answer:
        hub = self.hub
        command, path = asked.split(" ", 1)
        if path.startswith("/lfs/"):  # the address itself is the permission
            return hub.put(path.removeprefix("/lfs/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return hub.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {}
        if path == "/verify":
            return hub.verify(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return hub.batch(json.loads(body))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/(.+))?", path)
        if found is None or found[1] not in hub.repos:
            return 404, {"error": "Repository not found"}
        name, what, branch = found.groups()
        if what is None:
            return 200, {"id": name, "sha": f"{len(hub.messages):040x}"}
        if what == "branch":
            return hub.branch(name, branch)
        if what == "tree":
            return hub.tree(name, branch)
        if what == "preupload":
            return hub.preupload(name, branch, json.loads(body))
        if what == "commit":
            request = "create_pr" in parse_qs(urlsplit(self.path).query)
            return hub.commit(name, branch, body, request=request)
        return 404, {"error": f"unknown: {command} {path}"}

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
