#!/bin/busybox sh
# First program of a guest that brings no ramdisk of its own: an initramfs with busybox and the drivers of its disks.
# With root=DEVICE on the kernel's command line it goes on with what is on that disk; without, it offers a shell on
# the console. Either way an agent stays, which the driver of the machine talks to over a serial line
# (tapio_agent=DEVICE): one command per line, one answer per line, as crates/vm/src/agent.rs says.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /mnt /tmp /run /bin /etc /root /agent
$bb --install -s /bin
export PATH=/bin HOME=/root
umask 022
mount -t proc proc /proc
mount -t sysfs sys /sys
[ -c /dev/null ] || mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /mnt
mount -t tmpfs tmpfs /tmp
# The kernel hands unknown parameters to us as variables.
hostname "${tapio_name:-guest}"
[ ! -e /etc/drivers ] || while read -r driver; do
	case $driver in *.xz) unxz "/lib/$driver" && driver=${driver%.xz} ;; esac
	insmod "/lib/$driver" || echo "the kernel refused $driver"
done </etc/drivers
export PS1='tapio# '

# --- the agent ---

# in_use NAME: whether something in the guest uses a disk or its partitions, and what.
in_use() {
	for part in /sys/class/block/"$1" /sys/class/block/"$1"/"$1"*; do
		[ -e "$part/dev" ] || continue
		read -r number <"$part/dev"
		name=${part##*/}
		while read -r _ _ device _ where _; do
			[ "$device" = "$number" ] && echo "$name is mounted at $where" && return 0
		done </proc/1/mountinfo
		while read -r file _; do
			[ "$file" = "/dev/$name" ] && echo "$name is swap space" && return 0
		done </proc/swaps
		for holder in "$part"/holders/*; do
			[ -e "$holder" ] && echo "$name is used by ${holder##*/}" && return 0
		done
	done
	# Whoever has claimed the disk for itself and shows nowhere above; the same call looks for new partitions.
	blockdev --rereadpt "/dev/$1" 2>/dev/null && return 1
	[ -b "/dev/$1" ] && echo "$1 is in use" && return 0
	return 1
}

# node_of SYSFS_DEVICE: the name of its disk.
node_of() {
	for found in "$1"/virtio*/block/*; do
		[ -e "$found" ] && echo "${found##*/}" && return 0
	done
	return 1
}

# wait_for COMMAND...: for at most five seconds.
wait_for() {
	waited=0
	until "$@"; do
		[ "$waited" -lt 250 ] || return 1
		waited=$((waited + 1))
		usleep 20000
	done
}

uml=/sys/bus/platform/drivers/virtio-uml

agent_command() {
	case $1 in
	ping) echo ok ;;
	# A device of User-mode Linux whose disk has come, or goes.
	bind)
		[ -e "$uml/$2" ] || echo "$2" >$uml/bind || return
		wait_for node_of "/sys/bus/platform/devices/$2" >/tmp/node || { echo "no $2 has no disk" && return; }
		read -r node </tmp/node
		echo "ok $node"
		;;
	unbind)
		[ -e "$uml/$2" ] || { echo ok && return; }
		if [ "$3" != force ] && node=$(node_of "/sys/bus/platform/devices/$2") && why=$(in_use "$node"); then
			echo "no $why" && return
		fi
		echo "$2" >$uml/unbind || return
		echo ok
		;;
	# A device that the machine itself adds and removes.
	appears)
		wait_for node_of "$2" >/tmp/node || { echo "no $2 has no disk" && return; }
		read -r node </tmp/node
		echo "ok $node"
		;;
	idle)
		if node=$(node_of "$2") && why=$(in_use "$node"); then echo "no $why" && return; fi
		echo ok
		;;
	poweroff | reboot)
		# After the answer: nobody hears one that comes later.
		then=$1
		echo ok
		;;
	*) echo "no $1 is not known" ;;
	esac
}

# end_guest poweroff|reboot
end_guest() {
	if [ -e /tmp/handed-over ]; then
		# What is on the disk has an init of its own.
		read -r init </proc/1/comm
		case $init-$1 in
		systemd-poweroff) kill -38 1 ;;
		systemd-reboot) kill -39 1 ;;
		*-poweroff) kill -USR2 1 ;;
		*) kill -TERM 1 ;;
		esac
		return
	fi
	sync
	umount -a -r 2>/dev/null
	"$1" -f
}

agent() {
	stty raw -echo <"$1" || return
	exec <"$1" >"$1" 2>>/tmp/agent.err
	echo "0 ok agent"
	last= then=
	while read -r number command; do
		# Asked again because the first answer was lost or late: answered again, not done again.
		if [ "$number" != "$last" ]; then
			: >/tmp/agent.err
			# shellcheck disable=SC2086
			agent_command $command >/tmp/answer
			last=$number
			[ -s /tmp/answer ] || echo "no $command: $(tr '\n' ' ' </tmp/agent.err)" >/tmp/answer
		fi
		read -r answer </tmp/answer
		echo "$number $answer"
		[ -z "$then" ] || end_guest "$then"
		then=
	done
}

start_agent() {
	[ -n "$tapio_agent" ] && [ -c "/dev/$tapio_agent" ] || return 0
	# In a tree of its own, which stays when the root is handed over to a disk.
	mount -t tmpfs tmpfs /agent
	mkdir -p /agent/bin /agent/proc /agent/sys /agent/dev /agent/tmp
	cp $bb /agent/bin/
	for applet in /bin/*; do [ "$applet" = $bb ] || ln -s busybox "/agent$applet" 2>/dev/null; done
	cp "$0" /agent/init
	mount -t proc proc /agent/proc
	mount -t sysfs sys /agent/sys
	mount -t devtmpfs dev /agent/dev
	setsid chroot /agent /bin/sh /init --agent "/dev/$tapio_agent" </dev/null >/dev/null 2>&1 &
}

# --- root on a disk ---

parameter() { sed -n "s/^\(.* \)\?$1=\([^ ]*\).*/\2/p" /proc/cmdline; }

hand_over() {
	root=$(parameter root)
	wait_for [ -b "$root" ] || { echo "there is no disk $root; a shell instead" && return; }
	way=ro
	case " $(cat /proc/cmdline) " in *" rw "*) way=rw ;; esac
	mkdir -p /newroot
	mount -o $way "$root" /newroot || { echo "$root cannot be mounted; a shell instead" && return; }
	init=$(parameter init)
	: >/agent/tmp/handed-over 2>/dev/null
	for dir in proc sys dev; do
		[ -d /newroot/$dir ] && mount --move /$dir /newroot/$dir
	done
	umount /mnt /tmp
	exec switch_root -c /dev/console /newroot "${init:-/sbin/init}"
}

if [ "$1" = --agent ]; then
	agent "$2"
	exit
fi
start_agent
case " $(cat /proc/cmdline) " in *" root=/dev/"*) hand_over ;; esac
if [ -n "$tapio_run" ]; then sh -c "$tapio_run"; fi
echo "Tapio guest $(uname -r): a shell, and the disks $(cd /dev && echo vd*)"
while :; do
	setsid cttyhack sh
	usleep 200000
done
