# The functions on Google Cloud, as Cloud Run services, and trainings as a Cloud Run job with a GPU. docs/deploy.md says
# how to deploy it. The state holds no secret, but says where everything is: keep it in a bucket of its own.
terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 7.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

data "google_project" "this" {}

resource "google_project_service" "needed" {
  for_each = toset([
    "artifactregistry.googleapis.com",
    "cloudscheduler.googleapis.com",
    "iam.googleapis.com",
    "iamcredentials.googleapis.com",
    "monitoring.googleapis.com",
    "pubsub.googleapis.com",
    "run.googleapis.com",
    "secretmanager.googleapis.com",
    "storage.googleapis.com",
  ])
  service = each.key
  # Others in the project may need them, too.
  disable_on_destroy = false
}

resource "google_artifact_registry_repository" "images" {
  repository_id = var.prefix
  location      = var.region
  format        = "DOCKER"
  description   = "Images of the functions and of the trainer"
  depends_on    = [google_project_service.needed]
}
