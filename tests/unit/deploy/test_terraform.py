"""The Terraform files: formatting, syntax, and no unnecessary permissions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hcl2
import pytest
from hcl2.utils import SerializationOptions

from stoker._base.sizes import parse_bytes
from stoker._pack.record import SOURCE_RETENTION_SECONDS
from stoker._stores.access_token import DATASET_NAME
from stoker_functions import gcp
from stoker_functions._deployment import INGEST_KINDS, DeploymentSettings, IngestSettings
from stoker_functions._executors.gcf import deployed_size
from stoker_warm._config import WarmConfig
from support.function_rights import RIGHTS

FOLDER = Path(__file__).parents[3] / "infra" / "terraform"
FILES = sorted(FOLDER.glob("*.tf"))
FUNCTIONS = {"pack", "ingest", "commit", "compact", "shuffle", "serve", "serve-token"}
PREFIXES = {"local.manifests": ["manifest.safetensors", "manifests/"], "local.packed": ["data/", "packs/"]}
_PLAIN = SerializationOptions(with_comments=False, explicit_blocks=False, strip_string_quotes=True)

Blocks = dict[str, dict[str, Any]]


def parsed(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = hcl2.loads(file.read_text(), serialization_options=_PLAIN)
    return document


@pytest.fixture(scope="module")
def resources() -> dict[str, Blocks]:
    """Type → name → settings of a resource."""
    found: dict[str, Blocks] = {}
    for file in FILES:
        for block in parsed(file).get("resource", ()):
            for kind, named in block.items():
                found.setdefault(kind, {}).update(named)
    return found


@pytest.fixture(scope="module")
def functions() -> dict[str, dict[str, Any]]:
    """Name → size and rights of each function."""
    (tables,) = parsed(FOLDER / "functions.tf")["locals"]
    assert set(tables["sizes"]) == set(tables["rights"]) >= set(tables["environments"])
    return {name: {**size, **tables["rights"][name]} for name, size in tables["sizes"].items()}


def bodies(resources: dict[str, Blocks]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{kind}.{name}", body) for kind, named in resources.items() for name, body in named.items()]


def test_the_files_are_formatted() -> None:
    program = shutil.which("terraform")
    if program is None:
        pytest.skip("there is no terraform here; python-hcl2 parses the files all the same")
    command = [program, "fmt", "-check", "-diff", "-recursive", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_parses(file: Path) -> None:
    assert set(parsed(file)) <= {"data", "locals", "output", "provider", "resource", "terraform", "variable"}


def test_everything_that_is_named_is_there_and_used() -> None:
    # As far as it goes, what terraform validate would say with the provider at hand.
    documents = [parsed(file) for file in FILES]
    there = {
        f"{'data.' if section == 'data' else ''}{kind}.{name}"
        for document in documents
        for section in ("resource", "data")
        for block in document.get(section, ())
        for kind, named in block.items()
        for name in named
    }
    there |= {f"var.{name}" for document in documents for block in document.get("variable", ()) for name in block}
    there |= {f"local.{name}" for document in documents for block in document.get("locals", ()) for name in block}
    text = re.sub(r"(^|\s)#.*", "", "\n".join(file.read_text() for file in FILES))
    named = set(re.findall(r"(?<![\w.\"])((?:data\.google_\w+|google_\w+|var|local)\.[a-z]\w*)", text))
    assert named <= there
    assert {name for name in there if name.startswith(("var.", "local."))} <= named


def test_the_provider_is_bound_to_a_major_version() -> None:
    (terraform,) = parsed(FOLDER / "versions.tf")["terraform"]
    (providers,) = terraform["required_providers"]
    assert re.fullmatch(r"~> \d+\.\d+", providers["google"]["version"])


def test_only_named_principals_have_access(resources: dict[str, Blocks]) -> None:
    granted = [(name, body) for name, body in bodies(resources) if "_iam_" in name and "custom_role" not in name]
    assert len(granted) > 10
    for name, body in granted:
        assert "member" in body, name  # bindings and policies would replace what others have granted
        assert not re.search("allUsers|allAuthenticatedUsers", json.dumps(body)), name
    text = "".join(file.read_text() for file in FILES)
    assert "allUsers" not in text
    assert "allAuthenticatedUsers" not in text


def test_members_that_a_person_names_are_named() -> None:
    variables = {name: body for block in parsed(FOLDER / "variables.tf")["variable"] for name, body in block.items()}
    for name in ("fan_out_callers", "serve_callers"):
        ((condition,),) = ([each["condition"] for each in variables[name]["validation"]],)
        (pattern,) = re.findall(r'regex\("([^"]+)"', condition)
        assert re.match(pattern, "user:jane@example.com")
        assert not re.match(pattern, "allUsers")
        assert not re.match(pattern, "allAuthenticatedUsers")


def test_what_a_function_would_not_understand_is_refused_before_it_is_deployed() -> None:
    variables = {name: body for block in parsed(FOLDER / "variables.tf")["variable"] for name, body in block.items()}
    (validation,) = variables["dataset"]["validation"]
    assert f"^{DATASET_NAME.pattern}$" in validation["condition"]
    kinds, classes = (each["condition"] for each in variables["ingest"]["validation"])
    assert json.dumps(INGEST_KINDS) in kinds
    assert "image-folder" in classes
    wanted = re.findall(r"(\w+) *= *optional\(\w+(?:\(\w+\))?, ([^)]*)\)", (FOLDER / "variables.tf").read_text())
    default = IngestSettings(dataset="train")
    assert {name: json.loads(value) for name, value in wanted} == {
        "kind": default.kind,
        "classes": list(default.classes),
        "super_sample_bytes": default.super_sample_bytes,
    }


@pytest.mark.parametrize("name", ["image", "trainer_image"])
def test_images_are_named_by_digest(name: str) -> None:
    variables = {name: body for block in parsed(FOLDER / "variables.tf")["variable"] for name, body in block.items()}
    (validation,) = variables[name]["validation"]
    (pattern,) = re.findall(r'regex\("([^"]+)"', validation["condition"])
    assert re.search(pattern, f"us-central1-docker.pkg.dev/p/stoker/functions@sha256:{'0' * 64}")
    assert not re.search(pattern, "us-central1-docker.pkg.dev/p/stoker/functions:latest")


def test_buckets_are_private_under_uniform_access_and_tidied_up(resources: dict[str, Blocks]) -> None:
    (bucket,) = resources["google_storage_bucket"].values()
    assert bucket["for_each"] == '${toset(["raw", "incoming", "data"])}'
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == "enforced"
    assert not bucket.get("force_destroy")
    assert [rule["action"][0]["type"] for rule in bucket["lifecycle_rule"]] == ["AbortIncompleteMultipartUpload"]
    ((deleted,),) = ([each["lifecycle_rule"] for each in bucket["dynamic"]],)
    assert deleted["for_each"] == '${each.key == "data" ? ["${var.dataset}/epochs/"] : []}'
    assert deleted["content"][0]["action"] == [{"type": "Delete"}]
    assert deleted["content"][0]["condition"] == [{"age": 14, "matches_prefix": ["${lifecycle_rule.value}"]}]


def test_every_function_is_there_with_an_account_of_its_own(
    resources: dict[str, Blocks], functions: dict[str, dict[str, Any]]
) -> None:
    assert set(functions) == FUNCTIONS
    account = resources["google_service_account"]["function"]
    service = resources["google_cloud_run_v2_service"]["function"]
    assert account["for_each"] == service["for_each"] == "${local.functions}"
    assert account["account_id"] == service["name"] == "${var.prefix}-${each.key}"
    (template,) = service["template"]
    assert template["service_account"] == "${google_service_account.function[each.key].email}"
    assert template["containers"][0]["image"] == "${var.image}"
    assert len({body["account_id"] for body in resources["google_service_account"].values()}) == 6
    assert resources["google_cloud_run_v2_job"]["trainer"]["template"][0]["template"][0]["service_account"] == (
        "${google_service_account.trainer.email}"
    )


def prefixes(value: list[str] | str) -> frozenset[str]:
    """Return the prefixes that a function's ``reads`` or ``writes`` are, as patterns."""
    text = value if isinstance(value, str) else " ".join(f'"{each}"' for each in value)
    found = {*re.findall(r'"([^"]+)"', text)}.union(*(PREFIXES[name] for name in re.findall(r"local\.\w+", text)))
    return frozenset(f"{each}*" if each.endswith("/") else each for each in found)


