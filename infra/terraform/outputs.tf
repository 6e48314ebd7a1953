output "dataset" {
  description = "URL of the data set."
  value       = local.dataset_url
}

output "sources" {
  description = "URL below which raw objects are put."
  value       = local.sources_url
}

output "functions" {
  description = "Name of a function → its address."
  value       = { for name, service in google_cloud_run_v2_service.function : name => service.uri }
}

output "images" {
  description = "Where images are pushed to."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "ingest_subscription" {
  description = "What carries events to ingest; give it a dead-letter topic to keep those that fail for a day."
  value       = google_eventarc_trigger.raw.transport[0].pubsub[0].subscription
}
