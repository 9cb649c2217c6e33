"""Many runs on a large cluster: what waits, what is lost, what breaks first. Kubernetes, Argo and Kueue are real.

    KWOK_NODES=1000 rig up argo kueue jobset kwok
    python benchmarks/scale.py                         # three runs, two minutes
    python benchmarks/scale.py --runs 10 50 200        # half an hour on two cores

The nodes are simulated (kwok), and `scale_executor` is their kubelet and Argo's executor. The runs are `grpo` of three
sizes in turn, rendered and prepared as `tuneloop submit` does, and created without its preflight; queue and priorities
are those of manifests/overlays/gpu, with a quota of 8 GPUs a node. Durations are seconds where a real
stage takes minutes, so the controllers meet as much as from some ten times as many real runs.

Use a cluster of its own: the ClusterQueue and the flavor of manifests/ are overwritten.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scale_api import Api
from scale_executor import ARGO, JOBSETS, Executor

from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError, report_error
from tuneloop.kube.connection import Connection, connect_to_cluster
from tuneloop.workflow.settings import RUN_LABEL

ROOT = Path(__file__).parents[1]
GPUS = 8
"""Of a node."""
SIZES = {"1+1": (1, 1, 1, 1.0), "8+4": (8, 1, 4, 1.2), "64+8": (8, 8, 8, 1.5)}
"""GPUs of trainer and sampler → GPUs of a trainer's pod, its pods, GPUs of the server, and how much longer it takes."""
PRIORITIES = ("tuneloop-low",) * 3 + ("tuneloop-normal",) * 6 + ("tuneloop-high",)
PLACE = '{"node_selector": {"type": "kwok"}, "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]}'
OVERLAY = """
resources: [{root}/manifests/base]
components: [{root}/manifests/components/kueue, {root}/manifests/components/gpu-nvidia]
patches:
  - target: {{kind: ResourceFlavor}}
    patch: |
      - {{op: replace, path: /spec, value: {{nodeLabels: {{type: kwok}}, tolerations: [{{operator: Exists}}]}}}}
"""
QUOTA = """
  - target: {{kind: ClusterQueue, name: {name}}}
    patch: |
      - {{op: replace, path: /spec/resourceGroups/0/flavors/0/resources/0/nominalQuota, value: {cpus}}}
      - {{op: replace, path: /spec/resourceGroups/0/flavors/0/resources/1/nominalQuota, value: {nodes}Ti}}
      - {{op: replace, path: /spec/resourceGroups/0/flavors/0/resources/2/nominalQuota, value: {gpus}}}
"""
SAMPLERS = "tuneloop-samplers"
"""The queue of rollout servers, where they have one of their own."""
PROGRAMS = [
    "kube-apiserver",
    "etcd",
    "kube-controller-manager",
    "kube-scheduler",
    "workflow-controller",
    "kueue",
]
PROGRAMS += ["jobset", "kwok"]
HOW = {
    "runs ended": "labels of the workflows; from the first creation",
    "deadlocked": "no stage computes, none began or ended for --stall, quota is held",
    "workload made": "watch of Workloads, p50 / p95 / max (number)",
    "admitted →": "watches of Workloads and pods",
    "pod without": "watch of pods",
    "stage ended": "from the kubelet's last write to the watch of the next pod; Argo waits 10 s by default",
    "GPUs used": "limits of running pods, each second",
    "GPUs held": "admission of Workloads, each second",
    "lost": "from Running to the deletion; GPU s: times its GPUs",
    "evicted": "condition Evicted of Workloads, reason Preempted",
    "status": "JSON of the workflows at the end",
    "requests to": "apiserver_request_total, but for nodes and leases",
    "requests refused": "429 and 5xx that the simulated executors got",
    "CPU": "/proc/PID/stat",
}
"""Beginning of a row → how it was obtained."""


@dataclass
class Result:
    """Of so many runs: rows of the table, and GPUs used and held each second."""

    rows: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[int, int]] = field(default_factory=list)


