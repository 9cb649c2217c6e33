"""A process that has imported the libraries of stages, or of a vLLM server, and forks them.

A fresh interpreter needs 5 to 15 seconds for torch and transformers; a fork needs milliseconds.
Each stage is a process of its own all the same: own process group, environment, working directory
and log. The server's process imports vLLM, which no stage needs, beside the first stages; so the
server has only its engine left to start.

Run as ``python -m tuneloop.local.warm stages FD PARENT``, or ``server FD PARENT``, by
`tuneloop.local.processes`, the process PARENT; it speaks the protocol of `tuneloop.local.spawn`. It
says ``{"ready": true}`` once it has imported `LIBRARIES`, or ``{"failed": reason}``: a thread that
lives before the fork (an OpenMP pool, a CUDA context) would be missing in the child, so none may.

Run as ``python -m tuneloop.local.warm stages PATH [MODULE …]`` it serves many runs, until the
process that started it ends: those with ``TUNELOOP_WARM=PATH`` in their environment connect to the
socket PATH, and each gets a fork of this process, which serves it as a warm process of its own
would. The further modules are imported too.

What is added to `STAGES` is imported once for all stages of all runs: it must start no thread, and
must not read the environment when it is imported, unless `is_compatible` compares the variable.

A program is forked from it only if `is_stage` or `is_server` knows its command; any other starts as
a fresh process, without a word. Tests: `tests/local/test_warm.py` and `test_warm_server.py`.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Literal, NoReturn, cast

from tuneloop.core.json_types import JsonObject
from tuneloop.core.processor import find_answer
from tuneloop.core.provenance import code_digest, list_packages
from tuneloop.core.threads import end_process
from tuneloop.inference.engines._vllm_start import quiet_vllm
from tuneloop.local.spawn import adopt_orphans, die_with_parent, end_all, serve_requests

Kind = Literal["stages", "server"]

STAGES = (
    "tuneloop.core.component",
    "httpx2",
    "pyarrow.parquet",
    "tokenizers",
    "safetensors.torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "tuneloop.algorithms.grpo",
    "tuneloop.inference.engines._client",
    "tuneloop.inference.engines.vllm",
    "tuneloop.inference.generate",
    "tuneloop.training.policy_gradient",
    "tuneloop.rewards.exact",
    "tuneloop.rewards.scoring",
    "tuneloop.training.epochs",
    "tuneloop.training.fsdp.trainer",
    "tuneloop.stages.rollout",
    "tuneloop.stages.reward",
    "tuneloop.stages.policy_update",
    "tuneloop.stages.evaluate",
)
"""What the stages of a loop import and what takes long to import. A module that is missing here is
imported by each stage; one that starts a thread must not be here."""
SERVER = (
    "tuneloop.core.component",
    "tuneloop.inference.follower",
    "tuneloop.inference.engine_loop",
    "uvicorn",
    "fastapi",
    "torch",
    "transformers.models.auto.tokenization_auto",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
)
LIBRARIES: dict[Kind, Sequence[str]] = {"stages": STAGES, "server": SERVER}
"""Modules that are imported before the first fork; a fork imports all others itself."""

READ_AT_IMPORT = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "GOMP_",
    "KMP_",
    "CUDA_",
    "LD_",
    "TORCH",
    "PYTORCH_",
    "HF_",
    "TRANSFORMERS_",
    "VLLM_",
)
"""Variables with these prefixes take effect when a library is imported.

A stage that has others than the warm process cannot be its fork. `tests/warm.py` restores these
variables between tests.
"""
READ_AT_START = ("PYTHON",)
"""Variables with these prefixes take effect when the interpreter starts."""


def is_stage(argv: Sequence[str]) -> bool:
    """Return whether `argv` is one of tuneloop's stages in a single process: ``python -m
    tuneloop.stages.… …``, or a pod of several iterations.
    """
    name = _program(argv)
    return name.rpartition(".")[0] == "stages" or name == "local.iterations"


def is_server(argv: Sequence[str]) -> bool:
    """Return whether `argv` is tuneloop's server of vLLM; the command names any other engine."""
    return _program(argv) == "inference.server" and "--engine" not in argv


def _program(argv: Sequence[str]) -> str:
    """Return the module below `tuneloop` that `argv` runs, or nothing."""
    if len(argv) < 3 or argv[1] != "-m" or not argv[2].startswith("tuneloop."):
        return ""
    interpreters = ("python", "python3", Path(sys.executable).name)
    return argv[2].removeprefix("tuneloop.") if Path(argv[0]).name in interpreters else ""


