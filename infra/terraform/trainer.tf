resource "google_service_account" "trainer" {
  account_id   = "${var.prefix}-trainer"
  display_name = "stoker trainer"
}

locals {
  runs = "projects/_/buckets/${google_storage_bucket.bucket["data"].name}/objects/runs/"
}

resource "google_storage_bucket_iam_member" "trainer_lists" {
  bucket = google_storage_bucket.bucket["data"].name
  role   = google_project_iam_custom_role.lister.id
  member = google_service_account.trainer.member
}

resource "google_storage_bucket_iam_member" "trainer_reads" {
  bucket = google_storage_bucket.bucket["data"].name
  role   = google_project_iam_custom_role.reader.id
  member = google_service_account.trainer.member

  condition {
    title      = "trainer reads"
    expression = "resource.name.startsWith(\"${local.objects}/\")"
  }
}

resource "google_storage_bucket_iam_member" "trainer_writes" {
  bucket = google_storage_bucket.bucket["data"].name
  role   = google_project_iam_custom_role.writer.id
  member = google_service_account.trainer.member

  condition {
    title      = "trainer writes checkpoints"
    expression = "resource.name.startsWith(\"${local.runs}\")"
  }
}

resource "google_cloud_run_v2_job" "trainer" {
  count               = var.trainer_image == "" ? 0 : 1
  name                = "${var.prefix}-trainer"
  location            = var.region
  deletion_protection = false
  depends_on          = [google_project_service.needed]

  template {
    # Tasks cannot reach each other: each would be a training of its own (examples/train_job.py says more).
    task_count  = 1
    parallelism = 1

    template {
      service_account = google_service_account.trainer.email
      # A task is killed when its machine is maintained, and goes on from its checkpoint: that is no failure.
      max_retries                   = 10
      timeout                       = "43200s"
      gpu_zonal_redundancy_disabled = true

      node_selector {
        accelerator = var.gpu
      }

      containers {
        image = var.trainer_image
        args = concat(var.trainer_arguments, [
          "--data=${local.dataset_url}",
          "--checkpoint=gs://${google_storage_bucket.bucket["data"].name}/runs/${var.prefix}",
        ])

        resources {
          # The least that comes with the GPU.
          limits = var.gpu == "nvidia-l4" ? { cpu = "4", memory = "16Gi", "nvidia.com/gpu" = "1" } : { cpu = "20", memory = "80Gi", "nvidia.com/gpu" = "1" }
        }

        # The driver beside an L4 is of CUDA 12; the image has what lets a CUDA 13 program run on it.
        dynamic "env" {
          for_each = var.gpu == "nvidia-l4" ? { LD_LIBRARY_PATH = "/usr/local/cuda/compat:/usr/local/nvidia/lib64" } : {}
          content {
            name  = env.key
            value = env.value
          }
        }
      }
    }
  }
}
