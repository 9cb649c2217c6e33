"""A small Hugging Face hub over HTTP: what `huggingface_hub` asks for to upload and to load, and no more."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Repos = dict[str, list[dict[str, bytes]]]


class Handler(BaseHTTPRequestHandler):
    """`repos` has of each repository the files of every commit; a revision is ``main`` or a number of 40 digits.

    Its token is ``hf_secret``; others, as ``hf_401``, are answered with their number.
    """

    repos: Repos
    refusals: dict[str, tuple[int, str]]
    blobs: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body, parts = (
            self.rfile.read(int(self.headers["Content-Length"] or 0)),
            self.path.strip("/").split("/"),
        )
        if parts[1] == "datasets" and parts[4] == "paths-info":
            files = self.repos["/".join(parts[1:4])][int(parts[5], 16)]
            asked = json.loads(body)["paths"]
            return self.answer(
                [describe_file(name, files[name]) for name in asked if name in files]
            )
        if (token := self.headers.get("Authorization", "")) != "Bearer hf_secret":
            return self.answer({"error": "Refused."}, int(token.removeprefix("Bearer hf_")))
        told = json.loads(body) if body[:1] == b"{" and b"\n{" not in body else {}
        if parts == ["api", "repos", "create"]:
            repo = f"{told['organization']}/{told['name']}"
            self.repos.setdefault(repo, [{}])
            return self.answer({"url": f"{self.home}/{repo}"})
        if parts == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        if "preupload" in parts:
            files = [{"path": each["path"], "uploadMode": "lfs" if each["path"].endswith("safetensors") else "regular",
                      "shouldIgnore": False} for each in told["files"]]  # fmt: skip
            return self.answer({"files": files})
        if parts[-3:] == ["lfs", "objects", "batch"]:
            put = {
                o["oid"]: {"upload": {"href": f"{self.home}/blobs/{o['oid']}"}}
                for o in told["objects"]
            }
            return self.answer(
                {
                    "transfer": "basic",
                    "objects": [{**o, "actions": put[o["oid"]]} for o in told["objects"]],
                }
            )
        assert parts[4] == "commit", self.path
        files = dict(self.repos[repo := "/".join(parts[2:4])][-1])
        for line in map(json.loads, body.splitlines()):
            about = line["value"]
            if line["key"] == "file":
                files[about["path"]] = base64.b64decode(about["content"])
            elif line["key"] == "lfsFile":
                files[about["path"]] = self.blobs[about["oid"]]
            elif line["key"] == "deletedFile":
                del files[about["path"]]
        self.repos[repo].append(files)
        at = f"{len(self.repos[repo]) - 1:040}"
        self.answer({"commitUrl": f"{self.home}/{repo}/commit/{at}", "commitOid": at})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.blobs[self.path.rpartition("/")[2]] = data
        self.answer({})

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        kind = ""
        if parts[0] == "datasets":
            parts = parts[1:]
            kind = "datasets/"
        elif parts[:2] == ["api", "datasets"]:
            kind = "datasets/"
        repo = kind + "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo in self.refusals and parts[0] != "api":
            status, code = self.refusals[repo]
            return self.answer({"error": "Refused."}, status, {"X-Error-Code": code})
        revision = (
            parts[5 if parts[0] == "api" else 3]
            if len(parts) > 3 + 2 * (parts[0] == "api")
            else "main"
        )
        commits = self.repos.get(repo, [])
        number = len(commits) - 1 if revision == "main" else int(revision, 16)
        if not 0 <= number < len(commits):
            code = "RevisionNotFound" if commits else "RepoNotFound"
            return self.answer({"error": "Not found"}, 404, {"X-Error-Code": code})
        files = commits[number]
        if parts[0] == "api" and parts[4:5] == ["tree"]:
            folder = "/".join(parts[6:])
            entries = list_folder(files, folder, "recursive=true" in self.path.lower())
            # A repository without files is one; a folder without files is none.
            if folder and not entries:
                return self.answer({"error": "none"}, 404, {"X-Error-Code": "EntryNotFound"})
            return self.answer(entries)
        if parts[0] == "api":
            about = {
                "id": repo,
                "sha": f"{number:040}",
                "siblings": [{"rfilename": name} for name in files],
            }
            return self.answer({**about, "tags": [], "downloads": 0, "likes": 0, "private": False})
        name = "/".join(parts[4:])
        if name not in files:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        about = {
            "X-Repo-Commit": f"{number:040}",
            "ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"',
        }
        self.answer(files[name], 200, about)

    do_HEAD = do_GET

    @property
    def home(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, told: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        about = {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def list_folder(
    files: dict[str, bytes], folder: str, is_recursive: bool
) -> list[dict[str, str | int]]:
    """List what is in a folder of a repository, as the hub's `tree` does."""
    prefix = f"{folder}/" if folder else ""
    # A folder may have the name of a file here, which no repository of git has.
    entries: dict[tuple[str, str], dict[str, str | int]] = {}
    for name, data in files.items():
        if not name.startswith(prefix):
            continue
        first, slash, _ = name.removeprefix(prefix).partition("/")
        if slash:
            path = prefix + first
            entries["directory", path] = {
                "type": "directory",
                "path": path,
                "size": 0,
                "oid": "1" * 40,
            }
        if is_recursive or not slash:
            entries["file", name] = describe_file(name, data)
    return list(entries.values())


def describe_file(name: str, data: bytes) -> dict[str, str | int]:
    return {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}


@contextmanager
def open_hub(
    refusals: dict[str, tuple[int, str]] | None = None,
) -> Iterator[tuple[str, Repos]]:
    """Serve a hub; yields its address, and what its repositories hold, data sets under
    ``datasets/OWNER/NAME``. `refusals`: repository → status and error code of its files."""
    repos: Repos = {}
    attributes = {"repos": repos, "blobs": {}, "refusals": refusals or {}}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (Handler,), attributes))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", repos
    finally:
        server.shutdown()
        server.server_close()