def is_compatible(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Return whether a process with environment `theirs` may be a fork of one with `ours`."""
    return _select_variables(ours) == _select_variables(theirs)


def _select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change any more."""
    prefixes = READ_AT_IMPORT + READ_AT_START
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def main() -> None:
    """Run as a program: import libraries, and then serve requests until the channel closes."""
    kind, channel_name, *arguments = sys.argv[1:]
    # A number is a socket of the one run that it serves, anything else a path for many runs.
    is_for_one_run = channel_name.isdigit()
    if is_for_one_run:
        channel = socket.socket(fileno=int(channel_name))
        parent = int(arguments.pop(0))
    else:
        channel = _listen(Path(channel_name))
        parent = os.getppid()
    # Computed before the imports: if a file changes meanwhile, runs see another digest, and start
    # their own process.
    code = [sys.executable, code_digest(), list_packages()]
    environment = _select_variables(os.environ)
    # While it imports, it cannot see that the channel closes. Who started it may have ended by now:
    # then this process has another parent already.
    die_with_parent(parent)
    # Else transformers would open a CUDA context when it looks for GPUs, and no fork could use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    quiet_vllm()
    try:
        modules = list(LIBRARIES[cast(Kind, kind)]) + arguments
        _import_libraries(kind, modules)
    except Exception as error:
        if not is_for_one_run:
            raise
        _send(channel, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    # The collector of a child does not touch, and so does not copy, what was imported.
    gc.freeze()
    message: JsonObject = {"ready": True}
    if not is_for_one_run:
        channel = _connection(channel)
        message["env"] = environment
        message["code"] = code
    # If the client has gone, `serve_requests` will see it.
    with contextlib.suppress(ConnectionError):
        _send(channel, message)
    die_with_parent(None)
    adopt_orphans()
    request = serve_requests(channel)
    if request is None:
        end_all()
    else:
        _become(request["argv"], request["env"], request["cwd"], request["report"])


def _import_libraries(kind: str, modules: Sequence[str]) -> None:
    """Import modules, and what else forks inherit. Raises RuntimeError if threads run then."""
    with _hushed():
        for name in modules:
            importlib.import_module(name)
    # The forks inherit the answer, and the digests of the code.
    find_answer()
    # It compiles 700 regular expressions when the first model is opened.
    if kind == "stages":
        mapping = importlib.import_module("transformers.conversion_mapping")
        mapping.get_checkpoint_conversion_mapping("qwen3")
    # Linux lists the threads of a process, also those of native libraries.
    tasks = Path("/proc/self/task")
    threads = list(tasks.iterdir()) if tasks.exists() else []
    if len(threads) > 1:
        names = ", ".join((thread / "comm").read_text().strip() for thread in threads)
        raise RuntimeError(f"threads are running after the imports: {names}")


def _send(channel: socket.socket, message: JsonObject) -> None:
    """Send a message as a line."""
    channel.sendall(json.dumps(message).encode() + b"\n")


def _listen(path: Path) -> socket.socket:
    """Listen at `path`, for this user alone; clients wait until the imports are done."""
    listener = socket.socket(socket.AF_UNIX)
    # A client that sees the path can connect at once, so it gets its name when it listens.
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    earlier_mask = os.umask(0o077)
    listener.bind(str(staged))
    os.umask(earlier_mask)
    listener.listen(128)
    staged.rename(path)
    return listener


def _connection(listener: socket.socket) -> socket.socket:
    """Fork for each client that connects; return in these forks only."""
    while True:
        channel, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.setsid()
            return channel
        channel.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    report: socket.socket,
) -> NoReturn:
    """Go on as ``python -m module arguments``, and end."""

    def report_code(code: int) -> None:
        # The next stage begins after this, and may need a whole GPU. Its memory is freed only when
        # a process has ended, so one that has used the GPU reports nothing.
        torch = sys.modules.get("torch")
        if not torch or not torch.cuda.is_initialized():
            with contextlib.suppress(OSError):
                report.sendall(str(code & 255).encode())

    # Only this process reports its exit code.
    os.register_at_fork(after_in_child=report.close)
    # Drop the libraries' exit handlers, which clean up after the warm process, slowly; a stage may
    # add its own.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    numpy = sys.modules.get("numpy")
    if numpy:
        # As in a fresh process; `random` does so by itself.
        numpy.random.seed()
    sys.path[0] = cwd
    sys.argv = list(argv[2:])
    # The name that `ps -o comm` and `top` show, on Linux alone.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"tuneloop.{argv[2].rpartition('.')[2]}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 0
    try:
        # To execute a module again takes longer than all else that a small stage waits for.
        stage = importlib.import_module("tuneloop.core.component").find_component(argv[2])
        # `main` ends the process. What is no stage is run as a program.
        if stage is not None:
            stage.main()
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    end_process(code or 0, report_code)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drop what libraries print while they are imported, as it is for no run's terminal.

    Their loggers keep the stream.
    """
    terminal = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nothing)


if __name__ == "__main__":
    main()
