#!/usr/bin/env python3
"""Prints the manifest of a run on Kubernetes (GKE): a JobSet of a trainer world and sampler worlds.

    python launch/jobset.py NAME CONFIG [KEY=VALUE]... --image IMAGE --claim CLAIM --secret SECRET \\
        --trainer v5e:4x4 --sampler v5e:2x4 --samplers 4 | kubectl apply -f -

--trainer and --sampler are a TPU (TYPE:TOPOLOGY: v4, v5e, v5p, v6e) or GPUs (gpu:NODES:GPUS_PER_NODE); a sampler is
one pod. The image has jaxrl_llm and CONFIG; CLAIM is a volume claim all pods can write, mounted on /run-data, where
the run directory is. The secret holds launch/credentials.sh's three files; --names prints the names for that script.
"""

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_COORDINATOR, _TRAINER, _SAMPLER = 8476, 8477, 8478  # ports
_SHARED, _SECRETS = "/run-data", "/credentials"
# label of the accelerator, chips of a host in a slice of several, the most chips of a host that is a slice alone
_TPUS = {
    "v4": ("tpu-v4-podslice", 4, 4),
    "v5e": ("tpu-v5-lite-podslice", 4, 8),
    "v5p": ("tpu-v5p-slice", 4, 4),
    "v6e": ("tpu-v6e-slice", 4, 8),
}


@dataclass(frozen=True)
class Hardware:
    """`pods` of `chips` each, on nodes with these labels."""

    pods: int
    chips: int
    resource: str
    labels: Mapping[str, str]


