"""SGLang's command line in front of the stub server; ``--fault`` names how it misbehaves."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[5]))

from aiohttp import web
from tests.stub_server import StubServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--model-path")
parser.add_argument("--weight-version")
parser.add_argument("--fault")
options, _ = parser.parse_known_args()
print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
if options.fault == "exits" or options.model_path == "broken":
    leaks = ["nanobind: leaked 40 types!", ' - leaked type "x"', " - ... skipped remainder", "See https://nanobind.x"]
    sys.exit("\n".join([*(f"line {number}" for number in range(50)), *leaks]))
server = StubServer(answer_len=4)
server.version = options.weight_version
server.told = {}  # the tests serve models of any size
if options.fault == "never ready":
    server.fault = lambda number: "500"
if options.fault == "dies":  # after the probe of its launcher
    server.fault = lambda number: os.kill(os.getpid(), 9) if number else None
if options.fault == "slow":
    time.sleep(2)
if options.fault == "has a child":  # it must not outlive the server
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(json.dumps({"child": child.pid}), flush=True)
web.run_app(server.app(), host="127.0.0.1", port=options.port, print=None, access_log=None)
