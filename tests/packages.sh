#!/bin/sh
# Installs Tapio's packages in a root tree of its own, upgrades and purges them there, and says what was shown.
#
#   packages.sh WORK OLD NEW CLIENT      run by host::packages, in namespaces of mounts and processes of its own
#
# WORK is an empty directory, OLD and NEW have the packages of two versions, CLIENT is a client of `POST /cli`. The tree is
# this host's system with a layer of its own above it: what is done there is seen in that layer alone.
set -eu
work=$1 old=$2 new=$3 client=$4
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive

fail() { echo "packages: $*" >&2; exit 1; }

# 77: this host allows no mounts.
mount -t tmpfs -o mode=755 tmpfs "$work" || exit 77
mkdir "$work/layer" "$work/scratch" "$work/tree"
mount -t overlay -o "lowerdir=/,upperdir=$work/layer,workdir=$work/scratch" overlay "$work/tree" || exit 77
tree=$work/tree
mount -t proc proc "$tree/proc"
mount --rbind /dev "$tree/dev"
mount -t tmpfs -o mode=1777 tmpfs "$tree/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$tree/run"
mkdir "$tree/run/old" "$tree/run/new" "$tree/run/disks"
cp "$old"/*.deb "$tree/run/old"
cp "$new"/*.deb "$tree/run/new"
inside() { chroot "$tree" "$@"; }
# All packages of a version, in one run of dpkg, which takes them in the order of their dependencies.
install_all() { inside sh -c "dpkg --force-unsafe-io --install /run/$1/*.deb" >"$work/dpkg" 2>&1 || { cat "$work/dpkg"; fail "$1: dpkg failed"; }; }
# What the layer has and this host has not, without the notes of dpkg and what its triggers keep for all packages.
left() {
	(cd "$work/layer" && find . -mindepth 1 ! -path './var/lib/dpkg*' ! -path './var/log*' ! -path './var/cache*' \
		! -path './var/lib/systemd*' ! -path './tmp*' ! -name '*.cache' | sort) |
		while read -r path; do [ -e "/$path" ] || echo "${path#.}"; done
}
[ -z "$(left)" ] || fail "the layer is not empty: $(left)"

install_all old
for name in xe tap-ctl xsiostat vhd-util cbt-util tapio; do
	inside test -x "/usr/bin/$name" || fail "no $name"
	inside test -s "/usr/share/man/man1/$name.1.gz" || fail "no manual page of $name"
done
for page in man8/tapio-disk.8 man8/tapiod.8 man8/tapio-tapback.8 man8/tapio-xenstored.8 man1/tapio-top.1 man1/tapio-doctor.1 man1/tapio-timeline.1; do
	inside test -s "/usr/share/man/$page.gz" || fail "no manual page $page"
done
for name in top doctor timeline; do inside tapio $name --help >/dev/null || fail "tapio $name explains nothing"; done
for page in README.md docs/api.md docs/dashboard.md docs/doctor.md docs/transfers.md docs/design/threats.md; do
	[ "${page%/*}" != "$page" ] || page=docs/$page
	inside test -s "/usr/share/doc/tapio-doc/$page" || fail "no $page"
done
inside vhd-util create -n /run/disks/a.vhd -s 64
inside vhd-util check -n /run/disks/a.vhd
for name in tapio xe tap-ctl xsiostat vhd-util cbt-util; do
	[ "$(inside bash -c ". /usr/share/bash-completion/completions/$name; complete -p $name" | wc -l)" = 1 ] ||
		fail "nothing completes $name"
done
for name in top doctor; do
	grep -q "$name" "$tree/usr/share/bash-completion/completions/tapio" || fail "tapio $name is not completed"
	grep -q "$name" "$tree/usr/share/fish/vendor_completions.d/tapio.fish" || fail "tapio $name is not completed by fish"
done
inside dpkg --verify tapio tapio-disk tapiod tapio-xenstored tapio-doc | grep . && fail "files differ from the packages'"
inside tapiod --check >/dev/null || fail "the installed settings are refused"
if command -v systemd-analyze >/dev/null; then
	for unit in tapiod tapio-tapback tapio-xenstored; do
		inside systemd-analyze verify --man=no "/usr/lib/systemd/system/$unit.service" || fail "unit $unit"
	done
fi
echo "installed: programs, manual pages, completions, settings and units are there"

# A disk that a client writes, and the toolstack with an account of its own and a SR.
inside tapio-disk --image vhd:/run/disks/a.vhd --nbd-unix /run/disks/a.sock </dev/null >"$work/control" 2>"$work/disk"
disk=$(sed -n 's/.*ctl\([0-9]*\)$/\1/p' "$work/control")
[ -n "$disk" ] || fail "the disk process did not say its socket"
# Without a shell between, so that its number is the daemon's.
chroot "$tree" tapiod --no-tls --http none --default-sr /srv/disks </dev/null >"$work/tapiod" 2>&1 &
daemon=$!
tries=0
until inside xe sr-list 2>/dev/null | grep -q 'type .*: file'; do
	tries=$((tries + 1))
	[ $tries -lt 600 ] || { cat "$work/tapiod"; fail "tapiod does not answer"; }
	sleep 0.1
done
# The files of the dashboard are in the program; a command line of XenServer's xe runs in the installed one.
socket=$(inside sh -c 'ls /run/tapio/xapi')
inside curl -sS --unix-socket "$socket" http://localhost/dashboard/ | grep -q '<title>' || fail "no dashboard"
cp "$client" "$tree/run/thin.py"
inside /usr/bin/python3 /run/thin.py "unix:$socket" sr-list type=file --minimal | grep -q -- - || fail "no command lines"

# A guest that the toolstack runs, with a disk of its own. The driver of simulated guests starts real disk processes.
sr=$(inside xe sr-list type=file --minimal)
vm=$(inside xe vm-install template='Simulated guest' new-name-label=guest)
vdi=$(inside xe vdi-create sr-uuid="$sr" name-label=its-disk virtual-size=64MiB)
vbd=$(inside xe vbd-create vm-uuid="$vm" vdi-uuid="$vdi" device=0)
inside xe vm-start uuid="$vm"
attached() { inside xe vbd-list uuid="$vbd" currently-attached=true --minimal; }
[ "$(attached)" = "$vbd" ] || fail "the disk of the guest is not plugged"
# The processes of disks and their starts, without that of the client.
disks() {
	for one in /proc/[0-9]*; do
		[ "$(cat "$one/comm" 2>/dev/null)" = tapio-disk ] && [ "${one#/proc/}" != "$disk" ] || continue
		echo "${one#/proc/} $(cut -d' ' -f22 "$one/stat")"
	done
}
guest_disk=$(disks)
[ -n "$guest_disk" ] || fail "the guest has no disk process"
cat >"$tree/run/client.py" <<'END'
import nbd, os
client = nbd.NBD()
client.connect_unix("/run/disks/a.sock")
turn = after = 0
while after < 200:
    block = turn.to_bytes(4, "little") * 1024
    client.pwrite(block, turn % 4096 * 4096)
    assert client.pread(4096, turn % 4096 * 4096) == block
    turn += 1
    open("/run/turn", "w").write(str(turn))
    after += os.path.exists("/run/upgraded")
client.flush()
END
inside /usr/bin/python3 /run/client.py &
writer=$!
until [ -s "$tree/run/turn" ]; do kill -0 $writer || fail "the client failed before the upgrade"; sleep 0.1; done
started=$(cut -d' ' -f22 "/proc/$disk/stat")
install_all new
touch "$tree/run/upgraded"
wait $writer || fail "the client failed beside the upgrade"
[ "$started" = "$(cut -d' ' -f22 "/proc/$disk/stat")" ] || fail "the disk process was restarted"
readlink "/proc/$disk/exe" | grep -q deleted || fail "the program was not replaced"
kill -0 $daemon || fail "tapiod ended in the upgrade"
[ "$guest_disk" = "$(disks)" ] || fail "the disk process of the guest was not left alone: $guest_disk, $(disks)"
# systemd restarts the daemon: the new program goes on with the guest and its disk.
kill $daemon
wait $daemon || true
chroot "$tree" tapiod --no-tls --http none </dev/null >"$work/tapiod.new" 2>&1 &
daemon=$!
tries=0
until [ "$(attached 2>/dev/null)" = "$vbd" ]; do
	tries=$((tries + 1))
	[ $tries -lt 600 ] || { cat "$work/tapiod.new"; fail "the new daemon does not have the guest's disk"; }
	sleep 0.1
done
readlink "/proc/$daemon/exe" | grep -q deleted && fail "the old daemon runs still"
[ "$guest_disk" = "$(disks)" ] || fail "the new daemon started the guest's disk again"
[ "$(inside xe vm-param-get uuid="$vm" param-name=power-state)" = running ] || fail "the guest does not run"
inside xe vdi-snapshot uuid="$vdi" >/dev/null || fail "the new daemon cannot use the guest's disk"
inside xe vm-shutdown uuid="$vm" force=true
tries=0
while [ -n "$(disks)" ]; do
	tries=$((tries + 1))
	[ $tries -lt 600 ] || fail "the disk process stays behind its guest"
	sleep 0.1
done
echo "upgraded: a client wrote and read on, a guest kept its disk process, and the new daemon has both"

inside dpkg --remove tapiod tapio-disk >"$work/dpkg" 2>&1 && fail "tapio-disk was removed while it serves a disk"
grep -q "disks are served by the processes $disk:" "$work/dpkg" || { cat "$work/dpkg"; fail "it is not said why"; }
inside vhd-util check -n /run/disks/a.vhd >/dev/null 2>&1 || true
kill "$disk" $daemon
wait $daemon || true
while [ -d "/proc/$disk" ]; do sleep 0.1; done
inside vhd-util check -n /run/disks/a.vhd || fail "the image is damaged"
echo "refused: no removal of a program that serves"

# An image below the state directory may be the only copy of a disk.
inside touch /var/lib/tapio/a.vhd
inside dpkg --purge tapiod >"$work/dpkg" 2>&1 || { cat "$work/dpkg"; fail "purging tapiod"; }
grep -q 'has images of disks: it is kept' "$work/dpkg" && inside test -e /var/lib/tapio/a.vhd || fail "an image was removed"
inside rm -r /var/lib/tapio /srv/disks
inside dpkg --purge tapio-disk tapio tapio-xenstored tapio-doc >"$work/dpkg" 2>&1 || { cat "$work/dpkg"; fail "purging"; }
[ -z "$(left)" ] || fail "left behind: $(left)"
run=$(inside find /run -maxdepth 1 \( -name 'tapio*' -o -name 'blktap*' \))
[ -z "$run" ] || fail "left in /run: $run"
echo "purged: nothing is left"
