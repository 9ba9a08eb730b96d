"""vLLM's command line, its token route and its version route, with the worker extension on its path."""

import argparse
import json
import os
import sys
import areal_lite_vllm
from aiohttp import web

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
has_extension = hasattr(areal_lite_vllm.WorkerExtension, "load_checkpoint_dir")
started = {"arguments": sys.argv[1:], "environment": dict(os.environ), "has_extension": has_extension}
print(json.dumps(started), flush=True)
version = "default"


async def generate(request: web.Request) -> web.Response:
    count = (await request.json())["sampling_params"]["max_tokens"]
    choice = {
        "token_ids": [7] * count,
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}] * count},
        "weight_versions": [{"version": version, "start": 0, "end": count}],
    }
    return web.json_response({"choices": [choice]})


async def update_version(request: web.Request) -> web.Response:
    global version
    version = (await request.json())["new_version"]
    print(f"version {version}", flush=True)
    return web.Response()


async def health(_: web.Request) -> web.Response:
    return web.Response()


app = web.Application()
app.router.add_get("/health", health)
app.router.add_post("/inference/v1/generate", generate)
app.router.add_post("/update_weight_version", update_version)
web.run_app(app, host="127.0.0.1", port=options.port, print=None)
