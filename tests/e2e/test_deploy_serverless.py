"""What ``serverless.yml`` becomes: packaged by the real program, without credentials, and read as AWS would read it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cfnlint.api import lint
from cfnlint.config import ManualArgs

from stoker._stores.access_token import DATASET_NAME
from stoker_functions._commit import read_commit_event, read_compact_event
from stoker_functions._deployment import DeploymentSettings
from stoker_functions._warm_node import shard_limit_bytes
from stoker_warm._config import WarmConfig
from stoker_warm._events import NodeTask, WakeEvent
from support.cloud_template import Statement, Template
from support.function_rights import RIGHTS

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "infra" / "serverless"
OSLS = TOOLS / "node_modules" / ".bin" / "osls"
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/stoker@sha256:{'0' * 64}"
FUNCTIONS = ("pack", "ingest", "commit", "compact", "shuffle", "serve")
DATA, INCOMING = "arn:aws:s3:::acme-data/train", "arn:aws:s3:::acme-incoming"
QUEUE = "arn:aws:sqs:us-east-1:123456789012:stoker-ingest"


def installed() -> None:
    """Install the pinned osls beside its lock file, once; skip where that cannot be.

    Under CI a registry that does not answer is a failure, not a skip.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node here; osls needs node 20.19 or newer")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (20, 19):
        pytest.skip(f"osls needs node 20.19 or newer, and this is {version.strip()}")
    stamp = TOOLS / "node_modules" / ".package-lock.json"
    if OSLS.exists() and stamp.exists() and stamp.stat().st_mtime >= (TOOLS / "package-lock.json").stat().st_mtime:
        return
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        assert not os.environ.get("CI"), done.stderr
        pytest.skip(f"npm cannot install osls: {done.stderr[-500:]}")