def prepare_queues(nodes: int, share: float) -> None:
    """Apply our manifests, with the quota of `nodes` nodes, of which servers have a `share` for themselves."""
    apart = round(GPUS * nodes * share)
    with tempfile.TemporaryDirectory() as folder:
        text = OVERLAY.format(root=os.path.relpath(ROOT, os.path.realpath(folder)))
        for name, gpus in (("tuneloop", GPUS * nodes - apart), (SAMPLERS, apart)):
            text += QUOTA.format(name=name, nodes=nodes, cpus=96 * nodes, gpus=gpus)
        (Path(folder) / "kustomization.yaml").write_text(text)
        apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "-k", folder]
        subprocess.run(apply, check=True, stdout=subprocess.DEVNULL)


def render_sizes(iterations: int, apart: bool) -> list[dict[str, Any]]:
    """Render `grpo` once for each size; servers wait in a queue `apart`."""
    found = find_pipeline("grpo")
    made = []
    for gpus, pods, server, _ in SIZES.values():
        sets = [
            f"cluster.trainer.gpus={gpus}",
            f"processes={gpus}",
            f"nodes={pods}",
            f"cluster.sampler.gpus={server}",
        ]
        sets += [
            f"engine.args.tensor_parallel_size={server}",
            f"loop.iterations={iterations}",
            f"cluster.cpu={PLACE}",
        ]
        sets += [
            "loop.iterations_per_pod=0",
            f"cluster.sampler.queue={SAMPLERS if apart else 'tuneloop'}",
        ]
        made.append(found.build(found.configure(None, sets)))
    return made


