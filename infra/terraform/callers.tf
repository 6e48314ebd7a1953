# Who calls the functions: people and schedules. Raw objects that appear do, too: notifications.tf.

# People have no identity tokens of their own that a service takes: who fans out acts for this account.
resource "google_service_account" "fan_out" {
  account_id   = "${var.prefix}-fan-out"
  display_name = "stoker fan-out"
}

resource "google_cloud_run_v2_service_iam_member" "fans_out" {
  for_each = toset(["pack", "commit", "compact", "shuffle"])
  name     = google_cloud_run_v2_service.function[each.key].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.fan_out.member
}

resource "google_service_account_iam_member" "acts_for_fan_out" {
  for_each           = toset(var.fan_out_callers)
  service_account_id = google_service_account.fan_out.name
  role               = "roles/iam.serviceAccountOpenIdTokenCreator"
  member             = each.key
}

resource "google_cloud_run_v2_service_iam_member" "serves" {
  for_each = toset(var.serve_callers)
  name     = google_cloud_run_v2_service.function["serve"].name
  location = var.region
  role     = "roles/run.invoker"
  member   = each.key
}

# Schedules.

locals {
  schedules = { commit = var.commit_schedule, compact = "17 3 * * *" }
}

resource "google_service_account" "schedule" {
  account_id   = "${var.prefix}-schedule"
  display_name = "stoker schedules"
}

resource "google_cloud_run_v2_service_iam_member" "schedule" {
  for_each = local.schedules
  name     = google_cloud_run_v2_service.function[each.key].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.schedule.member
}

resource "google_cloud_scheduler_job" "schedule" {
  for_each         = local.schedules
  name             = "${var.prefix}-${each.key}"
  region           = var.region
  schedule         = each.value
  attempt_deadline = "${local.functions[each.key].timeout_seconds}s"

  http_target {
    http_method = "POST"
    uri         = google_cloud_run_v2_service.function[each.key].uri
    headers     = { "Content-Type" = "application/json" }
    body        = base64encode(jsonencode({ dataset = local.dataset_url }))

    oidc_token {
      service_account_email = google_service_account.schedule.email
      audience              = google_cloud_run_v2_service.function[each.key].uri
    }
  }
}
