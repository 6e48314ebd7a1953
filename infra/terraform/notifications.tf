# Raw objects, as they appear: incoming bucket → topic → ingest, and what cannot be packed → dead letters. Eventarc would
# make such a subscription of its own, out of Terraform's sight and without dead letters.

locals {
  # What Pub/Sub itself acts as. In a project that has never used Pub/Sub it is not there yet: docs/deploy.md makes it.
  pubsub = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_pubsub_topic" "incoming" {
  for_each   = toset(["ingest", "ingest-dead"])
  name       = "${var.prefix}-${each.key}"
  depends_on = [google_project_service.needed]
}

data "google_storage_project_service_account" "storage" {}

resource "google_pubsub_topic_iam_member" "storage_publishes" {
  topic  = google_pubsub_topic.incoming["ingest"].name
  role   = "roles/pubsub.publisher"
  member = data.google_storage_project_service_account.storage.member
}

resource "google_storage_notification" "incoming" {
  bucket         = google_storage_bucket.bucket["incoming"].name
  topic          = google_pubsub_topic.incoming["ingest"].id
  event_types    = ["OBJECT_FINALIZE"]
  payload_format = "JSON_API_V1"
  # What is published before there is a subscription is lost.
  depends_on = [google_pubsub_topic_iam_member.storage_publishes, google_pubsub_subscription.ingest]
}

resource "google_service_account" "events" {
  account_id   = "${var.prefix}-events"
  display_name = "stoker events of the incoming bucket"
}

resource "google_cloud_run_v2_service_iam_member" "events" {
  name     = google_cloud_run_v2_service.function["ingest"].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.events.member
}

# Only projects from before April 2021 need it: in others Pub/Sub may identify itself as any account of the project.
resource "google_service_account_iam_member" "pubsub_acts_for_events" {
  service_account_id = google_service_account.events.name
  role               = "roles/iam.serviceAccountOpenIdTokenCreator"
  member             = local.pubsub
}

resource "google_pubsub_subscription" "ingest" {
  name  = "${var.prefix}-ingest"
  topic = google_pubsub_topic.incoming["ingest"].id
  # The most there is, and more than ingest has: a slow batch is not sent a second time.
  ack_deadline_seconds = 600
  # A week here and a week among the dead letters are less than the 15 days for which a data set remembers what it has.
  message_retention_duration = "604800s"
  depends_on = [
    google_cloud_run_v2_service_iam_member.events,
    google_service_account_iam_member.pubsub_acts_for_events,
    google_pubsub_subscription.dead_letters,
  ]

  # Otherwise a subscription is deleted after a month without messages.
  expiration_policy {
    ttl = ""
  }

  push_config {
    push_endpoint = google_cloud_run_v2_service.function["ingest"].uri

    # The body is what the bucket says, and nothing around it.
    no_wrapper {
      write_metadata = false
    }

    oidc_token {
      service_account_email = google_service_account.events.email
      audience              = google_cloud_run_v2_service.function["ingest"].uri
    }
  }

  # Twenty attempts with these pauses take more than two hours: what an hour's outage stops is packed after it.
  retry_policy {
    minimum_backoff = "10s"
    maximum_backoff = "600s"
  }

  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.incoming["ingest-dead"].id
    max_delivery_attempts = 20
  }
}

# Pub/Sub moves dead letters itself: it publishes them there, and acknowledges them here.
resource "google_pubsub_topic_iam_member" "pubsub_publishes_dead_letters" {
  topic  = google_pubsub_topic.incoming["ingest-dead"].name
  role   = "roles/pubsub.publisher"
  member = local.pubsub
}

resource "google_pubsub_subscription_iam_member" "pubsub_takes_dead_letters" {
  subscription = google_pubsub_subscription.ingest.name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub
}

# A topic keeps nothing by itself: without a subscription dead letters would be gone.
resource "google_pubsub_subscription" "dead_letters" {
  name                       = "${var.prefix}-ingest-dead"
  topic                      = google_pubsub_topic.incoming["ingest-dead"].id
  ack_deadline_seconds       = 600
  message_retention_duration = "604800s"

  expiration_policy {
    ttl = ""
  }

  # For when they are sent again.
  retry_policy {
    minimum_backoff = "10s"
    maximum_backoff = "600s"
  }
}

resource "google_monitoring_alert_policy" "dead_letters" {
  display_name          = "${var.prefix}: raw objects could not be packed"
  combiner              = "OR"
  notification_channels = var.alert_channels
  depends_on            = [google_project_service.needed]

  conditions {
    display_name = "dead letters of ingest"
    condition_threshold {
      filter = join(" AND ", [
        "metric.type = \"pubsub.googleapis.com/subscription/num_undelivered_messages\"",
        "resource.type = \"pubsub_subscription\"",
        "resource.labels.subscription_id = \"${google_pubsub_subscription.dead_letters.name}\"",
      ])
      comparison      = "COMPARISON_GT"
      threshold_value = 0
      duration        = "0s"

      aggregations {
        alignment_period   = "300s"
        per_series_aligner = "ALIGN_MAX"
      }
    }
  }

  documentation {
    content = "docs/deploy.md of stoker says how to look at them and how to have them sent again."
  }
}
