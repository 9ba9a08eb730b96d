"""Check of the chains in which the writer of dumps notes each file (:mod:`areal_lite.rollout.dumps.dump_writer`)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import orjson

from areal_lite.rollout.dumps.dump_lines import CHAIN
from areal_lite.tools.foreign_files import read_lines
from areal_lite.tools.verify.verify_run import Run
from areal_lite.tools.verify.verify_steps import RunCheck


def dumps_are_as_written(run: Run) -> Iterator[str]:
    """Dumps have the hashes that their writers noted, and each note has that of the note before it."""
    dumps, noted = {group.file for group in run.groups}, dict[str, str]()
    for folder in sorted({file.rpartition("/")[0] for file in dumps}):
        for chain in sorted((run.root / folder).glob(f"{CHAIN}*")):
            previous = b""
            for number, line in enumerate(read_lines(chain, run.root), 1):
                if not line.endswith(b"\n"):
                    break  # the writer was killed, or its disk was full
                note = orjson.loads(line)
                if note["previous"] != sha256(previous).hexdigest():
                    yield f"{folder}/{chain.name}:{number}: the notes before it were changed"
                noted[f"{folder}/{note['file']}"], previous = note["sha256"], line
    for file, wanted in noted.items():
        digest = sha256()
        try:
            for line in read_lines(run.root / file, run.root):
                digest.update(line)
            if digest.hexdigest() != wanted:
                yield f"{file} was changed after it was written"
        except FileNotFoundError:
            yield f"{file} was removed after it was written"
    if unnoted := dumps - noted.keys():
        run.unproved.append(
            f"that {len(unnoted)} of {len(dumps)} dumps are as they were written: they are in no chain, as those of an "
            f"older version, of a copy without {CHAIN}* and of a writer that was killed"
        )


CHAIN_CHECKS: dict[str, RunCheck] = {"chain": dumps_are_as_written}
