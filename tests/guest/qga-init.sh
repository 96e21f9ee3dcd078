#!/bin/sh
# First program of a guest with Debian's qemu-guest-agent: an initramfs with busybox, the agent and its libraries. An
# ext4 file system that the test has made on the second disk is mounted, and written to for ever.
/bin/busybox mkdir -p /proc /sys /dev /mnt /bin /sbin /tmp /var/run /run /etc
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /tmp
. /lib.sh
hostname agent-guest
printf 'PRETTY_NAME="A test guest"\nID=test\nVERSION_ID="3.1"\n' >/etc/os-release
for driver in virtio_blk dummy; do [ ! -e /$driver.ko ] || insmod /$driver.ko; done
ip link set lo up
if [ -e /sys/class/net/dummy0 ]; then ip addr add 192.0.2.7/24 dev dummy0 && ip link set dummy0 up; fi
waited=0
while [ ! -b /dev/vdb ]; do
	[ "$waited" -lt 100 ] || fail "the guest sees no second disk"
	waited=$((waited + 1))
	usleep 100000
done
mount -t ext4 /dev/vdb /mnt || fail "the file system is not mounted"
# What the agent calls to end the guest; no program here watches the power button.
printf '#!/bin/sh\nsync\numount /mnt\npoweroff -f\n' >/sbin/shutdown
chmod 755 /sbin/shutdown
(n=0; while :; do n=$((n + 1)); echo $n >/mnt/last-$((n % 64)); done) &
for port in /sys/class/virtio-ports/*; do
	[ "$(cat "$port/name")" = org.qemu.guest_agent.0 ] || continue
	echo "the agent listens on ${port##*/}"
	qemu-ga -m virtio-serial -p "/dev/${port##*/}" -t /tmp -f /tmp/agent.pid
done
fail "the agent has ended"
