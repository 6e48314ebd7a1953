# The warm tier: a service for each node, whose instance does one thing at a time. There is a second instance while it is
# in doubt which one is the node. It may do nothing at all: it dials the proxy that calls it, and both know the secret.
locals {
  warm       = { cpu = 1, memory = "2Gi", timeout_seconds = 3600, concurrency = 1, instances = 2 }
  warm_nodes = toset([for number in range(var.warm_nodes) : "warm-${number}"])
  # A network of yours for them, if there is one.
  warm_networks = toset(var.warm_nodes > 0 && var.warm_subnetwork != "" ? [var.warm_subnetwork] : [])
}

resource "google_service_account" "warm" {
  account_id   = "${var.prefix}-warm"
  display_name = "stoker nodes of the warm tier"
}

resource "google_cloud_run_v2_service" "warm" {
  for_each            = local.warm_nodes
  name                = "${var.prefix}-${each.key}"
  location            = var.region
  deletion_protection = false
  ingress             = "INGRESS_TRAFFIC_ALL"
  depends_on = [
    google_project_service.needed,
    google_secret_manager_secret_iam_member.warm,
    google_compute_firewall.warm_dials_proxy,
    google_compute_firewall.warm_dials_nobody,
  ]

  template {
    service_account                  = google_service_account.warm.email
    timeout                          = "${local.warm.timeout_seconds}s"
    max_instance_request_concurrency = local.warm.concurrency

    scaling {
      min_instance_count = 0 # the proxy keeps it warm, for as long as there is one
      max_instance_count = local.warm.instances
    }

    # Without a network of yours, nodes reach public addresses only.
    dynamic "vpc_access" {
      for_each = local.warm_networks
      content {
        egress = "ALL_TRAFFIC" # all of it meets the firewall
        network_interfaces {
          subnetwork = vpc_access.value
          tags       = ["${var.prefix}-warm"]
        }
      }
    }

    containers {
      image = var.image

      resources {
        limits            = { cpu = tostring(local.warm.cpu), memory = local.warm.memory }
        cpu_idle          = true # billed while a proxy uses it, and not between
        startup_cpu_boost = true
      }

      dynamic "env" {
        for_each = {
          FUNCTION_TARGET        = "warm_node"
          STOKER_TIMEOUT_SECONDS = tostring(local.warm.timeout_seconds)
        }
        content {
          name  = env.key
          value = env.value
        }
      }

      env {
        name = "STOKER_WARM_SECRET"
        value_source {
          secret_key_ref {
            secret  = var.warm_secret
            version = var.warm_secret_version
          }
        }
      }
    }
  }
}

# Whoever runs a proxy calls nodes and knows the secret: the trainer, on a machine that nodes can reach.
resource "google_cloud_run_v2_service_iam_member" "calls_nodes" {
  for_each = local.warm_nodes
  name     = google_cloud_run_v2_service.warm[each.key].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.trainer.member
}

resource "google_secret_manager_secret_iam_member" "warm" {
  for_each  = toset(var.warm_nodes > 0 ? ["node", "trainer"] : [])
  secret_id = var.warm_secret
  role      = "roles/secretmanager.secretAccessor"
  member    = each.key == "node" ? google_service_account.warm.member : google_service_account.trainer.member
}

# In a network of yours nodes dial the port of proxies, which are machines with a tag, and nothing else in the world. Nodes
# have no addresses of their own and no tag that the rule for proxies could name: it takes their subnetwork's range.
data "google_compute_subnetwork" "warm" {
  for_each = local.warm_networks
  name     = each.key
  region   = var.region
}

resource "google_compute_firewall" "warm_dials_proxy" {
  for_each           = local.warm_networks
  name               = "${var.prefix}-warm-dials-proxy"
  network            = data.google_compute_subnetwork.warm[each.key].network
  direction          = "EGRESS"
  priority           = 900
  target_tags        = ["${var.prefix}-warm"]
  destination_ranges = coalescelist(var.warm_proxy_ranges, [data.google_compute_subnetwork.warm[each.key].ip_cidr_range])

  allow {
    protocol = "tcp"
    ports    = [tostring(var.warm_port)]
  }
}

resource "google_compute_firewall" "warm_dials_nobody" {
  for_each           = local.warm_networks
  name               = "${var.prefix}-warm-dials-nobody"
  network            = data.google_compute_subnetwork.warm[each.key].network
  direction          = "EGRESS"
  priority           = 1000
  target_tags        = ["${var.prefix}-warm"]
  destination_ranges = ["0.0.0.0/0"]

  deny {
    protocol = "all"
  }
}

resource "google_compute_firewall" "warm_proxy" {
  for_each      = local.warm_networks
  name          = "${var.prefix}-warm-proxy"
  network       = data.google_compute_subnetwork.warm[each.key].network
  direction     = "INGRESS"
  target_tags   = ["${var.prefix}-proxy"]
  source_ranges = [data.google_compute_subnetwork.warm[each.key].ip_cidr_range]

  allow {
    protocol = "tcp"
    ports    = [tostring(var.warm_port)]
  }
}
