"""Bytes and requests that each stage of a loop costs its store, counted by an S3 in this process.

    python benchmarks/store_bytes.py [--layers 4] [--hidden 128]

Every stage begins with an empty cache, as in a pod of its own. The first iteration goes on from `sft`, the second from
`policy_update`, and so with the optimizer's state. The last column is what the same stage reads by read(2) where the
store is a folder: files that are hashed count, those that are mapped into memory do not. `--layers 11 --hidden 512` is
a model of 35 million parameters.

The second table has the updates of five iterations, with `state_every` 1 and 5, in one pod where the trainer stays in
memory, and each in a pod of its own, which replays those before it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tuneloop.core.artifacts import Artifact
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft
from tuneloop.training.checkpoint import RESIDENT

Request = tuple[str, str, int]
"""Method, ``bucket/key``, and bytes of the object that went over the line."""


class CountingS3(ThreadingHTTPServer):
    """What obstore asks of S3, over files of a directory.

    Attributes:
        log: the requests, in the order in which they were answered.
        bytes_per_s: of the line that all requests share, in each direction.
    """

    daemon_threads = True
    bytes_per_s = math.inf

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory, self.log, self.lock = directory, list[Request](), threading.Lock()
        self.lines = {"GET": threading.Lock(), "PUT": threading.Lock()}
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.directory / quote(key, safe="")

    def keys(self, prefix: str) -> list[str]:
        return sorted(
            k for p in self.directory.iterdir() if (k := unquote(p.name)).startswith(prefix)
        )

    def read(self, pattern: str = "") -> int:
        """Count the bytes read of keys that match `pattern`."""
        return sum(
            size for method, key, size in self.log if method == "GET" and re.search(pattern, key)
        )

    def written(self) -> int:
        return sum(size for method, _, size in self.log if method == "PUT")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingS3

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), {
            k: v[0] for k, v in parse_qs(parts.query, True).items()
        }

    def _reply(
        self, status: int, body: bytes = b"", size: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _note(self, key: str, size: int) -> None:
        with self.server.lock:
            self.server.log.append((self.command, key, size))
        with self.server.lines[self.command] if size else contextlib.nullcontext():
            time.sleep(size / self.server.bytes_per_s)

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        path = self.server.path(key)
        self._note(key, 0)
        if path.is_file():
            self._reply(200, size=path.stat().st_size, ETag=_tag(path))
        else:
            self._reply(404)

    def do_GET(self) -> None:
        key, query = self._asked()
        if "list-type" in query:
            self._list(key, query)
        elif not (path := self.server.path(key)).is_file():
            self._note(key, 0)
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data = path.read_bytes()
            about: dict[str, Any] = {"ETag": _tag(path)}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
                about["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
                data = data[start:end]
            self._note(key, len(data))
            self._reply(206 if wanted else 200, data, **about)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names, parts = [], set()
        for key in self.server.keys(f"{bucket}/{prefix}"):
            name = key.removeprefix(f"{bucket}/")
            if delimiter and delimiter in name[len(prefix) :]:
                parts.add(prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter)
            else:
                names.append((name, self.server.path(key).stat().st_size))
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, size in names
        )
        entries += "".join(
            f"<CommonPrefixes><Prefix>{escape(p)}</Prefix></CommonPrefixes>" for p in sorted(parts)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        self._note(bucket, 0)
        self._reply(200, body)

    def do_PUT(self) -> None:
        key, query = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._note(key, len(data))
        if "uploadId" in query:
            key = f".parts/{query['uploadId']}/{int(query['partNumber']):06d}"
        path = self.server.path(key)
        with self.server.lock:
            expected = self.headers.get("If-Match")
            if (self.headers.get("If-None-Match") and path.exists()) or (
                expected and expected != _tag(path)
            ):
                return self._reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            path.write_bytes(data)
        self._reply(200, ETag=_tag(path))

    def do_POST(self) -> None:
        key, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._note(key, 0)
        if "uploads" in query:
            name = os.urandom(8).hex()
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        elif "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body)
            for name in names:
                self.server.path(f"{key}/{name}").unlink(missing_ok=True)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            text = f"<DeleteResult>{deleted}</DeleteResult>"
        else:
            with self.server.path(key).open("wb") as out:
                for part in self.server.keys(f".parts/{query['uploadId']}/"):
                    out.write(self.server.path(part).read_bytes())
                    self.server.path(part).unlink()
            text = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        self._reply(200, text.encode())

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        self._note(key, 0)
        self.server.path(key).unlink(missing_ok=True)
        self._reply(204)

    def log_message(self, *_: object) -> None: ...


def _tag(path: Path) -> str:
    return f'"{path.stat().st_mtime_ns:x}"' if path.exists() else ""


@contextlib.contextmanager
def serve_s3(directory: Path, kind: type[CountingS3] = CountingS3) -> Iterator[CountingS3]:
    """Serve a `CountingS3` at the endpoint that the environment names meanwhile."""
    with kind(directory) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "a",
        }
        given |= {"AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield server
        finally:
            server.shutdown()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def make_model(work: Path, layers: int, hidden: int) -> Path:
    """Make a model directory, with the tokenizer of the demo's."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    data_prep(out=f"{work}/prompts", train=64, eval=16, sft=64)
    base_model(out=f"{work}/tiny", prompts=f"{work}/prompts")
    words = AutoTokenizer.from_pretrained(Artifact(f"{work}/tiny").path / "model")
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "head_dim": 32,
    }
    heads = {
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "tie_word_embeddings": True,
    }
    ends = {
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    config = Qwen3Config(
        **shape, **heads, **ends, vocab_size=len(words), max_position_embeddings=1024
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(work / "model")
    words.save_pretrained(work / "model")
    return work / "model"


def run_loop(
    url: str, model: Path, measure: Callable[..., None], iterations: int = 2, **options: Any
) -> None:
    """Run the stages of a loop, each by `measure`; `options` are of its updates."""
    sampled = {"engine": "transformers", "max_tokens": 4}
    prompts, policy = f"{url}/data-prep", f"{url}/sft"
    measure("data_prep", data_prep, out=prompts, train=64, eval=16, sft=64)
    measure("base_model", base_model, out=f"{url}/base", prompts=prompts, model=str(model))
    measure(
        "sft",
        sft,
        out=policy,
        policy=f"{url}/base",
        prompts=prompts,
        max_steps=2,
        save_dtype="bfloat16",
    )
    for i in range(1, iterations + 1):
        here = f"{url}/iterations/{i}"
        given = {
            "policy": policy,
            "prompts": prompts,
            "n": 2,
            "prompts_per_iteration": 4,
            **sampled,
        }
        measure(f"rollout {i}", rollout, out=f"{here}/rollout", iteration=i, **given)
        measure(
            f"reward {i}",
            reward,
            out=f"{here}/reward",
            rollouts=f"{here}/rollout",
            error_budget=0.5,
        )
        given = {
            "policy": policy,
            "rewards": f"{here}/reward",
            "iteration": i,
            "save_dtype": "bfloat16",
        }
        measure(
            f"policy_update {i}", policy_update, out=f"{here}/policy-update", **given, **options
        )
        policy = f"{here}/policy-update"
    measure(
        "evaluate",
        evaluate,
        out=f"{url}/evaluate",
        policy=policy,
        prompts=prompts,
        limit=4,
        **sampled,
    )
    measure("export", export, out=f"{url}/export", policy=policy)


def count_updates(
    server: CountingS3, model: Path, work: Path, every: int, alone: bool
) -> list[float]:
    """Count the updates of five iterations, replayed ones included, and MB that they read and wrote.

    Args:
        alone: each in a process of its own, with an empty cache.
    """
    sums, url = [0.0, 0.0, 0.0], f"s3://bucket/{every}-{alone}"

    def measure(name: str, stage: Any, **given: Any) -> None:
        os.environ["TUNELOOP_CACHE"] = f"{work}/caches/{every}-{alone}" + (
            f"-{name}" if alone else ""
        )
        if alone:
            RESIDENT.options = None
        server.log.clear()
        made = stage(**given)
        if stage is policy_update:
            updates = 1 + made.notes.get("replayed", {"updates": 0})["updates"]
            sums[:] = map(sum, zip(sums, (updates, server.read() / 1e6, server.written() / 1e6)))

    run_loop(url, model, measure, 5, state_every=every)
    for key in server.keys(url.removeprefix("s3://")):
        server.path(key).unlink()
    shutil.rmtree(work / "caches")
    return sums


def _read_calls() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    flags = parser.parse_args()
    counts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = make_model(work, flags.layers, flags.hidden)

        def count_remote(name: str, stage: Any, **given: Any) -> None:
            RESIDENT.options = None  # a pod of its own
            os.environ["TUNELOOP_CACHE"] = f"{work}/caches/{name}"
            server.log.clear()
            stage(**given)
            counts[name] = [len(server.log), server.read() / 1e6, server.written() / 1e6]

        def count_local(name: str, stage: Any, **given: Any) -> None:
            RESIDENT.options = None
            before = _read_calls()
            stage(**given)
            counts[name].append((_read_calls() - before) / 1e6)

        with serve_s3(work / "objects") as server:
            run_loop("s3://bucket/run", model, count_remote)
            run_loop(f"{work}/run", model, count_local)
            parameters = Artifact(f"{work}/run/base").manifest.results["parameters"]
            print(f"{parameters:,} parameters; MB of 1e6 bytes")
            print(
                f"{'stage':<18} {'requests':>8} {'read MB':>10} {'written MB':>10} {'folder: read MB':>16}"
            )
            for name, (requests, *sizes) in counts.items():
                print(
                    f"{name:<18} {requests:>8.0f} "
                    + " ".join(f"{s:>{w}.3f}" for s, w in zip(sizes, (10, 10, 16)))
                )
            print(f"\n{'five updates':<28} {'updates':>8} {'read MB':>10} {'written MB':>10}")
            for every, alone in ((1, False), (5, False), (1, True), (5, True)):
                found = count_updates(server, model, work, every, alone)
                name = f"state_every={every}, {'a pod each' if alone else 'in one pod'}"
                print(
                    f"{name:<28} {found[0]:>8.0f} {found[1]:>10.3f} {found[2]:>10.3f}", flush=True
                )


if __name__ == "__main__":
    main()
