"""`make bench`: measure, print the tables, write build/bench.json. `python -m tests.bench calls memory` for some."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.support.servers import Server, start

from . import asgi, attention, calls, counting, effects, instructions, peers, process, rows, serving
from .turns import Figure

SECTIONS: Mapping[str, tuple[Callable[[Server], Iterable[Figure]], ...]] = {
    "python": (calls.own_python,),
    "instructions": (instructions.instructions,),
    "counts": (counting.requests, counting.event),
    "calls": (calls.ledger, calls.extension, calls.async_ledger),
    "http": (serving.gunicorn,),
    "effects": (effects.records,),
    "process": (process.imports, process.uploads, process.heartbeats),
    "server": (rows.server_cpu, rows.hot_key),
    "memory": (rows.memory,),
    "scale": (rows.many_rows, rows.cluster, rows.io_threads),
    "attention": (attention.stuck_rows,),
    "peers": (peers.peers,),
    "asgi": (asgi.instructions, asgi.times),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--server", choices=("valkey", "redis"), default="valkey")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; there are {', '.join(SECTIONS)}")

    measured: dict[str, list[Figure]] = {}
    for name in options.sections or SECTIONS:
        print(f"\n{name}", flush=True)
        measured[name] = []
        for section in SECTIONS[name]:
            with tempfile.TemporaryDirectory() as directory:
                server = start(options.server, Path(directory) / "server")
                try:
                    for figure in section(server):
                        print(f"  {figure.line()}", flush=True)
                        measured[name].append(figure)
                finally:
                    server.stop()

    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    kept |= {name: [dataclasses.asdict(figure) for figure in figures] for name, figures in measured.items()}
    kept["machine"] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "server": options.server,
        "redis-py": importlib.metadata.version("redis"),
        "hiredis": importlib.util.find_spec("hiredis") is not None,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    missed = [figure for figures in measured.values() for figure in figures if figure.missed]
    print(f"\n{len(missed)} aims missed; all figures are in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
