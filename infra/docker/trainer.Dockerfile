# syntax=docker/dockerfile:1
# A training on GPUs, for Cloud Run jobs, AWS Batch and whatever else runs containers:
#
#   docker build --file infra/docker/trainer.Dockerfile --tag stoker-trainer .
#
# The pinned torch is built for CUDA 13 and brings the libraries it needs; the base has the rest, and what leads the
# container runtime to the driver. Bases by digest; docs/deploy.md says how they are renewed.

FROM nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1 AS python
# hadolint ignore=DL3008 # Ubuntu drops the old version of a package when it fixes it: a pin would break the build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
# hadolint ignore=DL3008 # as above
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv --without-pip /opt/stoker
# torch changes less often than what is trained with it, and is most of the image: a layer of its own.
COPY constraints.txt ./
RUN python3 -m pip --python /opt/stoker/bin/python install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime
COPY loader loader
COPY functions functions
COPY infra/local infra/local
RUN python3 -m pip --python /opt/stoker/bin/python install --no-cache-dir --constraint constraints.txt \
    ".[s3,gcs,torch,images]"

FROM python AS trainer
COPY --from=build /opt/stoker /opt/stoker
COPY examples/train_job.py /opt/stoker/train_job.py
ENV PATH=/opt/stoker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/stoker
USER 65532:65532
ENTRYPOINT ["python", "/opt/stoker/train_job.py"]
