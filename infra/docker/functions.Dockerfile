# syntax=docker/dockerfile:1
# What runs in functions, for two platforms; and a server of a shared tier:
#
#   docker build --file infra/docker/functions.Dockerfile --target lambda    --tag stoker-lambda    .
#   docker build --file infra/docker/functions.Dockerfile --target cloud-run --tag stoker-cloud-run .
#   docker build --file infra/docker/functions.Dockerfile --target tier      --tag stoker-tier      .
#
# Dependencies come from constraints.txt, bases by digest; docs/deploy.md says how both are renewed.

FROM python:3.13.15-slim-bookworm@sha256:3e2de9c40ca4e3d73240059f9d48baff27908f10293e985a2f382a0378e6df4a AS python

# The environment is filled from outside: it has no pip. Modules are compiled here, not in every cold start.
FROM python AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/stoker
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY runtime runtime
COPY loader loader
COPY functions functions
COPY infra/local infra/local

FROM build AS build-lambda
RUN python -m pip --python /opt/stoker/bin/python install --no-cache-dir --compile \
    --constraint constraints.txt ".[aws,redis]" awslambdaric

FROM build AS build-cloud-run
RUN python -m pip --python /opt/stoker/bin/python install --no-cache-dir --compile \
    --constraint constraints.txt ".[gcp,redis]"

FROM build AS build-tier
RUN python -m pip --python /opt/stoker/bin/python install --no-cache-dir --compile \
    --constraint constraints.txt ".[s3,gcs,tier]"

# What is left is Python, the environment, and a user who owns nothing: no compiler, no pip, no shell needed.
FROM python AS runtime
RUN python -m pip uninstall --yes pip
ENV PATH=/opt/stoker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/stoker
USER 65532:65532

FROM runtime AS lambda
COPY --from=build-lambda /opt/stoker /opt/stoker
ENTRYPOINT ["python", "-m", "awslambdaric"]
CMD ["stoker_functions.aws.pack"]

# Which function it is says FUNCTION_TARGET, and the port to listen on PORT.
FROM runtime AS tier
COPY --from=build-tier /opt/stoker /opt/stoker
EXPOSE 7412
ENTRYPOINT ["stoker", "tier", "serve"]

FROM runtime AS cloud-run
COPY --from=build-cloud-run /opt/stoker /opt/stoker
ENV FUNCTION_SOURCE=/opt/stoker/lib/python3.13/site-packages/stoker_functions/gcp.py FUNCTION_USE_ASGI=1
ENTRYPOINT ["functions-framework"]
