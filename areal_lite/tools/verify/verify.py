"""``areal-lite verify``: runs all checks over a run's folder; writes nothing but the index of its dumps.

Each check is one function in one of the tables: :mod:`.verify_episodes` checks groups, :mod:`.verify_steps` steps
against dumps, :mod:`.verify_weights` folders with weights, :mod:`.verify_tokens` what each token trained with.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from areal_lite.config.dotted_path import importing
from areal_lite.files.safe_text import printable
from areal_lite.tools.argument_types import add_trust
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.index_update import UNREADABLE
from areal_lite.tools.inspect.last_answer import run_tokenizer
from areal_lite.tools.inspect.rescore import scored
from areal_lite.tools.verify.verify_episodes import GROUP_CHECKS, LINE_CHECKS
from areal_lite.tools.verify.verify_run import DumpedGroup, Run, differs
from areal_lite.tools.verify.verify_steps import METRICS_CHECKS
from areal_lite.tools.verify.verify_tokens import TOKEN_CHECKS, token_findings
from areal_lite.tools.verify.verify_weights import WEIGHT_CHECKS

SHOWN = 20
_TABLES = (LINE_CHECKS, GROUP_CHECKS, METRICS_CHECKS, WEIGHT_CHECKS, TOKEN_CHECKS)
_NUM_CHECKS = sum(len(table) for table in _TABLES) + 1  # dumps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--reward", metavar="PKG.FN", help="the run's reward function: score its episodes again")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Print what was found, unread and unproved; return 0 if sound, 1 with findings, else 2 if a part is unread."""
    result = check_run(options.path, reward=options.reward, trust_config=options.trust_config)
    shown: Counter[str] = Counter()
    for name, finding in result.findings:
        shown[name] += 1
        if shown[name] <= SHOWN:
            print(printable(f"{name}: {finding}"))
    for name, count in shown.items():
        if count > SHOWN:
            print(f"{name}: and {count - SHOWN} more")
    for heading, texts in (("not read", result.unread), ("not proved", result.unproved)):
        for text in dict.fromkeys(texts):
            print(printable(f"{heading}: {text}"))
    what = f"{_NUM_CHECKS} checks over {len(result.groups)} groups, {result.lines} lines and {len(result.steps)} steps"
    found = f"{len(result.findings)} findings" if result.findings else "no finding"
    print(f"{found} in {what}" if result.findings or result.unread else f"sound: {what}")
    return 1 if result.findings else 2 if result.unread else 0


def check_run(path: Path, *, reward: str | None = None, trust_config: bool = False) -> Run:
    """Run all checks over the run in the folder ``path``, and over its rewards with the reward function ``reward``."""
    run = Run(path)
    with Dumps.open(path, may_be_empty=True) as dumps:
        dumps.refresh(budget_s=3600)  # look at every file again
        for problem in dumps.problems():
            if problem["kind"] == UNREADABLE:
                run.unread.append(": ".join(filter(None, (problem["file"], problem["message"]))))
            else:
                run.findings.append(("dumps", f"{problem['file']}:{problem['line']}: {problem['message']}"))
        run.tokenizer = run_tokenizer(path)
        for group in run.dumped(dumps):
            run.lines += len(group.records)
            run.findings += _group_findings(group, run)
            group.records = ()
            run.groups.append(group)
        if reward is not None:
            run.findings += _reward_findings(dumps, reward)
        run.unproved.extend(dumps.notes())
    if run.tokenizer is None or 2 * sum(name == "texts" for name, _ in run.findings) > run.lines:
        run.findings = [finding for finding in run.findings if finding[0] != "texts"]
        run.unproved.append("that texts are those of their ids: the run's tokenizer is not on this machine")
    if not run.groups:
        run.unproved.append("anything about episodes: there are no dumps (rollout.dump_to_file)")
    with importing(allowed=trust_config):
        run.findings += token_findings(run, scored=reward is not None)
        for name, check in {**METRICS_CHECKS, **WEIGHT_CHECKS}.items():
            run.findings.extend((name, finding) for finding in _found(check(run), run))
    return run


def _reward_findings(dumps: Dumps, reward: str) -> Iterator[tuple[str, str]]:
    """Yield the accepted lines whose reward is not the one that the reward function gives."""
    for record, new in scored(dumps, reward, [], filter="status=accepted"):
        if isinstance(new, Exception):
            yield "rewards", f"{record['id']}: {reward} raised {type(new).__name__}: {new}"
        elif new is not None and differs(record.get("reward"), new):
            yield "rewards", f"{record['id']}: the reward is {record.get('reward')}, and {reward} gives {new}"


def _group_findings(group: DumpedGroup, run: Run) -> Iterator[tuple[str, str]]:
    broken = False
    for record in group.records:
        for name, check in LINE_CHECKS.items():
            for finding in _found(check(record), run):
                broken = broken or name == "columns"
                yield name, f"{record['id']}: {finding}"
    for name, group_check in GROUP_CHECKS.items() if not broken else ():
        for finding in _found(group_check(group, run), run):
            yield name, f"{group.id}: {finding}"


def _found(findings: Iterator[str], run: Run) -> Iterator[str]:
    """Yield the findings of a check; a field that is missing or has another type is one."""
    try:
        yield from findings
    except OSError as error:
        run.unread.append(f"{error.filename or 'a file'}: {error.strerror}")
    except Exception as error:  # a folder that somebody made by hand may break any assumption
        yield f"it cannot be checked: {type(error).__name__}: {error}"
