"""Runs llama-benchy, a benchmark client of others, against `proa serve demo`.

    make bench-benchy          or          python benchmarks/serving/benchy.py --benchy PATH/llama-benchy

llama-benchy wants a book to cut prompts from by URL; it gets the project's own text from a loopback server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from proa.cli.local_server import local_server
from proa.convert.demo_model import ensure_demo_model
from proa.core.env import child_environment

ROOT = Path(__file__).parents[2]
BOOK = ("LICENSE", "HACKING.md", "docs/architecture.md", "docs/request_lifecycle.md")
LOAD = ["--pp", "256", "1024", "--tg", "64", "--concurrency", "1", "4", "--runs", "2"]


class _Book(BaseHTTPRequestHandler):
    text = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        """Silence."""


def main() -> int:
    """Serve book and model, run the client, return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchy", default="llama-benchy", help="the program")
    parser.add_argument("load", nargs="*", default=LOAD, help="llama-benchy's flags, after --")
    arguments = parser.parse_args()
    _Book.text = "\n\n".join((ROOT / name).read_text() for name in BOOK).encode() * 4
    book = ThreadingHTTPServer(("127.0.0.1", 0), _Book)
    threading.Thread(target=book.serve_forever, daemon=True).start()
    with local_server("demo") as server:
        command = [
            arguments.benchy, "--base-url", server.endpoint.url("/v1"), "--model", "demo",
            "--tokenizer", str(ensure_demo_model()), "--book-url", f"http://127.0.0.1:{book.server_address[1]}/book.txt",
            "--skip-coherence", "--latency-mode", "none", "--exact-tg", "--no-cache", "--exit-on-first-fail",
        ]  # fmt: skip
        environment = child_environment(HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1")
        return subprocess.run([*command, *arguments.load], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
