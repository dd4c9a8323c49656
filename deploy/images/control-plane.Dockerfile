# The control plane: web, controller, worker, jobs, and every command of manage.py. Built from the checkout:
#   buildah build -f deploy/images/control-plane.Dockerfile -t switchyard/control-plane .
# The argument says which of them a container runs (deploy/images/control-plane.sh); docs/operate/configure.md has the variables.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS packages
# Of a mirror of packages, if there is one: as pip has them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /opt/switchyard-control
COPY requirements.lock ./
COPY controlplane/bootstrap.py controlplane/
COPY engine_agent/engines/uv_install.py engine_agent/engines/
# By versions and hashes, as `make up` does.
RUN UV_NO_CACHE=1 UV_LINK_MODE=copy python3 controlplane/bootstrap.py && rm -rf .cache

FROM ${BASE}
LABEL org.opencontainers.image.title="Switchyard control plane" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/switchyard-control
COPY --from=packages /opt/switchyard-control/.venv .venv
COPY LICENSE NOTICE manage.py requirements.lock ./
COPY accounts accounts
COPY audit audit
COPY controlplane controlplane
COPY engine_agent engine_agent
COPY fleet fleet
COPY kernel kernel
COPY models_registry models_registry
COPY simulator simulator
COPY templates templates
COPY traffic traffic
COPY deploy/images/control-plane.sh /usr/local/bin/switchyard-control
# What it keeps, a volume: the keys of this host of the control plane, releases of the agent, the audit's export.
RUN chmod 755 /usr/local/bin/switchyard-control \
    && mkdir -p /var/lib/switchyard-control /var/cache/switchyard-control \
    && chmod 700 /var/lib/switchyard-control /var/cache/switchyard-control \
    && chown 60800:60800 /var/lib/switchyard-control /var/cache/switchyard-control
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/switchyard-control \
    SWITCHYARD_HOME=/var/lib/switchyard-control \
    SWITCHYARD_CACHE=/var/cache/switchyard-control
USER 60800:60800
VOLUME /var/lib/switchyard-control
EXPOSE 8000 8443
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/switchyard-control"]
CMD ["web"]
