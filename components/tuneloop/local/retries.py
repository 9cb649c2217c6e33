"""Retries of a local run: policy, limit, backoff and expression.

They are read as the Argo controller 3.7 reads them (``processNodeRetries`` in
``workflow/controller/operator.go``). After which ends a pod is started again is not decided here: the
expression is rendered from `tuneloop.core.ends`.

A graph (`local/graph.py`) runs a template with a retry strategy by `Attempts`; the attempt gets the
tags of the one before it, by which its program is told how that ended (`core/attempts.py`).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tuneloop.core.ends import BUDGET, classify_end, describe_exit, name_signal
from tuneloop.core.errors import EXIT_RETRY
from tuneloop.core.json_types import JsonMapping
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.results import Call, Daemon, Result, Scope
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError
from tuneloop.workflow.manifest import RETRIED_PHASES, parse_duration

FIRST_ATTEMPT: Scope = {
    "lastRetry.exitCode": "0",
    "lastRetry.status": "",
    "lastRetry.duration": "0",
    "lastRetry.message": "",
}
"""The tags of the previous attempt, with the values that a first attempt reads."""


class Attempts:
    """The attempts of a template under a retry strategy, each a node ``<name>(n)`` below `node`.

    Attributes:
        node: the node of type ``Retry``, whose result is that of the last attempt.
    """

    def __init__(
        self,
        execution: Execution,
        strategy: JsonMapping,
        node: Node,
        call: Call,
        attempt: Callable[[Node, Scope], Result],
    ) -> None:
        """Prepare the attempts.

        Args:
            strategy: the template's ``retryStrategy``; its tags are substituted.
            attempt: runs the template as a node, with the tags of the attempt before.
        """
        self.execution = execution
        self.node = node
        self._strategy = strategy
        self._call = call
        self._attempt = attempt
        self._number = 0
        self._last = FIRST_ATTEMPT
        self._child = node

    def run(self) -> Result:
        """Run attempts until one does not fail or the strategy says so.

        A daemon is then restarted when it ends.
        """
        self.execution.start(self.node)
        result = self.run_until_ready()
        if result.daemon:
            result.daemon = _RestartedDaemon(self, result.daemon)
        return result

    def run_until_ready(self) -> Result:
        """Run attempts until one succeeds, is ready (a daemon), or is the last."""
        while True:
            name = f"{self._call.name}({self._number})"
            self._child = self.execution.create_node(
                replace(self._call, name=name, parent=self.node.id),
                self.execution.get_node_type(self._call.template),
            )
            self._child.inputs = self.node.inputs
            try:
                result = self._attempt(self._child, self._last | {"retries": str(self._number)})
            except ExpressionError as error:
                result = Result("Error", str(error))
            self.execution.settle(self._child, result)
            if not result.broken or not self.try_again(result):
                return result

    def try_again(self, result: Result) -> bool:
        """Return whether another attempt follows one that ended with `result`; wait until it is
        due.
        """
        if self.execution.stopping.is_set() or self.execution.find_end_reason(self.node.name):
            return False
        started = self._child.started or time.time()
        finished = self._child.finished or time.time()
        self._last = {
            "lastRetry.status": result.phase,
            "lastRetry.exitCode": str(result.code),
            "lastRetry.message": result.message,
            "lastRetry.duration": str(max(0.0, finished - started)),
            "retries": str(self._number),
        }
        refusal = _refusal(self._strategy, self._last, result, self._number)
        if refusal is not None:
            if refusal:
                result.message = f"{refusal}: {result.message}"
            return False
        pause = _pause(self._strategy.get("backoff") or {}, self._number)
        self._number += 1
        daemon = self.execution.templates[self._call.template].get("daemon")
        message = _announce_attempt(result, self._number, pause)
        if daemon:
            message = self._announce_restart(result)
        self.execution.set_message(self.node, message)
        return not self.execution.pause(pause, self.node.name)

    def _announce_restart(self, result: Result) -> str:
        """Return the message that a server died and is started again."""
        signal = name_signal(result.code)
        died = f"server died: {signal}" if signal else result.message
        # A number above the budget means that the server has answered in between, so that its
        # budget began anew.
        budget = min(BUDGET.limit, int(self._strategy.get("limit") or BUDGET.limit))
        count = f"restart {self._number}"
        if self._number <= budget:
            count = f"{self._number} of {budget}"
        log = self.execution.workdir / self._child.log
        if log.is_relative_to(Path.cwd()):
            log = log.relative_to(Path.cwd())
        return f"{died}; restarting ({count}); log: {log}"


def _announce_attempt(result: Result, number: int, pause: float) -> str:
    """Return the message before another attempt.

    It has the class of the last attempt's end, its last words, and the pause in seconds.
    """
    end = classify_end(result.phase, result.code, result.message)
    # The message of exit code 75 names the class itself, so the code is left out.
    reason = result.message.removeprefix(f"{describe_exit(EXIT_RETRY)}: ")
    reason = reason.removeprefix(f"{end.name}: ")
    return f"{end.name}: {reason}; retrying in {pause:g} s (attempt {number + 1})"


class _RestartedDaemon:
    """A daemon that is restarted, at the same address, when it ends by itself.

    Attributes:
        over: is set when it has ended and is not restarted.
        result: how it has ended then.
    """

    def __init__(self, attempts: Attempts, daemon: Daemon) -> None:
        self._attempts = attempts
        self._daemon = daemon
        self.over = threading.Event()
        self.result = Result("Succeeded")
        self._closing = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the attempt that runs, and wait for its end; no other follows."""
        self._closing = True
        # An attempt that is about to start must not.
        reason = "nothing is left that it could serve"
        self._attempts.execution.end_nodes([self._attempts.node.name], reason)
        self._daemon.close()
        self._thread.join()

    def _watch(self) -> None:
        """Start the daemon again whenever it ends, until it is closed or may not be retried."""
        execution = self._attempts.execution
        node = self._attempts.node
        while True:
            self._daemon.over.wait()
            result = self._daemon.result
            if self._closing or not self._attempts.try_again(result):
                break
            result = self._attempts.run_until_ready()
            if result.daemon is None:
                break
            self._daemon = result.daemon
            execution.set_message(node, "")
            # It may have been asked to end while it started.
            if self._closing:
                self._daemon.close()
        # The daemon has succeeded once its graph is over; each attempt has its own result.
        self.result = Result("Succeeded") if self._closing else result
        execution.settle(node, self.result)
        self.over.set()


def _refusal(strategy: JsonMapping, last: Scope, result: Result, number: int) -> str | None:
    """Return why there is no further attempt; None if there is one.

    It is empty if the message of the last attempt says enough.
    """
    expression = strategy.get("expression")
    policy = strategy.get("retryPolicy") or ("Always" if expression else "OnFailure")
    if result.phase not in RETRIED_PHASES[policy]:
        return ""
    if strategy.get("limit") is not None and number >= int(strategy["limit"]):
        return "No more retries left"
    if expression and not expressions.evaluate_boolean(expression, last):
        return ""
    return None


def _pause(backoff: JsonMapping, number: int) -> float:
    """Return the seconds before a retry: the duration times a power of the factor, as Argo does.

    Args:
        backoff: of the template's retry strategy.
        number: how many retries were before it; 0 for the first.
    """
    factor = float(int(backoff.get("factor") or 1))
    return parse_duration(backoff.get("duration") or 0) * factor**number
