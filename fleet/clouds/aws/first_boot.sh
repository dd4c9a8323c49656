
set -u
export SERVER PIN AWS_REGION INSTALL UNIT SWITCHYARD_CACHE
ROOT=${SWITCHYARD_ROOT:-}
OF_IMAGE=$ROOT/var/cache/switchyard
DISKS=$ROOT/mnt/switchyard
DEEP_LEARNING=$ROOT/opt/dlami/nvme  # where AWS's images for deep learning mount the disks themselves
SWITCHYARD_CACHE=$OF_IMAGE

say() { echo "switchyard: $*"; }

# The disks of the instance without partition, file system, RAID or mount. Volumes of EBS have other names. `blkid -p`
# exits with 2 if it finds nothing on a disk.
free_disks() {
  for link in "$ROOT"/dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
    case $link in *-part*) continue ;; esac
    if [ -e "$link" ]; then readlink -f "$link"; fi
  done | sort -u | while read -r disk; do
    uses=$(lsblk -nro NAME,MOUNTPOINT "$disk") || continue
    [ "$(echo "$uses" | wc -w)" = 1 ] || continue
    blkid -p "$disk" >/dev/null 2>&1
    if [ $? -eq 2 ]; then echo "$disk"; fi
  done
}

# One file system over these disks, at this boot and later ones. The agent starts after the mount.
mount_disks() {
  if [ $# -gt 1 ] && command -v mdadm >/dev/null; then
    mdadm --create /dev/md/switchyard --run --level=0 --raid-devices=$# "$@" || return 1
    set -- /dev/md/switchyard
  fi
  kind=ext4
  if command -v mkfs.xfs >/dev/null; then kind=xfs; fi
  "mkfs.$kind" -q -L switchyard "$1" || return 1
  mkdir -p "$DISKS"
  echo "LABEL=switchyard $DISKS $kind noatime,nofail,x-systemd.before=switchyard-machine.service 0 2" >>"$ROOT/etc/fstab"
  mount "$DISKS"
}

# The cache is on the disks of the instance if there are any, else on the root volume. No mount hides a file, and what
# the image has in its cache is linked from the new one.
make_cache() {
  mkdir -p "$OF_IMAGE"
  if mountpoint -q "$DEEP_LEARNING"; then
    DISKS=$DEEP_LEARNING
  elif grep -q "^LABEL=switchyard " "$ROOT/etc/fstab" 2>/dev/null; then
    mountpoint -q "$DISKS" || mount "$DISKS" || return 0
  elif ! mountpoint -q "$DISKS"; then
    # shellcheck disable=SC2046  # a list of words
    set -- $(free_disks)
    [ $# -gt 0 ] || return 0
    if [ -n "$(ls -A "$DISKS" 2>/dev/null)" ]; then
      say "$DISKS has files, so the disks of the instance are not mounted there; the cache is on the root volume"
      return 0
    fi
    mount_disks "$@" || { say 'the disks of the instance cannot be used; the cache is on the root volume'; return 0; }
  fi
  SWITCHYARD_CACHE=$DISKS/switchyard-cache
  mkdir -p "$SWITCHYARD_CACHE"
  for entry in "$OF_IMAGE"/*; do
    if [ -e "$entry" ] && [ ! -e "$SWITCHYARD_CACHE/${entry##*/}" ]; then ln -s "$entry" "$SWITCHYARD_CACHE/"; fi
  done
  say "the cache is on the disks of the instance, in $SWITCHYARD_CACHE"
}

fetch() {
  if [ -n "$PIN" ]; then set -- -k --pinnedpubkey "$PIN" "$@"; fi
  curl -fsS --noproxy '*' --proto '=https' --connect-timeout 10 --max-time 60 "$@"
}

join() {
  script=$(mktemp) || return 1
  fetch -o "$script" "$SERVER$JOIN_PATH" && sh "$script"
  joined=$?
  rm -f "$script"
  return $joined
}

# Many machines boot together: random pauses spread their retries.
pause_s() { awk -v seed="$1$$" 'BEGIN { srand(seed); print int(5 + rand() * 25) }'; }

make_cache
begun=$(date +%s)
until join; do
  now=$(date +%s)
  if [ $((now - begun)) -ge "$TRIES_FOR_S" ]; then
    say "this machine could not join $SERVER within $TRIES_FOR_S s, and ends"
    exec shutdown -h now
  fi
  say 'not joined yet; another try follows'
  sleep "$(pause_s "$now")"
done
say 'joined'
