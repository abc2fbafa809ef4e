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

# The pair of torch and Triton that the results on GPUs are of, as dev/setup.sh installs it. A B200, B300, GB200, GB300 or
# GB10 needs a newer one: docker build --build-arg GPU=gpu_newer.
ARG GPU=gpu
# A layer of its own for the pinned dependencies: a change of the source keeps it.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=requirements.txt,target=/pins/requirements.txt \
    --mount=type=bind,source=requirements-gpu.txt,target=/pins/requirements-gpu.txt \
    --mount=type=bind,source=constraints.txt,target=/pins/constraints.txt \
    --mount=type=bind,source=dev/setup.sh,target=/pins/dev/setup.sh \
    --mount=type=bind,source=dev/signals.sh,target=/pins/dev/signals.sh \
    bash -c 'cd /pins && ROOT=. && source dev/setup.sh && flavour=$GPU && for file in requirements.txt constraints.txt; do pins $file >/opt/venv/$file; done' \
    && pip install --requirement /opt/venv/requirements.txt --constraint /opt/venv/constraints.txt

RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,target=/source,rw \
    pip install --no-deps --no-build-isolation /source

USER 10001
WORKDIR /home/nanochat
VOLUME /home/nanochat
ENTRYPOINT ["nanochat-fp4"]
CMD ["--help"]
