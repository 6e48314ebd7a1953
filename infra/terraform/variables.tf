variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Where everything is. The GPU has to be offered there."
  type        = string
  default     = "us-central1"
}

variable "prefix" {
  description = "What every name begins with; a second deployment in the same project needs another."
  type        = string
  default     = "stoker"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,15}$", var.prefix))
    error_message = "The prefix is at most 16 small letters, digits and hyphens, and begins with a letter."
  }
}

variable "bucket" {
  description = "<bucket>-raw, -incoming and -data are made; the whole world shares the names of buckets."
  type        = string
}

variable "dataset" {
  description = "Name of the data set, and the folder of the data bucket that it is in."
  type        = string
  default     = "train"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", var.dataset))
    error_message = "A data set is called by at most 64 letters, digits, hyphens and underscores."
  }
}

variable "image" {
  description = "The functions' image (target cloud-run of infra/docker/functions.Dockerfile), by digest."
  type        = string

  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image))
    error_message = "Name the image by its digest, so that what runs is what was pushed."
  }
}

variable "ingest" {
  description = "What becomes of raw objects that appear; the fields are those of stoker_functions._deployment.Ingest."
  type = object({
    kind               = optional(string, "files")
    classes            = optional(list(string), [])
    super_sample_bytes = optional(number, 8388608)
  })
  default = {}

  validation {
    condition     = contains(["files", "image-folder", "webdataset"], var.ingest.kind)
    error_message = "Raw objects are files, an image-folder or a webdataset."
  }

  validation {
    condition     = (var.ingest.kind == "image-folder") == (length(var.ingest.classes) > 0)
    error_message = "An image-folder needs the names of all classes, and nothing else has any."
  }
}

variable "commit_schedule" {
  description = "How long a raw object may wait for the manifest version that has it."
  type        = string
  default     = "*/5 * * * *"
}

variable "alert_channels" {
  description = "Who is told of raw objects that could not be packed: names of channels of Cloud Monitoring."
  type        = list(string)
  default     = []
}

variable "fan_out_callers" {
  description = "Who may act for the account that packs, commits, compacts and shuffles, such as user:jane@example.com."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.fan_out_callers : can(regex("^(user|group|serviceAccount):", member))])
    error_message = "Only people, groups and service accounts may call; nobody unnamed."
  }
}

variable "serve_callers" {
  description = "Who may read through serve."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.serve_callers : can(regex("^(user|group|serviceAccount):", member))])
    error_message = "Only people, groups and service accounts may call; nobody unnamed."
  }
}

variable "serve_token" {
  description = "Whether there is a public service, too, whose callers show a token of our own."
  type        = bool
  default     = false
}

variable "token_secret" {
  description = "The secret in Secret Manager that has the keys of these tokens."
  type        = string
  default     = "stoker-token-keys"
}

variable "token_secret_version" {
  description = "Its version; naming a number makes a new key a change that is deployed, and can be taken back."
  type        = string
  default     = "latest"
}

variable "trainer_image" {
  description = "The trainer's image, by digest; empty for no training job."
  type        = string
  default     = ""

  validation {
    condition     = var.trainer_image == "" || can(regex("@sha256:[0-9a-f]{64}$", var.trainer_image))
    error_message = "Name the image by its digest, so that what runs is what was pushed."
  }
}

variable "trainer_arguments" {
  description = "What examples/train_job.py is told, besides where data and checkpoints are."
  type        = list(string)
  default     = ["--classes=10", "--epochs=10"]
}

variable "gpu" {
  description = "nvidia-l4 (24 GB) or nvidia-rtx-pro-6000 (96 GB)."
  type        = string
  default     = "nvidia-l4"
}

variable "warm_nodes" {
  description = "How many nodes the warm tier has; 0 for no warm tier."
  type        = number
  default     = 0

  validation {
    condition     = var.warm_nodes >= 0 && var.warm_nodes <= 400 && floor(var.warm_nodes) == var.warm_nodes
    error_message = "There are 0 to 400 nodes."
  }
}

variable "warm_subnetwork" {
  description = "The subnetwork through which nodes reach the proxy at a private address; empty for public addresses only."
  type        = string
  default     = ""
}

variable "warm_port" {
  description = "The port on which proxies listen in that network."
  type        = number
  default     = 7411
}

variable "warm_proxy_ranges" {
  description = "Where proxies are in that network, if not in the nodes' own subnetwork: ranges such as 10.128.0.0/20."
  type        = list(string)
  default     = []
}

variable "warm_secret" {
  description = "The secret in Secret Manager that nodes and proxy share."
  type        = string
  default     = "stoker-warm-secret"
}

variable "warm_secret_version" {
  description = "Its version; naming a number makes a new secret a change that is deployed, and can be taken back."
  type        = string
  default     = "latest"
}
