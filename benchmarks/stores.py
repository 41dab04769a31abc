"""CPU time of ranged reads by scheme, from one server on loopback that only sends.

boto3 reads s3://, our own code the others.

image_ms  milliseconds of CPU in the reading process for 110 kB, a photograph, by scheme; medians over turns
block_ms  the same for 16 MiB, a block
"""

import multiprocessing
import os
import random
import re
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import common

from eagleray.storage import store

SIZE = 64 * 2**20  # bytes of the file
IMAGE, BLOCK = 110_000, 16 * 2**20
HEADERS = {"ETag": '"x"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=30, help="reads of 110 kB in a turn")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    urls = point_at(f"http://127.0.0.1:{ours.recv()}")
    result = {}
    for key, length, count in (("image_ms", IMAGE, args.images), ("block_ms", BLOCK, 2)):
        candidates = {url.partition(":")[0]: partial(read, url, length, count) for url in urls}
        times = common.alternate(candidates, range(args.rounds + 1))
        result[key] = {name: common.short(1000 * seconds.cpu / count) for name, seconds in times.items()}
    server.terminate()
    common.show(result, as_json=args.json)


def read(url: str, length: int, count: int, seed: int) -> None:
    """Read ranges at random."""
    rng = random.Random(seed)
    for _ in range(count):
        assert len(store.store(url).read(url, rng.randrange(SIZE - length), length)) == length


def point_at(address: str) -> list[str]:
    """Let the clouds' usual settings name the server, and return a URL of each scheme."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "STORAGE_EMULATOR_HOST": address,
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey=AAAA;BlobEndpoint={address}/a",
        "no_proxy": "127.0.0.1",
    }
    return ["s3://bucket/x", "gs://bucket/x", "az://bucket/x", f"{address}/x"]


def serve(pipe: Connection) -> None:
    """Say a port, and answer every request for a range."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        pipe.send(server.server_port)
        server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    data = memoryview(bytes(SIZE))

    def do_GET(self) -> None:
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        self.send_response_only(206)
        sent = {"Content-Length": str(last - first + 1), "Content-Range": f"bytes {first}-{last}/{SIZE}"}
        for name, value in (sent | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.data[first : last + 1])

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    common.run(main)