@pytest.mark.parametrize("name", RIGHTS)
def test_a_function_may_do_what_it_does_and_no_more(functions: dict[str, dict[str, Any]], name: str) -> None:
    function, rights = functions[name], RIGHTS[name]
    written = prefixes(function["writes"])  # which includes reading them, and replacing, which includes deleting
    assert written == rights.writes | rights.deletes
    assert prefixes(function["reads"]) == rights.reads - written
    assert function["lists"] == rights.lists
    assert function["raw"] == ({"pack": "raw", "ingest": "incoming"}[name] if rights.reads_raw else "")


def test_every_target_is_there(functions: dict[str, dict[str, Any]]) -> None:
    text = (FOLDER / "functions.tf").read_text()
    assert re.search(r'FUNCTION_TARGET += each.key == "serve-token" \? "serve_with_token" : each.key\n', text)
    for name in functions:
        assert callable(getattr(gcp, "serve_with_token" if name == "serve-token" else name))


def test_the_public_function_may_do_what_the_other_does(functions: dict[str, dict[str, Any]]) -> None:
    (tables,) = parsed(FOLDER / "functions.tf")["locals"]
    assert tables["rights"]["serve"] == tables["rights"]["serve-token"]
    assert not {"serve", "serve-token"} & set(tables["environments"])


