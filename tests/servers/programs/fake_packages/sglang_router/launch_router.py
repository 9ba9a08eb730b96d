"""sglang-router's command line in front of its stand-in."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[5]))

from aiohttp import web
from tests.rollout.router_stand_in import RouterStandIn

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
print(json.dumps({"arguments": sys.argv[1:]}), flush=True)
web.run_app(RouterStandIn().app(), host="127.0.0.1", port=options.port, print=None, access_log=None)
