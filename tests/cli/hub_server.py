"""The few endpoints of the Hugging Face Hub that a download asks for, on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """`repos`: name -> revision -> file name -> bytes; `gated` names cannot be read. `asked` are the paths."""

    def __init__(self):
        self.repos, self.gated, self.asked = {}, set(), []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repo, revision):
        revisions = self.repos[repo]
        for name, files in revisions.items():
            digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            if revision in (name, digest):
                return digest, files
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def log_message(self, *arguments):
        pass

    def _answer(self):
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, kind, revision = "/".join(parts[2:4]), *(parts[4:6] or ("revision", "main"))
        elif len(parts) < 5:
            return self._send(404, b"", {})
        else:
            repo, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repo in self.hub.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if repo not in self.hub.repos:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if (found := self.hub.commit(repo, revision)) is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        sha, files = found
        if kind == "revision":
            return self._json({"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]})
        if kind == "tree":
            rows = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
            return self._json(rows)
        data = files["/".join(parts[4:])]
        return self._send(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": sha})

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data):
    return hashlib.sha1(data).hexdigest()
