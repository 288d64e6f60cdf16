# One file, three images: docker build --target engine|operator|tuner .
#
# operator and tuner carry no torch and no compiler. The engine image carries gcc because triton compiles its launcher at run
# time. All run as user 65532 with a read-only root file system; the engine wants an emptyDir at /var/lib/trimtab and one at /tmp.
# The base is pinned by version here; pin it by digest in your own builds (--build-arg PYTHON_IMAGE=python@sha256:…).
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir --disable-pip-version-check uv==0.13.9
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY crds crds
COPY engine engine
COPY operator operator
COPY tuner tuner
RUN uv build --wheel --out-dir /wheels .

FROM build AS light
RUN uv venv /opt/trimtab && uv pip install --python /opt/trimtab/bin/python -c constraints.txt /wheels/*.whl

FROM build AS heavy
RUN uv venv /opt/trimtab && uv pip install --python /opt/trimtab/bin/python -c constraints.txt "$(ls /wheels/*.whl)[engine]"

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/trimtab/bin:$PATH PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp

FROM base AS operator
COPY --from=light /opt/trimtab /opt/trimtab
ENTRYPOINT ["trimtab-operator"]

FROM base AS tuner
ENV MPLCONFIGDIR=/tmp/matplotlib
COPY --from=light /opt/trimtab /opt/trimtab
ENTRYPOINT ["trimtab-tuner"]

FROM base AS engine
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
  && install --directory --owner=65532 --group=65532 /var/lib/trimtab
USER 65532:65532
# Where the operator mounts the cache; converted weights go below HOME, kernels where these say.
ENV HOME=/var/lib/trimtab TRITON_CACHE_DIR=/var/lib/trimtab/triton TORCHINDUCTOR_CACHE_DIR=/var/lib/trimtab/inductor
COPY --from=heavy /opt/trimtab /opt/trimtab
EXPOSE 8000 8001
ENTRYPOINT ["trimtab-engine"]
CMD ["--help"]
