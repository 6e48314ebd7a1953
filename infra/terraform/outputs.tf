output "dataset" {
  description = "URL of the data set."
  value       = local.dataset_url
}

output "raw" {
  description = "Where raw objects are put: raw for those that are packed by hand, incoming for those that pack themselves."
  value       = local.raw_urls
}

output "functions" {
  description = "Name of a function → its address."
  value       = { for name, service in google_cloud_run_v2_service.function : name => service.uri }
}

output "function_url" {
  description = "For --function-url: where functions are, by their names."
  value       = "https://{function}-${data.google_project.this.number}.${var.region}.run.app"
}

output "fan_out_account" {
  description = "For --function-account: who functions are called as."
  value       = google_service_account.fan_out.email
}

output "images" {
  description = "Where images are pushed to."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "ingest_url" {
  description = "Where raw objects are announced; to have dead letters sent there again."
  value       = google_cloud_run_v2_service.function["ingest"].uri
}

output "ingest_account" {
  description = "Who announces them."
  value       = google_service_account.events.email
}