def read_requests(api: Api) -> Counter[tuple[str, str]]:
    """Count what the API server was asked, by verb and resource, but for the nodes' heartbeats."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in api.send("GET", "/metrics").data.decode().splitlines():
        if line.startswith("apiserver_request_total{"):
            labels, value = line.rsplit(" ", 1)
            about = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if about["resource"] not in ("leases", "nodes", ""):
                counts[about["verb"], about["resource"]] += round(float(value))
    return counts


def read_cpu() -> dict[str, float]:
    """Read the CPU seconds of the controllers, where their processes are on this machine, and of this program."""
    tick, found = os.sysconf("SC_CLK_TCK"), dict.fromkeys(PROGRAMS, 0.0)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")[0].decode()
            host = re.search(rb"HOSTNAME=(\w+)", (stat.parent / "environ").read_bytes())
            name = host[1].decode() if host and words == "/manager" else Path(words).name
            if name in found:
                found[name] += (
                    sum(map(int, stat.read_text().rsplit(") ", 1)[1].split()[11:13])) / tick
                )
        except OSError:  # it has ended
            continue
    return {**found, "scale.py": time.process_time()}


def format_waits(values: list[float]) -> str:
    """Format the median, the 95th percentile, the longest, and how many there are."""
    if not values:
        return "none"
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return f"{statistics.median(ordered):.1f} / {p95:.1f} / {ordered[-1]:.1f} ({len(ordered)})"


def simulate_runs(
    cluster: Connection, count: int, given: argparse.Namespace, made: list[dict[str, Any]]
) -> Result:
    """Submit `count` runs, end their pods, and measure until all have ended, nothing moves, or time is over."""
    draw, api, result = random.Random(f"{given.seed} {count}"), Api(cluster), Result()
    runs = [f"scale-{count}-{number:03d}" for number in range(count)]
    factors = [given.pace * size[-1] for size in SIZES.values()]
    plans = {
        run: (factors[number % len(factors)], draw.choice(PRIORITIES))
        for number, run in enumerate(runs)
    }
    starts = sorted(draw.uniform(0, given.ramp) for _ in runs)
    due = []
    for number, run in enumerate(runs):
        about: Any = {"run": run, "store": "s3://artifacts/runs", "priority": plans[run][1]}
        due.append((starts[number], prepare_workflow(made[number % len(made)], **about)))
    executor = Executor(api, given.seed, plans, given.preempt)
    requests, cpu = read_requests(api), read_cpu()
    executor.follow_cluster()
    begun, told, stuck = time.monotonic(), 0.0, 0
    while len(executor.phases) < count:
        passed = time.monotonic() - begun
        while due and due[0][0] <= passed:
            executor.do_later(api.write, "POST", api.path(ARGO, "workflows"), due.pop(0)[1])
        executor.clock.run(blocking=False)
        if executor.failed:
            raise executor.failed[0]
        if passed >= len(result.samples):
            result.samples.append((sum(executor.used.values()), sum(executor.held.values())))
        if passed >= told:
            told += 15
            print(
                f"  {passed:4.0f} s: {len(executor.phases)} of {count} runs ended, {len(executor.attempts)} stages",
                end="",
            )
            print(
                f" compute; GPUs used {result.samples[-1][0]}, held {result.samples[-1][1]}",
                flush=True,
            )
        idle = time.monotonic() - executor.progress
        computing = any(not attempt.code for attempt in list(executor.attempts.values()))
        if not computing and not due and idle > given.stall and result.samples[-1][1]:
            stuck = count - len(executor.phases)
            tell_stuck(api, executor)
            break
        if passed > given.limit:
            break
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    used_cpu = {name: value - cpu[name] for name, value in read_cpu().items()}
    asked = read_requests(api) - requests
    fill_rows(result, executor, seconds, stuck, given)
    fill_costs(result, api, asked, used_cpu, seconds, count)
    api.stopped = True
    executor.pool.shutdown(wait=False)
    return result


def tell_stuck(api: Api, executor: Executor) -> None:
    """Print of each run that stands still what its workflow waits for, and the address of its server."""
    for workflow in json.loads(api.send("GET", api.path(ARGO, "workflows")).read())["items"]:
        run = workflow["metadata"]["labels"].get(RUN_LABEL, "")
        if run in executor.runs and run not in executor.phases:
            server = executor.servers.get(run, {}).get("status", {}).get("podIP")
            print(f"  {run}: its server is {server or 'not there'}")
            for node in workflow.get("status", {}).get("nodes", {}).values():
                if node["type"] in ("Pod", "Retry") and node["phase"] in (
                    "Pending",
                    "Running",
                    "Failed",
                    "Error",
                ):
                    told = [
                        each["value"]
                        for each in node.get("inputs", {}).get("parameters", ())
                        if "http" in str(each)
                    ]
                    print(
                        f"    {node['displayName']}: {node['phase']}, {node.get('message', '')[:150]} {told}"
                    )


def fill_rows(
    result: Result, executor: Executor, seconds: float, stuck: int, given: argparse.Namespace
) -> None:
    """Fill in what runs felt."""
    rows, ended = result.rows, Counter(executor.phases.values())
    rows["runs ended"] = (
        ", ".join(f"{n} {phase}" for phase, n in ended.items()) + f" in {seconds:.0f} s"
    )
    rows["deadlocked runs"] = str(stuck)
    for row, kind in (
        ("workload made → admitted, s", "admitted"),
        ("admitted → all its pods run, s", "running"),
        ("pod without queue made → runs, s", "bound"),
        ("stage ended → next pod made, s", "next"),
    ):
        rows[row] = format_waits(executor.waits[kind])
    total = GPUS * given.nodes
    used, held = ([each[kind] for each in result.samples] for kind in (0, 1))
    rows["GPUs used: mean, most, of quota"] = (
        f"{statistics.mean(used) / total:.1%}, {max(used) / total:.1%}"
    )
    rows["GPUs held: mean, most, of quota"] = (
        f"{statistics.mean(held) / total:.1%}, {max(held) / total:.1%}"
    )
    tenth = max(1, len(used) // 10)
    parts = [used[at : at + tenth] for at in range(0, tenth * 10, tenth) if used[at : at + tenth]]
    rows["GPUs used, by tenths of the time"] = " ".join(
        f"{statistics.mean(part):.0f}" for part in parts
    )
    for cause, lost in sorted(executor.lost.items()):
        each = [sum(column) for column in zip(*lost)]
        rows[f"lost, {cause}"] = f"{len(lost)} attempts, {each[0]:.0f} s, {each[1]:.0f} GPU s"
    rows["evicted by priority"] = str(len(executor.evicted))


def fill_costs(
    result: Result,
    api: Api,
    asked: Counter[tuple[str, str]],
    cpu: dict[str, float],
    seconds: float,
    count: int,
) -> None:
    """Fill in what the controllers had to do."""
    rows = result.rows
    if sizes := read_statuses(api, f"scale-{count}-"):
        rows["status of a workflow: largest, sum"] = (
            f"{max(sizes) / 1e3:.1f} kB, {sum(sizes) / 1e6:.2f} MB"
        )
    rows["requests to the API server a run"] = (
        f"{asked.total() / count:.0f}, {asked.total() / seconds:.0f}/s"
    )
    for (verb, resource), number in asked.most_common(6):
        rows[f"    {verb} {resource}"] = f"{number / count:.0f}"
    rows["requests refused and repeated"] = str(api.refused)
    rows["CPU seconds of these controllers"] = f"{sum(cpu.values()):.0f} in {seconds:.0f} s"
    for name in (*PROGRAMS, "scale.py"):
        rows[f"    {name}"] = f"{cpu[name]:.0f}"


def read_statuses(api: Api, prefix: str) -> list[int]:
    """Return the bytes of the status of each workflow whose name begins so, as compact JSON."""
    listed = json.loads(api.send("GET", api.path(ARGO, "workflows")).data)["items"]
    mine = [each for each in listed if each["metadata"]["name"].startswith(prefix)]
    return [len(json.dumps(each.get("status", {}), separators=(",", ":"))) for each in mine]


def delete_runs(api: Api, prefix: str, count: int) -> None:
    """Delete what the runs have left, and wait until it is gone."""
    selector = f"{RUN_LABEL} in ({','.join(f'{prefix}{number:03d}' for number in range(count))})"
    for group, plural in ((ARGO, "workflows"), (JOBSETS, "jobsets"), ("v1", "pods")):
        query = {
            "labelSelector": selector,
            "gracePeriodSeconds": 0,
            "propagationPolicy": "Background",
        }
        api.write("DELETE", api.path(group, plural), **query)
    for _ in range(120):
        if not json.loads(
            api.send("GET", api.path("v1", "pods"), labelSelector=selector, limit=1).data
        )["items"]:
            return
        time.sleep(1.0)
    print("  pods were left after two minutes", flush=True)


def print_table(results: dict[int, Result]) -> None:
    """Print a row a figure, a column a number of runs, and how each was obtained."""
    names = list(dict.fromkeys(name for result in results.values() for name in result.rows))
    table = [["runs", *map(str, results), "how"]]
    for name in names:
        how = next((text for start, text in HOW.items() if name.strip().startswith(start)), "")
        table.append([name, *(result.rows.get(name, "") for result in results.values()), how])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[10, 50, 200], help="measured one after the other"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1000,
        help="whose GPUs are the quota; at most those that are there",
    )
    parser.add_argument(
        "--sampler-share", type=float, default=0.0, help="of the quota, servers' own; 0: one queue"
    )
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--pace", type=float, default=1.0, help="times the seconds of all stages")
    parser.add_argument(
        "--preempt",
        type=float,
        default=0.05,
        help="share of attempts that are preempted from outside",
    )
    parser.add_argument(
        "--ramp", type=float, default=60.0, help="seconds within which the runs are submitted"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which what was seen is told"
    )
    parser.add_argument(
        "--stall", type=float, default=60.0, help="seconds without progress that are a deadlock"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--small", action="store_true", help="three runs of one iteration: two minutes"
    )
    given = parser.parse_args()
    if given.small:
        given.runs, given.iterations, given.pace, given.ramp = [3], 1, 0.2, 5.0
    try:
        measure_all(given)
    except UserError as error:
        sys.exit(report_error(error))


def measure_all(given: argparse.Namespace) -> None:
    """Measure each number of runs, and print the table.

    Raises:
        UserError: there are too few simulated nodes; `grpo` has no such setting.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # more connections than it keeps
    cluster = connect_to_cluster()
    there = len(
        json.loads(Api(cluster).send("GET", "/api/v1/nodes", labelSelector="type=kwok").data)[
            "items"
        ]
    )
    if there < given.nodes:
        raise UserError(
            "--nodes",
            given.nodes,
            f"is more than the {there} with the label type=kwok: KWOK_NODES=…",
        )
    made, results = render_sizes(given.iterations, given.sampler_share > 0), dict[int, Result]()
    prepare_queues(given.nodes, given.sampler_share)
    for count in given.runs:
        print(f"{count} runs, {GPUS * given.nodes} GPUs:", flush=True)
        results[count] = simulate_runs(cluster, count, given, made)
        print_table(results)
        delete_runs(Api(cluster), f"scale-{count}-", count)


if __name__ == "__main__":
    main()
