#!/bin/sh
# A base image for who reaches no registry of images: a small Debian with Python, made by mmdebstrap of the packages that
# this computer's apt gets, from where it gets them. As root: `deploy/images/base.sh [IMAGE [SUITE]]`.
set -eu
IMAGE=${1:-localhost/switchyard/base}
SUITE=${2:-$(. /etc/os-release && echo "$VERSION_CODENAME")}

for program in mmdebstrap buildah; do
  command -v "$program" >/dev/null || {
    echo "switchyard: $program is missing: apt-get install $program" >&2
    exit 69
  }
done
folder=$(mktemp -d)
container=''
trap 'rm -rf "$folder"; [ -z "$container" ] || buildah rm "$container" >/dev/null' EXIT
mmdebstrap --quiet --variant=minbase --aptopt='Dir::Cache::pkgcache ""' --aptopt='Dir::Cache::srcpkgcache ""' \
  --include=ca-certificates,python3,python3-venv "$SUITE" "$folder/root.tar"
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root.tar" / >/dev/null
buildah commit --quiet "$container" "$IMAGE" >/dev/null
echo "$IMAGE"
