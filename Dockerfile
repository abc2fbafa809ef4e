# syntax=docker/dockerfile:1
# nanochat_fp4 on CUDA 13, for amd64 and arm64. Data, checkpoints and compiled kernels go to the volume.
#
#     docker build --tag nanochat-fp4 .
#     docker run --gpus all --ipc=host --volume nanochat:/home/nanochat nanochat-fp4 speedrun
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton compiles its launchers with gcc and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 nanochat \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# A layer of its own for the pinned dependencies: a change of the source keeps it.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=requirements.txt,target=/pins/requirements.txt \
    --mount=type=bind,source=constraints.txt,target=/pins/constraints.txt \
    pip install --requirement /pins/requirements.txt --constraint /pins/constraints.txt

RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,target=/source,rw \
    pip install --no-deps --no-build-isolation /source

USER 10001
WORKDIR /home/nanochat
VOLUME /home/nanochat
ENTRYPOINT ["nanochat-fp4"]
CMD ["--help"]
