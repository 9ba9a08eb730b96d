"""llama.cpp's server for benchmarks/embedded_throughput.py, in an environment with the package xllamacpp.

    PYTHON benchmarks/llama_cpp.py WEIGHTS.gguf --port N [--threads 2] [--parallel 64] [--context 144]

Serves until its input ends. Flash attention, batch sizes and the cache of prompts stay as llama.cpp sets them.
"""

from __future__ import annotations
import argparse
import sys
from pathlib import Path
from typing import Any


def in_bfloat16(source: Path, target: Path) -> None:
    """Write a GGUF file again with its matrices in bfloat16, as the other servers of a benchmark compute."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, sub_type=field.types[-1] if kind is GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--context", type=int, default=144, help="tokens of one request")
    options = parser.parse_args()
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = options.weights
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.parallel * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
