# A host of the fleet in a container: it joins by an invitation for nodes, and runs the release of the agent that the
# control plane hands out (deploy/images/agent.sh). Built from the checkout:
#   buildah build -f deploy/images/node-agent.Dockerfile -t switchyard/node-agent .
# Engines arrive as builds that versions name. --build-arg ENGINE=vllm (for CPU) or ENGINE=llama_cpp puts one into the
# image, for versions that name no build. A base with the drivers' libraries serves accelerators: --build-arg BASE=…
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS engine
ARG ENGINE
# Of a mirror of packages, if there is one: as pip has them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /opt/switchyard-build
COPY requirements.lock ./
COPY controlplane/bootstrap.py controlplane/
COPY engine_agent engine_agent
# By versions and hashes, as `make engine` does.
RUN mkdir -p /opt/switchyard-engines && if [ -n "$ENGINE" ]; then \
      export UV_NO_CACHE=1 UV_LINK_MODE=copy \
      && python3 controlplane/bootstrap.py \
      && .venv/bin/python -m "engine_agent.engines.$ENGINE.environment" install --cache /opt/switchyard-engines; \
    fi

FROM ${BASE}
LABEL org.opencontainers.image.title="Switchyard node agent" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN command -v curl >/dev/null || { apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/*; }
COPY LICENSE NOTICE /usr/share/doc/switchyard/
COPY --from=engine /opt/switchyard-engines /opt/switchyard-engines
COPY deploy/images/agent.sh /usr/local/bin/switchyard-agent
RUN chmod 755 /usr/local/bin/switchyard-agent
# All that it has: the release, its identity, what its engines fetched.
ENV SWITCHYARD_PREFIX=/var/lib/switchyard
VOLUME /var/lib/switchyard
# The first 20 ports of a node.
EXPOSE 21000-21019
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/switchyard-agent"]
CMD ["node"]
