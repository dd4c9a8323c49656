# A host of the fleet in a container: it joins by an invitation for nodes, and runs the release of the agent that the
# control plane hands out (deploy/images/agent.sh). Built from the checkout:
#   buildah build -f deploy/images/node-agent.Dockerfile -t switchyard/node-agent .
# No engine is in it, and the agent installs none: install one into SWITCHYARD_CACHE/engines, or build on an image that
# has it. A base with the drivers' libraries serves accelerators: --build-arg BASE=…
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}
LABEL org.opencontainers.image.title="Switchyard node agent" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN command -v curl >/dev/null || { apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/*; }
COPY LICENSE NOTICE /usr/share/doc/switchyard/
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
