# One image for agents and, in compose, for their etcd. `scripts/image` builds it, also where no registry is in reach.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

RUN for tool in etcd etcdctl ip iptables openssl pgrep; do command -v $tool >/dev/null || missing=1; done; \
    if [ -n "${missing:-}" ]; then \
        apt-get update -qq \
        && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            etcd-server etcd-client iproute2 iptables openssl procps \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# The mount points exist and belong to the user, so that fresh volumes do too.
RUN useradd --uid 10001 --create-home trainer \
    && install -d -o trainer -g trainer /checkpoints /logs /etcd

# Dependencies: a layer that only pyproject.toml and constraints.txt can change. The package is installed editable
# from empty directories, which the source fills below. Wheels put into wheels/ win over the index.
WORKDIR /app
COPY pyproject.toml constraints.txt ./
RUN --mount=type=bind,source=wheels,target=/wheels \
    mkdir agent trainer_runtime \
    && touch README.md agent/__init__.py trainer_runtime/__init__.py \
    && python3 -m venv /opt/venv \
    && PIP_FIND_LINKS=/wheels /opt/venv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check \
        -c constraints.txt -e ".[examples,web]"

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
COPY agent agent
COPY trainer_runtime trainer_runtime
COPY examples examples
# The user may not write here, so each start of an agent would compile all of it again.
RUN python -m compileall -q agent trainer_runtime

ARG VERSION=dev
LABEL project="elastic-agent" \
    org.opencontainers.image.title="elastic-agent" \
    org.opencontainers.image.description="Elastic training agent for PyTorch: membership in etcd, hot restarts" \
    org.opencontainers.image.version="${VERSION}"

USER trainer
VOLUME ["/checkpoints", "/logs"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["elastic-agent"]
CMD ["--help"]