def package(folder: Path, params: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``osls package`` with no credentials at hand."""
    command = [str(OSLS), "package", "--package", str(folder / "package")]
    command += [f"--param={name}={value}" for name, value in params.items()]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "AWS_EC2_METADATA_DISABLED": "true"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def packaged(folder: Path, **params: str) -> Template:
    """Return the template that osls makes of the project."""
    with zipfile.ZipFile(folder / "serve.zip", "w") as archive:
        archive.writestr("stoker_functions/aws.py", "")
    given = {"bucket": "acme", "image": IMAGE, "serveZip": str(folder / "serve.zip"), **params}
    done = package(folder, given)
    assert done.returncode == 0, done.stdout + done.stderr
    return Template(folder / "package" / "cloudformation-template-update-stack.json")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """What is deployed by default."""
    installed()
    return packaged(tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """What is deployed with the opt-in public URL, and other parameters."""
    installed()
    ingest = json.dumps({"dataset": "train", "kind": "webdataset"})
    params = {"serveToken": "enabled", "tokenSecretVersion": "v-1", "ingest": ingest, "commitRate": "rate(1 minute)"}
    return packaged(tmp_path_factory.mktemp("public"), **params)


NODES = 3


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """What is deployed with a warm tier in a private network, and a schedule that keeps it."""
    installed()
    network = {
        "warmVpc": "vpc-1a2b3c4d",
        "warmSubnets": "subnet-1a2b3c4d,subnet-5e6f7a8b",
        "warmTrainerGroup": "sg-1a2b3c4d",
    }
    params = {"warmNodes": str(NODES), "warmRate": "rate(5 minutes)", "warmSecretVersion": "v-2", **network}
    return packaged(tmp_path_factory.mktemp("warm"), **params)


@pytest.fixture(scope="module")
def open_warm(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """What is deployed with a warm tier of many nodes that reaches public addresses."""
    installed()
    return packaged(tmp_path_factory.mktemp("open"), warmNodes="130", warmMemory="1024")


def function_of(template: Template, name: str) -> dict[str, Any]:
    functions = template.of_type("AWS::Lambda::Function").values()
    (found,) = (each for each in functions if each["FunctionName"] == f"stoker-{name}")
    properties: dict[str, Any] = found
    return properties


def required_rights(name: str) -> dict[str, set[str]]:
    """Return what a function needs besides logging: action → resources."""
    rights = RIGHTS[name]
    raw = {INCOMING if name == "ingest" else "arn:aws:s3:::acme-raw"} if rights.reads_raw else set()
    wanted = {
        "s3:GetObject": {f"{DATA}/{key}" for key in rights.reads} | {f"{bucket}/*" for bucket in raw},
        "s3:PutObject": {f"{DATA}/{key}" for key in rights.writes},
        "s3:DeleteObject": {f"{DATA}/{key}" for key in rights.deletes},
        "s3:ListBucket": ({"arn:aws:s3:::acme-data"} if rights.lists else set()) | raw,
    }
    if name == "ingest":
        wanted |= {f"sqs:{action}": {QUEUE} for action in ("ReceiveMessage", "DeleteMessage", "GetQueueAttributes")}
    return {action: resources for action, resources in wanted.items() if resources}


def rights_of(template: Template, name: str) -> dict[str, set[str]]:
    """Return what a function may do: action → resources."""
    role = function_of(template, name)["Role"]
    rights: dict[str, set[str]] = {}
    for logical, statement in template.statements(("AWS::IAM::Role",)):
        if logical == role:
            assert statement.effect == "Allow"
            for action in statement.actions:
                rights.setdefault(action, set()).update(statement.resources)
    return rights


def test_cfn_lint_finds_nothing(template: Template, public: Template) -> None:
    assert set(template.resources) < set(public.resources)  # so one look is enough
    # W3005: osls names a function's role among what it depends on, besides referring to it.
    config = ManualArgs(regions=["us-east-1"], ignore_checks=["W3005"])
    found = lint(public.text, config=config)
    assert [f"{match.rule.id} {match.message} {match.path}" for match in found] == []


@pytest.mark.parametrize("which", ["template", "public"])
def test_nothing_is_allowed_on_everything_and_no_action_is_a_pattern(
    which: str, request: pytest.FixtureRequest
) -> None:
    statements = list(request.getfixturevalue(which).statements())
    allowed = [statement for _, statement in statements if statement.effect == "Allow"]
    assert len(allowed) > 20
    assert not [each for each in allowed if any("*" in action for action in each.actions)]
    assert not [each for each in allowed if "*" in each.resources or not each.resources]
    assert not [each for each in allowed if each.principal in ("*", {"AWS": "*"})]


def test_the_functions_are_those_of_the_package_under_their_names(template: Template, public: Template) -> None:
    def names(of: Template) -> set[str]:
        return {each["FunctionName"] for each in of.of_type("AWS::Lambda::Function").values()}

    assert names(template) == {f"stoker-{name}" for name in FUNCTIONS}
    assert names(public) - names(template) == {"stoker-serve-token"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_may_do_what_it_does_and_no_more(template: Template, name: str) -> None:
    rights = rights_of(template, name)
    group = f"arn:aws:logs:us-east-1:123456789012:log-group:/aws/lambda/stoker-{name}:*"
    assert rights.pop("logs:CreateLogStream") == rights.pop("logs:PutLogEvents") == {group}
    assert rights == required_rights(name)


def test_every_function_has_a_role_of_its_own_that_only_lambda_assumes(template: Template, public: Template) -> None:
    for each in (template, public):
        roles = [function["Role"] for function in each.of_type("AWS::Lambda::Function").values()]
        assert len(set(roles)) == len(roles)
        assert set(each.of_type("AWS::IAM::Role")) == {*roles, "TrainerRole"}
        for name, role in each.of_type("AWS::IAM::Role").items():
            (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
            service = "ecs-tasks" if name == "TrainerRole" else "lambda"
            assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_costs_is_bounded_on_purpose(template: Template, name: str) -> None:
    function = function_of(template, name)
    assert 1024 <= function["MemorySize"] <= 3008
    assert function["Timeout"] <= 900
    assert function["EphemeralStorage"] == {"Size": 512}
    assert 1 <= function["ReservedConcurrentExecutions"] <= 200
    (group,) = (
        each
        for each in template.of_type("AWS::Logs::LogGroup").values()
        if each["LogGroupName"] == f"/aws/lambda/stoker-{name}"
    )
    assert group["RetentionInDays"] == 30


def test_serve_is_a_zip_and_all_others_are_the_image_by_its_digest(template: Template) -> None:
    for name in FUNCTIONS:
        function = function_of(template, name)
        if name == "serve":
            assert function["Handler"] == "stoker_functions.aws.serve"
            assert function["Runtime"] == "python3.13"
        else:
            assert function["Code"] == {"ImageUri": IMAGE}
            assert function["ImageConfig"]["Command"] == [f"stoker_functions.aws.{name}"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_environment_of_a_function_is_one_that_it_understands(template: Template, name: str) -> None:
    settings = DeploymentSettings.from_environment(function_of(template, name)["Environment"]["Variables"])
    assert settings.datasets == {"train": "s3://acme-data/train"}
    assert DATASET_NAME.fullmatch("train")
    sources = {"pack": ("s3://acme-raw",), "ingest": ("s3://acme-incoming",)}
    assert settings.sources == sources.get(name, ())
    assert (settings.ingest is not None) == (name == "ingest")
    assert not settings.token_keys


def test_every_handler_is_there(public: Template) -> None:
    for function in public.of_type("AWS::Lambda::Function").values():
        handler = function.get("Handler") or function["ImageConfig"]["Command"][0]
        module, _, name = handler.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_parameters_reach_the_functions(public: Template) -> None:
    settings = DeploymentSettings.from_environment(function_of(public, "ingest")["Environment"]["Variables"])
    assert settings.ingest is not None
    assert settings.ingest.kind == "webdataset"
    rates = {rule["ScheduleExpression"] for rule in public.of_type("AWS::Events::Rule").values()}
    assert "rate(1 minute)" in rates


def test_another_prefix_bucket_and_data_set_share_nothing_with_the_first(tmp_path: Path, template: Template) -> None:
    installed()
    other = packaged(tmp_path, prefix="second", bucket="emca", dataset="photos")

    def names(of: Template) -> set[str]:
        """Return what resources are called, where AWS does not choose."""
        every = (each.get("Properties", {}) for each in of.resources.values())
        return {
            value
            for properties in every
            for key, value in properties.items()
            if key.endswith("Name") and key != "MetricName" and isinstance(value, str)
        } - set(of.resources)

    assert len(names(other)) == len(names(template)) > 15
    assert not names(other) & names(template)
    assert not re.search(r"/train\b|\btrain=|acme", other.text.replace(IMAGE, ""))
    (function,) = (
        each for each in other.of_type("AWS::Lambda::Function").values() if each["FunctionName"] == "second-ingest"
    )
    settings = DeploymentSettings.from_environment(function["Environment"]["Variables"])
    assert settings.ingest is not None
    assert settings.datasets[settings.ingest.dataset] == "s3://emca-data/photos"


def test_every_bucket_is_private_encrypted_and_spoken_to_over_tls(template: Template) -> None:
    buckets = template.of_type("AWS::S3::Bucket")
    assert len(buckets) == 4  # raw, incoming, data, and the deployment's own
    for logical, bucket in buckets.items():
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert len(bucket["PublicAccessBlockConfiguration"]) == 4
        (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
        assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
        (policy,) = (
            each
            for each in template.of_type("AWS::S3::BucketPolicy").values()
            if each["Bucket"] in (logical, bucket.get("BucketName"))
        )
        (statement,) = policy["PolicyDocument"]["Statement"]
        assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:*")
        assert str(statement["Condition"]["Bool"]["aws:SecureTransport"]).lower() == "false"
        assert len(statement["Resource"]) == 2


def test_what_is_ephemeral_expires_and_what_was_given_up_is_removed(template: Template) -> None:
    buckets = template.of_type("AWS::S3::Bucket")
    data = buckets["DataBucket"]["LifecycleConfiguration"]["Rules"]
    assert [rule["Prefix"] for rule in data if "ExpirationInDays" in rule] == ["train/epochs/"]
    for logical in ("RawBucket", "IncomingBucket", "DataBucket"):
        rules = buckets[logical]["LifecycleConfiguration"]["Rules"]
        assert any(rule.get("AbortIncompleteMultipartUpload") == {"DaysAfterInitiation": 1} for rule in rules)


def test_deleting_the_stack_deletes_no_samples_and_a_first_try_that_fails_leaves_no_bucket(template: Template) -> None:
    for logical in ("RawBucket", "IncomingBucket", "DataBucket"):
        resource = template.resources[logical]
        assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("RetainExceptOnCreate", "Retain")


def test_raw_objects_reach_ingest_through_a_queue_that_loses_none(template: Template) -> None:
    queues = template.of_type("AWS::SQS::Queue")
    queue, dead = queues["IngestQueue"], queues["IngestDeadLetters"]
    (mapping,) = template.of_type("AWS::Lambda::EventSourceMapping").values()
    function = function_of(template, "ingest")
    assert mapping["EventSourceArn"] == QUEUE
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["ScalingConfig"]["MaximumConcurrency"] <= function["ReservedConcurrentExecutions"]
    window_seconds = mapping["MaximumBatchingWindowInSeconds"]
    assert queue["VisibilityTimeout"] >= 6 * function["Timeout"] + window_seconds
    assert queue["RedrivePolicy"]["deadLetterTargetArn"] == f"{QUEUE}-dead"
    assert queue["RedrivePolicy"]["maxReceiveCount"] >= 3
    for each in (queue, dead):
        assert each["SqsManagedSseEnabled"] is True
        assert each["MessageRetentionPeriod"] == 14 * 24 * 3600
    buckets = template.of_type("AWS::S3::Bucket")
    told = {
        name: each["NotificationConfiguration"] for name, each in buckets.items() if "NotificationConfiguration" in each
    }
    assert told == {"IncomingBucket": {"QueueConfigurations": [{"Event": "s3:ObjectCreated:*", "Queue": QUEUE}]}}


def test_dead_letters_raise_an_alarm_with_a_recipient(template: Template) -> None:
    (alarm,) = template.of_type("AWS::CloudWatch::Alarm").values()
    ((logical, topic),) = template.of_type("AWS::SNS::Topic").items()
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/SQS", "ApproximateNumberOfMessagesVisible")
    assert alarm["Dimensions"] == [{"Name": "QueueName", "Value": "stoker-ingest-dead"}]
    assert (alarm["ComparisonOperator"], alarm["Threshold"]) == ("GreaterThanThreshold", 0)
    assert alarm["AlarmActions"] == [logical]
    assert topic["TopicName"] == "stoker-alarms"


def test_only_the_incoming_bucket_of_this_account_may_send_to_the_queue(template: Template) -> None:
    ((_, statement),) = template.statements(("AWS::SQS::QueuePolicy",))
    assert statement == Statement(
        effect="Allow",
        actions=("sqs:SendMessage",),
        resources=(QUEUE,),
        principal={"Service": "s3.amazonaws.com"},
        condition={
            "ArnEquals": {"aws:SourceArn": INCOMING},
            "StringEquals": {"aws:SourceAccount": "123456789012"},
        },
    )


def test_schedules_send_events_that_the_functions_understand(template: Template) -> None:
    targets = [target for rule in template.of_type("AWS::Events::Rule").values() for target in rule["Targets"]]
    sent = {target["Arn"].rpartition(":")[2]: json.loads(target["Input"]) for target in targets}
    assert read_commit_event(sent.pop("stoker-commit")) == ("s3://acme-data/train", None)
    assert read_compact_event(sent.pop("stoker-compact"))[0] == "s3://acme-data/train"
    assert not sent


def test_by_default_nothing_is_public(template: Template) -> None:
    (url,) = template.of_type("AWS::Lambda::Url").values()
    assert url["AuthType"] == "AWS_IAM"
    assert url["TargetFunctionArn"].endswith("stoker-serve")
    permissions = template.of_type("AWS::Lambda::Permission").values()
    assert {each["Principal"] for each in permissions} == {"events.amazonaws.com"}


def test_the_public_url_is_opt_in_reads_only_and_its_keys_are_in_no_template(public: Template) -> None:
    urls = {
        url["TargetFunctionArn"].rpartition(":")[2]: url["AuthType"]
        for url in public.of_type("AWS::Lambda::Url").values()
    }
    assert urls == {"stoker-serve": "AWS_IAM", "stoker-serve-token": "NONE"}
    open_to_all = [each for each in public.of_type("AWS::Lambda::Permission").values() if each["Principal"] == "*"]
    assert {each["FunctionName"].rpartition(":")[2] for each in open_to_all} == {"stoker-serve-token"}
    assert {each["Action"] for each in open_to_all} == {"lambda:InvokeFunctionUrl", "lambda:InvokeFunction"}
    assert all(each.get("FunctionUrlAuthType") == "NONE" or each.get("InvokedViaFunctionUrl") for each in open_to_all)
    function = function_of(public, "serve-token")
    assert function["Environment"]["Variables"]["STOKER_TOKEN_KEYS"] == (
        "{{resolve:secretsmanager:stoker/token-keys:SecretString:::v-1}}"
    )
    assert function["Handler"] == "stoker_functions.aws.serve_with_token"
    rights = rights_of(public, "serve-token")
    assert {action: on for action, on in rights.items() if "logs" not in action} == required_rights("serve")


def test_callers_may_invoke_and_read_and_train_and_no_more(template: Template) -> None:
    rights: dict[str, dict[str, set[str]]] = {}
    for logical, statement in template.statements(("AWS::IAM::ManagedPolicy",)):
        for action in statement.actions:
            rights.setdefault(logical, {}).setdefault(action, set()).update(statement.resources)
    function = "arn:aws:lambda:us-east-1:123456789012:function:stoker"
    assert rights["FanOutPolicy"] == {
        "lambda:InvokeFunction": {f"{function}-{name}" for name in ("pack", "commit", "compact", "shuffle")}
    }
    assert rights["ServePolicy"] == {
        "lambda:InvokeFunctionUrl": {f"{function}-serve"},
        "lambda:InvokeFunction": {f"{function}-serve"},
    }
    assert rights["TrainPolicy"]["s3:PutObject"] == {"arn:aws:s3:::acme-data/runs/*"}


def nodes_of(template: Template) -> list[dict[str, Any]]:
    return [function_of(template, WarmConfig().node_name(number)) for number in range(NODES)]


def test_the_requested_number_of_nodes_has_the_names_that_the_proxy_calls(
    template: Template, warm: Template, open_warm: Template
) -> None:
    def nodes(of: Template) -> set[str]:
        return {each["FunctionName"] for each in of.of_type("AWS::Lambda::Function").values()} - {
            f"stoker-{name}" for name in FUNCTIONS
        }

    assert not nodes(template)
    assert "arm" not in "".join(name for name in template.resources if "Alarm" not in name)
    for of, count in ((warm, NODES), (open_warm, 130)):
        assert nodes(of) == {f"stoker-{WarmConfig().node_name(number)}" for number in range(count)}
        assert len(of.resources) < 500, "more CloudFormation does not take"


def test_cfn_lint_finds_nothing_in_a_warm_tier(warm: Template) -> None:
    found = lint(warm.text, config=ManualArgs(regions=["us-east-1"], ignore_checks=["W3005"]))
    assert [f"{match.rule.id} {match.message} {match.path}" for match in found] == []


def test_what_a_node_costs_is_bounded_on_purpose(warm: Template, open_warm: Template) -> None:
    for function in nodes_of(warm):
        assert (function["MemorySize"], function["Timeout"]) == (1769, 900)
        assert function["EphemeralStorage"] == {"Size": 512}
        # One instance, and while it is backed up a second.
        assert function["ReservedConcurrentExecutions"] == 2
    groups = {each["LogGroupName"]: each["RetentionInDays"] for each in warm.of_type("AWS::Logs::LogGroup").values()}
    assert {groups[f"/aws/lambda/{function['FunctionName']}"] for function in nodes_of(warm)} == {7}
    assert {each["MemorySize"] for each in nodes_of(open_warm)} == {1024}


def test_a_node_understands_its_environment_and_its_secret_is_in_no_template(warm: Template) -> None:
    for function in nodes_of(warm):
        variables = function["Environment"]["Variables"]
        assert variables["STOKER_WARM_SECRET"] == "{{resolve:secretsmanager:stoker/warm-secret:SecretString:::v-2}}"
        memory = {"AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function["MemorySize"])}
        assert shard_limit_bytes(DeploymentSettings.from_environment({**variables, **memory})) > 1500 << 20
        (command,) = function["ImageConfig"]["Command"]
        module, _, name = command.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


LOGS_OF_NODES = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/lambda/stoker-warm-*:*"


def test_a_node_may_write_its_log_and_nothing_else(open_warm: Template) -> None:
    assert len({each["Role"] for each in nodes_of(open_warm)}) == 1
    rights = rights_of(open_warm, "warm-0")
    assert rights == {action: {LOGS_OF_NODES} for action in ("logs:CreateLogStream", "logs:PutLogEvents")}
    assert not any("VpcConfig" in each for each in nodes_of(open_warm))


def test_in_a_private_network_lambda_may_make_interfaces_as_a_node_and_the_node_itself_may_not(warm: Template) -> None:
    statements = [each for name, each in warm.statements(("AWS::IAM::Role",)) if name == "WarmRole"]
    logs, allowed, denied = statements
    assert (logs.effect, logs.resources) == ("Allow", (LOGS_OF_NODES,))
    assert {action.partition(":")[0] for action in allowed.actions} == {"ec2"}
    assert "ec2:CreateNetworkInterface" in allowed.actions
    assert (allowed.effect, denied.effect, denied.actions) == ("Allow", "Deny", allowed.actions)
    assert denied.condition == {
        "ArnLike": {"lambda:SourceFunctionArn": ["arn:aws:lambda:us-east-1:123456789012:function:stoker-warm-*"]}
    }


def test_nodes_reach_the_port_of_the_proxy_and_nothing_else(warm: Template) -> None:
    for function in nodes_of(warm):
        assert function["VpcConfig"] == {
            "SecurityGroupIds": ["WarmNodeGroup"],
            "SubnetIds": ["subnet-1a2b3c4d", "subnet-5e6f7a8b"],
        }
    (group,) = warm.of_type("AWS::EC2::SecurityGroup").values()
    (egress,) = group["SecurityGroupEgress"]
    (ingress,) = warm.of_type("AWS::EC2::SecurityGroupIngress").values()
    for rule in (egress, ingress):
        assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 7411, 7411)
    assert egress["DestinationSecurityGroupId"] == ingress["GroupId"] == "sg-1a2b3c4d"
    assert ingress["SourceSecurityGroupId"] == "WarmNodeGroup"
    assert group["VpcId"] == "vpc-1a2b3c4d"


@pytest.mark.parametrize(("which", "count"), [("warm", NODES), ("open_warm", 130)])
def test_the_trainer_may_call_the_nodes_and_read_the_secret_and_no_more(
    which: str, count: int, request: pytest.FixtureRequest
) -> None:
    template: Template = request.getfixturevalue(which)
    policies = {name: each for name, each in template.of_type("AWS::IAM::ManagedPolicy").items() if "Warm" in name}
    assert {role for each in policies.values() for role in each["Roles"]} == {"TrainerRole"}
    assert all(len(json.dumps(each["PolicyDocument"])) < 6144 for each in policies.values()), "IAM takes no more"
    rights: dict[str, list[str]] = {}
    for name, statement in template.statements(("AWS::IAM::ManagedPolicy",)):
        if name in policies:
            for action in statement.actions:
                rights.setdefault(action, []).extend(statement.resources)
    assert set(rights) == {"lambda:InvokeFunction", "secretsmanager:GetSecretValue"}
    assert sorted(rights["lambda:InvokeFunction"]) == sorted(
        f"arn:aws:lambda:us-east-1:123456789012:function:stoker-warm-{number}" for number in range(count)
    )
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:stoker/warm-secret-??????"
    assert set(rights["secretsmanager:GetSecretValue"]) == {secret}


def test_a_schedule_keeps_each_node_warm_without_connections(warm: Template, open_warm: Template) -> None:
    rules = {
        rule["Targets"][0]["Arn"].rpartition(":")[2]: rule
        for rule in warm.of_type("AWS::Events::Rule").values()
        if rule["Description"] == "Keeps a node warm"
    }
    assert set(rules) == {each["FunctionName"] for each in nodes_of(warm)}
    for name, rule in rules.items():
        assert rule["ScheduleExpression"] == "rate(5 minutes)"
        wake = WakeEvent.parse(json.loads(rule["Targets"][0]["Input"]))
        assert (f"stoker-{wake.node}", wake.task) == (name, NodeTask.WARM)
    others = {rule["Description"] for rule in open_warm.of_type("AWS::Events::Rule").values()}
    assert "Keeps a node warm" not in others


def test_a_call_of_the_schedule_that_fails_or_comes_late_is_not_made_up_for_by_more(warm: Template) -> None:
    configs = {
        each["FunctionName"].rpartition(":")[2]: (each["MaximumRetryAttempts"], each["MaximumEventAgeInSeconds"])
        for each in warm.of_type("AWS::Lambda::EventInvokeConfig").values()
        if "MaximumEventAgeInSeconds" in each
    }
    assert configs == {each["FunctionName"]: (0, 60) for each in nodes_of(warm)}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"warmNodes": "many"}, "warmNodes is many"),
        ({"warmNodes": "81", "warmRate": "rate(1 minute)"}, "from 0 to 80"),
        ({"warmNodes": "1", "warmMemory": "128"}, "warmMemory is 128"),
        ({"warmNodes": "1", "warmPort": "https"}, "warmPort is https"),
        ({"warmNodes": "1", "warmVpc": "vpc-1a2b3c4d"}, "warmSubnets and warmTrainerGroup"),
        ({"bucket": "acme"}, "images.functions.uri"),
        ({"image": IMAGE}, "STOKER_DATASETS"),
        ({"bucket": "acme", "image": IMAGE, "serveToken": "yes"}, "functions.1"),
    ],
)
def test_a_parameter_that_is_missing_or_wrong_is_an_error(tmp_path: Path, given: dict[str, str], named: str) -> None:
    installed()
    if any(name.startswith("warm") for name in given):
        given = {"bucket": "acme", "image": IMAGE, **given}
    done = package(tmp_path, given)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
