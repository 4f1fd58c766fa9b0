"""A trainer process: does one job, and reports what it does.

python -m lightckpt.demo.trainer JOB
"""

import sys
import time

from .digest import digest_state
from .job import Job, Reporter
from .measure import measure
from .train import build, train_checkpointed, train_plain


def main(arguments: list[str]) -> int:
    """Do the job in ``arguments[0]``."""
    job = Job.from_json(arguments[0])
    report = Reporter(job.report_fd)
    run = build(job)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    report.send("ready", at_ns=time.monotonic_ns(), parameters=parameters)
    if job.role == "measure":
        measure(job, run, report)
        return 0
    train = train_plain if job.role == "plain" else train_checkpointed
    train(job, run, report)
    report.send("digests", digests=digest_state(run.model, run.optimizer, run.scheduler))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