def test_the_prefixes_are_those_of_a_data_set() -> None:
    (tables,) = parsed(FOLDER / "functions.tf")["locals"]
    for name, prefixes_ in PREFIXES.items():
        assert tables[name.removeprefix("local.")] == prefixes_


def test_roles_have_single_permissions_and_grants_end_at_a_folder(resources: dict[str, Blocks]) -> None:
    permissions = {name: role["permissions"] for name, role in resources["google_project_iam_custom_role"].items()}
    assert permissions == {
        "reader": ["storage.objects.get"],
        "lister": ["storage.objects.list"],
        "writer": ["storage.objects.get", "storage.objects.create", "storage.objects.delete"],
        "signer": ["iam.serviceAccounts.signBlob"],
    }
    for name, grant in resources["google_storage_bucket_iam_member"].items():
        if re.search("custom_role.(reader|writer)", grant["role"]):
            assert "resource.name.startsWith" in grant["condition"][0]["expression"], name
        else:
            assert "lister" in grant["role"] or grant["role"] == "roles/storage.objectViewer", name
    wide = r"roles/(owner|editor|viewer|.*[aA]dmin)$"
    assert not [name for name, body in bodies(resources) if re.match(wide, str(body.get("role", "")))]


def test_only_the_opt_in_function_is_called_without_googles_check(resources: dict[str, Blocks]) -> None:
    service = resources["google_cloud_run_v2_service"]["function"]
    assert service["invoker_iam_disabled"] == '${each.key == "serve-token"}'
    (locals_,) = parsed(FOLDER / "functions.tf")["locals"]
    assert 'if name != "serve-token" || var.serve_token' in locals_["functions"]
    variables = {name: body for block in parsed(FOLDER / "variables.tf")["variable"] for name, body in block.items()}
    assert variables["serve_token"]["default"] is False


def test_the_keys_of_tokens_come_from_secret_manager(resources: dict[str, Blocks]) -> None:
    (template,) = resources["google_cloud_run_v2_service"]["function"]["template"]
    secret = [each["env"] for each in template["containers"][0]["dynamic"] if "secret_key_ref" in json.dumps(each)]
    assert len(secret) == 1
    assert "STOKER_TOKEN_KEYS" in json.dumps(secret)
    accessor = resources["google_secret_manager_secret_iam_member"]["token_keys"]
    assert accessor["role"] == "roles/secretmanager.secretAccessor"
    assert accessor["count"] == "${var.serve_token ? 1 : 0}"


