# An ingress in a container: it joins by an invitation for ingresses, and runs the release of the agent that the control
# plane hands out, with its HAProxy (deploy/images/agent.sh). Built from the checkout:
#   buildah build -f deploy/images/ingress.Dockerfile -t switchyard/ingress .
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}
LABEL org.opencontainers.image.title="Switchyard ingress" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN command -v curl >/dev/null || { apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/*; }
COPY LICENSE NOTICE /usr/share/doc/switchyard/
COPY deploy/images/agent.sh /usr/local/bin/switchyard-agent
RUN chmod 755 /usr/local/bin/switchyard-agent
# All that it has: the release, its identity, its journal.
ENV SWITCHYARD_PREFIX=/var/lib/switchyard
VOLUME /var/lib/switchyard
# Plain HTTP and TLS of applications, other ingresses, metrics.
EXPOSE 8080 11080 10080 9080 12080 13080
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/switchyard-agent"]
CMD ["ingress"]
