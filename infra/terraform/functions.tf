# The functions: how large each is, what it may do, and the service that it is.
locals {
  dataset_url = "gs://${google_storage_bucket.bucket["data"].name}/${var.dataset}"
  objects     = "projects/_/buckets/${google_storage_bucket.bucket["data"].name}/objects/${var.dataset}"
  raw_urls    = { for name in ["raw", "incoming"] : name => "gs://${google_storage_bucket.bucket[name].name}" }
  manifests   = ["manifest.safetensors", "manifests/"]
  packed      = ["data/", "packs/"]

  # One instance does one thing at a time (concurrency 1), since its memory is the budget of one invocation. But serve
  # waits for the bucket most of the time; and ingest packs together what is announced within a second to one instance:
  # the more requests it has, the larger the super-samples. More than 4 GiB come with two processors at least, of which
  # the second is idle: an instance has one thread.
  sizes = {
    pack        = { cpu = 1, memory = "2Gi", timeout_seconds = 3600, concurrency = 1, instances = 100 }
    ingest      = { cpu = 1, memory = "2Gi", timeout_seconds = 300, concurrency = 500, instances = 20 }
    commit      = { cpu = 1, memory = "2Gi", timeout_seconds = 300, concurrency = 1, instances = 2 }
    compact     = { cpu = 1, memory = "4Gi", timeout_seconds = 1800, concurrency = 1, instances = 2 }
    shuffle     = { cpu = 2, memory = "8Gi", timeout_seconds = 3600, concurrency = 1, instances = 100 }
    serve       = { cpu = 1, memory = "2Gi", timeout_seconds = 60, concurrency = 8, instances = 20 }
    serve-token = { cpu = 1, memory = "2Gi", timeout_seconds = 60, concurrency = 8, instances = 5 }
  }

  # raw: the bucket of raw objects that it reads. lists: the bucket of the data set. reads and writes: prefixes within
  # the data set; what it writes, it reads, too.
  rights = {
    pack        = { raw = "raw", lists = true, reads = [], writes = local.packed }
    ingest      = { raw = "incoming", lists = true, reads = local.manifests, writes = local.packed }
    commit      = { raw = "", lists = true, reads = [], writes = concat(local.manifests, local.packed) }
    compact     = { raw = "", lists = true, reads = [], writes = concat(local.manifests, local.packed) }
    shuffle     = { raw = "", lists = true, reads = concat(local.manifests, ["data/"]), writes = ["epochs/"] }
    serve       = { raw = "", lists = false, reads = concat(local.manifests, ["data/"]), writes = [] }
    serve-token = { raw = "", lists = false, reads = concat(local.manifests, ["data/"]), writes = [] }
  }

  environments = {
    pack = { STOKER_SOURCES = local.raw_urls["raw"] }
    ingest = {
      STOKER_SOURCES = local.raw_urls["incoming"]
      STOKER_INGEST  = jsonencode(merge({ dataset = var.dataset }, var.ingest))
    }
  }

  functions = {
    for name, size in local.sizes : name => merge(size, local.rights[name])
    if name != "serve-token" || var.serve_token
  }
}

resource "google_service_account" "function" {
  for_each     = local.functions
  account_id   = "${var.prefix}-${each.key}"
  display_name = "stoker function ${each.key}"
}

resource "google_cloud_run_v2_service" "function" {
  for_each            = local.functions
  name                = "${var.prefix}-${each.key}"
  location            = var.region
  deletion_protection = false
  # Only Pub/Sub calls ingest, and what this project's Pub/Sub sends counts as internal.
  ingress = each.key == "ingest" ? "INGRESS_TRAFFIC_INTERNAL_ONLY" : "INGRESS_TRAFFIC_ALL"
  # Only the opt-in service is called without Google's check; it checks tokens of our own.
  invoker_iam_disabled = each.key == "serve-token"
  depends_on           = [google_project_service.needed, google_secret_manager_secret_iam_member.token_keys]

  template {
    service_account                  = google_service_account.function[each.key].email
    timeout                          = "${each.value.timeout_seconds}s"
    max_instance_request_concurrency = each.value.concurrency

    scaling {
      min_instance_count = 0
      max_instance_count = each.value.instances
    }

    containers {
      image = var.image

      resources {
        limits            = { cpu = tostring(each.value.cpu), memory = each.value.memory }
        cpu_idle          = true # billed while a request is served, and not between
        startup_cpu_boost = true
      }

      dynamic "env" {
        for_each = merge(try(local.environments[each.key], {}), {
          FUNCTION_TARGET        = each.key == "serve-token" ? "serve_with_token" : each.key
          STOKER_DATASETS        = "${var.dataset}=${local.dataset_url}"
          STOKER_CATALOG         = "bucket"
          STOKER_TIMEOUT_SECONDS = tostring(each.value.timeout_seconds)
        })
        content {
          name  = env.key
          value = env.value
        }
      }

      dynamic "env" {
        for_each = each.key == "serve-token" ? ["STOKER_TOKEN_KEYS"] : []
        content {
          name = env.value
          value_source {
            secret_key_ref {
              secret  = var.token_secret
              version = var.token_secret_version
            }
          }
        }
      }
    }
  }
}

resource "google_storage_bucket_iam_member" "reads_raw" {
  for_each = { for name, function in local.functions : name => function if function.raw != "" }
  bucket   = google_storage_bucket.bucket[each.value.raw].name
  role     = "roles/storage.objectViewer"
  member   = google_service_account.function[each.key].member
}

# Without it GCS answers 403 for an object that is not there, and nobody could tell a new data set from a forbidden one.
resource "google_storage_bucket_iam_member" "lists" {
  for_each = { for name, function in local.functions : name => function if function.lists }
  bucket   = google_storage_bucket.bucket["data"].name
  role     = google_project_iam_custom_role.lister.id
  member   = google_service_account.function[each.key].member
}

resource "google_storage_bucket_iam_member" "reads" {
  for_each = { for name, function in local.functions : name => function if length(function.reads) > 0 }
  bucket   = google_storage_bucket.bucket["data"].name
  role     = google_project_iam_custom_role.reader.id
  member   = google_service_account.function[each.key].member

  condition {
    title      = "${each.key} reads"
    expression = join(" || ", [for at in each.value.reads : "resource.name.startsWith(\"${local.objects}/${at}\")"])
  }
}

resource "google_storage_bucket_iam_member" "writes" {
  for_each = { for name, function in local.functions : name => function if length(function.writes) > 0 }
  bucket   = google_storage_bucket.bucket["data"].name
  role     = google_project_iam_custom_role.writer.id
  member   = google_service_account.function[each.key].member

  condition {
    title      = "${each.key} writes"
    expression = join(" || ", [for at in each.value.writes : "resource.name.startsWith(\"${local.objects}/${at}\")"])
  }
}

resource "google_project_iam_custom_role" "signer" {
  role_id     = "${replace(var.prefix, "-", "_")}_signer"
  title       = "Signs as a service account"
  permissions = ["iam.serviceAccounts.signBlob"]
}

# An answer too large for the platform is a redirect to a URL that the function signs as itself.
resource "google_service_account_iam_member" "signs" {
  for_each           = { for name, function in local.functions : name => function if startswith(name, "serve") }
  service_account_id = google_service_account.function[each.key].name
  role               = google_project_iam_custom_role.signer.id
  member             = google_service_account.function[each.key].member
}

resource "google_secret_manager_secret_iam_member" "token_keys" {
  count     = var.serve_token ? 1 : 0
  secret_id = var.token_secret
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.function["serve-token"].member
}