def test_the_environment_of_a_function_is_one_that_it_understands(functions: dict[str, dict[str, Any]]) -> None:
    text = "".join((FOLDER / name).read_text() for name in ("functions.tf", "warm.tf"))
    assert {*re.findall(r"\bSTOKER_[A-Z_]+\b", text)} <= _read_variables()
    for function in functions.values():
        assert 1 <= function["timeout_seconds"] <= 3600
        DeploymentSettings.from_environment({"STOKER_TIMEOUT_SECONDS": str(function["timeout_seconds"])})


def _read_variables() -> set[str]:
    """Return the variables that the settings are read from."""
    read: set[str] = set()

    class Environment(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    DeploymentSettings.from_environment(Environment())
    return read


@pytest.fixture(scope="module")
def warm() -> dict[str, Any]:
    """How large each node of the warm tier is."""
    (tables,) = parsed(FOLDER / "warm.tf")["locals"]
    size: dict[str, Any] = tables["warm"]
    return size


def test_a_node_does_one_thing_at_a_time_and_may_have_a_second_instance(
    resources: dict[str, Blocks], warm: dict[str, Any]
) -> None:
    assert (warm["concurrency"], warm["instances"], warm["timeout_seconds"]) == (1, 2, 3600)
    service = resources["google_cloud_run_v2_service"]["warm"]
    (template,) = service["template"]
    assert template["max_instance_request_concurrency"] == "${local.warm.concurrency}"
    assert template["scaling"] == [{"min_instance_count": 0, "max_instance_count": "${local.warm.instances}"}]
    assert template["timeout"] == "${local.warm.timeout_seconds}s"
    (container,) = template["containers"]
    assert container["image"] == "${var.image}"
    assert container["resources"][0]["limits"] == {
        "cpu": "${tostring(local.warm.cpu)}",
        "memory": "${local.warm.memory}",
    }
    assert container["resources"][0]["cpu_idle"] is True  # else it would be billed all the time


def test_a_node_is_called_and_billed_as_what_it_is(resources: dict[str, Blocks], warm: dict[str, Any]) -> None:
    (tables,) = parsed(FOLDER / "warm.tf")["locals"]
    assert tables["warm_nodes"] == '${toset([for number in range(var.warm_nodes) : "warm-${number}"])}'
    assert WarmConfig().node_name(7) == "warm-7"
    assert resources["google_cloud_run_v2_service"]["warm"]["name"] == "${var.prefix}-${each.key}"
    assert deployed_size("warm-7") == (parse_bytes(warm["memory"] + "B"), float(warm["cpu"]))
    assert callable(gcp.warm_node)
    assert 'FUNCTION_TARGET        = "warm_node"' in (FOLDER / "warm.tf").read_text()


def test_there_are_no_nodes_unless_they_are_requested(resources: dict[str, Blocks]) -> None:
    variables = {name: body for block in parsed(FOLDER / "variables.tf")["variable"] for name, body in block.items()}
    assert variables["warm_nodes"]["default"] == 0
    for kind in ("google_cloud_run_v2_service", "google_cloud_run_v2_service_iam_member"):
        name = {"google_cloud_run_v2_service": "warm"}.get(kind, "calls_nodes")
        assert resources[kind][name]["for_each"] == "${local.warm_nodes}"
    assert "var.warm_nodes > 0" in resources["google_secret_manager_secret_iam_member"]["warm"]["for_each"]


def test_a_node_may_do_nothing_and_only_the_trainer_calls_it(resources: dict[str, Blocks]) -> None:
    account = "google_service_account.warm."
    granted = {name for name, body in bodies(resources) if "_iam_" in name and account in json.dumps(body)}
    assert granted == {"google_secret_manager_secret_iam_member.warm"}
    service = resources["google_cloud_run_v2_service"]["warm"]
    assert service["template"][0]["service_account"] == "${google_service_account.warm.email}"
    assert not service.get("invoker_iam_disabled")
    callers = {
        (name, body["role"], body["member"])
        for name, body in resources["google_cloud_run_v2_service_iam_member"].items()
        if "google_cloud_run_v2_service.warm" in json.dumps(body)
    }
    assert callers == {("calls_nodes", "roles/run.invoker", "${google_service_account.trainer.member}")}


def test_the_secret_of_the_warm_tier_comes_from_secret_manager(resources: dict[str, Blocks]) -> None:
    (template,) = resources["google_cloud_run_v2_service"]["warm"]["template"]
    (secret,) = template["containers"][0]["env"]
    assert secret["name"] == "STOKER_WARM_SECRET"
    (reference,) = secret["value_source"][0]["secret_key_ref"]
    assert reference == {"secret": "${var.warm_secret}", "version": "${var.warm_secret_version}"}
    assert resources["google_secret_manager_secret_iam_member"]["warm"]["role"] == "roles/secretmanager.secretAccessor"


def test_nodes_are_in_a_private_network_if_one_is_named(resources: dict[str, Blocks]) -> None:
    (template,) = resources["google_cloud_run_v2_service"]["warm"]["template"]
    (access,) = (each["vpc_access"] for each in template["dynamic"])
    assert access["for_each"] == "${local.warm_networks}"
    (content,) = access["content"]
    assert content["egress"] == "ALL_TRAFFIC"
    assert content["network_interfaces"] == [{"subnetwork": "${vpc_access.value}", "tags": [NODE_TAG]}]


NODE_TAG = "${var.prefix}-warm"


def test_in_a_private_network_nodes_dial_the_port_of_proxies_and_nothing_else(resources: dict[str, Blocks]) -> None:
    rules = resources["google_compute_firewall"]
    assert {rule["for_each"] for rule in rules.values()} == {"${local.warm_networks}"}
    outwards = {name: rule for name, rule in rules.items() if rule["direction"] == "EGRESS"}
    assert {tuple(rule["target_tags"]) for rule in outwards.values()} == {(NODE_TAG,)}
    allowing, denying = (outwards[name] for name in ("warm_dials_proxy", "warm_dials_nobody"))
    assert allowing["allow"] == [{"protocol": "tcp", "ports": ["${tostring(var.warm_port)}"]}]
    assert (denying["deny"], denying["destination_ranges"]) == ([{"protocol": "all"}], ["0.0.0.0/0"])
    assert allowing["priority"] < denying["priority"], "the lower number is looked at first"
    waits = resources["google_cloud_run_v2_service"]["warm"]["depends_on"]
    assert {f"${{google_compute_firewall.{name}}}" for name in outwards} <= set(waits), "or nodes may dial before"


def test_only_nodes_may_connect_to_proxies(resources: dict[str, Blocks]) -> None:
    (rule,) = (each for each in resources["google_compute_firewall"].values() if each["direction"] == "INGRESS")
    assert rule["allow"] == [{"protocol": "tcp", "ports": ["${tostring(var.warm_port)}"]}]
    assert rule["source_ranges"] == ["${data.google_compute_subnetwork.warm[each.key].ip_cidr_range}"]
    assert rule["target_tags"] == ["${var.prefix}-proxy"]


def test_schedules_reach_the_functions_with_an_account_of_their_own(resources: dict[str, Blocks]) -> None:
    (job,) = resources["google_cloud_scheduler_job"].values()
    (target,) = job["http_target"]
    assert target["oidc_token"][0]["service_account_email"] == "${google_service_account.schedule.email}"
    (locals_,) = parsed(FOLDER / "callers.tf")["locals"]
    assert set(locals_["schedules"]) == {"commit", "compact"}


def test_raw_objects_reach_ingest_as_what_the_bucket_says_of_them(resources: dict[str, Blocks]) -> None:
    (told,) = resources["google_storage_notification"].values()
    assert told["bucket"] == '${google_storage_bucket.bucket["incoming"].name}'
    assert told["topic"] == '${google_pubsub_topic.incoming["ingest"].id}'
    assert (told["event_types"], told["payload_format"]) == (["OBJECT_FINALIZE"], "JSON_API_V1")
    # Otherwise objects that appear between the two would not be notified.
    assert "${google_pubsub_subscription.ingest}" in told["depends_on"]
    (push,) = resources["google_pubsub_subscription"]["ingest"]["push_config"]
    assert push["push_endpoint"] == '${google_cloud_run_v2_service.function["ingest"].uri}'
    assert push["no_wrapper"] == [{"write_metadata": False}]
    assert push["oidc_token"] == [
        {"service_account_email": "${google_service_account.events.email}", "audience": push["push_endpoint"]}
    ]


def test_what_cannot_be_packed_ends_among_dead_letters_and_no_subscription_expires(
    resources: dict[str, Blocks], functions: dict[str, dict[str, Any]]
) -> None:
    subscriptions = resources["google_pubsub_subscription"]
    ingest, dead = subscriptions["ingest"], subscriptions["dead_letters"]
    (policy,), (pauses,) = ingest["dead_letter_policy"], ingest["retry_policy"]
    assert "${google_pubsub_subscription.dead_letters}" in ingest["depends_on"]
    assert policy["dead_letter_topic"] == dead["topic"] == '${google_pubsub_topic.incoming["ingest-dead"].id}'
    least, most = (int(pauses[f"{name}imum_backoff"].removesuffix("s")) for name in ("min", "max"))
    waited_seconds = sum(min(least << attempt, most) for attempt in range(policy["max_delivery_attempts"] - 1))
    assert waited_seconds > 2 * 3600
    kept_seconds = 0
    for each in (ingest, dead):
        assert each["expiration_policy"] == [{"ttl": ""}]
        assert 2 * functions["ingest"]["timeout_seconds"] <= each["ack_deadline_seconds"] <= 600
        kept_seconds += int(each["message_retention_duration"].removesuffix("s"))
    assert kept_seconds < SOURCE_RETENTION_SECONDS
    (alert,) = resources["google_monitoring_alert_policy"].values()
    assert "google_pubsub_subscription.dead_letters.name" in json.dumps(alert["conditions"])


def test_pubsub_and_storage_have_rights_on_their_topics_and_no_others(resources: dict[str, Blocks]) -> None:
    pubsub, storage = "${local.pubsub}", "${data.google_storage_project_service_account.storage.member}"
    found = {
        (name, grant.get("topic") or grant.get("subscription"), grant["role"], grant["member"])
        for kind in ("google_pubsub_topic_iam_member", "google_pubsub_subscription_iam_member")
        for name, grant in resources[kind].items()
    }
    assert found == {
        (
            "storage_publishes",
            '${google_pubsub_topic.incoming["ingest"].name}',
            "roles/pubsub.publisher",
            storage,
        ),
        (
            "pubsub_publishes_dead_letters",
            '${google_pubsub_topic.incoming["ingest-dead"].name}',
            "roles/pubsub.publisher",
            pubsub,
        ),
        (
            "pubsub_takes_dead_letters",
            "${google_pubsub_subscription.ingest.name}",
            "roles/pubsub.subscriber",
            pubsub,
        ),
    }
    assert "google_project_iam_member" not in resources  # which would be a right on everything in the project


def test_a_training_has_one_gpu_and_continues_after_it_was_killed(resources: dict[str, Blocks]) -> None:
    job = resources["google_cloud_run_v2_job"]["trainer"]
    (execution,) = job["template"]
    (task,) = execution["template"]
    assert execution["task_count"] == 1
    assert task["max_retries"] >= 3
    assert task["node_selector"] == [{"accelerator": "${var.gpu}"}]
    assert 'nvidia.com/gpu" = "1"' in json.dumps(task["containers"][0]["resources"]).replace("\\", "")
