#!/bin/busybox sh
# First program of a guest that brings no ramdisk of its own: an initramfs with busybox and the drivers of its disks.
# With root=DEVICE on the kernel's command line it goes on with what is on that disk; without, it offers a shell on
# the console. Either way the agent (crates/stack/vm/src/guest/agent) stays, which the VM's driver talks to over a
# serial line (tapio_agent=DEVICE). It ends the guest by this program: init --end poweroff|reboot. The drivers of network
# interfaces are loaded if there is one; for one that comes later, by hand: init --net.
bb=/bin/busybox

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

# load LIST: drivers in the order of a list.
load() {
	[ ! -e "$1" ] || while read -r driver; do
		case $driver in *.xz) unxz "/lib/$driver" && driver=${driver%.xz} ;; esac
		insmod "/lib/$driver" || echo "the kernel refused $driver"
	done <"$1"
}

case $1 in
--end)
	end_guest "$2"
	exit
	;;
--net)
	load /etc/net-drivers
	exit
	;;
esac

$bb mkdir -p /proc /sys /dev /mnt /tmp /run /bin /etc /root /agent
$bb --install -s /bin
export PATH=/bin HOME=/root
umask 022
mount -t proc proc /proc
mount -t sysfs sys /sys
# No program here handles events of new devices; where a kernel names one for that, it would run it for each.
[ ! -e /proc/sys/kernel/hotplug ] || echo >/proc/sys/kernel/hotplug
[ -c /dev/null ] || mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /mnt
mount -t tmpfs tmpfs /tmp
# The kernel hands unknown parameters to us as variables.
hostname "${tapio_name:-guest}"
load /etc/drivers
# The device number of a virtio interface on PCI.
if grep -qs 0x1041 /sys/bus/pci/devices/*/device; then load /etc/net-drivers; fi
export PS1='tapio# '

# wait_for COMMAND...: for at most five seconds.
wait_for() {
	waited=0
	until "$@"; do
		[ "$waited" -lt 250 ] || return 1
		waited=$((waited + 1))
		usleep 20000
	done
}

# --- the agent ---

start_agent() {
	[ -n "$tapio_agent" ] && [ -c "/dev/$tapio_agent" ] || return 0
	# In a tree of its own, which stays when the root is handed over to a disk.
	mount -t tmpfs tmpfs /agent
	mkdir -p /agent/bin /agent/proc /agent/sys /agent/dev /agent/tmp
	cp $bb /bin/agent /agent/bin/
	cp "$0" /agent/init
	mount -t proc proc /agent/proc
	chroot /agent $bb --install -s /bin
	mount -t sysfs sys /agent/sys
	mount -t devtmpfs dev /agent/dev
	setsid chroot /agent /bin/agent "/dev/$tapio_agent" </dev/null >/dev/null 2>&1 &
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

start_agent
# Xen asks the kernel to end the guest, which starts these.
if [ "$(cat /sys/hypervisor/type 2>/dev/null)" = xen ]; then
	mkdir -p /sbin
	for word in poweroff reboot; do
		printf '#!/bin/busybox sh\n/bin/sync\n/bin/umount -a -r 2>/dev/null\nexec /bin/%s -f\n' $word >/sbin/$word
		chmod 755 /sbin/$word
	done
fi
case " $(cat /proc/cmdline) " in *" root=/dev/"*) hand_over ;; esac
if [ -n "$tapio_run" ]; then sh -c "$tapio_run"; fi
echo "Tapio guest $(uname -r): a shell, and the disks $(cd /dev && ls -d vd* xvd* ubd* 2>/dev/null | tr '\n' ' ')"
while :; do
	setsid cttyhack sh
	usleep 200000
done
