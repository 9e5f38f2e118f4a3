"""Shows what a save to a bucket and a load from it survive, compared with s3torchconnector's DCP classes.

    pip install s3torchconnector[dcp]
    go build -o slow ./internal/object/faultproxy/slow
    python3 survive.py 's3://BUCKET/PREFIX?endpoint=http://127.0.0.1:7070&region=us-east-1&path-style=1' --slow ./slow [--bin DIR]

Each fault happens in a proxy in front of the server, to one save or one load of 48 MB by one
process. The outcome is what the program has afterwards: the right bytes, wrong bytes, or an error.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.parse
import uuid

FAULTS = [
    ("save", "flip-put", "a bit of what is sent flips, once"),
    ("save", "flip-puts", "a bit flips in each large request"),
    ("save", "cut-put", "the connection breaks in a part, once"),
    ("save", "drop-complete", "the answer to the last request of an upload is lost"),
    ("load", "flip-get", "a bit of what is read flips, once"),
    ("load", "flip-gets", "a bit flips in each answer"),
    ("load", "cut-get", "the connection breaks in an answer, once"),
    ("load", "change", "a bit of the stored file is changed"),
]
WAYS = ["peer", "ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what saves and loads of a bucket survive.")
    parser.add_argument("url")
    parser.add_argument("--slow", help="the proxy")
    parser.add_argument("--bin", type=pathlib.Path, help="directory of ckptstore and trainer; default: PATH")
    parser.add_argument("--objects", type=pathlib.Path, help="the server's directory of the bucket, for the last fault")
    parser.add_argument("--do", nargs=3, metavar=("WAY", "SAVE|LOAD", "STEP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        one(options.url, *options.do)
        return
    at = urllib.parse.urlsplit(options.url)
    program = {name: str(options.bin / name) if options.bin else name for name in ("ckptstore", "trainer")}
    print(f"{'FAULT':76}{'s3torchconnector':28}ckptstore")
    for kind, fault, text in FAULTS:
        if fault == "change" and not options.objects:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
            cells = [outcome(options, at, program, f"{base}/{way}", way, kind, fault) for way in WAYS]
        print(f"{kind + ': ' + text:76}{cells[0]:28}{cells[1]}", flush=True)


def outcome(options, at, program, base, way, kind, fault) -> str:
    """Run one save and one load, one of them with the fault, and return what came of it."""
    name = uuid.uuid4().hex
    clean = at._replace(path=f"{at.path.rstrip('/')}/{name}").geturl()
    query = dict(urllib.parse.parse_qsl(at.query))
    proxy = subprocess.Popen([options.slow, "--target", query["endpoint"], "--every", "1h", *(["--fault", fault] if fault != "change" else [])], stdout=subprocess.PIPE, text=True)
    try:
        faulty = at._replace(path=urllib.parse.urlsplit(clean).path, query=urllib.parse.urlencode(query | {"endpoint": proxy.stdout.readline().strip()})).geturl()
        store = f"{base}-store"
        through = fault != "change"
        if way == "ours":  # the store records the server's address; a fault of a load does not concern its save
            subprocess.run([program["ckptstore"], "init", "-q", "--store", store, "--data", faulty if through else clean], check=True, capture_output=True)
        run = lambda what, url: act(program, store, way, what, url)  # noqa: E731
        saved = run("save", faulty if through and kind == "save" else clean)
        if saved != "right bytes":
            return saved if kind == "save" else f"the save: {saved}"
        if fault == "change":
            change(options.objects, name)
        return run("load", faulty if through and kind == "load" else clean)
    finally:
        proxy.send_signal(signal.SIGTERM)
        proxy.wait()


def change(objects: pathlib.Path, name: str) -> None:
    """Change a bit of each data file below a prefix."""
    for path in objects.rglob("*"):
        if name in str(path) and path.suffix in (".safetensors", ".distcp") and path.is_file():
            with path.open("r+b") as file:
                file.seek(1 << 19)
                byte = file.read(1)
                file.seek(1 << 19)
                file.write(bytes([byte[0] ^ 1]))


def act(program, store, way, what, url) -> str:
    """Save or load in a process of its own."""
    rank = [sys.executable, __file__, url, "--do", way, what, "1"]
    command = rank
    if way == "ours":
        command = [program["trainer"], "run", "-q", "--store", store, "--name", "bench", "--max-restarts", "0", "--save-timeout", "60s", "--", *rank]
    env = os.environ | {"CKPTSTORE_BIN": program["ckptstore"]}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    words = [line.split("outcome: ")[1] for line in (done.stdout + done.stderr).splitlines() if "outcome: " in line]
    return words[-1] if words else "error"


def one(url: str, way: str, what: str, step: str) -> None:
    """Save, or load and compare, in this process."""
    import torch
    import torch.distributed.checkpoint as dcp

    at = urllib.parse.urlsplit(url)
    settings = dict(urllib.parse.parse_qsl(at.query))
    torch.manual_seed(1)
    made = {f"layer{i}.weight": torch.randn(1 << 20) for i in range(12)}
    state = made if what == "save" else {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    if way == "ours":
        import ckptstore

        if what == "save":
            ckptstore.save(state, step=int(step)).wait("committed")
        else:
            ckptstore.load(state)
    else:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        config = S3ClientConfig(force_path_style=settings.get("path-style") == "1")
        handle = (S3StorageWriter if what == "save" else S3StorageReader)(settings.get("region", "us-east-1"), f"s3://{at.netloc}{at.path}/step-{step}", s3client_config=config)
        handle.fs._client = S3Client(settings.get("region", "us-east-1"), endpoint=settings.get("endpoint"), s3client_config=config)
        if what == "save":
            dcp.save(state, storage_writer=handle)
        else:
            dcp.load(state, storage_reader=handle)
    same = all(torch.equal(state[name], made[name]) for name in made)
    print("outcome: " + ("right bytes" if same else "wrong bytes"), flush=True)


if __name__ == "__main__":
    main()