def hardware(text: str) -> Hardware:
    """Of "v5e:4x4" or "gpu:2:8". Raises ValueError for anything else."""
    kind, _, shape = text.partition(":")
    if kind == "gpu":
        pods, chips = (int(part) for part in shape.split(":"))
        if min(pods, chips) < 1:
            raise ValueError(text)
        return Hardware(pods, chips, "nvidia.com/gpu", {})
    if kind not in _TPUS:
        raise ValueError(text)
    label, of_many, alone = _TPUS[kind]
    sizes = [int(part) for part in shape.split("x")]
    chips = math.prod(sizes)
    if len(sizes) not in (2, 3) or min(sizes) < 1 or (chips > alone and chips % of_many):
        raise ValueError(text)
    labels = {"cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": shape}
    if chips <= alone:
        return Hardware(1, chips, "google.com/tpu", labels)
    return Hardware(chips // of_many, of_many, "google.com/tpu", labels)


def manifest(arguments: argparse.Namespace) -> dict:
    """The JobSet as plain data."""
    name, trainer = arguments.name, arguments.trainer
    files = [
        ("token_file", f"{_SECRETS}/token"),
        ("tls_cert", f"{_SECRETS}/cert.pem"),
        ("tls_key", f"{_SECRETS}/key.pem"),
        ("tls_authority", f"{_SECRETS}/cert.pem"),
    ]
    first = _host(name, "trainer", 0)
    keys = [("listen", f"0.0.0.0:{_TRAINER}"), ("advertise", f"{first}:{_TRAINER}"), *files]
    train = ["jaxrl", "train", arguments.config, *arguments.overrides]
    train += [f"sampler.remote.{key}={value}" for key, value in keys] + ["--run-dir", f"{_SHARED}/{name}"]
    sample = ["jaxrl", "sampler", arguments.config, *arguments.overrides, "--trainer", f"{first}:{_TRAINER}"]
    sample += ["--listen", f"0.0.0.0:{_SAMPLER}"]
    sample += [f"--{key.replace('_', '-')}={value}" for key, value in files]
    # Its own name is known to the pod alone.
    sampler = ["sh", "-c", f'exec {shlex.join(sample)} --advertise "$HOSTNAME.{name}:{_SAMPLER}"']
    world = []
    if trainer.pods > 1:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        world = [
            {"name": "JAXRL_COORDINATOR", "value": f"{first}:{_COORDINATOR}"},
            {"name": "JAXRL_PROCESSES", "value": str(trainer.pods)},
            {"name": "JAXRL_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    labels = {"kueue.x-k8s.io/queue-name": arguments.queue} if arguments.queue else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            # The run is over when its trainer is; samplers are then deleted.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            # A trainer that has died is started again with everything else, and goes on from its checkpoint.
            "failurePolicy": {"maxRestarts": arguments.restarts},
            "replicatedJobs": [
                # A process that is missing ends the others: no pod is started again alone.
                _replicated("trainer", 1, trainer, arguments, train, world, restart="Never", failures=0),
                # A sampler that dies is started again where it was; one that ends well has been told that all is over.
                _replicated(
                    "sampler", arguments.samplers, arguments.sampler, arguments, sampler, [],
                    restart="OnFailure", failures=100,
                ),
            ],
        },
    }  # fmt: skip


def _host(name: str, job: str, replica: int) -> str:
    return f"{name}-{job}-{replica}-0.{name}"


def _replicated(
    job: str,
    replicas: int,
    on: Hardware,
    arguments: argparse.Namespace,
    command: Sequence[str],
    environment: Sequence[Mapping],
    *,
    restart: str,
    failures: int,
) -> dict:
    container = {
        "name": job,
        "image": arguments.image,
        "command": list(command),
        "env": list(environment),
        "ports": [{"containerPort": port} for port in (_COORDINATOR, _TRAINER, _SAMPLER)],
        "resources": {"limits": {on.resource: str(on.chips)}},
        "volumeMounts": [
            {"name": "run-data", "mountPath": _SHARED},
            {"name": "credentials", "mountPath": _SECRETS, "readOnly": True},
        ],
    }
    pod = {
        "restartPolicy": restart,
        # Time to finish the step and save.
        "terminationGracePeriodSeconds": 180,
        "nodeSelector": dict(on.labels),
        "containers": [container],
        "volumes": [
            {"name": "run-data", "persistentVolumeClaim": {"claimName": arguments.claim}},
            {"name": "credentials", "secret": {"secretName": arguments.secret}},
        ],
    }
    spec = {
        "parallelism": on.pods,
        "completions": on.pods,
        "completionMode": "Indexed",
        "backoffLimit": failures,
        "template": {"spec": pod},
    }
    return {"name": job, "replicas": replicas, "template": {"spec": spec}}


def names(arguments: argparse.Namespace) -> list[str]:
    """The host names that the certificate must have."""
    replicas = range(arguments.samplers)
    return [_host(arguments.name, "trainer", 0), *(_host(arguments.name, "sampler", index) for index in replicas)]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help="of the JobSet and its subdomain")
    parser.add_argument("config", metavar="CONFIG", help="in the image")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--image", required=True)
    parser.add_argument("--claim", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--trainer", type=hardware, required=True)
    parser.add_argument("--sampler", type=hardware, required=True)
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--restarts", type=int, default=10, help="of the whole set when the trainer has failed [10]")
    parser.add_argument("--queue", help="Kueue's LocalQueue")
    parser.add_argument("--names", action="store_true", help="print the certificate's names instead")
    arguments = parser.parse_intermixed_args(words)
    # Pods are called NAME-sampler-REPLICA-INDEX-XXXXX, and a label holds 63 characters.
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", arguments.name):
        parser.error(f"NAME {arguments.name!r}: at most 40 lower-case letters, digits and '-', a letter first")
    if arguments.sampler.pods > 1:
        parser.error(f"--sampler takes {arguments.sampler.pods} pods; a sampler is one process, so one pod")
    if arguments.samplers < 1:
        parser.error("--samplers must be at least 1")
    return arguments


def main() -> None:
    arguments = parsed(sys.argv[1:])
    # JSON is YAML too, and needs no package.
    print("\n".join(names(arguments)) if arguments.names else json.dumps(manifest(arguments), indent=2))


if __name__ == "__main__":
    main()
