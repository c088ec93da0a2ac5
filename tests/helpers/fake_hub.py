"""A hub of models on this machine, and folders of models as large as published ones, which take no
space: their weights are holes behind true headers.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}


def write_model(folder: Path, config: dict[str, Any], bits: int | None = None) -> int:
    """Write a model of mlx-lm with these sizes in bfloat16, as ``mlx_lm.convert`` would with
    ``bits``, and return the bytes of its weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
        config = {**config, "quantization": {"group_size": 64, "bits": bits}}
    (folder / "config.json").write_text(json.dumps(config))
    return write_header(folder / "model.safetensors", dict(tree_flatten(model.parameters())))


def write_header(path: Path, weights: Mapping[str, mx.array]) -> int:
    """Write a file of tensors with these shapes, and return the bytes that they would take."""
    header, end = {}, 0
    for name, weight in weights.items():
        offsets = [end, end + weight.nbytes]
        header[name] = {
            "dtype": _NAMES[weight.dtype],
            "shape": weight.shape,
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


@contextmanager
def hub(root: Path, requests: list[str] | None = None, broken: int = 0) -> Iterator[str]:
    """Serve the folders ``root/owner/name`` as a hub's repositories; yields its address.

    Args:
        requests: is appended the method, the path and the range of each request for a file.
        broken: the number of connections that end halfway through a file of weights.
    """
    left = [broken]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, has_body: bool) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and (root / parts[2] / parts[3]).is_dir():
                self._describe(root / parts[2] / parts[3], parts[4:5] == ["tree"])
                return
            is_file = len(parts) >= 5 and parts[2] == "resolve"
            path = root.joinpath(*parts[:2], *parts[4:]) if is_file else None
            if path is None or not path.is_file():
                there = is_file and (root / parts[0] / parts[1]).is_dir()
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if there else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            first, last = 0, size - 1
            if given := self.headers.get("Range"):
                begin, end = given.removeprefix("bytes=").split("-")
                first, last = int(begin), min(int(end or size), size - 1)
            self.send_response(206 if given else 200)
            self.send_header("ETag", f'"{parts[4]}-{size}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            if requests is not None:
                requests.append(f"{self.command} {path.name} {given or ''}".rstrip())
            if has_body:
                with path.open("rb") as file:
                    file.seek(first)
                    contents = file.read(last - first + 1)
                if left[0] and path.name == "model.safetensors":
                    left[0] -= 1
                    contents, self.close_connection = contents[: len(contents) // 2], True
                self.wfile.write(contents)

        def _describe(self, folder: Path, is_tree: bool) -> None:
            files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
            names = {str(each.relative_to(folder)): each.stat().st_size for each in files}
            tree = [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                for name, size in names.items()
            ]
            siblings = [{"rfilename": name} for name in names]
            described: Any = {
                "id": f"{folder.parent.name}/{folder.name}",
                "sha": "0" * 40,
                "siblings": siblings,
            }
            described = tree if is_tree else described
            body = json.dumps(described).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
