"""Run a program where `TUNELOOP_SANDBOX` says: beside this process, or by `tuneloop.inference.sandbox_server`.

It is ``process``, or the URL of a service; ``URL#gvisor`` is of one that proves to be in gVisor: a weaker one runs
nothing. A run's pods have it from ``cluster.sandbox``.
"""

import json
import os
import re
import time
from dataclasses import asdict

from tuneloop.core.errors import UserError
from tuneloop.core.http import CONNECT_S, Unanswered, send_request
from tuneloop.core.server_token import build_token_headers
from tuneloop.rewards.sandbox import HINDERED, Ending, Limits, check_kernel, run_program
from tuneloop.workflow.settings import PROCESS, SANDBOX_PLACE, SANDBOX_TOKEN, SANDBOX_VARIABLE

PAUSE_S = 0.5
"""Between two requests to a service that is busy, or away."""


def find_sandbox() -> str:
    """Find where programs run. Raises UserError where the environment names no such place."""
    if not re.fullmatch(SANDBOX_PLACE, where := os.environ.get(SANDBOX_VARIABLE, PROCESS)):
        raise UserError(SANDBOX_VARIABLE, where, "must be process, or a URL as http://host:8000, perhaps with #gvisor")
    return where


def check_sandbox(field: str, value: str) -> None:
    """Check that programs can be run: as `check_kernel`; a service is asked only when there is a program."""
    if find_sandbox() == PROCESS:
        check_kernel(field, value)


def run_in_sandbox(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run a program as `run_program` does, there. It can be run anew, so a service that is lost is asked again.

    Raises:
        OSError: it could not be shut in, or no service takes it; it was not run then.
        UserError: the service is weaker than it is to be, or refuses what is no program's doing.
    """
    if (where := find_sandbox()) == PROCESS:
        return run_program(program, stdin, call, limits)
    url, _, isolation = where.partition("#")
    asked = {"program": program, "stdin": stdin, "call": call, **asdict(limits), "isolation": isolation or PROCESS}
    try:
        program.encode()
    except UnicodeEncodeError as error:  # as Python's compiler says of it
        return Ending("error", "", error=f"UnicodeEncodeError: {error}"[:300])
    end = time.monotonic() + (most := HINDERED * limits.seconds + CONNECT_S)
    while True:
        headers = build_token_headers(SANDBOX_TOKEN)
        try:
            status, answer = send_request("POST", f"{url}/run", timeout_s=most, body=asked, headers=headers)
        except Unanswered as error:
            status, answer = 503, str(error).encode()
        if status == 200:
            return Ending(**json.loads(answer)["ending"])
        if status == 413:
            return Ending("memory", "")
        told = f"the sandbox answers {status}: {answer.decode(errors='replace')[:300]}"
        if status < 500 and status != 401:  # a token that was just replaced comes to two pods at two times
            raise UserError(SANDBOX_VARIABLE, where, told)
        if time.monotonic() > end:
            raise OSError(f"{url}: {told}")
        time.sleep(PAUSE_S)
