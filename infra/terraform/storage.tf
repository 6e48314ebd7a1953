# raw: objects that are packed when somebody says so. incoming: those that are packed as they appear. data: the data set.
resource "google_storage_bucket" "bucket" {
  for_each                    = toset(["raw", "incoming", "data"])
  name                        = "${var.bucket}-${each.key}"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 1
    }
  }

  # Materialized epochs can be made again; whoever makes one deletes those before it, and this what was left.
  dynamic "lifecycle_rule" {
    for_each = each.key == "data" ? ["${var.dataset}/epochs/"] : []
    content {
      action {
        type = "Delete"
      }
      condition {
        age            = 14
        matches_prefix = [lifecycle_rule.value]
      }
    }
  }
}

# Google's own roles allow more than any function needs.
resource "google_project_iam_custom_role" "reader" {
  role_id     = "${replace(var.prefix, "-", "_")}_reader"
  title       = "Reads objects whose names it knows"
  permissions = ["storage.objects.get"]
}

resource "google_project_iam_custom_role" "lister" {
  role_id     = "${replace(var.prefix, "-", "_")}_lister"
  title       = "Lists objects, and is told of one that it is not there"
  permissions = ["storage.objects.list"]
}

resource "google_project_iam_custom_role" "writer" {
  role_id = "${replace(var.prefix, "-", "_")}_writer"
  title   = "Reads, writes and replaces objects"
  # Replacing an object counts as deleting it.
  permissions = ["storage.objects.get", "storage.objects.create", "storage.objects.delete"]
}
