"""The part of a JobSet (jobset.x-k8s.io/v1alpha2) that is not a Job, as far as launch/jobset.py writes it.

Own wording, from the API's documentation; unknown keys are refused as a server with strict validation does.
"""

_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def _closed(required, **properties):
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_JOB_SPEC = {"type": "object"}  # the Job's own schema says more

JOBSET = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_closed(
        ["name"],
        name=_NAME,
        namespace=_NAME,
        labels={"type": "object", "additionalProperties": {"type": "string"}},
        annotations={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    spec=_closed(
        ["replicatedJobs"],
        network=_closed(
            [],
            enableDNSHostnames={"type": "boolean"},
            subdomain=_NAME,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=_closed(
            ["operator"],
            operator={"enum": ["All", "Any"]},
            targetReplicatedJobs={"type": "array", "items": _NAME},
        ),
        failurePolicy=_closed([], maxRestarts={"type": "integer", "minimum": 0}),
        suspend={"type": "boolean"},
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                ["name", "template"],
                name=_NAME,
                replicas={"type": "integer", "minimum": 0},
                template=_closed(["spec"], metadata={"type": "object"}, spec=_JOB_SPEC),
            ),
        },
    ),
)
